"""What the benchmarks share: problems, answers, random models, tables, arguments."""

import argparse
import json
import os
import re
from pathlib import Path

import numpy as np
import torch

from decode import Options, Sequence, add_options, read_options
from model import Config, Qwen2, initialize
from plumbing.arguments import Parser, number
from plumbing.chat import Chat
from plumbing.data import encode_prompt
from plumbing.errors import UserError, naming
from plumbing.jsonl import JsonlFile

ROOT = Path(__file__).parent.parent
TOY = Path(os.path.relpath(ROOT / "toy"))  # a short name where the benchmarks are run from


def read_problems(file: Path, limit: int | None = None) -> list[dict]:
    """The first `limit` rows of a JSONL file. Either all have an `answer`, or the first has none.

    An answer is a number, or a text whose last number counts.
    """
    problems = list(JsonlFile(file))[:limit]
    for line, problem in enumerate(problems, 1):
        answer = problem.get("answer")
        if "answer" in problems[0] and last_number(str(answer)) is None:
            raise UserError(f"{file}: row {line}: the answer is not a number: {answer}")
    return problems


def encode(chat: Chat, problems: list[dict]) -> list[list[int]]:
    """Token ids of each problem: of its `prompt`, `question` (as in GSM8K) or `messages`."""
    prompts = []
    for line, problem in enumerate(problems, 1):
        with naming(f"--data: row {line}"):
            prompts.append(encode_prompt(problem, chat))
    return prompts


def last_number(text: str) -> float | None:
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    if not numbers:
        return None
    return float(numbers[-1].replace(",", ""))


def are_right(chat: Chat, answers: list[Sequence], problems: list[dict]) -> list[bool]:
    """Is the last number of each answer the problem's?"""
    found = [last_number(chat.decode(answer.tokens)) for answer in answers]
    return [one == last_number(str(row["answer"])) for one, row in zip(found, problems)]


def mean_and_interval(values: np.ndarray) -> tuple[float, float, float]:
    """The mean of the problems' values and its 95 % interval: 1.96 standard errors to each side."""
    mean = np.mean(values)
    error = 1.96 * np.std(values) / len(values) ** 0.5
    return mean, mean - error, mean + error


def tokens_per_forward(answers: list[Sequence]) -> float:
    """All tokens over all forwards."""
    num_tokens = sum(len(answer.tokens) for answer in answers)
    return num_tokens / sum(answer.forwards for answer in answers)


# The shapes of Qwen2.5, and of Qwen3 where named: fields of their config.json.
SHAPES = json.loads((ROOT / "bench/shapes.json").read_text(encoding="utf-8"))


def random_model(shape: str, device: torch.device, dtype: torch.dtype) -> Qwen2:
    """A model with random weights. It predicts nonsense, at the cost of a trained one."""
    last = SHAPES[shape]["vocab_size"] - 1
    special = {"eos_token_id": (last,), "mask_token_id": last - 1}  # in no prompt
    config = Config(**SHAPES[shape], **special, max_position_embeddings=32768, rope_theta=1e6)
    with device:  # a CPU would take a minute for the 7B
        return initialize(config, seed=0).to(dtype).requires_grad_(False)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Aligned Markdown: the first column to the left, all others to the right."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = []
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line, widths)]
        cells[0] = line[0].ljust(widths[0])
        text.append("| " + " | ".join(cells) + " |")
    ruler = ["-" * (width + 1) + ":" for width in widths]
    ruler[0] = ":" + "-" * (widths[0] + 1)
    text.insert(1, "|" + "|".join(ruler) + "|")
    return "\n".join(text)


def add_problems(parser: Parser, limit: int | None = None) -> None:
    """Add --model, --device, --dtype, --data and --limit."""
    parser.add_model(str(TOY / "mars"), "directory or hub id")
    add = parser.add_argument
    add("--data", type=Path, default=TOY / "test.jsonl", help="JSONL with prompt and answer")
    add("--limit", type=number(int, 1), default=limit, help="only the first so many problems")


def add_decoding(parser: Parser, rows: int) -> None:
    """Add --rows and the options of decoding; --tau takes several values: see `ways_to_decode`."""
    add = parser.add_argument
    add("--rows", type=number(int, 1), default=rows, help="decoded at a time")
    add_options(parser, num_taus="+")


def ways_to_decode(args: argparse.Namespace) -> dict[str, Options]:
    """The options for each --tau; without one, those of lossless decoding."""
    ways = {}
    for tau in args.tau or [None]:
        name = "lossless" if tau is None else f"tau {tau:g}"
        ways[name] = read_options(argparse.Namespace(**vars(args) | {"tau": tau}))
    return ways
