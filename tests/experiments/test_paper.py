"""experiments/paper: nothing is computed twice, and the report follows what was computed."""

import json
import math
import re
import shutil
import string
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

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
    return Plan(
        train_rows=40,
        num_problems=3,
        options="--steps 2 --batch 4",
        work=tmp_path,
        out=tmp_path / "out",
    )


@pytest.fixture
def at_once(monkeypatch):
    """Trainings take no time, and their result is toy/mars."""

    def train(words, **_):
        out = Path(words[words.index("--out") + 1])
        shutil.copytree(ROOT / "toy/mars", out, dirs_exist_ok=True)
        line = {"step": 2, "grad_norm": 1.5, "look_ahead": [0.9, 0, 0, 0, 0]}
        (out / "log.jsonl").write_text(json.dumps(line) + "\n")
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(paper.subprocess, "run", train)


def test_a_piece_is_trained_and_decoded(plan):
    make_data(plan)
    piece = Piece(plan, 0, "mars-4")
    assert not piece.is_complete()
    piece.complete()
    assert Piece(plan, 0, "mars-4").is_complete()
    record = json.loads(piece.record.read_text())
    decoded = record["decoded"]
    assert {ONE, "paper 0.95", "ours 0.5", "verify", "entropy 0.1"} <= decoded.keys()
    assert decoded[ONE]["tokens"] == decoded[ONE]["forwards"]
    assert decoded["verify"]["right"] == decoded[ONE]["right"]
    assert decoded["verify"]["forwards"] < decoded[ONE]["forwards"]
    # The last mask gives tokens that the paper's decoder does not read.
    mine, papers = decoded["ours 0.5"], decoded["paper 0.5"]
    assert mine["tokens"] / mine["forwards"] > papers["tokens"] / papers["forwards"]
    assert len(decoded[ONE]["right"]) == len(record["nats"].split()) == 3
    assert len(record["trained"]["look_ahead"]) == 5
    assert 0 <= record["trained"]["clipped"] <= 1


@pytest.mark.parametrize("name", ["diffusion", "over-t-4"])
def test_a_baseline_is_trained_and_decoded(plan, name):
    make_data(plan)
    piece = Piece(plan, 0, name)
    piece.complete()
    decoded = json.loads(piece.record.read_text())["decoded"]
    assert decoded and all(way["forwards"] and len(way["right"]) == 3 for way in decoded.values())


def test_a_finished_training_is_not_repeated(plan):
    """Its log has times: it would differ."""
    make_data(plan)
    Piece(plan, 0, "ar").train()
    log = (plan.work / "ar-0/log.jsonl").read_bytes()
    Piece(plan, 0, "ar").train()
    assert (plan.work / "ar-0/log.jsonl").read_bytes() == log


def test_a_record_of_another_plan_is_refused(plan, monkeypatch, at_once):
    """Whoever changed the number of steps once got a report of the old results."""
    make_data(plan)
    for name in ("sft", "ar"):
        Piece(plan, 0, name).complete()
    others = {"options": "--steps 3 --batch 4"}, {"num_problems": 4}, {"train_rows": 41}
    for other, what in zip(others, ("command", "problems", "train_rows")):
        with pytest.raises(UserError, match=f"ar-0.json: of other {what}"):
            Piece(replace(plan, **other), 0, "ar").is_complete()
    monkeypatch.setitem(paper.ARMS, "sft", replace(paper.ARMS["sft"], ways=(ONE, "verify")))
    with pytest.raises(UserError, match="sft-0.json: of other ways"):
        Piece(plan, 0, "sft").is_complete()


def test_training_data_has_no_test_problem(plan):
    make_data(plan)
    rows = [json.loads(line) for line in open(plan.work / "train.jsonl")]
    assert len(rows) == plan.train_rows
    assert not {row["prompt"] for row in rows} & {row["prompt"] for row in problems_of(plan)[0]}


def test_a_failed_training_says_where_to_look(plan):
    plan = replace(plan, options="--steps 0")
    make_data(plan)
    with pytest.raises(UserError, match="ended with 2; see .*mars-4-0.txt"):
        Piece(plan, 0, "mars-4").complete()
    assert not Piece(plan, 0, "mars-4").is_complete()


def test_from_nothing_to_a_report(plan, monkeypatch, at_once):
    """All pieces, each in this process; what was made is not made again."""
    pytest.importorskip("matplotlib", reason="pip install -r bench/requirements.txt")
    made = []
    measured = (measured_record(plan, piece, lambda name, tau: 0.5) for piece in plan.pieces())

    class Pool:
        def __init__(self, jobs, **_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def imap_unordered(self, function, pieces):
            made.append([piece.name for piece in pieces])
            return map(function, pieces)

    monkeypatch.setattr(paper.multiprocessing, "get_context", lambda _: SimpleNamespace(Pool=Pool))
    monkeypatch.setattr(paper, "Plan", lambda: plan)
    monkeypatch.setattr(paper, "measure", lambda *_: next(measured))
    monkeypatch.setattr(sys, "argv", ["run"])
    paper.main()
    paper.main()
    assert made == [[piece.name for piece in plan.pieces()]]
    text = (plan.out / "paper.md").read_text()
    assert "23 models" in text and "{" not in text
    assert (plan.out / "pareto.png").stat().st_size > 10_000


def test_the_committed_records_are_complete_and_draw_the_committed_report(tmp_path):
    pieces = Plan().pieces()
    assert all(piece.is_complete() for piece in pieces)
    pytest.importorskip("matplotlib", reason="pip install -r bench/requirements.txt")
    report.write_report([piece.record for piece in pieces], tmp_path)
    committed = (RESULTS / "paper.md").read_text()
    assert without_intervals((tmp_path / "paper.md").read_text()) == without_intervals(committed)


def without_intervals(text):
    """Another version of NumPy may draw other bootstrap samples."""
    return re.sub(r"\(\S+ to \S+\)", "", text).replace("-", "").split()


def measured_record(plan, piece, right):
    """What `measure` could return; `right` gives the share by arm and tau."""
    name = piece.name[:-2]
    problems = np.random.default_rng(0).random(plan.num_problems)  # the same in all records
    rng = np.random.default_rng(list(piece.name.encode()))
    decoded = {}
    for way, options in piece.made_of["ways"].items():
        tau = options.get("tau", 1)
        bits = problems + 0.005 * rng.random(plan.num_problems) < right(name, tau)
        decoded[way] = {
            "right": "".join(map(str, bits.astype(int))),
            "tokens": round(1000 * (1 + 8 * (1 - tau))),
            "forwards": 1000,
        }
    nats = f"{9 - 8 * right(name, 1)} " * plan.num_problems
    return {"decoded": decoded, "nats": nats, "tokens": 90 * plan.num_problems}


def records(plan, right):
    """Results as if every piece had been computed."""
    for piece in plan.pieces():
        record = measured_record(plan, piece, right)
        record |= {"made": "now", "trained": {"clipped": 0.5}}
        piece.record.parent.mkdir(exist_ok=True)
        piece.record.write_text(json.dumps(record))
    return report.Results([piece.record for piece in plan.pieces()])


def test_verdicts_follow_the_data(tmp_path):
    """The same text says that a claim holds, or does not, as the numbers have it. Once, a control
    that did badly hid that MARS itself had missed, and where nothing was left to lose, larger
    blocks seemed to lose no more."""
    plan = Plan(num_problems=200, out=tmp_path)

    def results(right):
        return records(plan, right)

    worse = {"diffusion": 0.4, "no-clean-4": 0.6, "no-clean-16": 0.3}
    good = results(lambda name, tau: worse.get(name, 0.6 + 0.1 * tau))
    assert all_hold(report.one_token(good)["verdict"])
    assert "AR SFT had converged" in report.one_token(good)["verdict"]
    assert all_hold(report.one_token(good)["slow_verdict"])
    assert all_hold(report.block_diffusion(good)["diffusion_verdict"])
    assert all_hold(report.clean_loss(good)["clean_loss_verdict"])
    assert all_hold(report.training_free(good)["jacobi_verdict"])
    bad = results(lambda name, tau: 0.3 if name.startswith("mars") else 0.7)
    assert none_holds(report.one_token(bad)["verdict"])
    assert none_holds(report.one_token(bad)["slow_verdict"])
    found = report.clean_loss(bad)["clean_loss_verdict"]
    assert "**Does not hold**: fewer right answers without it, B = 4; " in found
    assert none_holds(report.block_diffusion(bad)["diffusion_verdict"])
    lifted = results(lambda name, tau: {"diffusion": 0.1, "mars-4": 0.5}.get(name, 0.7))
    assert none_holds(report.one_token(lifted)["verdict"])
    assert all_hold(report.block_diffusion(lifted)["diffusion_verdict"])
    assert all_hold(report.causes(lifted)["causes_verdict"])
    unfinished = results(lambda name, tau: 0.8 if name == "ar" else 0.7)
    assert "AR SFT had NOT converged" in report.one_token(unfinished)["verdict"]
    alike = results(lambda name, tau: 0.01 if name.startswith("no-clean") else 0.6)
    found = report.clean_loss(alike)["clean_loss_verdict"]
    assert found.startswith("**Holds**: fewer right answers")
    assert "**Cannot be told**: more nats are lost with the larger B." in found
    trade = results(lambda name, tau: 0.7 if tau >= 0.95 else 0.7 * tau)
    found = report.tau_buys(trade)["tau_verdicts"]
    assert found.count("**Holds**") == 3 and found.count("**") == 6
    better = results(lambda name, tau: 0.9 - 0.5 * tau)
    found = report.tau_buys(better)["tau_verdicts"]
    assert found.count("**Does not hold**: never better answers.") == 3
    better.records["sft"][0]["decoded"]["jacobi"]["tokens"] = 2000
    found = report.training_free(better)["jacobi_verdict"]
    assert "**Does not hold**: fewer than 1.3" in found


def all_hold(verdict):
    return verdict.startswith("**Holds**") and verdict.count("**") == 2


def none_holds(verdict):
    return verdict.startswith("**Does not hold**") and verdict.count("**") == 2


def test_worse_nats_alone_are_seen(tmp_path):
    """Accuracy is coarse: a model may answer as well, and yet be less sure of its words."""
    plan = Plan(num_problems=200, out=tmp_path)
    records(plan, lambda name, tau: 0.7)
    for path in tmp_path.glob("cache/mars-4-[0-9].json"):
        record = json.loads(path.read_text())
        nats = [float(one) + 0.3 for one in record["nats"].split()]  # of 90 tokens: 0.0033 each
        record["nats"] = " ".join(map(str, nats))
        path.write_text(json.dumps(record))
    results = report.Results([piece.record for piece in plan.pieces()])
    found = report.one_token(results)["verdict"]
    assert "**Does not hold**: nats as good as AR SFT's; nats as good as more AR's." in found


def test_verdicts():
    found = report.verdict({"a": True, "b": False, "c": None, "d": False})
    assert found == "**Holds**: a. **Does not hold**: b; d. **Cannot be told**: c."
    assert report.verdict({"a": None}) == "**Cannot be told**: a."


def test_all_that_is_computed_is_shown(tmp_path):
    full = records(Plan(num_problems=50, out=tmp_path), lambda name, tau: 0.5)
    template = (ROOT / "experiments/paper/claims.md").read_text()
    fields = {field for _, field, _, _ in string.Formatter().parse(template) if field}
    computed = {key for function in report.FIELDS for key in function(full)}
    assert fields == computed | {"made", "models", "table6"}


def test_a_difference_is_from_the_mean_over_the_seeds_of_the_base():
    """Once a model with three seeds was compared with one of a single seed in two ways, which
    disagreed: the table showed another interval than the verdict was about."""
    mine = {0: np.array([1.0, 0.0]), 1: np.array([1.0, 1.0])}
    base = {0: np.array([0.0, 1.0]), 1: np.array([0.0, 0.0])}
    assert {seed: list(one) for seed, one in report.minus(mine, base).items()} == {
        0: [1.0, -0.5],
        1: [1.0, 0.5],
    }
    assert report.mean(report.minus(mine, base)) == -report.mean(report.minus(base, mine)) == 0.5


def test_intervals():
    """With one seed the textbook's. With three, problems that are hard for all of them count once:
    the truth is inside in about 95 of 100 cases, where intervals of 3 x 200 independent answers
    would miss it more often."""
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
    assert report.above(one, 0.8) is False and report.above(one, 0.6) is True
    assert report.above(one, one[0].mean()) is None


def test_each_seed_is_shown_next_to_the_mean():
    right = {0: np.array([1.0, 1.0, 0.0, 0.0]), 1: np.array([1.0, 1.0, 1.0, 0.0])}
    assert report.text(right).startswith("62.5 (")
    assert report.text(right).endswith(") [50.0, 75.0]")
    assert "[" not in report.text({0: right[0]})
    assert report.text(right, sign="+").startswith("+62.5 (")
    assert report.text(right, report.NATS).startswith("0.6250 (")
