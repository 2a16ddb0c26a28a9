"""The command line of train.py: one clear line for every bad input, and nothing half-written."""

import math
import runpy
import sys

import pytest
from commands import is_refused
from common import ROOT
from training import DRAFT, checkpoint_tensors, checkpoints, run_train, write

import train
from model import Qwen2


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "cannot be read (No such file or directory)"),
        ('{"prompt": "?", "response": "1"}\nnot json\n', "data.jsonl:2: not JSON"),
        ('{"question": "?"}\n', "no usable row: 1 neither messages nor prompt and response"),
    ],
)
def test_bad_data(tmp_path, data, content, message):
    """An error before training writes nothing, not even the directory of --out."""
    if content is None:
        data.unlink()
    else:
        data.write_text(content)
    done = run_train("--model", ROOT / "toy/sft", "--data", data, "--out", tmp_path / "out")
    assert is_refused(done, message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words, message",
    [
        (("--block", 0), "--block: must be at least 1, not 0"),
        (("--batch", 0), "--batch: must be at least 1, not 0"),
        (("--steps", 0), "--steps: must be at least 1, not 0"),
        (("--steps", 1.5), "--steps: must be a whole number, not '1.5'"),
        (("--lr", "nan"), "--lr: must be at least 0, not nan"),
        (("--lr", "fast"), "--lr: must be a number, not 'fast'"),
        (("--clip", 0), "--clip: must be at least 1e-06, not 0"),
        (("--warmup", 1), "--warmup: must be below 1, not 1"),
        (("--warmup", -1), "--warmup: must be at least 0, not -1"),
        (("--held-out", -1), "--held-out: must be at least 0, not -1"),
        (("--block", 1000), "--block 1000: more than --max-length 512"),
        (("--seed", 10**30), "--seed: must be below 9.22337e+18, not 1"),
        (("--max-length", 4096), "--max-length 4096: the model has 2048 positions"),
        (("--model", "no/such/place"), "'no/such/place': no such directory"),
        (("--model", ROOT / "toy"), "config.json: no such file; is "),
        (("--data", "/"), "/: cannot be read (Is a directory)"),
        (("--data", ""), "--data: must name a file or directory"),
        (("--objective", "rl"), "--objective: invalid choice: 'rl'"),
        (("--keep", 3), "unrecognized arguments: --keep 3"),
        (("--device", "abacus"), "--device abacus: this machine has "),
    ],
)
def test_bad_training_options(tmp_path, data, words, message):
    given = ("--model", ROOT / "toy/sft", "--data", data, "--out", tmp_path / "out", *words)
    assert is_refused(run_train(*given), message)
    assert not (tmp_path / "out").exists()


def test_the_data_file_is_looked_at_first(tmp_path, monkeypatch):
    """Without the file, the hub was asked for the model first, and the complaint was of the hub."""
    monkeypatch.delattr(train, "locate")
    done = run_train("--data", tmp_path / "dolci.jsonl", "--out", tmp_path / "out")
    assert is_refused(done, "dolci.jsonl: cannot be read (No such file or directory)")


def test_a_response_with_another_end_of_turn(tmp_path):
    """A decoder stops at any of the config's; only the first of them was refused in a response."""
    rows = [{"prompt": "?", "response": "12 plums"}]
    rows.append({"prompt": "?", "response": "12 plums<|endoftext|>13 plums"})
    data = write(tmp_path / "data.jsonl", rows).path
    done = run_train(*DRAFT, "--data", data, "--out", tmp_path / "out", "--steps", 3)
    assert done.status == 0
    assert "skipped rows: 1 a mask or end-of-turn token in the response" in done.out


def test_data_is_required(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_refused(run_train(), "the following arguments are required: --data")
    assert not list(tmp_path.iterdir())


def test_fewer_examples_than_processes(tmp_path, data, monkeypatch):
    monkeypatch.setattr(train.processes, "rank_and_size", lambda: (0, 4))
    done = run_train(*DRAFT, "--data", data, "--out", tmp_path / "out", "--batch", 3)
    assert is_refused(done, "--batch 3: fewer examples than processes (4)")


@pytest.mark.parametrize("norm", [math.nan, math.inf, 0.0])
def test_a_learning_rate_that_is_too_high(tmp_path, data, monkeypatch, norm):
    """Weights that exploded: the run stops, and the checkpoint before it stays.

    Which norm they give depends on the CPU. Where every hidden state's square overflows, the final
    norm is 0 and so is the gradient: such a run went to its end and left a dead model, status 0.
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


def test_too_little_memory(tmp_path, data, monkeypatch, capsys):
    """One line that names the options to change.

    What a step needs was once estimated before it, too low by half.
    """

    def in_chunks(*_):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes")

    monkeypatch.setattr(Qwen2, "in_chunks", in_chunks)
    words = (*DRAFT, "--data", data, "--out", tmp_path / "out", "--steps", 1)
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1
    assert err.startswith("error: out of memory: use a smaller --batch-tokens, or --checkpoint-lay")
