"""bench/paper: nothing is computed twice, and the report follows what was computed."""

import contextlib
import json
import math
import re
import shutil
import string
import subprocess
from dataclasses import replace
from pathlib import Path

from plumbing.errors import UserError

import numpy as np
import pytest
from common import ROOT

from bench.paper import report
from bench.paper import run as paper
from bench.paper.run import FULL, QUICK, RESULTS, STAGES, Piece, problems_of, to_do


@pytest.fixture
def plan(tmp_path):
    return replace(
        QUICK,
        train_rows=40,
        num_problems=3,
        options=("--steps", "2", "--batch", "4", "--lr", "1e-4"),
        stages=("sft", "mars-4", "diffusion"),
        work=tmp_path,
        cache=tmp_path / "cache",
    )


@pytest.fixture
def at_once(monkeypatch):
    """Trainings take no time, and their result is toy/sft."""

    def train(words, **_):
        out = Path(words[words.index("--out") + 1])
        shutil.copytree(ROOT / "toy/sft", out)
        line = {"step": 2, "clean": 0.1, "look_ahead": [0.9, 0, 0, 0, 0]}
        (out / "log.jsonl").write_text(json.dumps(line) + "\n")
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(paper.subprocess, "run", train)


def keys(pieces):
    return [(piece.seed, piece.name) for piece in pieces]


def test_a_piece_is_trained_and_decoded_once(plan, monkeypatch):
    Piece(plan, 0, "mars-4").complete()
    piece = Piece(plan, 0, "mars-4")
    assert piece.is_complete()
    decoded = piece.record["decoded"]
    assert {"tau 1", "paper 0.95", "ours 0.5", "verify", "entropy 0.1"} <= decoded.keys()
    assert decoded["tau 1"]["tokens"] == decoded["tau 1"]["forwards"]
    # Lossless, and the last mask gives tokens that the paper's decoder does not read.
    assert decoded["verify"]["right"] == decoded["tau 1"]["right"]
    assert decoded["verify"]["forwards"] < decoded["tau 1"]["forwards"]
    assert len(decoded["tau 1"]["right"]) == 3
    assert len(piece.record["trained"]["look_ahead"]) == 1

    monkeypatch.setattr(paper, "load", None)  # neither a model nor a training is needed now
    monkeypatch.setattr(paper.subprocess, "run", None)
    Piece(plan, 0, "mars-4").complete()
    del decoded["ours 0.5"]
    piece.path.write_text(json.dumps(piece.record))
    assert list(Piece(plan, 0, "mars-4").missing_ways()) == ["ours 0.5"]


@pytest.mark.parametrize("name", ["diffusion", "over-t-4"])
def test_a_baseline_is_trained_and_decoded(plan, name):
    plan = replace(plan, stages=("sft", name))
    Piece(plan, 0, name).complete()
    record = Piece(plan, 0, name).record
    assert record["trained"]["last"].keys() == {"noisy", "clean"}
    assert all(way["forwards"] and len(way["right"]) == 3 for way in record["decoded"].values())


def test_decoding_continues_where_it_was_stopped(plan):
    Piece(plan, 0, "sft").complete()
    path = Piece(plan, 0, "sft").path
    before = json.loads(path.read_text())
    before["decoded"]["tau 1"]["right"] = "kept"
    del before["decoded"]["jacobi"]
    path.write_text(json.dumps(before))
    Piece(plan, 0, "sft").complete()
    after = json.loads(path.read_text())["decoded"]
    assert after["tau 1"]["right"] == "kept"
    assert after["jacobi"]["forwards"]


def test_a_record_of_another_plan_is_refused(plan, monkeypatch, at_once):
    """Whoever changed the number of steps once got a report of the old results."""
    plan = replace(plan, stages=("sft", "ar", "diffusion"))
    Piece(plan, 0, "ar").complete()
    steps = ("--steps", "3", "--batch", "4", "--lr", "1e-4")
    for other, what in (({"options": steps}, "command"), ({"num_problems": 4}, "problems")):
        with pytest.raises(UserError, match=f"ar-0.json: has another {what}"):
            Piece(replace(plan, **other), 0, "ar")
    monkeypatch.setattr(paper, "NUM_JACOBI_GUESSES", 3)
    Piece(plan, 0, "sft").complete()
    monkeypatch.setattr(paper, "NUM_JACOBI_GUESSES", 4)
    assert list(Piece(plan, 0, "sft").missing_ways()) == ["jacobi"]
    rows = (plan.work / "train.jsonl").read_text()
    (plan.work / "train.jsonl").write_text(rows + json.dumps(problems_of(plan)[0][0]))
    with pytest.raises(UserError, match="contains problems of the test set"):
        Piece(plan, 0, "diffusion").complete()


def test_weights_that_a_stage_starts_from_are_made_again(plan, at_once):
    """Only the records are committed: a fresh clone does not have the weights."""
    plan = replace(plan, sft_options=("--steps", "2"), stages=("sft", "ar", "diffusion"))
    for name in ("sft", "ar"):
        Piece(plan, 0, name).complete()
    assert not to_do(replace(plan, stages=("sft", "ar")))
    shutil.rmtree(plan.work / "sft-0")
    assert not to_do(replace(plan, stages=("sft", "ar")))
    assert keys(to_do(plan)) == [(0, "sft"), (0, "diffusion")]
    Piece(plan, 0, "sft").complete()
    assert keys(to_do(plan)) == [(0, "diffusion")]


def test_from_nothing_to_a_report(plan, monkeypatch, at_once):
    """All pieces; a failure says its reason, and cancels what has not begun."""
    pytest.importorskip("matplotlib", reason="pip install -r bench/requirements.txt")
    plan = replace(plan, stages=("sft", "ar", "no-clean-4"), out=plan.work / "out")
    train = paper.subprocess.run
    begun = []
    failing = {"ar"}

    def run(words, **options):
        """Pieces in this process, trainings as `at_once`."""
        if "--stage" not in words:
            return train(words, **options)
        name = words[words.index("--stage") + 1]
        begun.append(name)
        if name in failing:
            return subprocess.CompletedProcess(words, 2, stderr="Traceback\n\nKeyError: 'why'\n")
        Piece(plan, int(words[words.index("--seed") + 1]), name).complete()
        return subprocess.CompletedProcess(words, 0, stderr="")

    monkeypatch.setattr(paper.subprocess, "run", run)
    with pytest.raises(UserError, match="ar, seed 0: KeyError: 'why"):
        paper.run_pieces(plan, 1, quick=False)
    assert begun[:2] == ["sft", "ar"]
    failing.clear()
    paper.run_pieces(plan, 2, quick=False)
    assert not to_do(plan)
    report.write_report(plan.cache, plan.out, {"method": plan.method}, readings=False)
    text = (plan.out / "paper.md").read_text()
    assert "\n> " not in text and "{" not in text
    assert "(not in this run)" in text and "quick run" in text
    assert (plan.out / "pareto.png").stat().st_size > 10_000


def test_a_failed_training_says_where_to_look(plan):
    plan = replace(plan, options=("--steps", "0"))
    with pytest.raises(UserError, match="ended with 2; see .*mars-4-0.txt"):
        Piece(plan, 0, "mars-4").complete()
    assert not Piece(plan, 0, "mars-4").is_complete()


def test_the_committed_records_are_complete_and_draw_the_committed_report(tmp_path):
    """Their commands name bench/controls.py, where bench/paper/baselines.py once was."""
    assert not to_do(FULL)
    assert "bench/controls.py" in Piece(FULL, 0, "diffusion").record["command"]
    pytest.importorskip("matplotlib", reason="pip install -r bench/requirements.txt")
    texts = {"method": FULL.method}
    texts["table5"] = (RESULTS / "cache/speed.txt").read_text()
    texts["table6"] = (RESULTS / "cache/speculative.txt").read_text()
    report.write_report(RESULTS / "cache", tmp_path, texts, readings=True)
    committed = (RESULTS / "paper.md").read_text()
    assert without_intervals((tmp_path / "paper.md").read_text()) == without_intervals(committed)


def without_intervals(text):
    """Another version of NumPy may draw other bootstrap samples."""
    return re.sub(r"\(\S+ to \S+\)", "", text).replace("-", "").split()


def records(plan, right):
    """A cache as if every piece had been computed; `right` gives the share by stage and tau."""
    rng = np.random.default_rng(0)
    problems = rng.random(plan.num_problems)
    for seed, name in plan.pieces():
        piece = Piece(plan, seed, name)
        decoded = piece.record["decoded"] = {}
        for way, options in piece.missing_ways().items():
            bits = problems + 0.02 * rng.random(plan.num_problems) < right(name, options["tau"])
            speed = 1 + 8 * (1 - options["tau"])
            decoded[way] = {
                "options": options,
                "right": "".join(map(str, bits.astype(int))),
                "tokens": round(1000 * speed),
                "forwards": 1000,
                "seconds": 1.0,
            }
        shares = [0.9 - 0.1 * k for k in range(piece.stage.block + 1)]
        piece.record["trained"] = {"last": {}, "look_ahead": {"50": shares, "100": shares}}
        piece.record["seconds"] = 60
        piece.keep()
    return report.read_results(plan.cache)


def test_verdicts_follow_the_data(tmp_path):
    """The same text says that a claim holds, or does not, as the numbers have it. Once, a control
    that did badly hid that MARS itself had missed, and where nothing was left to lose, larger
    blocks seemed to lose no more."""
    plan = replace(FULL, num_problems=200, cache=tmp_path)

    def results(right):
        shutil.rmtree(tmp_path)
        return records(plan, right)

    worse = {"diffusion": 0.4, "no-clean-4": 0.6, "no-clean-8": 0.5, "no-clean-16": 0.3}
    good = results(lambda name, tau: worse.get(name, 0.6 + 0.1 * tau))
    assert "Holds at" in report.one_token(good)["one_token_verdict"]
    assert "Holds at" in report.clean_loss(good)["clean_loss_verdict"]
    assert "Holds at" in report.training_free(good)["jacobi_verdict"]
    bad = results(lambda name, tau: 0.3 if name.startswith("mars") else 0.7)
    assert "Does not hold" in report.one_token(bad)["one_token_verdict"]
    assert "Does not hold" in report.clean_loss(bad)["clean_loss_verdict"]
    lifted = results(lambda name, tau: {"diffusion": 0.1, "mars-4": 0.5}.get(name, 0.7))
    assert "Does not hold" in report.one_token(lifted)["one_token_verdict"]
    assert "Holds at" in report.one_token(lifted)["control_verdict"]
    floor = results(lambda name, tau: 0.01 if name.startswith("no-clean") else 0.6)
    told = report.clean_loss(floor)
    assert "as far as can be told" in told["clean_loss_verdict"]
    assert "cannot be told" in told["clean_loss_trend"]
    trade = results(lambda name, tau: 0.7 if tau >= 0.95 else 0.7 * tau)
    assert "Holds at" in report.tau_buys(trade)["tau_verdict"]
    better = results(lambda name, tau: 0.9 - 0.5 * tau)
    assert "partly" in report.tau_buys(better)["tau_verdict"]


def test_verdicts():
    assert report.verdict(True, True) == "**Holds at this scale.**"
    assert report.verdict(True, None) == "**Holds, as far as can be told at this scale.**"
    assert report.verdict(True, False, None) == "**Holds partly at this scale.**"
    assert report.verdict(False, None) == "**Does not hold here.**"
    assert report.verdict(None) == "**Cannot be told at this scale.**"


def test_all_fields_of_the_text_are_computed(tmp_path):
    full = records(replace(FULL, num_problems=50, cache=tmp_path / "full"), lambda n, tau: 0.5)
    quick = records(replace(QUICK, num_problems=50, cache=tmp_path / "quick"), lambda n, tau: 0.5)
    template = (ROOT / "bench/paper/claims.md").read_text()
    fields = {field for _, field, _, _ in string.Formatter().parse(template) if field}
    computed = {key for claim in report.CLAIMS for key in claim(full)}
    assert fields == computed | {"method", "table5", "table6"}
    for claim in report.CLAIMS:
        with contextlib.suppress(report.Missing):
            claim(quick)
    with pytest.raises(report.Missing, match="over-t-4"):
        quick.accuracy(("over-t-4", "tau 1"))


def test_differences_are_over_common_seeds(tmp_path):
    """A model with three seeds and one with a single seed are compared on that one."""
    results = records(replace(FULL, num_problems=200, cache=tmp_path), lambda name, tau: 0.5)
    assert len(results.accuracy(("mars-4", "tau 1")).by_seed) == 3
    assert len(results.difference(("distill", "verify"), ("mars-4", "verify")).by_seed) == 1
    del results.records["mars-4", 1]
    assert len(results.difference(("mars-4", "tau 1"), ("sft", "tau 1")).by_seed) == 2


def test_intervals():
    """With one seed the textbook's. With three, problems that are hard for all of them count once:
    the truth is inside in about 95 of 100 cases, where intervals of 3 x 200 independent answers
    would miss it more often."""
    rng = np.random.default_rng(1)
    one = (rng.random((1, 1000)) < 0.7).astype(float)
    found = report.estimate(one)
    textbook = 1.96 * math.sqrt(found.mean * (1 - found.mean) / 1000)
    assert found.mean == pytest.approx(one.mean())
    assert found.high - found.low == pytest.approx(2 * textbook, rel=0.05)
    nothing = report.estimate(one - one)
    assert nothing.low == nothing.mean == nothing.high == 0
    inside = 0
    for _ in range(400):
        hard = rng.normal(0, 0.2, (1, 200))
        found = report.estimate(0.6 + hard + rng.normal(0, 0.3, (3, 200)))
        inside += found.low < 0.6 < found.high
    assert 0.92 <= inside / 400 <= 0.98
    assert found.above(found.high + 1) is False and found.above(found.low - 1) is True
    assert found.above(found.mean) is None


def test_each_seed_is_shown_next_to_the_mean():
    right = np.array([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    text = report.estimate(right).text()
    assert text.startswith("62.5 (") and text.endswith(") [50.0, 75.0]")
    assert "[" not in report.estimate(right[:1]).text()
    assert report.estimate(right).text("+").startswith("+62.5 (")


def test_every_piece_comes_after_what_it_starts_from():
    for plan in (FULL, QUICK):
        seen = set()
        for seed, name in plan.pieces():
            start = STAGES[name].start
            assert start in ("", "base") or (seed, start) in seen
            seen.add((seed, name))
