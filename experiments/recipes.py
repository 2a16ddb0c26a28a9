"""Which recipe makes a real model look ahead: SmolLM2-135M, one factor at a time.

    python -m apps.smollm2 experiments/work/recipes/base --unpatched
    python -m apps.smollm2 experiments/work/recipes/new-patch
    python -m experiments.recipes --data train.jsonl input_data.jsonl    # its greedy answers
    python -m experiments.recipes --data train.jsonl input_data.jsonl --sample  # for arm `sample`
    python -m experiments.recipes --train base own batch-1    # and judge: 27 minutes each
    python -m experiments.recipes    # the tables of all that were judged

train.jsonl is GSM8K's (openai/grade-school-math), input_data.jsonl IFEval's. Every arm starts from
the same model and sees 1,024 answers; the arms `more` start from `patched`, a model that MARS has
trained for long: base with the former patch of smollm2/. All are judged on prompts that no arm has
seen: by tokens per forward of `--verify` (with all groups of 5 % and more) and of lower taus, by
how likely a model finds what it says then, and by how well its clean stream predicts the answers of
base, and those of GSM8K. Intervals are over prompts only: another seed of the training may differ
by more. A training that was interrupted goes on from its last checkpoint. Records are kept in
experiments/results/recipes. In bfloat16 the answers of base depend on the CPU, so records that were
judged by the same answers, and by the same judge, have a folder of their own.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

import lossless
from bench.common import ROOT, encode, read_problems, table
from bench.likelihood import predict, read_examples, resampled
from bench.quality import nats_per_token
from decode import generate
from model import load
from plumbing.arguments import Parser, path
from plumbing.errors import UserError, run_main
from plumbing.files import atomic_write
from plumbing.jsonl import JsonlFile

WORK = ROOT / "experiments/work/recipes"
RECORDS = ROOT / "experiments/results/recipes"
PLAN = (
    "--steps 512 --batch 2 --lr 2e-4 --dtype bfloat16 "
    "--batch-tokens 2048 --held-out 32 --save-every 128"
)
STARTS = ("base", "patched", "new-patch")  # not trained here
ARMS = {  # options of train.py; the last one of a kind counts
    "own": "--data own.jsonl",
    "sample": "--data sample.jsonl --normalization token",
    "batch-1": "--data own.jsonl --batch 1 --steps 1024 --save-every 256",
    "batch-4": "--data own.jsonl --batch 4 --steps 256 --save-every 64",
    "batch-16": "--data own.jsonl --batch 16 --steps 64 --save-every 16",
    "lr-4e-4": "--data own.jsonl --lr 4e-4",
    "block-8": "--data own.jsonl --block 8",
    "ar-weight-2": "--data own.jsonl --ar-weight 2",
    "ar-weight-4": "--data own.jsonl --ar-weight 4",
    "sft": "--data own.jsonl --objective sft",
    "expected": "--data own.jsonl --mask-weight expected",
    "more": "--data own.jsonl --model patched",
    "more-seed-1": "--data own.jsonl --model patched --seed 1",
    "more-expected": "--data own.jsonl --model patched --mask-weight expected",
    "more-expected-seed-1": "--data own.jsonl --model patched --mask-weight expected --seed 1",
    "more-fading-seed-1": "--data own.jsonl --model patched --seed 1",
    "more-smoothing-1-seed-1": "--data own.jsonl --model patched --seed 1",
}
WEIGHTS = {  # arms that experiments/mask_weights.py trains, with these weights of guesses
    "more-fading-seed-1": "fading",
    "more-smoothing-1-seed-1": "smoothing-1",
}
CONTROL = {  # what an arm is compared with, if not with own
    "more-expected": "more",
    "more-expected-seed-1": "more-seed-1",
    "more-fading-seed-1": "more-seed-1",
    "more-smoothing-1-seed-1": "more-seed-1",
}
UNSEEN = 32  # prompts of each kind, to judge by
NUM_GSM8K = 640  # prompts, with the unseen ones
MAX_NEW = 128  # tokens of an answer to train on
MAX_JUDGED = 96  # and of one to judge by
OWN = ("gsm8k-own", "ifeval-own")  # the starting model's answers to the unseen prompts
JUDGED_BY = (*OWN, "gsm8k-gold")
TAUS = (0.95, 0.8)
EDITION = 2  # of the judge; edition 1 left out groups below 2 %
LEAST_PROBABILITY = 0.05  # of guesses and groups in this edition, whatever is lossless.py's now


def check_made(*names: str) -> None:
    for name in names:
        if not (WORK / name).exists():
            first = "the commands at the top of experiments/recipes.py make it"
            raise UserError(f"{WORK / name}: is missing; {first}")


# -------------------------------------------------------------------------------------------- data


def by_hash(prompts: Iterable[str]) -> list[str]:
    """In an order that depends on nothing but the texts."""
    return sorted(prompts, key=lambda text: hashlib.sha256(text.encode()).hexdigest())


def prompts_in(file: Path) -> set[str]:
    return {row["prompt"] for row in read_problems(file)}


def write_rows(name: str, prompts: list[str], answers: dict[str, dict]) -> None:
    lines = [json.dumps({"prompt": prompt} | answers[prompt]) + "\n" for prompt in prompts]
    atomic_write(WORK / name, lambda file: file.write_text("".join(lines)))


def own_answers(prompts: list[str], temperature: float) -> dict[str, dict]:
    """By the model that all arms start from."""
    check_made("base")
    model, chat = load(str(WORK / "base"), dtype=torch.bfloat16)
    encoded = encode(chat, [{"prompt": prompt} for prompt in prompts])
    answers = generate(model, encoded, 16, tau=1.0, temperature=temperature, max_new=MAX_NEW)
    rows = {}
    for prompt, answer in zip(prompts, answers):
        reason = "stop" if answer.tokens[-1] in answer.stop else "length"
        rows[prompt] = {"response": chat.decode(answer.tokens), "finish_reason": reason}
    return rows


def make_data(gsm8k: Path, ifeval: Path, sample: bool) -> None:
    """Write own.jsonl and what to judge by; or sample.jsonl alone."""
    gold = {}
    for row in read_problems(gsm8k):
        if "answer" not in row:
            raise UserError(f"{gsm8k}: has no answers; --data takes GSM8K's file first")
        gold[row["prompt"]] = {"response": re.sub("<<.*?>>", "", row["answer"])}
    questions = gold.keys() - prompts_in(ROOT / "bench/data/gsm8k/test.jsonl")
    instructions = prompts_in(ifeval) - prompts_in(ROOT / "bench/data/ifeval/test.jsonl")
    questions = by_hash(questions)[:NUM_GSM8K]
    instructions = by_hash(instructions)
    training = questions[UNSEEN:] + instructions[UNSEEN:]
    if sample:
        write_rows("sample.jsonl", training, own_answers(training, temperature=1.0))
        return
    own = own_answers(questions + instructions, temperature=0.0)
    write_rows("own.jsonl", training, own)
    write_rows("gsm8k-own.jsonl", questions[:UNSEEN], own)
    write_rows("gsm8k-gold.jsonl", questions[:UNSEEN], gold)
    write_rows("ifeval-own.jsonl", instructions[:UNSEEN], own)


# ---------------------------------------------------------------------------------- train and judge


def run_arm(arm: str) -> None:
    check_made("base", *(f"{name}.jsonl" for name in JUDGED_BY))
    if arm not in STARTS:
        options = ARMS[arm].split()
        check_made(options[1])  # what --data names
        program = ["-m", "train"]
        if arm in WEIGHTS:
            program = ["-m", "experiments.mask_weights", WEIGHTS[arm]]
        words = [sys.executable, *program, "--model", "base", "--out", arm, "--resume"]
        here = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run([*words, *PLAN.split(), *options], cwd=WORK, env=here)
        if done.returncode:
            sys.exit(done.returncode)  # train.py has said why
    text = json.dumps(judge(WORK / arm)) + "\n"
    answers = JsonlFile(WORK / f"{OWN[0]}.jsonl")
    folder = RECORDS / f"{answers.checksum}-{EDITION}"
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / f"{arm}.json", lambda file: file.write_text(text))


def judge(directory: Path) -> dict:
    """Lists with a number for every unseen prompt; likelihoods are sums over an answer."""
    base, _ = load(str(WORK / "base"), dtype=torch.bfloat16)
    model, chat = load(str(directory), dtype=torch.bfloat16)
    block = model.config.block or 4  # base has none
    record = {}
    for name in JUDGED_BY:
        file = WORK / f"{name}.jsonl"
        found = predict(model, read_examples(file, None, chat, model.config), base)
        record[name] = {field: values.tolist() for field, values in found._asdict().items()}
        if name in OWN:
            prompts = encode(chat, read_problems(file))
            ways = {"verify": {"verify": True, "groups": block + 1}}
            ways |= {f"tau {tau:g}": {"tau": tau} for tau in TAUS}
            for way, options in ways.items():
                answers = generate(model, prompts, 8, block=block, max_new=MAX_JUDGED, **options)
                record[name][way] = {
                    "decoded": [len(answer.tokens) for answer in answers],
                    "forwards": [answer.forwards for answer in answers],
                    "nats": nats_per_token(model, answers),
                }
    return record


# ------------------------------------------------------------------------------------------- report


def rate(record: dict, name: str, weights: np.ndarray, way: str = "verify") -> np.ndarray:
    """Tokens per forward, for every row of weights over the prompts."""
    decoded = record[name][way]
    return (weights @ np.array(decoded["decoded"])) / (weights @ np.array(decoded["forwards"]))


def gain(record: dict, other: dict) -> tuple[float, float, float]:
    """Of tokens per forward, the mean over both kinds of prompts, with its 95 % interval."""
    draws = np.vstack([np.ones(UNSEEN), resampled(UNSEEN)])  # (1 + resamples, prompts)
    other_draws = np.vstack([draws[:1], draws[:0:-1]])  # backwards: the kinds are drawn apart
    gsm8k, ifeval = OWN
    means = [
        (rate(side, gsm8k, draws) + rate(side, ifeval, other_draws)) / 2 for side in (record, other)
    ]
    gains = means[0] / means[1] - 1
    return gains[0], *np.quantile(gains[1:], [0.025, 0.975])


def gain_over(record: dict, control: str, reference: dict) -> str:
    mean, low, high = gain(record, reference)
    return f"{mean:+.0%} ({low:+.0%} to {high:+.0%}) over {control}"


def cells(record: dict) -> list[str]:
    row = []
    for tau in TAUS:
        row += cells_of_tau(record, f"tau {tau:g}")
    nats = [f"{sum(record[name]['nats']) / sum(record[name]['tokens']):.3f}" for name in JUDGED_BY]
    divergence = sum(sum(record[name]["divergence"]) for name in OWN)
    num_tokens = sum(sum(record[name]["tokens"]) for name in OWN)
    return [*row, ", ".join(nats), f"{divergence / num_tokens:.2f}"]


def cells_of_tau(record: dict, way: str) -> list[str]:
    if way not in record[OWN[0]]:  # not judged by lower taus at that time
        return ["", ""]
    tokens = [f"{rate(record, name, np.ones(UNSEEN), way):.2f}" for name in OWN]
    nats = [f"{record[name][way]['nats']:.2f}" for name in OWN]
    return [", ".join(tokens), ", ".join(nats)]


def report(folder: Path) -> str:
    """The table of the arms that were judged by the same answers and the same judge."""
    records = {}
    for arm in (*STARTS, *ARMS):
        if (folder / f"{arm}.json").exists():
            records[arm] = json.loads((folder / f"{arm}.json").read_text())
    head = ["tokens/forward of verify", "gain, 95 %"]
    for tau in TAUS:
        head += [f"of tau {tau:g}", "its nats"]
    head += ["nats: base's GSM8K, base's IFEval, GSM8K's answers", "KL from base"]
    rows = []
    for arm, record in records.items():
        both = [f"{rate(record, name, np.ones(UNSEEN)):.2f}" for name in OWN]
        control = CONTROL.get(arm, "own")
        has_control = control in records and control != arm
        gained = gain_over(record, control, records[control]) if has_control else ""
        rows.append([arm, ", ".join(both), gained, *cells(record)])
    return table(["", *head], rows)


def main() -> None:
    parser = Parser("Which recipe makes a real model look ahead.")
    add = parser.add_argument
    files = ("GSM8K", "IFEVAL")
    add("--data", type=path, nargs=2, metavar=files, help="let the model answer their prompts")
    add("--sample", action="store_true", help="with --data: at temperature 1, not greedily")
    names = [*STARTS, *ARMS]
    add("--train", nargs="+", choices=names, metavar="ARM", help=f"of: {' '.join(names)}")
    args = parser.parse_args()
    if args.sample and not args.data:
        parser.error("--sample goes with --data")
    lossless.LEAST_PROBABILITY = LEAST_PROBABILITY
    if args.data:
        make_data(*args.data, args.sample)
    for arm in args.train or []:
        run_arm(arm)
    if not args.data and not args.train:
        folders = sorted(RECORDS.glob("*/"))
        if not folders:
            raise UserError("nothing was judged yet: --train own first")
        print("\n\n".join(f"{folder.name}:\n{report(folder)}" for folder in folders))


if __name__ == "__main__":
    run_main(main)
