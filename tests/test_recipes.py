"""bench.recipes: what is trained on and what is judged by, and the table's figures by hand."""

import json

import pytest
from common import ROOT

from bench import recipes


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts_of(name):
    return [json.loads(line)["prompt"] for line in (recipes.WORK / name).read_text().splitlines()]


@pytest.fixture
def data(tmp_path, monkeypatch):
    """50 questions and 50 instructions, of which 3 each are kept for judging."""
    monkeypatch.setattr(recipes, "WORK", tmp_path)
    monkeypatch.setattr(recipes, "UNSEEN", 3)
    monkeypatch.setattr(recipes, "NUM_GSM8K", 20)
    monkeypatch.setattr(
        recipes,
        "own_answers",
        lambda prompts, temperature: {
            prompt: {"response": f"{temperature} {prompt}", "finish_reason": "length"}
            for prompt in prompts
        },
    )
    with open(ROOT / "bench/data/ifeval/test.jsonl") as file:
        tested = json.loads(file.readline())["prompt"]
    questions = [
        {"question": f"q{i}", "answer": f"2 + {i} = <<2+{i}={2 + i}>>{2 + i}"} for i in range(50)
    ]
    instructions = [{"prompt": f"i{i}"} for i in range(50)] + [{"prompt": tested}]
    return (
        write_jsonl(tmp_path / "gsm8k.jsonl", questions),
        write_jsonl(tmp_path / "ifeval.jsonl", instructions + instructions[:5]),
        tested,
    )


def test_nothing_that_is_judged_by_is_trained_on(data):
    gsm8k, ifeval, tested = data
    recipes.make_data(0.0, gsm8k, ifeval)
    recipes.make_data(1.0, gsm8k, ifeval)
    training = prompts_of("own.jsonl")
    assert training == prompts_of("gold.jsonl") == prompts_of("sample.jsonl")
    assert len(set(training)) == len(training) == 17 + 47
    unseen = prompts_of("gsm8k-own.jsonl") + prompts_of("ifeval-own.jsonl")
    assert len(unseen) == 6
    assert prompts_of("gsm8k-gold.jsonl") == unseen[:3]
    assert not set(unseen) & set(training)
    assert tested not in training + unseen


def test_whose_answers_are_trained_on(data):
    gsm8k, ifeval, _ = data
    recipes.make_data(0.0, gsm8k, ifeval)
    recipes.make_data(1.0, gsm8k, ifeval)
    for name, expected in (("own", "0.0 "), ("sample", "1.0 ")):
        for line in (recipes.WORK / f"{name}.jsonl").read_text().splitlines():
            row = json.loads(line)
            assert row["response"] == expected + row["prompt"]
            assert row["finish_reason"] == "length"  # else train.py would teach it to end there
    for line in (recipes.WORK / "gold.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["prompt"].startswith("q"):
            number = int(row["prompt"][1:])
            assert row == {"prompt": f"q{number}", "response": f"2 + {number} = {2 + number}"}
        else:
            assert row["response"] == "0.0 " + row["prompt"]


def test_gain_by_hand(monkeypatch):
    monkeypatch.setattr(recipes, "UNSEEN", 2)
    mine = [{"decoded": [30, 30], "forwards": [10, 10]}, {"decoded": [8, 12], "forwards": [4, 6]}]
    others = [
        {"decoded": [20, 20], "forwards": [10, 10]},
        {"decoded": [8, 12], "forwards": [8, 12]},
    ]
    gain, low, high = recipes.gain_over(mine, others)
    assert gain == pytest.approx((80 / 30) / (60 / 40) - 1)
    assert low < gain < high
    assert recipes.gain_over(mine, mine) == (0, 0, 0)
