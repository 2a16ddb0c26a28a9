"""How well a model predicts given answers, one token ahead: what training has kept.

    python -m bench.likelihood toy/test.jsonl toy/sft toy/mars
    python -m bench.likelihood answers.jsonl BEFORE AFTER --dtype bfloat16

The cross-entropy of the clean stream, in nats per token of the answers (rows as train.py takes
them), and the share of tokens that would have been greedy's choice. Every model but the first is
also compared with the first, row by row: how much its cross-entropy differs, and the divergence
KL(first || model) of what they predict. Intervals are 95 %, a bootstrap over rows.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from bench.common import machine, table
from model import Config, Qwen2, load
from plumbing.arguments import Parser, find_device, number, path
from plumbing.data import Example, Unusable, encode
from plumbing.errors import UserError, run_main
from plumbing.jsonl import JsonlFile

RESAMPLES = 2000  # of the bootstrap


class Predicted(NamedTuple):
    """For each row, summed over its answer."""

    nats: np.ndarray  # (rows,)
    right: np.ndarray  # tokens that greedy would have chosen
    tokens: np.ndarray
    divergence: np.ndarray  # KL(base || model)


@torch.inference_mode()
def predict(model: Qwen2, examples: list[Example], base: Qwen2) -> Predicted:
    rows = []
    for example in examples:
        logits = answer_logits(model, example)
        target = torch.tensor(example.tokens[example.prompt :], device=model.device)
        nats = cross_entropy(logits, target, reduction="sum")
        right = (logits.argmax(-1) == target).sum()
        base_logits = logits if model is base else answer_logits(base, example)
        expected = base_logits.log_softmax(-1)
        # <|mask|> has the probability 0 in both, and 0 * log(0 / 0) is to be 0.
        each = expected.exp() * (expected - logits.log_softmax(-1)).nan_to_num()
        rows.append((nats.item(), right.item(), len(target), each.sum().item()))
    return Predicted(*np.array(rows, dtype=float).T)


def answer_logits(model: Qwen2, example: Example) -> torch.Tensor:
    """Of the answer's tokens, one token ahead: (targets, V)."""
    tokens = torch.tensor([example.tokens[:-1]], device=model.device)
    positions = torch.arange(tokens.size(1), device=model.device)[None]
    return model.logits(model(tokens, positions, None)[0, example.prompt - 1 :])


@functools.cache
def resampled(rows: int) -> np.ndarray:
    """How often each row is drawn: (RESAMPLES, rows)."""
    rng = np.random.default_rng(0)
    return rng.multinomial(rows, np.full(rows, 1 / rows), size=RESAMPLES)


def interval(values: np.ndarray, counts: np.ndarray) -> tuple[float, float, float]:
    """The sum of the values over the sum of the counts, and its 95 % interval."""
    weights = resampled(len(values))
    low, high = np.quantile((weights @ values) / (weights @ counts), [0.025, 0.975])
    return values.sum() / counts.sum(), low, high


def show(values: np.ndarray, counts: np.ndarray, sign: str = "") -> str:
    mean, low, high = interval(values, counts)
    return f"{mean:{sign}.3f} ({low:{sign}.3f} to {high:{sign}.3f})"


def greedy_share(found: Predicted) -> str:
    return f"{found.right.sum() / found.tokens.sum():.1%}"


def read_examples(file, limit: int | None, chat, config: Config) -> list[Example]:
    examples = []
    eos = config.eos_token_id[0]
    for line_number, row in enumerate(list(JsonlFile(file))[:limit], 1):
        try:
            examples.append(encode(row, chat, eos, config.max_position_embeddings))
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
    base, chat = load(args.models[0], device, dtype)
    examples = read_examples(args.data, args.limit, chat, base.config)
    before = predict(base, examples, base)
    rows = [[args.models[0], show(before.nats, before.tokens), "", "", greedy_share(before)]]
    for name in args.models[1:]:
        model, other_chat = load(name, device, dtype)
        same_tokens = other_chat.tokenizer.get_vocab() == chat.tokenizer.get_vocab()
        if not same_tokens or model.config.vocab_size != base.config.vocab_size:
            raise UserError(f"{name}: its vocabulary is not that of {args.models[0]}")
        after = predict(model, examples, base)
        row = [name, show(after.nats, after.tokens)]
        row.append(show(after.nats - before.nats, before.tokens, "+"))
        rows.append([*row, show(after.divergence, after.tokens), greedy_share(after)])
    size = f"{len(examples)} rows, {before.tokens.sum():.0f} tokens"
    print(f"{args.data}: {size}; {machine(base)}\n")
    head = ["", "nats per token", f"more than {args.models[0]}", "divergence", "greedy's choice"]
    print(table(head, rows))


if __name__ == "__main__":
    run_main(main)
