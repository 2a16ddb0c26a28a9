"""The paper's claims at a scale that a laptop reaches, from one command.

    python -m experiments.paper    # ten hours of one core

All arms go on from one AR model, with the same data and number of steps (one has twice as many),
once per seed. Each model decodes the problems in several ways. What became of each problem is kept
in experiments/results/cache, and not made again: with the committed records this only draws the
report. An interrupted training is resumed. Records of two commits are not comparable: to make one
anew, delete all, or check out the commit of the others.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from tqdm import tqdm

from bench.common import ROOT, are_right
from bench.quality import given_responses, predict
from decode import generate
from experiments.paper import report
from experiments.paper.jacobi import jacobi
from experiments.paper.report import ENTROPY, MARGIN, ONE, OURS, PAPER
from model import Qwen2, load
from plumbing.arguments import Parser
from plumbing.chat import Chat
from plumbing.data import encode_prompt
from plumbing.errors import run_main
from plumbing.files import atomic_write, write_json
from toy.make import HARD_TEST_ROWS, hard_problem, split, write

START = "toy/hard"  # the model that all start from
WORK = "experiments/work/full"  # data and models; only the records are committed
RESULTS = ROOT / "experiments/results"
TRAIN_ROWS = 12_800
OPTIONS = "--steps 800 --batch 32 --save-every 200 --device cpu"  # of all trainings


@dataclass(frozen=True)
class Arm:
    """A way to train on, and the ways in which its models are decoded."""

    options: str = ""  # of the training; "" is the model that all start from
    block: int = 4  # B of training and decoding
    ways: tuple[str, ...] = (ONE,)  # to decode: see `decoding_options`
    num_seeds: int = 1


ALL_WAYS = (ONE, *PAPER, OURS, *ENTROPY, *MARGIN, "lossless")
FEW_WAYS = (ONE, *PAPER[::2], "lossless")
ARMS = {
    "sft": Arm(ways=(ONE, "jacobi")),
    "ar": Arm("--objective sft --lr 1e-3", num_seeds=3),
    "ar-slow": Arm("--objective sft --lr 5e-4", num_seeds=3),
    "mars-4": Arm("--block 4 --lr 1e-3", ways=ALL_WAYS, num_seeds=3),
    "mars-4-slow": Arm("--block 4 --lr 5e-4", num_seeds=3),
    "mars-4-long": Arm("--block 4 --lr 1e-3 --steps 1600"),
    "mars-8": Arm("--block 8 --lr 1e-3", 8, FEW_WAYS),
    "mars-16": Arm("--block 16 --lr 1e-3", 16, FEW_WAYS),
}


def decoding_options(way: str, block: int) -> dict:
    """The options of `generate` for a way to decode, such as "paper 0.95".

    The paper's decoder with B reads B candidates, where B masks give B + 1: it is ours with B - 1.
    """
    if way == "lossless":
        return {"block": block}
    kind, tau = way.split()
    if kind in ("tau", "ours"):
        return {"block": block, "tau": float(tau)}
    metric = "probability" if kind == "paper" else kind
    return {"block": block - 1, "tau": float(tau), "metric": metric}


def record_path(name: str, seed: int) -> Path:
    return RESULTS / "cache" / f"{name}-{seed}.json"


def this_commit() -> str:
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def complete(name: str, seed: int, problems: list[dict]) -> None:
    """Train an arm with a seed, decode the problems in its ways, and write the record.

    The record also has how well the written answers are predicted, one token ahead.
    """
    arm = ARMS[name]
    directory = START
    command = ""
    if arm.options:
        directory = f"{WORK}/{name}-{seed}"
        command = f"python train.py --model {START} --data {WORK}/train.jsonl {OPTIONS}"
        command += f" --out {directory} --seed {seed} {arm.options}"
        # --resume goes on with an interrupted training, and ends at once after one.
        words = [sys.executable, *command.split()[1:], "--resume"]
        subprocess.run(words, cwd=ROOT, check=True)
    model, chat = load(str(ROOT / directory))  # float32, on the CPU
    examples = given_responses(model, chat, problems)
    nats = [predict(model, each.tokens, each.prompt_length)[0].sum().item() for each in examples]
    record = {
        "command": command,
        "commit": this_commit(),
        "made": f"{date.today()}, {os.cpu_count()} CPU cores, torch {torch.__version__}",
        "decoded": {way: measure(model, chat, problems, way, arm.block) for way in arm.ways},
        "nats": " ".join(f"{one:.4f}" for one in nats),
        "tokens": sum(len(example.response) for example in examples),
    }
    atomic_write(record_path(name, seed), lambda path: write_json(path, record))


def measure(model: Qwen2, chat: Chat, problems: list[dict], way: str, block: int) -> dict:
    """Which problems were answered right, as a text of 0 and 1, and what the tokens cost."""
    prompts = [encode_prompt(problem, chat) for problem in problems]
    if way == "jacobi":
        answers = [jacobi(model, prompt, num_guesses=16) for prompt in prompts]
    else:
        answers = generate(model, prompts, rows=64, **decoding_options(way, block))
    return {
        "right": "".join(str(int(right)) for right in are_right(chat, answers, problems)),
        "tokens": sum(len(answer.tokens) for answer in answers),
        "forwards": sum(answer.forwards for answer in answers),
    }


def main() -> None:
    Parser("The paper's claims at a scale that a laptop reaches.").parse_args()
    pieces = [(name, seed) for name, arm in ARMS.items() for seed in range(arm.num_seeds)]
    missing = [piece for piece in pieces if not record_path(*piece).exists()]
    if missing:
        report.read_records(RESULTS, this_commit())  # a mix is refused before hours of training
        rows, problems = split(hard_problem, TRAIN_ROWS, HARD_TEST_ROWS)
        (ROOT / WORK).mkdir(parents=True, exist_ok=True)
        write(ROOT / WORK / "train.jsonl", rows)
        for name, seed in tqdm(missing):
            complete(name, seed, problems)
    report.write_report(RESULTS)
    print(f"{RESULTS}/paper.md")


if __name__ == "__main__":
    run_main(main)
