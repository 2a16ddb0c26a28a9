"""Accuracy against tokens per forward, over tau (the paper's Figure 2 and Table 4).

    python bench/pareto.py --model toy/mars --data toy/test.jsonl --tau 1 .95 .9 .8 .7 .6 .5

The data is JSONL with `prompt` and `answer`; an output is right if its last number is the answer.
"""

import argparse
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from decode import METRICS, Result, generate
from model import UserError, load, pick_device, pick_dtype, run
from train import Rows


def last_number(text: str) -> str | None:
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return numbers[-1].replace(",", "") if numbers else None


def tokens_per_forward(results: list[Result]) -> float:
    return sum(len(r.tokens) for r in results) / sum(r.forwards for r in results)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="toy/mars", help="directory or hub id")
    add("--data", type=Path, default=Path("toy/test.jsonl"), help='JSONL with "prompt" and "answer"')
    add("--tau", type=float, nargs="+", default=[1, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5], help="thresholds")
    add("--metric", choices=METRICS, default="probability", help="of confidence")
    add("--block", type=int, help="masks per forward; None is what the checkpoint was trained with")
    add("--limit", type=int, help="only the first so many problems")
    add("--rows", type=int, default=32, help="problems decoded at a time")
    add("--max-new", type=int, default=256, help="most tokens per problem")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", choices=("float32", "bfloat16"), help="None is bfloat16 on cuda, else float32")
    args = parser.parse_args()

    rows = list(Rows(args.data))[: args.limit]
    for number, row in enumerate(rows, 1):
        if not {"prompt", "answer"} <= row.keys():
            raise UserError(f"{args.data}: row {number} lacks prompt or answer")
    device = pick_device(args.device)
    model, chat = load(args.model, device, pick_dtype(args.dtype, device))
    turns = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    prompts = [chat.encode(chat.prompt(turn)) for turn in turns]
    block = args.block or model.config.block_size or 4
    print(f"{args.model} on {args.data} ({len(rows)} problems), B = {block}, {args.metric}\n")
    print("|  tau | accuracy | tokens/forward |\n|-----:|---------:|---------------:|")
    for tau in args.tau:
        results = generate(
            model, prompts, args.rows, tau=tau, metric=args.metric, block=block, max_new=args.max_new
        )
        right = sum(last_number(chat.decode(r.tokens)) == row["answer"] for r, row in zip(results, rows))
        print(f"| {tau:4g} | {right / len(rows):8.1%} | {tokens_per_forward(results):14.2f} |", flush=True)


if __name__ == "__main__":
    run(main)
