"""Accuracy against tokens per forward, over tau: the paper's trade-off, on any data.

    python bench/pareto.py --model toy/mars --data toy/test.jsonl --tau 1 .95 .9 .8 .7 .6 .5

The data is JSONL with `prompt` and `answer`; an output is right if its last number is the answer.
"""

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from decode import METRICS, Answer, generate, plain_ar
from model import UserError, load, place, run
from train import Rows

ROOT = Path(__file__).parent.parent


def last_number(text: str) -> str | None:
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return numbers[-1].replace(",", "") if numbers else None


def tokens_per_forward(results: list[Answer]) -> float:
    return sum(len(r.tokens) for r in results) / sum(r.forwards for r in results)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Accuracy against tokens per forward, over tau.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    # fmt: off
    add("--model", default=str(ROOT / "toy/mars"), help="directory or hub id")
    add("--data", type=Path, default=ROOT / "toy/test.jsonl", help='JSONL, "prompt" and "answer"')
    add("--tau", type=float, nargs="+", default=[1, .95, .9, .8, .7, .6, .5], help="thresholds")
    add("--metric", choices=METRICS, default="probability", help="of confidence")
    add("--block", type=int, help="masks per forward; None is what the checkpoint was trained with")
    add("--limit", type=int, help="only the first so many problems")
    add("--rows", type=int, default=32, help="problems decoded at a time")
    add("--max-new", type=int, default=256, help="most tokens per problem")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", choices=("float32", "bfloat16"), help="None: bfloat16 on cuda, else float32")
    # fmt: on
    args = parser.parse_args()

    rows = list(Rows(args.data))[: args.limit]
    if not rows or (args.limit or 1) < 1:
        raise UserError(f"--limit {args.limit}: must be at least 1")
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get("prompt"), str) or "answer" not in row:
            raise UserError(f"{args.data}: row {number} lacks prompt or answer")
    for tau in args.tau:
        plain_ar(tau, args.metric)  # raises for one that cannot be, before the table begins
    model, chat = load(args.model, *place(args.device, args.dtype))
    turns = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    prompts = [chat.encode(chat.prompt(turn)) for turn in turns]
    options = {"metric": args.metric, "block": args.block, "max_new": args.max_new}
    print(f"{args.model}, {args.data}: {len(rows)} problems\n")
    print("|  tau | accuracy | tokens/forward |\n|-----:|---------:|---------------:|")
    for tau in args.tau:
        results = generate(model, prompts, args.rows, tau=tau, **options)
        texts = [chat.decode(result.tokens) for result in results]
        right = sum(last_number(text) == str(row["answer"]) for text, row in zip(texts, rows))
        accuracy, speed = right / len(rows), tokens_per_forward(results)
        print(f"| {tau:4g} | {accuracy:8.1%} | {speed:14.2f} |", flush=True)


if __name__ == "__main__":
    run(main)
