"""Every claim of the paper at a scale that a laptop reaches, from one command.

    python -m bench.paper                        # everything: about four hours on 2 cores
    python -m bench.paper --seed 0 --stage sft   # one piece; an interrupted training is resumed
    python -m bench.paper --quick                # 14 minutes, from toy/sft, on easy problems

A piece is one stage (a trained model) with one seed. It is trained by a command of train.py or
bench/paper/baselines.py, decodes the problems in several ways, and keeps what became of each
problem under bench/results/cache. What is there already is not computed again, so with the
committed cache this command only draws the report (bench/paper/report.py).
"""

import datetime
import functools
import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from plumbing.arguments import Parser, find_device, number
from plumbing.chat import Chat
from plumbing.errors import UserError, run_main
from plumbing.files import atomic_write
from plumbing.jsonl import JsonlFile
from plumbing.scheduler import Text

import torch
from tqdm import tqdm

from bench.common import ROOT, encode, last_number
from bench.paper import report
from bench.paper.baselines import Jacobi, diffuse
from bench.paper.report import ONE, PAPER, SWEEPS
from decode import generate
from model import Qwen2, load
from toy.make import World, hard_problem, problem, split, write

WORK = ROOT / "bench/work"
RESULTS = ROOT / "bench/results"
SFT = ROOT / "toy/sft"
ROWS = 64  # problems decoded at a time
NUM_JACOBI_GUESSES = 16
BASELINES = "-m bench.paper.baselines"
FORMER_BASELINES = "bench/controls.py"  # as the records of November 2026 name it

# --------------------------------------------------------------------------------------- the stages


@dataclass(frozen=True)
class Stage:
    """One trained model, and the ways in which it is decoded."""

    script: str = "train.py"
    options: tuple[str, ...] = ()  # of the script, besides the plan's
    block: int = 4  # B of training and decoding
    ways: tuple[str, ...] = (ONE,)  # to decode: see `decoding_options`
    first_seed_ways: tuple[str, ...] = ()  # more of these for seed 0
    num_seeds: int = 1
    start: str = "sft"  # the stage whose model it starts from


PAPER_SWEEP = SWEEPS["probability"]
STAGES = {
    "base": Stage(start=""),  # toy/sft as it is
    "sft": Stage(options=("--objective", "sft"), ways=(ONE, "jacobi"), num_seeds=3, start="base"),
    "ar": Stage(options=("--objective", "sft"), num_seeds=3),
    "mars-4": Stage(
        options=("--block", "4"),
        ways=(ONE, *PAPER_SWEEP, *SWEEPS["ours"], "verify"),
        first_seed_ways=(*SWEEPS["entropy"], *SWEEPS["margin"]),
        num_seeds=3,
    ),
    "mars-8": Stage(options=("--block", "8"), block=8, ways=(ONE, *PAPER_SWEEP, "verify")),
    "mars-16": Stage(options=("--block", "16"), block=16, ways=(ONE, *PAPER_SWEEP, "verify")),
    "diffusion": Stage(BASELINES, options=("diffusion",), ways=("diffusion",), num_seeds=3),
    "distill": Stage(options=("--block", "4", "--distill"), ways=(ONE, *SWEEPS["ours"], "verify")),
    "fixed": Stage(
        options=("--block", "4", "--block-phase", "fixed"),
        ways=(ONE, *SWEEPS["ours"], "verify"),
    ),
}
for size in (4, 8, 16):
    no_clean = ("--block", str(size), "--ar-weight", "0")
    over_t = ("over-t", *no_clean)
    STAGES[f"no-clean-{size}"] = Stage(options=no_clean, block=size, ways=(ONE, PAPER))
    STAGES[f"over-t-{size}"] = Stage(BASELINES, options=over_t, block=size, ways=(ONE, PAPER))


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
        return {"block": block, "tau": 0.0, "verify": True}
    if kind == "jacobi":
        return {"tau": 1.0, "guesses": NUM_JACOBI_GUESSES}
    return {"tau": 1.0}  # also for diffusion, which has no tau


@dataclass(frozen=True)
class Plan:
    """Which stages, how long they train, and on which problems they are measured."""

    world: World
    train_rows: int
    num_problems: int
    sft_options: tuple[str, ...]  # of train.py; none: toy/sft is the model
    options: tuple[str, ...]  # of train.py, for all later stages
    stages: tuple[str, ...]
    num_seeds: int  # at most
    work: Path  # for the trained models
    cache: Path  # for the records
    out: Path  # for the report
    method: str  # a paragraph of the report

    def pieces(self) -> Iterator[tuple[int, str]]:
        """(seed, stage), in an order in which each comes after the one that it starts from."""
        for name in self.stages:
            for seed in range(min(self.num_seeds, STAGES[name].num_seeds)):
                yield seed, name

    def model_path(self, name: str, seed: int) -> Path:
        if name == "base" or (name == "sft" and not self.sft_options):
            return SFT
        return self.work / f"{name}-{seed}"


FULL = Plan(
    world=hard_problem,
    train_rows=60_000,
    num_problems=1000,
    sft_options=("--steps", "900", "--batch", "32", "--lr", "2e-3"),
    options=("--steps", "400", "--batch", "32", "--lr", "1e-3"),
    stages=tuple(STAGES),
    num_seeds=3,
    work=WORK / "full",
    cache=RESULTS / "cache",
    out=RESULTS,
    method="""\
**The problems** are harder than the bundled ones (`python toy/make.py --hard`): one to six
operations on numbers up to 999, with up to two irrelevant sentences. The model has 1.5 M parameters
and starts from one that has learnt the easy problems ([toy/sft](../../toy/README.md)). Stage 1, AR
SFT, is 900 steps of 32 problems. Every other model is 400 steps of 32 problems from AR SFT, at half
the learning rate, on the same data in the same order. Seeds differ in the order of the data, from
stage 1 on.""",
)
QUICK = Plan(
    world=problem,
    train_rows=20_000,
    num_problems=500,
    sft_options=(),
    options=("--steps", "150", "--batch", "64", "--lr", "1e-3"),
    stages=("sft", "ar", "mars-4", "diffusion", "no-clean-4"),
    num_seeds=1,
    work=WORK / "quick",
    cache=WORK / "quick/cache",
    out=WORK / "quick",
    method="""\
**This is the quick run**: the easy problems of toy/, with the bundled toy/sft as AR SFT. Every
other model is 150 steps of 64 problems from there. One seed, fewer models, no wall-clock times.""",
)


@functools.cache
def problems_of(plan: Plan) -> tuple[list[dict], str]:
    """The problems, and a hash by which records know them."""
    _, problems = split(plan.world, 0, plan.num_problems)
    return problems, hashlib.sha256(json.dumps(problems).encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------ a piece


class Piece:
    """One stage with one seed: its model in plan.work, and its record in plan.cache."""

    def __init__(self, plan: Plan, seed: int, name: str):
        self.plan = plan
        self.seed = seed
        self.name = name
        self.stage = STAGES[name]
        self.model_path = plan.model_path(name, seed)
        self.is_trained_here = self.model_path != SFT
        self.path = plan.cache / f"{name}-{seed}.json"
        self.record = {}
        if self.path.exists():
            self.record = json.loads(self.path.read_text(encoding="utf-8"))
        self.expect("problems", problems_of(plan)[1])
        if self.is_trained_here:
            self.expect("command", self.command())

    def expect(self, what: str, value: str) -> None:
        """Raise UserError if the record is another plan's; note the value in a new record."""
        found = self.record.setdefault(what, value)
        if found.replace(FORMER_BASELINES, BASELINES) != value:
            raise UserError(f"{self.path}: has another {what}; move it away to compute it anew")

    def command(self) -> str:
        """What trains the model."""
        start = self.plan.model_path(self.stage.start, self.seed)
        options = self.plan.options
        if self.name == "sft":
            options = self.plan.sft_options
        words = ["python", self.stage.script, *self.stage.options]
        words += ["--model", relative(start), "--data", relative(self.plan.work / "train.jsonl")]
        words += ["--out", relative(self.model_path), "--seed", str(self.seed), *options]
        words += ["--save-every", "50", "--held-out", "256"]
        return " ".join(words)

    def missing_ways(self) -> dict[str, dict]:
        """Ways to decode that the record lacks, or has with other options; their options."""
        ways = self.stage.ways
        if self.seed == 0:
            ways += self.stage.first_seed_ways
        decoded = self.record.get("decoded", {})
        missing = {}
        for way in ways:
            options = decoding_options(way, self.stage.block)
            if way not in decoded or decoded[way]["options"] != options:
                missing[way] = options
        return missing

    def is_complete(self) -> bool:
        if self.is_trained_here and "trained" not in self.record:
            return False
        return not self.missing_ways()

    def needs_training(self) -> bool:
        """Records are committed and weights are not: the weights of a trained piece may be gone."""
        if not self.is_trained_here:
            return False
        has_weights = (self.model_path / "model.safetensors").exists()
        return "trained" not in self.record or not has_weights

    def keep(self) -> None:
        """Write the record, an entry per line, so that a diff shows what changed."""
        self.record["machine"] = f"{os.cpu_count()} CPU cores, {platform.machine()}"
        self.record["versions"] = f"Python {platform.python_version()}, torch {torch.__version__}"
        self.record["date"] = datetime.date.today().isoformat()
        text = json.dumps(self.record, indent=1) + "\n"
        atomic_write(self.path, lambda path: path.write_text(text, encoding="utf-8"))

    def train(self) -> None:
        """Run the command, which resumes an interrupted training."""
        make_data(self.plan)
        log = self.model_path.with_suffix(".txt")
        words = [sys.executable, *self.command().split()[1:], "--resume"]
        began = time.perf_counter()
        with open(log, "w") as file:
            done = subprocess.run(words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        if done.returncode:
            raise UserError(f"{self.command()}: ended with {done.returncode}; see {log}")
        self.record["trained"] = read_log(self.model_path / "log.jsonl")
        self.record["seconds"] = round(time.perf_counter() - began)
        self.keep()

    def decode(self) -> None:
        missing = self.missing_ways()
        if not missing:
            return
        problems = problems_of(self.plan)[0]
        device, dtype = find_device("auto", None)
        model, chat = load(str(self.model_path), device, dtype)
        decoded = self.record.setdefault("decoded", {})
        bar = tqdm(missing.items(), desc=f"{self.name}, seed {self.seed}", leave=False)
        for way, options in bar:
            decoded[way] = measure(model, chat, problems, way, options)
            self.keep()

    def complete(self) -> None:
        """Train and decode what is missing; train again if only the weights are missing."""
        if self.needs_training():
            self.train()
        self.decode()


def relative(path: Path) -> str:
    """The path as seen from the repository's root, where it is below it."""
    return str(path).removeprefix(f"{ROOT}/")


def make_data(plan: Plan) -> None:
    """Write the training data; UserError if it contains one of the problems."""
    path = plan.work / "train.jsonl"
    if not path.exists():
        rows, _ = split(plan.world, plan.train_rows, plan.num_problems)
        atomic_write(path, lambda temporary: write(temporary, rows))
    prompts = {problem["prompt"] for problem in problems_of(plan)[0]}
    if any(row["prompt"] in prompts for row in JsonlFile(path)):
        raise UserError(f"{path}: contains problems of the test set; move it away")


def read_log(path: Path) -> dict:
    """The last losses, and the share of right guesses at each look-ahead by step."""
    lines = [json.loads(line) for line in open(path, encoding="utf-8")]
    last = {key: lines[-1][key] for key in ("noisy", "clean") if key in lines[-1]}
    look_ahead = {line["step"]: line["look_ahead"] for line in lines if "look_ahead" in line}
    return {"last": last, "look_ahead": look_ahead}


def answer_all(model: Qwen2, prompts: list, way: str, options: dict) -> tuple[list[Text], int]:
    """The answers, and how many forwards they took together."""
    if way == "diffusion":
        answers = []
        for i in range(0, len(prompts), ROWS):
            answers += diffuse(model, prompts[i : i + ROWS])
        num_blocks = sum(answer.forwards for answer in answers)
        return answers, num_blocks * (model.config.block_size + 1)
    if way == "jacobi":
        decoder = Jacobi(model, prompts, options["guesses"], ROWS)
        answers = list(decoder.waiting)
        for _ in decoder:
            pass
    else:
        answers = generate(model, prompts, ROWS, **options)
    return answers, sum(answer.forwards for answer in answers)


def measure(model: Qwen2, chat: Chat, problems: list[dict], way: str, options: dict) -> dict:
    """Which problems were answered right, as a text of 0 and 1, and what the tokens cost."""
    began = time.perf_counter()
    answers, num_forwards = answer_all(model, encode(chat, problems), way, options)
    right = ""
    for answer, row in zip(answers, problems):
        is_right = last_number(chat.decode(answer.tokens)) == float(row["answer"])
        right += "1" if is_right else "0"
    return {
        "options": options,
        "right": right,
        "tokens": sum(len(answer.tokens) for answer in answers),
        "forwards": num_forwards,
        "seconds": round(time.perf_counter() - began, 1),
    }


# --------------------------------------------------------------------------------------- all pieces


def to_do(plan: Plan) -> list[Piece]:
    """Incomplete pieces, and before them those that they start from if the weights are gone."""
    pieces = [Piece(plan, seed, name) for seed, name in plan.pieces()]
    incomplete = [piece for piece in pieces if not piece.is_complete()]
    starts = {(piece.seed, piece.stage.start) for piece in incomplete}
    needed = []
    for piece in pieces:
        is_start = (piece.seed, piece.name) in starts
        if piece in incomplete or (is_start and piece.needs_training()):
            needed.append(piece)
    return needed


def run_pieces(plan: Plan, jobs: int, quick: bool) -> None:
    """Complete every piece, `jobs` at a time, each in a process of its own."""
    pieces = to_do(plan)
    if not pieces:
        return
    make_data(plan)
    num_threads = max(1, (os.cpu_count() or 1) // jobs)
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}

    def run_piece(piece: Piece) -> None:
        words = [sys.executable, "-m", "bench.paper"]
        words += ["--seed", str(piece.seed), "--stage", piece.name]
        if quick:
            words.append("--quick")
        done = subprocess.run(words, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            reason = lines[-1] if lines else f"ended with {done.returncode}"
            raise UserError(f"{piece.name}, seed {piece.seed}: {reason}")

    stage_1 = [piece for piece in pieces if piece.stage.start != "sft"]
    stage_2 = [piece for piece in pieces if piece.stage.start == "sft"]
    with ThreadPoolExecutor(jobs) as pool, tqdm(total=len(pieces), desc="pieces") as bar:
        for stage in (stage_1, stage_2):
            for _ in pool.map(run_piece, stage):  # the first error cancels what has not begun
                bar.update()


def printed_by(plan: Plan, file: str, *words: str) -> str:
    """What `python -m WORDS` printed when it first ran here; nothing else may run meanwhile."""
    path = plan.cache / file
    if not path.exists():
        command = [sys.executable, "-m", *words]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise UserError(f"{' '.join(words)}: ended with {done.returncode}")
        atomic_write(path, lambda temporary: temporary.write_text(done.stdout, encoding="utf-8"))
    return path.read_text(encoding="utf-8")


def main() -> None:
    parser = Parser("Every claim of the paper at a scale that a laptop reaches.")
    add = parser.add_argument
    add("--quick", action="store_true", help="14 minutes: easy problems, one seed, fewer models")
    add("--stage", choices=STAGES, help="only this piece, with the seed of --seed")
    add("--seed", type=number(least=0), default=0, help="of --stage: 0, 1 or 2")
    add("--jobs", type=number(least=1), default=os.cpu_count(), help="pieces at a time")
    args = parser.parse_args()
    plan = QUICK if args.quick else FULL
    if args.stage:
        if (args.seed, args.stage) not in plan.pieces():
            raise UserError(f"--stage {args.stage} --seed {args.seed}: not a piece of this plan")
        Piece(plan, args.seed, args.stage).complete()
        return
    if not importlib.util.find_spec("matplotlib"):
        raise UserError("the plots need matplotlib: pip install -r bench/requirements.txt")
    run_pieces(plan, args.jobs, args.quick)
    texts = {"method": plan.method}
    if not args.quick:
        texts["table5"] = printed_by(plan, "speed.txt", "bench.speed", "--table5")
        texts["table6"] = printed_by(plan, "speculative.txt", "bench.paper.drafts")
    report.write_report(plan.cache, plan.out, texts, readings=not args.quick)
    print(f"{plan.out / 'paper.md'}, and plots next to it")


if __name__ == "__main__":
    run_main(main)
