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
    """What each line asks for, by line number; blank lines are left out."""
    rows = {}
    is_jsonl = False
    for line_number, line in enumerate(file.read_bytes().splitlines(), start=1):
        where = f"{file}:{line_number}"
        try:
            text = line.decode("utf-8-sig").strip()
        except UnicodeDecodeError:
            raise UserError(f"{where}: not UTF-8") from None
        if not text:
            continue
        if not rows:
            is_jsonl = LIKE_JSON.match(text) is not None
        if not is_jsonl and text.startswith('{"'):
            raise UserError(f"{where}: either every line is a JSON object, or every line is text")
        rows[line_number] = with_prompt(parse_object(text, where)) if is_jsonl else {"prompt": text}
    if not rows:
        raise UserError(f"{file}: empty; expected a prompt per line, or JSONL")
    return rows


def encode_prompt(row: dict, chat: Chat) -> list[int]:
    """Token ids of a prompt. The rules are those of training, which may read the output."""
    if "prompt" not in row and not (row.get("messages") and isinstance(row["messages"], list)):
        raise Unusable("neither a prompt nor messages")
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
