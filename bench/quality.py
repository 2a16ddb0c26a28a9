"""Accuracy and tokens per forward over tau, and how many answers are those of tau 1.

    python -m bench.quality                                  # toy/README.md's table over tau
    python -m bench.quality --verify                         # is --verify lossless?
    python -m bench.quality --verify --temperature 1         # and are its samples those of tau 1?
    python -m bench.quality --data bench/data/gsm8k/test.jsonl --max-new 128

An answer is right if its last number is the problem's. Prompts without answers will do, too. Nats
are the mean of -log p of an answer's tokens, one token ahead, under the model itself: how unlikely
the model finds what it was made to say. (Greedy text at tau 1 is what it finds likely.)

Where an answer parts from that of tau 1 and the two best scores (logits, with the noise of the dice
at a temperature) are at most 1e-4 apart, it parted at a tie: the two tokens are as good as equal,
and a forward of another width rounds differently. With --verify in float32 there is no other
difference. If there is one, it is a bug, and the exit status is 1.
"""

import sys
from dataclasses import replace
from os.path import commonprefix  # of any two lists

import torch
from torch.nn.functional import cross_entropy

from bench import common
from decode import Options, Sequence, generate
from model import Qwen2, load
from plumbing.arguments import Parser, find_device
from plumbing.errors import run_main
from plumbing.sampling import dice

TIE = 1e-4
TAUS = [1, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5]
NATS = [0, 0.05, 0.1, 0.2, 0.5, 1]  # taus of the metric entropy


@torch.inference_mode()
def gap_between_best(
    model: Qwen2, answer: Sequence, num_tokens: int, temperature: float, seed: int
) -> float:
    """The difference of the two best scores for what follows the first tokens of an answer's text.

    The scores are those of sampling.with_dice: logits, at a temperature T with T times the dice.
    """
    ids = torch.tensor([answer.text[:num_tokens]], device=model.device)
    positions = torch.arange(num_tokens, device=model.device)[None]
    hidden = model(ids, positions, None)
    scores = model.logits_at(hidden, positions[:, -1:])[0, 0]
    scores = scores + temperature * dice(seed, answer.index, num_tokens, scores)
    best, second = scores.topk(2).values.tolist()
    return best - second


def gaps_at_parting(
    model: Qwen2, expected: list[Sequence], answers: list[Sequence], options: Options
) -> list[float]:
    """For each answer that is not the expected one: `gap_between_best` where the two part."""
    gaps = []
    for plain, answer in zip(expected, answers):
        if answer.tokens == plain.tokens:
            continue
        num_same = len(commonprefix([plain.text, answer.text]))
        gap = float("inf")  # one goes on where the other ends
        if num_same < min(len(plain.text), len(answer.text)):
            gap = gap_between_best(model, answer, num_same, options.temperature, options.seed)
        gaps.append(gap)
    return gaps


@torch.inference_mode()
def nats_per_token(model: Qwen2, answers: list[Sequence]) -> float:
    """The mean of -log p over all tokens of the answers."""
    total = 0.0
    for answer in answers:
        ids = torch.tensor([answer.text], device=model.device)
        positions = torch.arange(len(answer.text) - 1, device=model.device)[None]
        hidden = model(ids[:, :-1], positions, None)
        logits = model.logits(hidden[0, answer.prompt_length - 1 :])
        total += cross_entropy(logits, ids[0, answer.prompt_length :], reduction="sum").item()
    return total / sum(len(answer.tokens) for answer in answers)


def figures(model: Qwen2, answers: list[Sequence], right: str, gaps: list[float]) -> list[str]:
    """A row of the table, without its first cell."""
    num_ties = sum(gap <= TIE for gap in gaps)
    return [
        right,
        f"{nats_per_token(model, answers):.3f}",
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
    common.add_taus(parser, TAUS)
    parser.add_options(Options, without=("tau", "block", "verify", "max_new"))
    args = parser.parse_args()
    ways = common.ways_to_decode(args, NATS if args.metric == "entropy" else TAUS)
    one_token = {"tau": 1.0, "verify": False, "metric": "probability", "block_cache": None}
    plain = replace(next(iter(ways.values())), **one_token)
    if args.verify:
        ways = {"tau 1": plain} | ways
    problems = common.read_problems(args.data, args.limit)
    model, chat = load(args.model, *find_device(args.device, args.dtype))
    prompts = common.encode(chat, problems)
    expected = generate(model, prompts, args.rows, **vars(plain))
    rows, all_gaps = [], []
    for label, options in ways.items():
        answers = expected
        if options != plain:
            answers = generate(model, prompts, args.rows, **vars(options))
        gaps = gaps_at_parting(model, expected, answers, options)
        right = common.accuracy(chat, answers, problems)
        rows.append([label, *figures(model, answers, right, gaps)])
        all_gaps += gaps
    print(f"{args.model}, {args.data}: {len(problems)} problems\n")
    head = ["", "accuracy", "nats/token", "tokens/forward", "positions/forward"]
    print(common.table([*head, "same as tau 1", "parted at a tie", "different"], rows))
    if args.verify and all_gaps:
        worst = max(all_gaps)
        print(f"\nWhere answers parted, the two best scores were at most {worst:.2g} apart.")
        if worst > TIE and model.dtype != torch.bfloat16:
            sys.exit(1)


if __name__ == "__main__":
    run_main(main)
