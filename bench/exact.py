"""Is `--verify` lossless? Every answer beside that of plain AR, token by token.

    python bench/exact.py                                  # the 500 toy problems, float32
    python bench/exact.py --data gsm8k.jsonl --max-new 128 --dtype bfloat16

In exact arithmetic all are the same. In float32 a forward of 25 positions rounds otherwise than one
of a single position, so two words that are as good as equal may change places: a tie, if the two
best logits where the answers part are at most 1e-4 apart. Any other difference is an error of ours
(in bfloat16, whose logits have three digits, it may be rounding, too).
"""

import argparse
import sys
from os.path import commonprefix  # of any two lists
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from bench.pareto import ROOT, encode, read_problems, tokens_per_forward
from decode import generate
from model import Qwen2, load, place, run


@torch.inference_mode()
def gap(model: Qwen2, tokens: list[int]) -> float:
    """How far apart the two best logits are for what comes after these tokens."""
    ids = torch.tensor([tokens], device=model.device)
    hidden = model(ids, torch.arange(len(tokens), device=model.device)[None], None)
    best, second = model.logits(hidden[0, -1:]).float().topk(2).values[0].tolist()
    return best - second


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compare --verify with plain AR, token by token.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    # fmt: off
    add("--model", default=str(ROOT / "toy/mars"), help="directory or hub id")
    add("--data", type=Path, default=ROOT / "toy/test.jsonl", help='JSONL, "prompt" and "answer"')
    add("--tau", type=float, default=0.0, help="what is guessed; 0 is everything")
    add("--block", type=int, help="masks per group; None is what the checkpoint was trained with")
    add("--limit", type=int, default=500, help="only the first so many problems")
    add("--rows", type=int, default=8, help="problems decoded at a time")
    add("--max-new", type=int, default=256, help="most tokens per problem")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", choices=("float32", "bfloat16"), help="None: bfloat16 on cuda, else float32")
    # fmt: on
    args = parser.parse_args()

    problems = read_problems(args.data, args.limit)
    model, chat = load(args.model, *place(args.device, args.dtype))
    prompts, options = encode(chat, problems), {"block": args.block, "max_new": args.max_new}
    plain = generate(model, prompts, args.rows, tau=1, **options)
    checked = generate(model, prompts, args.rows, tau=args.tau, verify=True, **options)
    gaps = []
    for prompt, a, b in zip(prompts, plain, checked):
        if a.tokens != b.tokens:
            same = len(commonprefix([a.tokens, b.tokens]))
            ended = same in (len(a.tokens), len(b.tokens))  # one goes on where the other stopped
            gaps.append(float("inf") if ended else gap(model, prompt + a.tokens[:same]))
    ties = sum(g <= 1e-4 for g in gaps)
    print(
        f"{len(prompts)} answers: {len(prompts) - len(gaps)} identical, {ties} parted at a tie, "
        f"{len(gaps) - ties} different; AR {tokens_per_forward(plain):.2f} tokens per forward, "
        f"verified {tokens_per_forward(checked):.2f}"
    )
    if len(gaps) > ties:
        print("gaps between the two best logits there:", *(f"{g:.2g}" for g in sorted(gaps)[-9:]))
    sys.exit(len(gaps) > ties)


if __name__ == "__main__":
    run(main)
