"""Which recipe makes a real model look ahead: SmolLM2-135M, one factor at a time.

    python -m apps.smollm2 bench/work/recipes/base --unpatched
    python -m bench.recipes --data train.jsonl input_data.jsonl  # of GSM8K and IFEval; see --help
    python -m bench.recipes --train base own gold  # and judge: 45 minutes each on one thread
    python -m bench.recipes                        # the table of all arms that were judged

Every arm starts from the same model and sees as many answers in the same order. It is judged on
prompts that no arm has seen: by tokens per forward of `--verify` with all groups, and by what its
clean stream makes of the starting model's own answers, and of GSM8K's. Records are kept in
bench/results/recipes. A training that was interrupted is resumed.
"""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from plumbing.arguments import Parser, number, path
from plumbing.errors import UserError, run_main
from plumbing.files import atomic_write
from plumbing.jsonl import JsonlFile

import numpy as np
import torch

from bench.common import ROOT, encode, read_problems, table, tokens_per_forward
from bench.likelihood import interval, predict, read_examples, resampled
from decode import generate
from model import load

WORK = ROOT / "bench/work/recipes"
RECORDS = ROOT / "bench/results/recipes"
PLAN = (
    "--steps 64 --batch 16 --lr 2e-4 --dtype bfloat16 "
    "--batch-tokens 2048 --held-out 32 --save-every 16"
)
ARMS = {  # options of train.py; the last one of a kind counts
    "own": "--data own.jsonl",
    "own, seed 1": "--data own.jsonl --seed 1",
    "gold": "--data gold.jsonl",
    "sample": "--data sample.jsonl --normalization token",
    "batch 4": "--data own.jsonl --batch 4 --steps 256 --save-every 64",
    "lr 4e-4": "--data own.jsonl --lr 4e-4",
    "block 8": "--data own.jsonl --block 8",
    "ar-weight 2": "--data own.jsonl --ar-weight 2",
    "ar-weight 4": "--data own.jsonl --ar-weight 4",
    "sft": "--data own.jsonl --objective sft",
}
UNSEEN = 32  # prompts of each kind, to judge by
NUM_GSM8K = 640  # prompts, with the unseen ones
MAX_NEW = 128


# -------------------------------------------------------------------------------------------- data


def by_hash(prompts: Iterable[str]) -> list[str]:
    """In an order that depends on nothing but the texts."""
    return sorted(prompts, key=lambda text: hashlib.sha256(text.encode()).hexdigest())


def write_rows(name: str, prompts: list[str], answers: dict[str, dict]) -> None:
    lines = [json.dumps({"prompt": prompt} | answers[prompt]) + "\n" for prompt in prompts]
    atomic_write(WORK / name, lambda file: file.write_text("".join(lines)))


def own_answers(prompts: list[str], temperature: float) -> dict[str, dict]:
    """By the starting model."""
    model, chat = load(str(WORK / "base"), torch.device("cpu"), torch.bfloat16)
    encoded = encode(chat, [{"prompt": prompt} for prompt in prompts])
    answers = generate(model, encoded, 16, tau=1.0, temperature=temperature, max_new=MAX_NEW)
    rows = {}
    for prompt, answer in zip(prompts, answers):
        reason = "stop" if answer.tokens[-1] in answer.stop else "length"
        rows[prompt] = {"response": chat.decode(answer.tokens), "finish_reason": reason}
    return rows


def make_data(temperature: float, gsm8k: Path, ifeval: Path) -> None:
    """The model's answers to train on; and if they are greedy, gold.jsonl and what to judge by."""
    gold = {}
    for row in JsonlFile(gsm8k):
        gold[row["question"]] = {"response": re.sub("<<.*?>>", "", row["answer"])}
    for_tests = {row["prompt"] for row in JsonlFile(ROOT / "bench/data/ifeval/test.jsonl")}
    others = {row["prompt"] for row in JsonlFile(ifeval)} - for_tests
    questions = by_hash(gold)[:NUM_GSM8K]
    instructions = by_hash(others)
    training = questions[UNSEEN:] + instructions[UNSEEN:]
    if temperature:
        write_rows("sample.jsonl", training, own_answers(training, temperature))
        return
    own = own_answers(questions + instructions, temperature)
    write_rows("own.jsonl", training, own)
    write_rows("gold.jsonl", training, own | gold)
    write_rows("gsm8k-own.jsonl", questions[:UNSEEN], own)
    write_rows("gsm8k-gold.jsonl", questions[:UNSEEN], gold)
    write_rows("ifeval-own.jsonl", instructions[:UNSEEN], own)


# ---------------------------------------------------------------------------------- train and judge


def record_file(arm: str) -> Path:
    return RECORDS / f"{arm.replace(', ', '-').replace(' ', '-')}.json"


def run_arm(arm: str) -> None:
    if arm == "base":
        save_record(arm, judge(WORK / "base"))
        return
    out = WORK / record_file(arm).stem
    log = out / "log.jsonl"
    command = f"{sys.executable} {ROOT}/train.py --model base --out {out} {PLAN} {ARMS[arm]}"
    words = command.split() + ["--resume"] * out.exists()
    subprocess.run(words, cwd=WORK, check=True)
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    record = judge(out)
    record["clipped"] = sum(step["grad_norm"] > 1 for step in steps) / len(steps)
    save_record(arm, record)


def save_record(arm: str, record: dict) -> None:
    RECORDS.mkdir(parents=True, exist_ok=True)
    atomic_write(record_file(arm), lambda file: file.write_text(json.dumps(record) + "\n"))


@torch.inference_mode()
def judge(directory: Path) -> dict:
    """Lists with a number for every unseen prompt; likelihoods are sums over an answer."""
    base, _ = load(str(WORK / "base"), torch.device("cpu"), torch.bfloat16)
    model, chat = load(str(directory), torch.device("cpu"), torch.bfloat16)
    model.config.block_size = model.config.block_size or 4
    record = {}
    for name in ("gsm8k-own", "ifeval-own", "gsm8k-gold"):
        file = WORK / f"{name}.jsonl"
        found = predict(model, read_examples(file, None, chat, base.config), base)
        fields = {field: values.tolist() for field, values in found._asdict().items()}
        if name.endswith("own"):
            prompts = encode(chat, read_problems(file))
            groups = model.config.block_size + 1
            answers = generate(model, prompts, 8, verify=True, groups=groups, max_new=96)
            fields["decoded"] = [len(answer.tokens) for answer in answers]
            fields["forwards"] = [answer.forwards for answer in answers]
            fields["rate"] = tokens_per_forward(answers)
        record[name] = fields
    return record


# ------------------------------------------------------------------------------------------- report


def cells(record: dict, reference: dict) -> list[str]:
    kinds = [record[name] for name in ("gsm8k-own", "ifeval-own")]
    row = [f"{kind['rate']:.2f}" for kind in kinds]
    gain, low, high = gain_over(kinds, [reference["gsm8k-own"], reference["ifeval-own"]])
    row.append("" if record is reference else f"{gain:+.0%} ({low:+.0%} to {high:+.0%})")
    for name in ("gsm8k-own", "ifeval-own", "gsm8k-gold"):
        nats, low, high = interval(*(np.array(record[name][k]) for k in ("nats", "tokens")))
        row.append(f"{nats:.3f}")
    divergence = sum(sum(kind["divergence"]) for kind in kinds)
    row.append(f"{divergence / sum(sum(kind['tokens']) for kind in kinds):.2f}")
    row.append(f"{record['clipped']:.0%}" if "clipped" in record else "")
    return row


def gain_over(kinds: list[dict], others: list[dict]) -> tuple[float, float, float]:
    """Of tokens per forward, over both kinds of prompts, with a 95 % interval over prompts."""

    def joined(records, key):
        return np.concatenate([record[key] for record in records])

    weights = np.vstack([np.ones(2 * UNSEEN), resampled(2 * UNSEEN)])
    rates = [
        (weights @ joined(side, "decoded")) / (weights @ joined(side, "forwards"))
        for side in (kinds, others)
    ]
    gains = rates[0] / rates[1] - 1
    return gains[0], *np.quantile(gains[1:], [0.025, 0.975])


def report() -> str:
    names = [name for name in ("base", *ARMS) if record_file(name).exists()]
    records = {name: json.loads(record_file(name).read_text()) for name in names}
    if "own" not in records:
        raise UserError("nothing to compare with: train own first")
    head = ["", "GSM8K", "IFEval", "gain over own", "nats, own GSM8K", "own IFEval", "GSM8K's"]
    rows = [[name, *cells(record, records["own"])] for name, record in records.items()]
    return table([*head, "KL from base", "clipped"], rows)


def main() -> None:
    parser = Parser("Which recipe makes a real model look ahead.")
    add = parser.add_argument
    files = ("GSM8K", "IFEVAL")
    add("--data", type=path, nargs=2, metavar=files, help="let the model answer their prompts")
    add("--temperature", type=number(float, 0), default=0.0, help="of these answers")
    add("--train", nargs="+", choices=["base", *ARMS], metavar="ARM", help="train and judge these")
    args = parser.parse_args()
    if args.data:
        make_data(args.temperature, *args.data)
    for arm in args.train or []:
        run_arm(arm)
    if not args.data and not args.train:
        print(report())


if __name__ == "__main__":
    run_main(main)
