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
    ],
)
def test_bad_options(tmp_path, words, message):
    """--out nodir/x was once a traceback, and --rows 0 wrote 4,000 rows."""
    command = [sys.executable, ROOT / "toy/make.py", *map(str, words)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr.splitlines()[-1], done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
