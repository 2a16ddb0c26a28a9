"""A file of prompts: plain lines or JSONL, by the rules of training."""

import re
import sys
from pathlib import Path

from .chat import Chat
from .data import Unusable, encode, with_prompt
from .errors import UserError
from .jsonl import parse_object

LIKE_JSON = re.compile(r"""[{[]\s*(["'{]|$)""")  # also broken JSON; "{x} is a set" is text


def read_rows(file: Path) -> dict[int, dict]:
    """What each line asks for, by line number: text, or a JSON object. Blank lines are left out."""
    rows = {}
    for line_number, line in enumerate(file.read_bytes().splitlines(), start=1):
        where = f"{file}:{line_number}"
        try:
            text = line.decode("utf-8-sig").strip()
        except UnicodeDecodeError:
            raise UserError(f"{where}: not UTF-8") from None
        if LIKE_JSON.match(text):
            rows[line_number] = with_prompt(parse_object(text, where))
        elif text:
            rows[line_number] = {"prompt": text}
    if not rows:
        raise UserError(f"{file}: empty; expected a prompt per line, or JSONL")
    return rows


def encode_prompt(row: dict, chat: Chat) -> list[int]:
    """Token ids of a prompt. The rules are those of training, which may read the output."""
    example = encode(row | {"response": "?"}, chat, eos=-1, max_length=sys.maxsize)
    if row.get("messages") and row["messages"][-1]["role"] == "assistant":
        raise Unusable("the last message is the assistant's")
    return example.tokens[: example.prompt]
