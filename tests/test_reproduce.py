"""bench/reproduce.py: nothing is computed twice, and its figures are what it saw."""

import json
from dataclasses import replace

import pytest

from bench import reproduce
from bench.reproduce import FULL, QUICK, STAGES, Piece, one


@pytest.fixture
def plan(tmp_path):
    return replace(
        QUICK,
        train_rows=40,
        problems=6,
        mars=("--steps", "2", "--batch", "4", "--lr", "1e-4"),
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


def test_a_failed_training_says_where_to_look(plan, monkeypatch):
    with pytest.raises(reproduce.UserError, match="ended with 2; see .*mars-4-0.txt"):
        one(replace(plan, mars=("--steps", "0")), 0, "mars-4")
    assert Piece(plan, 0, "mars-4").lacks()


def test_every_piece_comes_behind_what_it_starts_from():
    for full in (FULL, QUICK):
        seen = set()
        for seed, name in full.pieces():
            start = STAGES[name].start
            assert start in ("", "base") or (seed, start) in seen
            seen.add((seed, name))
