"""The laptop-scale world in toy/: right answers, new test problems, reproducible files."""

import json
import re
import subprocess
import sys
from collections import Counter

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

    (tmp_path / "base").mkdir()
    monkeypatch.setattr(make, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["make.py"])
    make.main()
    for name in ("train.jsonl", "test.jsonl", "base/tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (ROOT / "toy" / name).read_bytes(), name


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ("--rows", 5, "--out", "nodir/x.jsonl"),
            "--out nodir/x.jsonl: cannot be written (No such",
        ),
        (("--rows", 0, "--out", "x.jsonl"), "--rows: must be at least 1, not 0"),
        (("--rows", "many", "--out", "x.jsonl"), "--rows"),
        (("--rows", 5), "need an --out"),
        (("--hard", "--out", ROOT / "README.md"), "is there already"),
    ],
)
def test_bad_options(tmp_path, words, message):
    """One line; nothing is written, and no file is replaced."""
    before = (ROOT / "README.md").read_bytes()
    command = [sys.executable, ROOT / "toy/make.py", *map(str, words)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=10)
    assert done.returncode == 2 and message in done.stderr.splitlines()[-1], done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()) and (ROOT / "README.md").read_bytes() == before
