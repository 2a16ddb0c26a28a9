"""How well a model predicts given answers, one token ahead: what training has kept.

    python -m bench.likelihood toy/test.jsonl toy/sft toy/mars
    python -m bench.likelihood answers.jsonl BEFORE AFTER --dtype bfloat16

The cross-entropy of the clean stream, in nats per token of the answers (rows as train.py takes
them), and the share of tokens that would have been greedy's choice. Every model but the first is
also compared with the first, row by row. Intervals are 95 %, a bootstrap over rows.
"""

from typing import NamedTuple

from plumbing.arguments import Parser, find_device, number, path
from plumbing.data import Unusable, encode
from plumbing.errors import UserError, run_main
from plumbing.jsonl import JsonlFile

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from bench.common import machine, table
from model import Qwen2, load

RESAMPLES = 2000  # of the bootstrap


class Predicted(NamedTuple):
    """For each row: nats of its answer, greedy's choices in it, its tokens."""

    nats: np.ndarray  # (rows,)
    right: np.ndarray
    tokens: np.ndarray


@torch.inference_mode()
def predict(model: Qwen2, examples: list) -> Predicted:
    rows = []
    for example in examples:
        tokens = torch.tensor(example.tokens, device=model.device)
        positions = torch.arange(len(tokens) - 1, device=model.device)
        hidden = model(tokens[None, :-1], positions[None], None)[0]
        logits = model.logits(hidden[example.prompt - 1 :])
        target = tokens[example.prompt :]
        nats = cross_entropy(logits, target, reduction="sum").item()
        rows.append((nats, (logits.argmax(-1) == target).sum().item(), len(target)))
    return Predicted(*np.array(rows, dtype=float).T)


def interval(values: np.ndarray, counts: np.ndarray) -> tuple[float, float, float]:
    """The sum of the values over the sum of the counts, and its 95 % interval."""
    rng = np.random.default_rng(0)
    even = np.full(len(values), 1 / len(values))
    weights = rng.multinomial(len(values), even, size=RESAMPLES)  # (RESAMPLES, rows)
    low, high = np.quantile((weights @ values) / (weights @ counts), [0.025, 0.975])
    return values.sum() / counts.sum(), low, high


def show(values: np.ndarray, counts: np.ndarray, sign: str = "") -> str:
    mean, low, high = interval(values, counts)
    return f"{mean:{sign}.3f} ({low:{sign}.3f} to {high:{sign}.3f})"


def read_examples(file, limit: int | None, chat, eos: int, max_length: int) -> list:
    examples = []
    for line_number, row in enumerate(list(JsonlFile(file))[:limit], 1):
        try:
            examples.append(encode(row, chat, eos, max_length))
        except Unusable as error:
            raise UserError(f"{file}: row {line_number}: {error}") from None
    return examples


def main() -> None:
    parser = Parser("How well models predict given answers, one token ahead.")
    add = parser.add_argument
    add("data", type=path, help="JSONL with prompt and response, or messages")
    add("models", nargs="+", help="directories or hub ids")
    add("--limit", type=number(int, 1), help="only the first so many rows")
    parser.add_device()
    args = parser.parse_args()
    device, dtype = find_device(args.device, args.dtype)
    rows = []
    first = None
    for name in args.models:
        model, chat = load(name, device, dtype)
        eos = model.config.eos_token_id[0]
        length = model.config.max_position_embeddings
        found = predict(model, read_examples(args.data, args.limit, chat, eos, length))
        first = first or found
        if not np.array_equal(found.tokens, first.tokens):
            raise UserError(f"{name}: its tokenizer is not that of {args.models[0]}")
        row = [name, show(found.nats, found.tokens)]
        row += [show(found.nats - first.nats, first.tokens, "+") if found is not first else ""]
        rows.append([*row, f"{found.right.sum() / found.tokens.sum():.1%}"])
    size = f"{len(first.tokens)} rows, {first.tokens.sum():.0f} tokens"
    print(f"{args.data}: {size}; {machine(model)}\n")
    head = ["", "nats per token", f"difference from {args.models[0]}", "greedy's choice"]
    print(table(head, rows))


if __name__ == "__main__":
    run_main(main)
