"""A run that is killed, stopped, or split among processes is still the same run."""

import json
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import training
from common import ROOT, cases, rows_of
from training import checkpoint_tensors, finish, num_logged, start, wait_for, write

from model import load

RUN = ("--model", "toy/draft", "--max-length", 96, "--lr", 1e-3, "--batch", 4, "--device", "cpu")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
TORCHRUN_PYTHON = (*TORCHRUN, "--no-python", sys.executable)
# Logits a few at a time, and in every process another number of times.
CHUNKED = "import model, os; model.LOGITS_AT_A_TIME = 640 * (7 + 40 * int(os.getenv('RANK', 0))); "
CHUNKED += "import runpy; runpy.run_path('train.py', run_name='__main__')"


@pytest.fixture
def run(tmp_path) -> tuple:
    """Options of train.py: 40 rows, of which 4 are held out."""
    rows = rows_of(ROOT / "toy/train.jsonl")[:40]
    return (*RUN, "--data", write(tmp_path / "data.jsonl", rows).path)


def log(out: Path) -> list[dict]:
    """What each step computed: all but its time and its memory."""
    records = training.log(out)
    for record in records:
        del record["tokens_per_s"], record["memory_gib"]
    return records


def checkpoints(out: Path) -> list[Path]:
    return sorted(out.glob("checkpoints/step-????????"))


def test_killed_at_any_instant_it_goes_on_bit_for_bit(tmp_path, run):
    """SIGKILL, every second time while a checkpoint is being written: a complete one is there from
    the first on, and losses, weights and optimizer end as if nothing had happened."""
    kills = len(cases(2, 20))
    words = (*run, "--steps", 20 + 10 * kills, "--save-every", 3)
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    finish(start(*words, "--out", whole))
    during_a_save = 0
    for kill in range(kills):
        process = start(*words, "--out", killed, "--resume")
        before = num_logged(killed)
        wait_for(lambda before=before: num_logged(killed) > before, process)
        if kill % 2:
            wait_for(lambda: list(killed.glob("checkpoints/*.tmp")), process)
        time.sleep(random.uniform(0, 0.01 if kill % 2 else 0.3))
        process.kill()
        process.communicate()
        during_a_save += bool(list(killed.rglob("*.tmp")))
        step = 0
        for checkpoint in checkpoints(killed):
            step = json.loads((checkpoint / "progress.json").read_text())["step"]
            assert len(checkpoint_tensors(checkpoint, tmp_path)) > 50
        assert num_logged(killed) // 3 - 1 <= step // 3
    assert during_a_save
    finish(start(*words, "--out", killed, "--resume"))
    assert log(killed) == log(whole) and len(log(whole)) == 20 + 10 * kills
    newest = [checkpoints(out)[-1] for out in (killed, whole)]
    ours, theirs = (checkpoint_tensors(checkpoint, tmp_path) for checkpoint in newest)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert not list(killed.rglob("*.tmp")) and len(checkpoints(killed)) == 2


def test_two_processes_train_as_one_and_either_goes_on_for_the_other(tmp_path, run):
    """FSDP over gloo: 20 steps, of which the second half again in the other number of processes.

    The head is gathered once for all chunks: no process waits for one that has fewer of them.
    """
    words = (*run, "--batch", 8, "--lr", 3e-4, "--steps", 20, "--save-every", 10)
    words += ("--batch-tokens", 512, "--checkpoint-layers")
    chunked = ("-c", CHUNKED)
    one = tmp_path / "one"
    two = tmp_path / "two"
    launchers = {one: (sys.executable,), two: TORCHRUN_PYTHON}
    for out, launcher in launchers.items():
        finish(start(*words, "--out", out, launcher=launcher, script=chunked))
    expected = log(one)
    for out, launcher in zip(launchers, reversed(launchers.values())):
        shutil.rmtree(checkpoints(out)[-1])
        shutil.copytree(out, out / "again")
        again = (*words, "--out", out / "again", "--resume")
        said = finish(start(*again, launcher=launcher, script=chunked))
        assert "resumed at step 10" in said and said.count("python decode.py") == 1
    for out in (two, one / "again", two / "again"):
        assert len(log(out)) == 20
        for ours, theirs in zip(log(out), expected):
            for name in ("noisy", "clean", "lr"):
                assert ours[name] == pytest.approx(theirs[name], abs=1e-4), (out, ours, theirs)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-2)
        assert load(str(out))[0].config.block == 4
    assert len(list(checkpoints(two / "again")[0].glob("__*.distcp"))) == 2


def test_a_signal_to_torchrun_saves_and_ends_the_run(tmp_path, run):
    """To a run of one process: plumbing/test_training_run.py."""
    words = (*run, "--steps", 500, "--out", tmp_path)
    process = start(*words, launcher=TORCHRUN)
    wait_for(lambda: num_logged(tmp_path) >= 3, process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=300)
    steps = num_logged(tmp_path)
    assert 3 <= steps < 500 and f"{steps} steps; {tmp_path} holds the model of step {steps}" in out
    assert [path.name for path in checkpoints(tmp_path)] == [f"step-{steps:08}"]
    assert not list(tmp_path.rglob("*.tmp"))


def test_what_fails_in_the_second_process_ends_both(tmp_path, run):
    """torchrun ends the first, which would wait for it."""
    fail = "import os, plumbing.files, runpy; from plumbing.errors import UserError\n"
    fail += "def locate(*_): raise UserError('only here')\n"
    fail += "if os.environ['RANK'] == '1': plumbing.files.locate = locate\n"
    fail += "runpy.run_path('train.py', run_name='__main__')"
    words = (*run, "--steps", 1, "--out", tmp_path)
    process = start(*words, launcher=TORCHRUN_PYTHON, script=("-c", fail))
    _, err = process.communicate(timeout=100)
    assert process.returncode != 0 and err.splitlines().count("error: only here") == 1
