"""The laptop-scale world in toy/: right answers, new test problems, reproducible files."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from common import ROOT, rows_of


def test_toy_answers_are_right_and_new():
    test = rows_of(ROOT / "toy/test.jsonl")
    training = rows_of(ROOT / "toy/train.jsonl")
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


def run_make(monkeypatch, *words: object, here: Path = ROOT / "toy") -> None:
    """`python toy/make.py WORDS`, as if it were in `here`."""
    monkeypatch.syspath_prepend(str(ROOT / "toy"))
    import make

    monkeypatch.setattr(make, "HERE", here)
    monkeypatch.setattr(sys, "argv", ["make.py", *map(str, words)])
    make.main()


def test_toy_is_reproducible(tmp_path, monkeypatch):
    run_make(monkeypatch, "--out", tmp_path / "train.jsonl", here=tmp_path)
    for name in ("train.jsonl", "test.jsonl", "base/config.json", "base/tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (ROOT / "toy" / name).read_bytes(), name


@pytest.mark.parametrize(
    "words, message",
    [
        (("--rows", 5, "--out", "nodir/x.jsonl"), "nodir"),
        (("--rows", 0, "--out", "x.jsonl"), "--rows"),
        (("--rows", 10**30, "--out", "x.jsonl"), "--rows: must be at most 1000000"),
        (("--rows", 5, "--out", "/proc/x"), "--out /proc/x: cannot be written"),
        (("--hard", "--out", ROOT / "README.md"), "is there already"),
    ],
)
def test_bad_options(tmp_path, monkeypatch, capsys, words, message):
    """No file is written, and none that is there is touched."""
    before = (ROOT / "README.md").read_bytes()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        run_make(monkeypatch, *words)
    assert stop.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir()) and before == (ROOT / "README.md").read_bytes()
