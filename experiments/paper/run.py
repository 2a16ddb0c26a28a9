"""The paper's claims at a scale that a laptop reaches, from one command.

    python -m experiments.paper    # five hours of two cores (ten of one: --jobs 1)

All arms go on from one AR model, with the same data and number of steps (one has twice as many). A
piece is one arm with one seed: it is trained, decodes the problems in several ways, and keeps what
became of each problem under experiments/results/cache. What is there already is not computed again,
and a training that was interrupted is resumed. So with the committed records this only draws the
report (report.py).
"""

import datetime
import functools
import hashlib
import json
import multiprocessing
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from bench.common import ROOT, are_right
from bench.quality import given_responses, predict
from decode import generate
from experiments.paper import report
from experiments.paper.baselines import diffuse, jacobi
from experiments.paper.report import ENTROPY, MARGIN, ONE, OURS, PAPER
from model import Qwen2, load
from plumbing.arguments import Parser, find_device, number
from plumbing.chat import Chat
from plumbing.data import encode_prompt
from plumbing.errors import UserError, run_main
from plumbing.files import atomic_write, write_json
from toy.make import HARD_TEST_ROWS, hard_problem, split, write

START = ROOT / "toy/hard"  # the model that all start from
WORK = ROOT / "experiments/work/full"
RESULTS = ROOT / "experiments/results"
ROWS = 64  # problems decoded at a time
NUM_JACOBI_GUESSES = 16
FAST = "--lr 1e-3"
SLOW = "--lr 5e-4"


@dataclass(frozen=True)
class Arm:
    """A way to train on, and the ways in which its models are decoded."""

    command: str = ""  # what trains it; "" is the model that all start from
    block: int = 4  # B of training and decoding
    ways: tuple[str, ...] = (ONE,)  # to decode: see `decoding_options`
    num_seeds: int = 1
    more: str = ""  # options that override the plan's


ARMS = {
    "sft": Arm(ways=(ONE, "jacobi")),
    "ar": Arm(f"train.py --objective sft {FAST}", num_seeds=3),
    "ar-slow": Arm(f"train.py --objective sft {SLOW}", num_seeds=3),
    "mars-4": Arm(
        f"train.py --block 4 {FAST}",
        ways=(ONE, *PAPER, *OURS, *ENTROPY, *MARGIN, "verify"),
        num_seeds=3,
    ),
    "mars-4-slow": Arm(f"train.py --block 4 {SLOW}", num_seeds=3),
    "mars-4-free": Arm(f"train.py --block 4 --clip 1e6 {FAST}"),  # the limit does not bind
    "mars-4-long": Arm(f"train.py --block 4 {FAST}", more=" --steps 1600"),
    "mars-4-heavy": Arm(f"train.py --block 4 --ar-weight 4 {FAST}"),
    "mars-8": Arm(f"train.py --block 8 {FAST}", 8, (ONE, *PAPER, "verify")),
    "mars-16": Arm(f"train.py --block 16 {FAST}", 16, (ONE, *PAPER, "verify")),
    "no-clean-4": Arm(f"train.py --block 4 --ar-weight 0 {FAST}"),
    "no-clean-16": Arm(f"train.py --block 16 --ar-weight 0 {FAST}", 16),
    "diffusion": Arm(
        f"-m experiments.paper.baselines diffusion --block 4 {FAST}", ways=("diffusion",)
    ),
    "fixed": Arm(f"train.py --block 4 --block-phase fixed {FAST}", ways=(ONE, *OURS, "verify")),
}


def decoding_options(way: str, block: int) -> dict:
    """The options of `generate` for a way to decode, such as "paper 0.95".

    The paper's decoder with B reads B candidates, where B masks give B + 1: it is ours with B - 1.
    """
    kind, _, tau = way.partition(" ")
    if kind == "paper":
        return {"block": block - 1, "tau": float(tau)}
    if kind in ("entropy", "margin"):
        return {"block": block - 1, "tau": float(tau), "metric": kind}
    if kind == "ours":
        return {"block": block, "tau": float(tau)}
    if kind == "verify":
        return {"block": block, "verify": True}
    return {"tau": 1.0}  # also for diffusion and Jacobi decoding, which have no tau


@dataclass(frozen=True)
class Plan:
    """How long the arms train, and on which problems they are measured. The tests have others."""

    train_rows: int = 12_800
    num_problems: int = HARD_TEST_ROWS
    options: str = "--steps 800 --batch 32 --save-every 200 --held-out 256"  # of train.py
    work: Path = WORK  # for the trained models
    out: Path = RESULTS  # for the report, and the records in out/cache

    def pieces(self) -> list["Piece"]:
        return [Piece(self, seed, name) for name in ARMS for seed in range(ARMS[name].num_seeds)]


@functools.cache
def problems_of(plan: Plan) -> tuple[list[dict], str]:
    """The problems, and a hash by which records know them."""
    _, problems = split(hard_problem, 0, plan.num_problems)
    return problems, hashlib.sha256(json.dumps(problems).encode()).hexdigest()[:16]


class Piece:
    """One arm with one seed: its model in plan.work, and its record below plan.out."""

    def __init__(self, plan: Plan, seed: int, name: str):
        self.plan = plan
        self.arm = ARMS[name]
        self.name = f"{name}-{seed}"
        self.model = plan.work / self.name if self.arm.command else START
        self.record = plan.out / "cache" / f"{self.name}.json"
        self.made_of = {
            "problems": problems_of(plan)[1],
            "train_rows": plan.train_rows,
            "command": self.training_command(seed),
            "ways": {way: decoding_options(way, self.arm.block) for way in self.arm.ways},
        }

    def training_command(self, seed: int) -> str:
        """Empty for the model that all start from."""
        if not self.arm.command:
            return ""
        data = relative(self.plan.work / "train.jsonl")
        return (
            f"python {self.arm.command} --model {relative(START)} --data {data}"
            f" {self.plan.options} --out {relative(self.model)} --seed {seed}{self.arm.more}"
        )

    def is_complete(self) -> bool:
        """UserError if the record is of something else than what this plan says."""
        if not self.record.exists():
            return False
        record = json.loads(self.record.read_text(encoding="utf-8"))
        for what, expected in self.made_of.items():
            if record.get(what) != expected:
                raise UserError(f"{self.record}: of other {what}; move it away to make it anew")
        return True

    def complete(self) -> None:
        """Train and measure. Only the record is committed: the weights can be made again."""
        record = dict(self.made_of)
        if self.arm.command:
            self.train()
        record |= measure(self.model, self.arm, self.plan)
        machine = f"{os.cpu_count()} CPU cores, Python {platform.python_version()}"
        record["made"] = f"{datetime.date.today()}, {machine}, torch {torch.__version__}"
        atomic_write(self.record, lambda path: write_json(path, record))

    def train(self) -> None:
        """Run the command, which resumes an interrupted training, and ends at once after one."""
        log = self.model.with_suffix(".txt")
        command = self.made_of["command"]
        words = [sys.executable, *command.split()[1:], "--resume"]
        with open(log, "w") as file:
            done = subprocess.run(words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        if done.returncode:
            raise UserError(f"{command}: ended with {done.returncode}; see {log}")


def relative(path: Path) -> str:
    """The path as seen from the repository's root, where it is below it."""
    return str(path).removeprefix(f"{ROOT}/")


def make_data(plan: Plan) -> None:
    """Write the training data; `split` keeps the problems out of it."""
    rows, _ = split(hard_problem, plan.train_rows, plan.num_problems)
    plan.work.mkdir(parents=True, exist_ok=True)
    write(plan.work / "train.jsonl", rows)


def measure(directory: Path, arm: Arm, plan: Plan) -> dict:
    """Decode in the arm's ways; and predict the written answers one token ahead."""
    problems = problems_of(plan)[0]
    model, chat = load(str(directory), *find_device("auto", None))
    decoded = {way: decode(model, chat, problems, way, arm.block) for way in arm.ways}
    examples = given_responses(model, chat, problems)
    nats = [predict(model, each.tokens, each.prompt_length)[0].sum().item() for each in examples]
    return {
        "decoded": decoded,
        "nats": " ".join(f"{one:.4f}" for one in nats),
        "tokens": sum(example.num_targets for example in examples),
    }


def decode(model: Qwen2, chat: Chat, problems: list[dict], way: str, block: int) -> dict:
    """Which problems were answered right, as a text of 0 and 1, and what the tokens cost."""
    prompts = [encode_prompt(problem, chat) for problem in problems]
    if way == "diffusion":
        answers = [diffuse(model, prompt) for prompt in prompts]
    elif way == "jacobi":
        answers = [jacobi(model, prompt, NUM_JACOBI_GUESSES) for prompt in prompts]
    else:
        answers = generate(model, prompts, ROWS, **decoding_options(way, block))
    return {
        "right": "".join(str(int(right)) for right in are_right(chat, answers, problems)),
        "tokens": sum(len(answer.tokens) for answer in answers),
        "forwards": sum(answer.forwards for answer in answers),
    }


def complete_all(pieces: list[Piece], jobs: int) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # every record is of float32 on a CPU
    os.environ["OMP_NUM_THREADS"] = "1"  # two processes with two threads each are far slower
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        for _ in tqdm(pool.imap_unordered(Piece.complete, pieces), total=len(pieces)):
            pass


def main() -> None:
    parser = Parser("The paper's claims at a scale that a laptop reaches.")
    help = "pieces at a time, one thread each"
    parser.add_argument("--jobs", type=number(int, 1), default=2, help=help)
    args = parser.parse_args()
    plan = Plan()
    pieces = plan.pieces()
    missing = [piece for piece in pieces if not piece.is_complete()]
    if missing:
        make_data(plan)
        complete_all(missing, args.jobs)
    report.write_report([piece.record for piece in pieces], plan.out)
    print(f"{relative(plan.out)}/paper.md")


if __name__ == "__main__":
    run_main(main)
