"""experiments/paper: nothing is computed twice, and the report follows what was computed."""

import json
import math
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from common import ROOT

from experiments.paper import report
from experiments.paper import run as paper
from experiments.paper.report import ONE
from experiments.paper.run import RESULTS, Piece, Plan, make_data, problems_of
from plumbing.errors import UserError
from toy.make import problem


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Few steps, from a smaller model, on easier problems."""
    monkeypatch.setattr(paper, "START", ROOT / "toy/sft")
    monkeypatch.setattr(paper, "hard_problem", problem)
    options = "--steps 2 --batch 4"
    return Plan(train_rows=40, num_problems=3, options=options, work=tmp_path, out=tmp_path / "out")


def test_pieces_are_trained_and_decoded(plan, monkeypatch):
    ways = (ONE, "paper 0.5", "ours 0.5", "entropy 0.1", "verify")
    monkeypatch.setitem(paper.ARMS, "mars-4", replace(paper.ARMS["mars-4"], ways=ways))
    make_data(plan)
    rows = [json.loads(line)["prompt"] for line in open(plan.work / "train.jsonl")]
    assert len(rows) == 40 and not {row["prompt"] for row in problems_of(plan)[0]} & set(rows)
    records = {}
    for name in ("mars-4", "diffusion"):
        piece = Piece(plan, 0, name)
        piece.complete()
        assert piece.is_complete()
        records[name] = json.loads(piece.record.read_text())
    decoded = records["mars-4"]["decoded"]
    assert decoded[ONE]["tokens"] == decoded[ONE]["forwards"]
    assert decoded["verify"]["right"] == decoded[ONE]["right"]
    assert decoded["verify"]["forwards"] < decoded[ONE]["forwards"]
    # The last mask gives tokens that the paper's decoder does not read.
    mine, papers = decoded["ours 0.5"], decoded["paper 0.5"]
    assert mine["tokens"] / mine["forwards"] > papers["tokens"] / papers["forwards"]
    assert len(decoded[ONE]["right"]) == len(records["mars-4"]["nats"].split()) == 3
    [way] = records["diffusion"]["decoded"].values()
    assert way["forwards"] and len(way["right"]) == 3


def test_a_record_of_another_plan_is_refused(plan, monkeypatch):
    """Or a report would mix old results with new ones."""
    write_record(plan, Piece(plan, 0, "ar"))
    assert Piece(plan, 0, "ar").is_complete()
    others = {"options": "--steps 3 --batch 4"}, {"num_problems": 4}, {"train_rows": 41}
    for other, what in zip(others, ("command", "problems", "train_rows")):
        with pytest.raises(UserError, match=f"ar-0.json: of other {what}"):
            Piece(replace(plan, **other), 0, "ar").is_complete()
    monkeypatch.setitem(paper.ARMS, "ar", replace(paper.ARMS["ar"], ways=(ONE, "verify")))
    with pytest.raises(UserError, match="ar-0.json: of other ways"):
        Piece(plan, 0, "ar").is_complete()


def test_from_nothing_to_a_report(plan, monkeypatch):
    """What was made is not made again."""
    made = []

    def complete_all(pieces, jobs):
        for piece in pieces:
            made.append(piece.name)
            write_record(plan, piece)

    monkeypatch.setattr(paper, "Plan", lambda: plan)
    monkeypatch.setattr(paper, "complete_all", complete_all)
    monkeypatch.setattr(sys, "argv", ["run"])
    paper.main()
    paper.main()
    assert made == [piece.name for piece in plan.pieces()]
    text = (plan.out / "paper.md").read_text()
    assert "22 models" in text and "{" not in text


def test_the_committed_records_are_complete_and_draw_the_committed_report(tmp_path):
    """Except for the intervals, whose samples NumPy draws. And --verify is as right as AR."""
    pieces = Plan().pieces()
    assert all(piece.is_complete() for piece in pieces)
    report.write_report([piece.record for piece in pieces], tmp_path)
    made, committed = (
        re.sub(r"\(\S+ to \S+\)", "", (folder / "paper.md").read_text()).replace("-", "").split()
        for folder in (tmp_path, RESULTS)
    )
    assert made == committed
    results = report.Results([piece.record for piece in pieces])
    one, verified = results.right(("mars-4", ONE)), results.right(("mars-4", "verify"))
    assert all(np.array_equal(verified[seed], one[seed]) for seed in range(3))


def write_record(plan, piece):
    """As if the piece had been computed."""
    decoded = {}
    for way in piece.made_of["ways"]:
        decoded[way] = {"right": "01" * plan.num_problems, "tokens": 2000, "forwards": 1000}
    nats = "0.5 " * plan.num_problems
    record = piece.made_of | {"decoded": decoded, "nats": nats, "tokens": 90, "made": "now"}
    piece.record.parent.mkdir(parents=True, exist_ok=True)
    piece.record.write_text(json.dumps(record))


def test_intervals():
    """With one seed the textbook's. With three, problems that are hard for all of them count once:
    the truth is inside in about 95 of 100 cases."""
    rng = np.random.default_rng(1)
    one = {0: (rng.random(1000) < 0.7).astype(float)}
    mean, low, high = report.estimate(one)
    assert mean == pytest.approx(one[0].mean())
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(mean * (1 - mean) / 1000), rel=0.05)
    assert report.estimate({0: one[0] - one[0]}) == (0, 0, 0)
    inside = 0
    for _ in range(400):
        hard = rng.normal(0, 0.2, 200)
        by_seed = {seed: 0.6 + hard + rng.normal(0, 0.3, 200) for seed in range(3)}
        _, low, high = report.estimate(by_seed)
        inside += low < 0.6 < high
    assert 0.92 <= inside / 400 <= 0.98
