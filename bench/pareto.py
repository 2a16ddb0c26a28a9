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
from model import Chat, UserError, load, place, run
from train import Rows

ROOT = Path(__file__).parent.parent


def read_problems(path: Path, limit: int | None) -> list[dict]:
    """The first `limit` rows, each with a prompt and an answer."""
    rows = list(Rows(path))[:limit]
    if not rows or (limit or 1) < 1:
        raise UserError(f"--limit {limit}: must be at least 1")
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get("prompt"), str) or "answer" not in row:
            raise UserError(f"{path}: row {number} lacks prompt or answer")
    return rows


def encode(chat: Chat, problems: list[dict]) -> list[list[int]]:
    turns = [[{"role": "user", "content": row["prompt"]}] for row in problems]
    return [chat.encode(chat.prompt(turn)) for turn in turns]


def last_number(text: str) -> str | None:
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return numbers[-1].replace(",", "") if numbers else None


def accuracy(chat: Chat, answers: list[Answer], problems: list[dict]) -> float:
    texts = [chat.decode(answer.tokens) for answer in answers]
    right = [last_number(text) == str(row["answer"]) for text, row in zip(texts, problems)]
    return sum(right) / len(right)


def tokens_per_forward(answers: list[Answer]) -> float:
    return sum(len(a.tokens) for a in answers) / sum(a.forwards for a in answers)


def positions_per_forward(answers: list[Answer]) -> float:
    """What the model computed in a forward, prefills aside."""
    widths = [width for answer in answers for width in answer.positions[1:]]
    return sum(widths) / max(1, len(widths))


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
    add("--block-cache", type=int, help="the paper's blocks of so many tokens; None is the cursor")
    add("--verify", action="store_true", help="lossless; tau says what is guessed")
    add("--limit", type=int, help="only the first so many problems")
    add("--rows", type=int, default=32, help="problems decoded at a time")
    add("--max-new", type=int, default=256, help="most tokens per problem")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", choices=("float32", "bfloat16"), help="None: bfloat16 on cuda, else float32")
    # fmt: on
    args = parser.parse_args()

    problems = read_problems(args.data, args.limit)
    for tau in args.tau:
        plain_ar(tau, args.metric)  # raises for one that cannot be, before the table begins
    model, chat = load(args.model, *place(args.device, args.dtype))
    prompts = encode(chat, problems)
    options = {name: getattr(args, name) for name in ("metric", "block", "block_cache", "max_new")}
    options["verify"] = args.verify
    print(f"{args.model}, {args.data}: {len(problems)} problems\n")
    print("|  tau | accuracy | tokens/forward | positions/forward |")
    print("|-----:|---------:|---------------:|------------------:|")
    for tau in args.tau:
        answers = generate(model, prompts, args.rows, tau=tau, **options)
        right, speed = accuracy(chat, answers, problems), tokens_per_forward(answers)
        wide = positions_per_forward(answers)
        print(f"| {tau:4g} | {right:8.1%} | {speed:14.2f} | {wide:17.1f} |", flush=True)


if __name__ == "__main__":
    run(main)
