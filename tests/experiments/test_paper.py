"""experiments/paper: nothing is computed twice, and the report follows what was computed."""

import json
import math
import random
import re
import shutil
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from common import ROOT, cases, random_prompt, rows_of, tiny_model

import experiments.paper.__main__ as paper
from bench.common import mean_and_interval
from decode import generate
from experiments.paper.jacobi import jacobi
from experiments.paper.report import ONE, with_interval
from plumbing.errors import UserError
from toy.make import problem


def test_from_nothing_to_a_report(tmp_path, monkeypatch):
    """Two arms, from a smaller model, of few steps, on easier problems. What was made is not made
    again."""
    monkeypatch.setattr(paper, "START", "toy/sft")
    monkeypatch.setattr(paper, "hard_problem", problem)
    monkeypatch.setattr(paper, "TRAIN_ROWS", 40)
    monkeypatch.setattr(paper, "OPTIONS", "--steps 2 --batch 4 --device cpu")
    monkeypatch.setattr(paper, "HARD_TEST_ROWS", 3)
    monkeypatch.setattr(paper, "WORK", str(tmp_path / "work"))
    monkeypatch.setattr(paper, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(paper.report, "write_report", lambda folder: None)
    monkeypatch.setattr(sys, "argv", ["paper"])
    ways = (ONE, "paper 0.5", "ours 0.5", "entropy 0.1", "lossless")
    mars = replace(paper.ARMS["mars-4"], ways=ways, num_seeds=1)
    arms = {"mars-4": mars, "sft": paper.ARMS["sft"]}
    monkeypatch.setattr(paper, "ARMS", arms)
    paper.main()
    records = {name: json.loads(paper.record_path(name, 0).read_text()) for name in arms}
    monkeypatch.delattr(paper, "complete")
    paper.main()

    training = {row["prompt"] for row in rows_of(tmp_path / "work/train.jsonl")}
    _, problems = paper.split(problem, 40, 3)
    assert len(training) == 40 and not {row["prompt"] for row in problems} & training
    decoded = records["mars-4"]["decoded"]
    assert list(decoded) == list(ways)
    assert decoded[ONE]["tokens"] == decoded[ONE]["forwards"]
    assert decoded["lossless"]["right"] == decoded[ONE]["right"]
    assert decoded["lossless"]["forwards"] < decoded[ONE]["forwards"]
    # The last mask gives tokens that the paper's decoder does not read.
    mine, papers = decoded["ours 0.5"], decoded["paper 0.5"]
    assert mine["tokens"] / mine["forwards"] > papers["tokens"] / papers["forwards"]
    assert len(decoded[ONE]["right"]) == len(records["mars-4"]["nats"].split()) == 3
    one, guessed = records["sft"]["decoded"].values()
    assert guessed["right"] == one["right"] and guessed["forwards"] < one["forwards"]


def test_the_committed_records_draw_the_committed_report(tmp_path, monkeypatch):
    """Except for the intervals, whose samples NumPy draws. And lossless is as right as AR.

    Every record is of an arm that can be run again; four were not.
    """
    shutil.copytree(paper.RESULTS, tmp_path, dirs_exist_ok=True)
    page = (tmp_path / "paper.md").read_text()
    (tmp_path / "paper.md").write_text(page.replace("|", "| other"))
    monkeypatch.setattr(paper, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["paper"])
    monkeypatch.delattr(paper, "complete")
    paper.main()
    made, committed = (
        re.sub(r"\(\S+ to \S+\)", "", (folder / "paper.md").read_text()).split()
        for folder in (tmp_path, ROOT / "experiments/results")
    )
    assert made == committed
    arms = [path.stem.rpartition("-")[0] for path in (tmp_path / "cache").iterdir()]
    assert Counter(arms) == {name: arm.num_seeds for name, arm in paper.ARMS.items()}
    for seed in range(3):
        decoded = json.loads(paper.record_path("mars-4", seed).read_text())["decoded"]
        assert list(decoded) == list(paper.ALL_WAYS)
        assert decoded["lossless"]["right"] == decoded[ONE]["right"]


def test_records_of_several_commits(tmp_path, monkeypatch):
    """One seed's record was deleted; another rule made it anew, and was averaged in silently."""
    shutil.copytree(paper.RESULTS / "cache", tmp_path / "cache")
    monkeypatch.setattr(paper, "RESULTS", tmp_path)
    monkeypatch.setattr(paper, "this_commit", lambda: "abc1234")
    monkeypatch.setattr(sys, "argv", ["paper"])
    path = paper.record_path("ar", 1)
    path.write_text(path.read_text().replace("c71ca89", "abc1234"))
    for _ in range(2):  # with a record of another commit; with one to be made
        with pytest.raises(UserError, match="records of abc1234 and c71ca89"):
            paper.main()
        path.unlink(missing_ok=True)


def test_no_negative_zero():
    """The rounding of a mean near 0 turned "+0.0" in a committed page into "-0.0"."""
    assert with_interval(np.array([-1e-9, -1e-9]), 1, "+") == "+0.0 (+0.0 to +0.0)"
    assert with_interval(np.array([-1.0, -1.0]), 1, "+") == "-1.0 (-1.0 to -1.0)"


def test_an_interval_is_the_textbooks():
    values = (np.random.default_rng(1).random(1000) < 0.7).astype(float)
    mean, low, high = mean_and_interval(values)
    assert mean == pytest.approx(values.mean())
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(mean * (1 - mean) / 1000), rel=0.05)


def test_jacobi_is_lossless():
    """And it gives more than one token per forward, where a text repeats itself."""
    num_tokens = 0
    num_forwards = 0
    for seed in cases(15, 300):
        rng = random.Random(seed)
        model = tiny_model(rng)
        prompts = [random_prompt(rng, rng.randint(1, 70)) for _ in range(5)]
        max_new = rng.randint(1, 40)
        for prompt, expected in zip(prompts, generate(model, prompts, tau=1.0, max_new=max_new)):
            answer = jacobi(model, prompt, rng.randint(1, 9), max_new)
            assert answer.tokens == expected.tokens
            alone = jacobi(model, prompt, 0, max_new)
            assert alone.tokens == expected.tokens and alone.forwards == len(alone.tokens)
            num_tokens += len(answer.tokens)
            num_forwards += answer.forwards
    assert num_tokens > 1.5 * num_forwards  # 1.4 if it forgot what it predicted
