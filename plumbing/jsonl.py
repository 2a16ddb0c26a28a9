"""Rows of a JSONL file: of any size, in any order; and files of prompts, which may be text."""

import json
import re
import zlib
from array import array
from pathlib import Path

from tqdm import tqdm

from .errors import UserError, failure_as
from .processes import leads

LONGEST = 4 * 10**6  # bytes of a line of prompts; its tokens take a gigabyte of memory
LIKE_JSON = re.compile(r"""[{[]\s*(["'{]|$)""")  # also broken JSON; "{x} is a set" is text


class JsonlFile:
    """The rows of a JSONL file, found by byte offset: memory stays flat whatever its size."""

    def __init__(self, path: Path):
        self.path = path
        self.offsets = array("Q")
        self.checksum = 0  # of the whole file: an edited file is another file
        self.file = open(path, "rb")
        if not self.file.seekable():
            raise UserError(f"{path}: a pipe, but rows are read in any order; write it to a file")
        offset = 0
        lines = tqdm(self.file, desc=str(path), leave=False, delay=2, disable=not leads())
        for number, line in enumerate(lines, start=1):
            if line.strip():
                parse_object(line, f"{path}:{number}")
                self.offsets.append(offset)
            offset += len(line)
            self.checksum = zlib.crc32(line, self.checksum)
        if not self.offsets:
            raise UserError(f"{path}: empty; expected one JSON object per line")

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> dict:
        self.file.seek(self.offsets[index])
        return parse_object(self.file.readline(), f"{self.path}:byte {self.offsets[index]}")


def parse_object(line: str | bytes, where: str) -> dict:
    """The JSON object in a line; anything else is a UserError."""
    hint = "is it compressed or parquet? unpack or convert it to JSONL"
    with failure_as(f"{where}: not JSON; {hint}"):
        row = json.loads(line)
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object but {str(row)[:40]}")
    return row


def read_rows(file: Path) -> dict[int, dict]:
    """What each line asks for, by line number: text, or from the first JSON object on only such."""
    rows = {}
    is_jsonl = False
    for line_number, line in enumerate(file.read_bytes().splitlines(), start=1):
        where = f"{file}:{line_number}"
        if len(line) > LONGEST:
            raise UserError(f"{where}: {len(line)} bytes, more than {LONGEST} in one line")
        with failure_as(f"{where}: not UTF-8"):
            text = line.decode("utf-8-sig").strip()
        is_jsonl = is_jsonl or LIKE_JSON.match(text) is not None
        if text and is_jsonl:
            rows[line_number] = with_prompt(parse_object(text, where))
        elif text:
            rows[line_number] = {"prompt": text}
    if not rows:
        raise UserError(f"{file}: empty; expected a prompt per line, or JSONL")
    return rows


def with_prompt(row: dict) -> dict:
    """The row with a `prompt`, also where its name is `question`, as in GSM8K."""
    if row.get("prompt") is None and row.get("question") is not None:
        return row | {"prompt": row["question"]}
    return row
