"""Rows of a JSONL file: of any size, in any order; and files of prompts, which may be text."""

import contextlib
import json
import os
import zlib
from array import array
from pathlib import Path

from tqdm import tqdm

from .errors import UserError, failure_as
from .processes import leads

EXPECTED = 'expected JSONL, lines like {"prompt": "...", "response": "..."}'


class JsonlFile:
    """The rows of a JSONL file, found by byte offset: memory stays flat whatever its size."""

    def __init__(self, path: Path):
        self.path = path
        self.offsets = array("Q")
        self.checksum = 0  # of the whole file: an edited file is another file
        self.file = open(path, "rb")
        if not self.file.seekable():
            raise UserError(f"{path}: a pipe, but rows are read in any order; write it to a file")
        self.version = self.size_and_time()
        offset = 0
        lines = tqdm(self.file, desc=str(path), leave=False, delay=2, disable=not leads())
        for number, line in enumerate(lines, start=1):
            if line.strip():
                parse_object(line, f"{path}:{number}")
                self.offsets.append(offset)
            offset += len(line)
            self.checksum = zlib.crc32(line, self.checksum)
        if not self.offsets:
            raise UserError(f"{path}: empty; {EXPECTED}")

    def size_and_time(self) -> tuple[int, int]:
        status = os.fstat(self.file.fileno())
        return status.st_size, status.st_mtime_ns

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> dict:
        changed = f"{self.path}: was changed since the start; put it back, or begin again"
        if self.size_and_time() != self.version:
            raise UserError(changed)
        self.file.seek(self.offsets[index])
        with failure_as(changed):
            return json.loads(self.file.readline())


def parse_object(line: bytes | str, where: str) -> dict:
    """The JSON object in a line; anything else is a UserError."""
    with failure_as(f"{where}: {EXPECTED}; is the line cut short, or the file compressed?"):
        row = json.loads(line)
        if not isinstance(row, dict):
            raise TypeError("not an object")
        return row


def read_rows(file: Path) -> dict[int, dict]:
    """The rows of a file of prompts, by line number.

    It is JSONL if it begins with "{" (blank lines aside); else each line is a prompt.
    """
    with failure_as(f"{file}: cannot be read as text in UTF-8"):
        text = file.read_text(encoding="utf-8-sig")
    if is_array(text):
        raise UserError(f"{file}: one JSON array; expected a prompt per line, or JSONL")
    is_jsonl = text.lstrip().startswith("{")
    rows = {}
    for line_number, line in enumerate(text.split("\n"), start=1):
        if is_jsonl and line.strip():
            rows[line_number] = parse_object(line, f"{file}:{line_number}")
        elif line.strip():
            rows[line_number] = {"prompt": line.strip()}
    if not rows:
        raise UserError(f"{file}: empty; expected a prompt per line, or JSONL")
    return rows


def is_array(text: str) -> bool:
    """Is a whole file one JSON array?"""
    with contextlib.suppress(ValueError, RecursionError):
        return isinstance(json.loads(text), list)
    return False
