"""bench/reproduce.py: nothing is computed twice, and its figures are what it saw."""

import contextlib
import json
import math
import string
from dataclasses import replace

import numpy as np
import pytest
from common import ROOT

from bench import report, reproduce
from bench.report import Results, verdict
from bench.reproduce import FULL, QUICK, STAGES, Piece, one


@pytest.fixture
def plan(tmp_path):
    return replace(
        QUICK,
        train_rows=40,
        problems=6,
        steps=2,
        mars=("--batch", "4", "--lr", "1e-4"),
        stages=("sft", "mars-4", "diffusion"),
        work=tmp_path,
        cache=tmp_path / "cache",
    )


def test_a_piece_is_trained_and_decoded_once(plan, monkeypatch):
    one(plan, 0, "mars-4")
    piece = Piece(plan, 0, "mars-4")
    assert not piece.lacks()
    decoded = piece.record["decoded"]
    assert {"tau 1", "paper 0.95", "ours 0.5", "verify", "entropy 0.1"} <= decoded.keys()
    assert decoded["tau 1"]["tokens"] == decoded["tau 1"]["forwards"]
    # Lossless, and what the last mask says comes on top of what the paper reads.
    assert decoded["verify"]["right"] == decoded["tau 1"]["right"]
    assert decoded["verify"]["forwards"] < decoded["tau 1"]["forwards"]
    assert len(decoded["tau 1"]["right"]) == 6 and len(piece.record["trained"]["look_ahead"]) == 1

    monkeypatch.setattr(reproduce, "load", None)  # neither a model nor a training is needed now
    monkeypatch.setattr(reproduce.subprocess, "run", None)
    one(plan, 0, "mars-4")
    del decoded["ours 0.5"]
    piece.path.write_text(json.dumps(piece.record))
    assert Piece(plan, 0, "mars-4").missing() == ["ours 0.5"]


def test_decoding_goes_on_where_it_was_stopped(plan, monkeypatch):
    one(plan, 0, "sft")
    path = Piece(plan, 0, "sft").path
    before = json.loads(path.read_text())
    before["decoded"]["tau 1"]["right"] = "kept"
    del before["decoded"]["jacobi"]
    path.write_text(json.dumps(before))
    one(plan, 0, "sft")
    after = json.loads(path.read_text())["decoded"]
    assert after["tau 1"]["right"] == "kept" and after["jacobi"]["forwards"]


def test_a_record_of_another_plan_is_not_taken(plan):
    """Somebody who changes the steps would once have drawn the old results."""
    one(plan, 0, "mars-4")
    with pytest.raises(reproduce.UserError, match="mars-4-0.json: was made by another command"):
        Piece(replace(plan, steps=3), 0, "mars-4")


def test_a_failed_training_says_where_to_look(plan, monkeypatch):
    with pytest.raises(reproduce.UserError, match="ended with 2; see .*mars-4-0.txt"):
        one(replace(plan, steps=0), 0, "mars-4")
    assert Piece(plan, 0, "mars-4").lacks()


def found(plan, right):
    """A cache as if every piece had been computed; `right` gives the share by name and way."""
    rng = np.random.default_rng(0)
    problems = rng.random(plan.problems)
    for seed, name in plan.pieces():
        piece = Piece(plan, seed, name)
        for way, options in piece.decoding().items():
            bits = problems + 0.02 * rng.random(plan.problems) < right(name, options["tau"])
            speed = 1 + 3 * (1 - options["tau"])
            piece.record.setdefault("decoded", {})[way] = {
                "right": "".join(map(str, bits.astype(int))),
                "tokens": round(1000 * speed),
                "forwards": 1000,
                "seconds": 1.0,
            }
        ahead = {str(step): [0.9 - 0.1 * k for k in range(piece.stage.B + 1)] for step in (50, 100)}
        piece.record |= {"trained": {"last": {}, "look_ahead": ahead}, "seconds": 60}
        piece.record["command"] = piece.command()
        piece.keep()
    return Results(plan.cache)


def test_verdicts_follow_the_data(tmp_path):
    """The same text says that a claim holds, or does not, as the numbers have it."""
    plan = replace(FULL, problems=200, cache=tmp_path)
    worse = ("diffusion", "no-clean-4", "no-clean-8", "no-clean-16")
    good = found(plan, lambda name, tau: 0.4 if name in worse else 0.6 + 0.1 * tau)
    assert "Holds at" in report.one_token(good)["one_token_verdict"]
    assert "Holds at" in report.clean_loss(good)["clean_loss_verdict"]
    bad = found(plan, lambda name, tau: 0.3 if name.startswith("mars") else 0.7)
    assert "Does not hold" in report.one_token(bad)["one_token_verdict"]
    assert "Does not hold" in report.clean_loss(bad)["clean_loss_verdict"]
    assert verdict("yes", "open") == "**Holds partly at this scale.**"
    assert verdict("open", "no") == "**Cannot be told at this scale.**"


def test_the_report_needs_no_piece_and_knows_all_fields(tmp_path):
    full = found(replace(FULL, problems=50, cache=tmp_path / "full"), lambda n, tau: 0.5)
    quick = found(replace(QUICK, problems=50, cache=tmp_path / "quick"), lambda n, tau: 0.5)
    fields = [
        field
        for _, field, _, _ in string.Formatter().parse((ROOT / "bench/claims.md").read_text())
        if field
    ]
    computed = {key for claim in report.CLAIMS for key in claim(full)}
    assert set(fields) <= computed | reproduce.TIMINGS.keys()
    assert computed <= set(fields)
    for claim in report.CLAIMS:
        with contextlib.suppress(report.Missing):
            claim(quick)
    with pytest.raises(report.Missing, match="over-t-4, tau 1"):
        quick.right("over-t-4", "tau 1")


def test_intervals():
    """One seed: the textbook's; several: never narrower than by problems alone; a difference of
    equals: none at all."""
    rng = np.random.default_rng(1)
    one = (rng.random((1, 1000)) < 0.7).astype(float)
    mean, low, high = report.estimate(one)
    textbook = 1.96 * math.sqrt(mean * (1 - mean) / 1000)
    assert mean == one.mean() and abs(high - low - 2 * textbook) < 0.1 * textbook
    apart = np.concatenate([one, one, 0 * one])
    assert report.estimate(apart).low < 0.3 and report.estimate(apart).high > 0.65
    assert report.estimate(one - one) == (0, 0, 0)


def test_every_piece_comes_behind_what_it_starts_from():
    for full in (FULL, QUICK):
        seen = set()
        for seed, name in full.pieces():
            start = STAGES[name].start
            assert start in ("", "base") or (seed, start) in seen
            seen.add((seed, name))
