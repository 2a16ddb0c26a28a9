"""The laptop-scale world in toy/: right answers, new test problems, reproducible files."""

import re
from collections import Counter

from commands import command
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


def test_toy_is_reproducible(tmp_path, monkeypatch):
    (tmp_path / "base").mkdir()
    monkeypatch.setattr("toy.make.HERE", tmp_path)
    assert command("toy.make").status == 0
    for name in ("train.jsonl", "test.jsonl", "base/tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (ROOT / "toy" / name).read_bytes(), name
