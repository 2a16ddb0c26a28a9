"""How a training run ends before its end: signals, and readers that go away."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from commands import is_refused
from training import DRAFT, checkpoints, num_logged, run_train, start, wait_for

import train


def assert_saved(out: Path) -> None:
    """There is a log, and a checkpoint and a model of its last step."""
    assert checkpoints(out)[-1] == f"step-{num_logged(out):08d}"
    assert (out / "model.safetensors").exists() and not list(out.rglob("*.tmp"))


@pytest.mark.parametrize("presses", [1, 2])
def test_interrupting_training_says_what_there_is(data, out, monkeypatch, presses):
    """Ctrl-C in the third step finishes that step and saves it; pressed again, it does not wait."""
    learning_rate = train.learning_rate  # is called once a step
    calls = []

    def third_is_interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            for _ in range(presses):
                os.kill(os.getpid(), signal.SIGINT)
        return learning_rate(*args)

    words = (*DRAFT, "--data", data, "--out", out, "--steps", 5, "--save-every", 2)
    with monkeypatch.context() as patch:
        patch.setattr(train, "learning_rate", third_is_interrupted)
        done = run_train(*words)
    steps = 3 if presses == 1 else 2
    assert done.status == 130 and "Traceback" not in done.err
    assert f"{steps} steps; {out} holds the model of step {steps}" in done.out
    assert num_logged(out) == steps
    for more, message in (
        ((), "out: has a run or a model; --resume it, or give another --out"),
        (("--resume", "--lr", 0.1), f"--lr 0.1: the run in {out} has 5e-06"),
    ):
        assert is_refused(run_train(*words, *more), message)
    done = run_train(*words, "--resume")
    assert done.status == 0 and f"resumed at step {steps}" in done.out and "5 steps; " in done.out
    assert num_logged(out) == 5


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN], ids=["terminal", "nohup"])
def test_a_hang_up(data, out, handler):
    """SIGHUP, from a terminal that is closed, loses no step. Under nohup it stays ignored."""
    process = start(
        *(*DRAFT, "--data", data, "--out", out, "--steps", 100_000),
        preexec_fn=lambda: signal.signal(signal.SIGHUP, handler),
    )
    wait_for(lambda: num_logged(out) >= 3, process)
    process.send_signal(signal.SIGHUP)
    number = signal.SIGHUP
    if handler == signal.SIG_IGN:
        before = num_logged(out)
        wait_for(lambda: num_logged(out) >= before + 5, process)
        number = signal.SIGTERM
        process.send_signal(number)
    said, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in err
    assert f"holds the model of step {num_logged(out)}" in said
    assert_saved(out)


@pytest.mark.parametrize("is_all", [False, True])
def test_a_reader_that_goes_away(data, out, is_all):
    """After `train.py ... | head -1`, or a dying `|& tee`, the run goes on to its end, silently."""
    words = (*DRAFT, "--data", data, "--out", out)
    pipes = {"stderr": subprocess.STDOUT} if is_all else {}  # the bar and the errors, too
    process = start(*words, "--steps", 6, "--save-every", 2, **pipes)
    process.stdout.readline()
    process.stdout.close()
    err = "" if is_all else process.stderr.read()
    assert process.wait(timeout=60) == 0 and err == ""
    assert_saved(out)
    assert num_logged(out) == 6
