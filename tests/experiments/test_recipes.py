"""experiments.recipes: what is trained on and judged by, the gain by hand, and what is refused."""

import json
import sys

import pytest
from common import ROOT

import train
from experiments import mask_weights, recipes
from plumbing.errors import UserError

own_answers = recipes.own_answers


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def first_row(path):
    with open(path) as file:
        return json.loads(file.readline())


def prompts_of(name):
    return [json.loads(line)["prompt"] for line in (recipes.WORK / name).read_text().splitlines()]


@pytest.fixture
def data(tmp_path, monkeypatch):
    """50 questions and 50 instructions, and one of each that bench/data has; 3 each to judge by."""
    monkeypatch.setattr(recipes, "WORK", tmp_path)
    monkeypatch.setattr(recipes, "UNSEEN", 3)
    monkeypatch.setattr(recipes, "NUM_GSM8K", 60)
    monkeypatch.setattr(
        recipes,
        "own_answers",
        lambda prompts, temperature: {
            prompt: {"response": f"{temperature} {prompt}", "finish_reason": "length"}
            for prompt in prompts
        },
    )
    question = first_row(ROOT / "bench/data/gsm8k/test.jsonl")
    instruction = first_row(ROOT / "bench/data/ifeval/test.jsonl")
    questions = [
        {"question": f"q{i}", "answer": f"2 + {i} = <<2+{i}={2 + i}>>{2 + i}"} for i in range(50)
    ]
    instructions = [{"prompt": f"i{i}"} for i in range(50)] + [instruction]
    return (
        write_jsonl(tmp_path / "gsm8k.jsonl", [question, *questions]),
        write_jsonl(tmp_path / "ifeval.jsonl", instructions + instructions[:5]),
        {question["question"], instruction["prompt"]},
    )


def test_no_prompt_is_both_trained_on_and_judged_by(data):
    gsm8k, ifeval, tested = data
    recipes.make_data(gsm8k, ifeval, sample=False)
    recipes.make_data(gsm8k, ifeval, sample=True)
    training = prompts_of("own.jsonl")
    assert training == prompts_of("sample.jsonl")
    assert len(set(training)) == len(training) == 47 + 47
    unseen = prompts_of("gsm8k-own.jsonl") + prompts_of("ifeval-own.jsonl")
    assert len(unseen) == 6
    assert prompts_of("gsm8k-gold.jsonl") == unseen[:3]
    assert not set(unseen) & set(training)
    assert not tested & {*training, *unseen}


def test_whose_answers_are_trained_on_and_judged_by(data):
    gsm8k, ifeval, _ = data
    recipes.make_data(gsm8k, ifeval, sample=False)
    recipes.make_data(gsm8k, ifeval, sample=True)
    for name, expected in (("own", "0.0 "), ("sample", "1.0 ")):
        for line in (recipes.WORK / f"{name}.jsonl").read_text().splitlines():
            row = json.loads(line)
            assert row["response"] == expected + row["prompt"]
            assert row["finish_reason"] == "length"  # else train.py would teach it to end there
    for line in (recipes.WORK / "gsm8k-gold.jsonl").read_text().splitlines():
        row = json.loads(line)
        number = int(row["prompt"][1:])
        assert row == {"prompt": f"q{number}", "response": f"2 + {number} = {2 + number}"}


def record(gsm8k, ifeval) -> dict:
    """Of (tokens, forwards) of every prompt."""
    kinds = {}
    for name, pairs in zip(recipes.OWN, (gsm8k, ifeval)):
        decoded, forwards = zip(*pairs)
        kinds[name] = {"verify": {"decoded": decoded, "forwards": forwards}}
    return kinds


def test_gain_by_hand(monkeypatch):
    monkeypatch.setattr(recipes, "UNSEEN", 2)
    mine = record([(30, 10), (10, 10)], [(8, 4), (8, 6)])
    other = record([(20, 10), (20, 10)], [(8, 8), (12, 12)])
    gain, low, high = recipes.gain(mine, other)
    assert gain == pytest.approx((40 / 20 + 16 / 10) / (40 / 20 + 20 / 20) - 1)
    assert low < gain < high
    assert recipes.gain(mine, mine) == (0, 0, 0)


def test_shorter_answers_are_no_gain(monkeypatch):
    """All prompts were once pooled, so whoever gave shorter answers to the easier kind lost."""
    monkeypatch.setattr(recipes, "UNSEEN", 2)
    long = record([(40, 20), (60, 30)], [(10, 10), (20, 20)])
    short = record([(20, 10), (30, 15)], [(10, 10), (20, 20)])
    assert recipes.gain(short, long) == (0, 0, 0)


def test_every_arm_is_understood():
    for words in recipes.ARMS.values():
        assert words.startswith("--data ")  # run_arm looks for the file that follows
        train.parse_arguments([*recipes.PLAN.split(), *words.split()])
    assert recipes.WEIGHTS.keys() < recipes.ARMS.keys()
    assert set(recipes.WEIGHTS.values()) == mask_weights.WEIGHTS.keys()


def test_a_weight_that_fades(monkeypatch):
    """From `expected` to 1, by the share of the run that the learning rate is asked for."""
    monkeypatch.setattr(train, "learning_rate", train.learning_rate)
    monkeypatch.setattr(train, "expected_weights", lambda factor: factor)
    mask_weights.fade()
    for progress, expected in ((0.0, 3.0), (0.25, 2.5), (1.0, 1.0)):
        train.learning_rate(peak=1.0, progress=progress, warmup=0.03)
        assert train.expected_weights(3.0) == expected


def test_a_smoothing_is_set(monkeypatch):
    """The program sets it and hands the other words to train.py."""
    monkeypatch.setattr(train, "SMOOTHING", train.SMOOTHING)
    monkeypatch.setattr(train, "identity", lambda args, rows: {"--lr": "1"})
    seen = []
    monkeypatch.setattr(train, "main", lambda: seen.append((train.SMOOTHING, sys.argv[1:])))
    monkeypatch.setattr(sys, "argv", ["mask_weights.py", "smoothing-1", "--data", "x.jsonl"])
    mask_weights.main()
    assert seen == [(1.0, ["--data", "x.jsonl", "--mask-weight", "expected"])]
    assert train.identity(None, None) == {"--lr": "1", "weights": "smoothing-1"}  # of a run
    monkeypatch.setattr(sys, "argv", ["mask_weights.py", "--data", "x.jsonl"])
    with pytest.raises(UserError, match="first argument must be one of: smoothing-1"):
        mask_weights.main()


def test_what_is_missing_is_named(data, monkeypatch):
    monkeypatch.setattr(recipes, "own_answers", own_answers)
    gsm8k, ifeval, _ = data
    for work in (
        lambda: recipes.make_data(gsm8k, ifeval, sample=False),
        lambda: recipes.run_arm("base"),
        lambda: recipes.run_arm("own"),
    ):
        with pytest.raises(UserError, match="base: is missing; the commands at the top of"):
            work()
    with pytest.raises(UserError, match="ifeval.jsonl: has no answers; .* GSM8K's file first"):
        recipes.make_data(ifeval, gsm8k, sample=False)


@pytest.mark.parametrize("length, reason", [(4, "length"), (100, "stop")])
def test_answers_that_were_cut_say_so(length, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(recipes, "WORK", tmp_path)
    monkeypatch.setattr(recipes, "MAX_NEW", length)
    (tmp_path / "base").symlink_to(ROOT / "toy/sft")
    prompt = first_row(ROOT / "toy/test.jsonl")["prompt"]
    answer = recipes.own_answers([prompt], temperature=0.0)[prompt]
    assert answer["finish_reason"] == reason
    assert answer["response"].endswith(".") == (reason == "stop")  # the text without the end token
