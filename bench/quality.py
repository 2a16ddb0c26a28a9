"""Accuracy and tokens per forward over tau, and how many answers are those of tau 1.

    python -m bench.quality                                  # toy/README.md's table over tau
    python -m bench.quality --verify --tau 0                 # is --verify lossless?
    python -m bench.quality --verify --tau 0 --temperature 1 # and are its samples those of tau 1?
    python -m bench.quality --data bench/data/gsm8k/test.jsonl --max-new 128

An answer is right if its last number is the problem's. Prompts without answers will do, too.

Where an answer parts from that of tau 1 and the two best scores (logits, with the noise of the dice
at a temperature) are at most 1e-4 apart, it parted at a tie: the two tokens are as good as equal,
and a forward of another width rounds differently. With --verify in float32 there is no other
difference. If there is one, it is a bug, and the exit status is 1.
"""

import sys
from dataclasses import fields
from os.path import commonprefix  # of any two lists

import torch

import lossless
from bench import common
from decode import Answer, Options, generate, is_plain_ar
from model import Qwen2, load
from plumbing.arguments import Parser, find_device
from plumbing.errors import run_main

TIE = 1e-4


@torch.inference_mode()
def gap_between_best(model: Qwen2, answer: Answer, num_tokens: int) -> float:
    """The difference of the two best scores for what follows the first tokens of an answer's text.

    The scores are those of decode.choose: logits, and at a temperature T also T times the dice.
    """
    ids = torch.tensor([answer.ids[:num_tokens]], device=model.device)
    positions = torch.arange(num_tokens, device=model.device)[None]
    scores = model.logits(model(ids, positions, None)[0, -1:])[0]
    noise = lossless.dice(answer.options.seed, answer.index, num_tokens, scores)
    scores = scores + answer.options.temperature * noise
    best, second = scores.topk(2).values.tolist()
    return best - second


def gaps_at_parting(model: Qwen2, expected: list[Answer], answers: list[Answer]) -> list[float]:
    """For each answer that is not the expected one: `gap_between_best` where the two part."""
    gaps = []
    for plain, answer in zip(expected, answers):
        if answer.tokens == plain.tokens:
            continue
        num_same = len(commonprefix([plain.ids, answer.ids]))
        if num_same in (len(plain.ids), len(answer.ids)):
            gaps.append(float("inf"))  # one goes on where the other ends
        else:
            gaps.append(gap_between_best(model, answer, num_same))
    return gaps


def figures(answers: list[Answer], right: str, gaps: list[float]) -> list[str]:
    """A row of the table, without its tau."""
    num_ties = sum(gap <= TIE for gap in gaps)
    return [
        right,
        f"{common.tokens_per_forward(answers):.2f}",
        f"{common.positions_per_forward(answers):.1f}",
        f"{len(answers) - len(gaps)}",
        f"{num_ties}",
        f"{len(gaps) - num_ties}",
    ]


def main() -> None:
    parser = Parser("Accuracy and tokens per forward over tau.")
    common.add_problems(parser)
    common.add_rows(parser, default=32)
    common.add_taus(parser, default=[1, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5])
    parser.add_options(Options, without=("tau", "block", "verify", "max_new"))
    args = parser.parse_args()
    options = {field.name: getattr(args, field.name) for field in fields(Options)}
    del options["tau"]
    for tau in args.tau:  # a UserError before any work, if these cannot be
        Options(tau, **options)
    problems = common.read_problems(args.data, args.limit)
    model, chat = load(args.model, *find_device(args.device, args.dtype))
    prompts = common.encode(chat, problems)
    plain = options | {"metric": "probability", "block_cache": None, "verify": False}
    expected = generate(model, prompts, args.rows, tau=1.0, **plain)
    rows, all_gaps = [], []
    for tau in args.tau:
        if is_plain_ar(tau, args.metric) and not args.verify and not args.block_cache:
            answers = expected
        else:
            answers = generate(model, prompts, args.rows, tau=tau, **options)
        gaps = gaps_at_parting(model, expected, answers)
        right = common.accuracy(chat, answers, problems)
        rows.append([f"{tau:g}", *figures(answers, right, gaps)])
        all_gaps += gaps
    print(f"{args.model}, {args.data}: {len(problems)} problems\n")
    head = ["tau", "accuracy", "tokens/forward", "positions/forward"]
    print(common.table([*head, "same as tau 1", "parted at a tie", "different"], rows))
    if args.verify and all_gaps:
        worst = max(all_gaps)
        print(f"\nWhere answers parted, the two best scores were at most {worst:.2g} apart.")
        if worst > TIE and model.dtype != torch.bfloat16:
            sys.exit(1)


if __name__ == "__main__":
    run_main(main)
