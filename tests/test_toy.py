"""The laptop-scale world in toy/: right answers, new test problems, reproducible files."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from common import ROOT


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (ROOT / "toy" / name).read_text().splitlines()]


def test_toy_answers_are_right_and_new():
    test = read("test.jsonl")
    training = read("train.jsonl")
    assert len(test) == 500
    assert not {row["prompt"] for row in test} & {row["prompt"] for row in training}
    operations = Counter()
    for row in test + training:
        for a, operator, b, result in re.findall(r"(\d+) ([+*-]) (\d+) = (\d+)", row["response"]):
            expected = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}
            assert int(result) == expected[operator]
            operations[operator] += 1
        assert row["response"].endswith(f"The answer is {row['answer']}.")
        assert 1 <= row["response"].count("=") <= 2
    assert min(operations.values()) > 1000


def test_toy_is_reproducible(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "toy"))
    import make

    monkeypatch.setattr(make, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["make.py", "--out", str(tmp_path / "train.jsonl")])
    make.main()
    for name in ("train.jsonl", "test.jsonl", "base/config.json", "base/tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (ROOT / "toy" / name).read_bytes(), name


@pytest.mark.parametrize(
    "words, message",
    [
        (("--rows", 5, "--out", "nodir/x.jsonl"), "nodir"),
        (("--rows", 5, "--out", ""), "--out"),
        (("--rows", 0, "--out", "x.jsonl"), "--rows"),
        (("--rows", -1, "--out", "x.jsonl"), "--rows"),
        (("--rows", "many", "--out", "x.jsonl"), "--rows"),
        # There are no so many problems, it ran for ever:
        (("--rows", 10**30, "--out", "x.jsonl"), "--rows: must be at most 1000000"),
        # These were tracebacks:
        (("--rows", 5, "--out", "/proc/x"), "--out /proc/x: cannot be written"),
        (("--rows", 5, "--out", "a\nb" * 100), "cannot be written (File name too long)"),
        # The committed file was overwritten, and so was any other:
        (("--rows", 5, "--out", "RELATIVE/toy/train.jsonl"), "is there already"),
        (("--rows", 5, "--out", ROOT / "toy/test.jsonl"), "is there already"),
        (("--hard", "--out", ROOT / "README.md"), "is there already"),
        (("--rows", 5, "--out", "/dev/full"), "is there already"),
    ],
)
def test_bad_options(tmp_path, words, message):
    """--out nodir/x was once a traceback, and --rows 0 wrote 4,000 rows."""
    before = [(ROOT / name).read_bytes() for name in ("README.md", "toy/train.jsonl")]
    words = [str(word).replace("RELATIVE", os.path.relpath(ROOT, tmp_path)) for word in words]
    command = [sys.executable, ROOT / "toy/make.py", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=10)
    assert done.returncode == 2 and message in done.stderr.splitlines()[-1], done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
    assert before == [(ROOT / name).read_bytes() for name in ("README.md", "toy/train.jsonl")]


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    """It was a traceback, and left the half-written file in the place of the old one."""
    monkeypatch.syspath_prepend(str(ROOT / "toy"))
    import make

    write_text = Path.write_text

    def full(path, text, encoding):
        write_text(path, text[:100], encoding)
        raise OSError(28, "No space left on device")

    file = tmp_path / "train.jsonl"
    file.write_text("the old one")
    monkeypatch.setattr(make, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["make.py"])
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(SystemExit):
        make.main()
    assert file.read_text() == "the old one" and list(tmp_path.iterdir()) == [file]
