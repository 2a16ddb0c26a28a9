"""A file of prompts: plain lines or JSONL, by the rules of training."""

import json
import sys
from pathlib import Path

from .chat import Chat
from .data import Unusable, encode
from .errors import UserError
from .terminal import note


def read_rows(file: Path) -> dict[int, dict]:
    """What each line asks for, by line number; blank lines are left out."""
    rows = {}
    is_jsonl = False
    for line_number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            text = line.decode("utf-8-sig").strip()
        except UnicodeDecodeError:
            raise UserError(f"{file}:{line_number}: not UTF-8") from None
        if not text:
            continue
        row = parse(text)
        if not rows:
            is_jsonl = isinstance(row, dict)
            if row is None and text[0] in '{["':
                note(f"{file}:{line_number}: not JSON, so every line is a prompt as it stands")
        if isinstance(row, dict) != is_jsonl or isinstance(row, list | str):
            message = "either every line is a JSON object, or every line is plain text"
            raise UserError(f"{file}:{line_number}: {message}")
        rows[line_number] = row if is_jsonl else {"prompt": text}
    if not rows:
        raise UserError(f"{file}: empty; expected a prompt per line, or JSONL")
    return rows


def parse(text: str) -> object:
    """The content of a line of JSON, None for any other line."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def encode_prompt(row: dict, chat: Chat) -> list[int]:
    """Token ids of a prompt. The rules are those of training, which may read the output."""
    example = encode(row | {"response": "?"}, chat, eos=-1, max_length=sys.maxsize)
    messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
    if not all(isinstance(m.get("role"), str) and m["role"].strip() for m in messages):
        raise Unusable("a message without a role")
    if messages[-1]["role"] == "assistant":
        raise Unusable("the last message is the assistant's")
    if not messages[-1]["content"].strip():
        raise Unusable("a blank prompt")
    tau = row.get("tau")
    if tau is not None and type(tau) not in (int, float):  # true is an int, too
        raise Unusable("tau must be a number")
    return example.tokens[: example.prompt]
