"""A JSONL file of any size, in any order."""

import json
import zlib
from array import array
from pathlib import Path

from tqdm import tqdm

from .errors import UserError
from .processes import leads


class JsonlFile:
    """The rows of a JSONL file, found by byte offset: memory stays flat whatever its size."""

    def __init__(self, path: Path):
        self.path = path
        self.offsets = array("Q")
        self.checksum = 0  # of the whole file: an edited file is another file
        self.file = open(path, "rb")
        if not self.file.seekable():
            raise UserError(f"{path}: a pipe, but rows are read in any order; write it to a file")
        self._index()
        if not self.offsets:
            raise UserError(f"{path}: empty; expected one JSON object per line")

    def _index(self) -> None:
        offset = 0
        lines = tqdm(self.file, desc=str(self.path), leave=False, delay=2, disable=not leads())
        for number, line in enumerate(lines, 1):
            if line.strip():
                parse_object(line, f"{self.path}:{number}")
                self.offsets.append(offset)
            offset += len(line)
            self.checksum = zlib.crc32(line, self.checksum)

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> dict:
        self.file.seek(self.offsets[index])
        where = f"{self.path}:byte {self.offsets[index]}, changed since the start"
        return parse_object(self.file.readline(), where)


def parse_object(line: str | bytes, where: str) -> dict:
    """The JSON object in a line; anything else is a UserError."""
    try:
        row = json.loads(line)
    except ValueError as error:
        hint = "is it compressed or parquet? unpack or convert it to JSONL"
        raise UserError(f"{where}: not JSON ({error}; {hint})") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object but {str(row)[:40]}")
    return row
