"""train.py as a command: what stops a run, and what it leaves."""

import math

import pytest
from commands import is_refused
from training import DRAFT, checkpoint_tensors, checkpoints, run_train, write

import train


def test_a_response_with_another_end_of_turn(tmp_path):
    """A decoder stops at any of the config's, so a response must have none of them."""
    rows = [{"prompt": "?", "response": "12 plums"}]
    rows.append({"prompt": "?", "response": "12 plums<|endoftext|>13 plums"})
    data = write(tmp_path / "data.jsonl", rows).path
    done = run_train(*DRAFT, "--data", data, "--out", tmp_path / "out", "--steps", 3)
    assert done.status == 0
    assert "skipped rows: 1 a mask or end-of-turn token in the response" in done.out


def test_fewer_examples_than_processes(tmp_path, data, monkeypatch):
    monkeypatch.setattr(train.processes, "rank_and_size", lambda: (0, 4))
    done = run_train(*DRAFT, "--data", data, "--out", tmp_path / "out", "--batch", 3)
    assert is_refused(done, "--batch 3: fewer examples than processes (4)")


@pytest.mark.parametrize("norm", [math.nan, math.inf, 0.0])
def test_a_learning_rate_that_is_too_high(tmp_path, data, monkeypatch, norm):
    """Weights that exploded: the run stops, and the checkpoint before it stays.

    Which norm they give depends on the CPU. Where every hidden state's square overflows, the final
    norm is 0 and so is the gradient.
    """
    clip_gradients = train.processes.clip_gradients
    norms = iter([1.0, norm])

    def exploding(model, most):
        clip_gradients(model, most)
        return next(norms)

    monkeypatch.setattr(train.processes, "clip_gradients", exploding)
    out = tmp_path / "out"
    done = run_train(*DRAFT, "--data", data, "--out", out, "--steps", 5, "--save-every", 1)
    assert done.status == 2 and done.err.count("\n") == 1
    assert done.err.startswith(
        f"error: step 2: the gradient's norm is {norm:g}; try a smaller --lr"
    )
    assert f"{out} holds the model of step 1" in done.out
    newest = out / "checkpoints" / checkpoints(out)[-1]
    state = checkpoint_tensors(newest, tmp_path)
    assert all(tensor.isfinite().all() for tensor in state.values())
