"""A training run in one process: its directory, what it says, and how it ends before its end."""

import itertools
import json
import os
import shutil
import signal
import subprocess
from unittest import mock

import pytest
from commands import is_refused
from common import ROOT
from torch.distributed.checkpoint import api
from training import DRAFT, checkpoints, contents, log, num_logged, run_train, start, write

import train
from decode import naive
from model import load
from plumbing import checkpoints as module
from plumbing import training_run
from plumbing.jsonl import JsonlFile


@pytest.fixture
def words(data, out) -> tuple:
    """A run of three steps, each of them saved."""
    return (*DRAFT, "--data", data, "--out", out, "--steps", 3, "--save-every", 1)


# ----------------------------------------------------------------------------- the directory


def test_a_model_is_not_destroyed(words, data, out, monkeypatch):
    """Neither a finished run's, nor the one that a run starts from."""
    assert run_train(*words).status == 0
    bundled = out.with_name("bundled")
    shutil.copytree(ROOT / "toy/draft", bundled)
    monkeypatch.delattr(train, "load")  # refused before the model is loaded
    for directory in (out, bundled):
        before = contents(directory)
        words = (*DRAFT, "--data", data, "--model", directory, "--out", directory)
        message = f"--out {directory}: has a run or a model; --resume it, or give another --out"
        assert is_refused(run_train(*words), message)
        assert contents(directory) == before
    assert is_refused(run_train(*words, "--resume"), message)


def test_only_what_is_its_own_is_removed(words, out):
    """A run deletes no file that it did not make."""
    kept = ["notes.txt", "mine.tmp/a", "checkpoints/best/a", "checkpoints/mine.tmp/a"]
    kept += ["checkpoints/step-00000002-good/a", "checkpoints/notes.tmp", "log.jsonl.bak"]
    for name in kept:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)
    assert run_train(*words).status == 0
    assert run_train(*words, "--resume").status == 0
    assert [(out / name).read_text() for name in kept] == kept


MUST_BE_THE_SAME = """--objective sft --block 5 --seed 1
--epochs 6 --steps 7 --batch 9 --lr 1e-4 --max-length 99 --model other""".split()
MAY_DIFFER = "--out elsewhere --save-every 3 --batch-tokens 99 --device cpu --dtype bfloat16"


def test_what_may_differ_when_a_run_is_resumed(data):
    """What decides where it ends must be as it was; what only decides how it gets there may not."""

    def settings(*words):
        args = train.make_parser().parse_args(["--data", str(data), "--out", "new", *words])
        return training_run.find_progress(args, JsonlFile(data))["settings"]

    before = settings()
    for option, value in zip(MUST_BE_THE_SAME[::2], MUST_BE_THE_SAME[1::2]):
        assert settings(option, value) != before, option
    assert settings(*MAY_DIFFER.split(), "--resume", "--checkpoint-layers") == before
    data.write_text(data.read_text().replace("12 plums", "13 plums", 1))
    assert settings() != before


# ------------------------------------------------------------------------------ what it says


def test_a_step_has_no_row_twice(tmp_path, out):
    """Of nine rows, a batch of 128 had each 14 times, and five epochs were one step.

    Epochs are counted in rows that can be used: two among a hundred were seen fifty times as often.
    """
    rows = [{"prompt": "?", "response": f"12 plums and {i}"} for i in range(7)] + 2 * [{}]
    data = write(tmp_path / "data.jsonl", rows).path
    done = run_train(*DRAFT, "--data", data, "--out", out, "--batch", 128, "--epochs", 7)
    said = "9 rows, 0 held out, of the first 9 skipped: 2 neither messages nor a prompt; "
    assert said + "7 steps of 7 examples" in done.out
    assert "fewer than ten rows held out" in done.out and "fewer than 50 steps" in done.out
    clean = [record["clean"] for record in log(out)]
    assert f"clean, mean of the last 1 steps: {clean[-1]:.3f}" in done.out
    progress = json.loads((out / "checkpoints/step-00000007/progress.json").read_text())
    assert 6 * 9 < progress["consumed"] <= 7 * 9  # an epoch a step, of 9 rows with those skipped


def test_the_end_says_how_to_go_on(words, data, out):
    """The next stage's command after sft; the answer to a row is that of tau 1, without masks."""
    said = run_train(*words, "--objective", "sft").out.partition("holds the model of step 3\n")[2]
    size, stage, command, *answer, figures = said.splitlines()
    assert f"{out}/checkpoints (" in size and "may be deleted" in size
    assert stage == f"the next stage: python train.py --model {out} --data {data} --out {out}-mars"
    assert command.endswith(f'python decode.py --model {out} --prompt "..."')
    model, chat = load(str(out))
    prompt = chat.encode_prompt([{"role": "user", "content": "?"}])
    tokens = naive(model, prompt, tau=1, block=4, max_new=64 - len(prompt))
    assert "\n".join(answer) == chat.decode(prompt + tokens)
    assert figures == f"({len(tokens)} tokens in {len(tokens)} forwards)"
    assert "next stage" not in run_train(*words, "--out", f"{out}-mars").out


def test_a_line_a_minute_where_there_is_no_bar(words, monkeypatch):
    """A run whose output is a file was silent for its first minutes, and looked as if it hung."""
    clock = itertools.count(0, 40).__next__  # of three steps the second comes after a minute
    monkeypatch.setattr(training_run, "time", mock.Mock(monotonic=clock))
    done = run_train(*words)
    assert "\n 67%: step=2, noisy=" in done.out and done.out.count("noisy=") == 1


# ----------------------------------------------------------------------- how it ends too early


@pytest.mark.parametrize(
    "name, signals, steps",
    [("SIGINT", 1, 3), ("SIGINT", 2, 2), ("SIGHUP", 1, 3), ("SIGHUP ignored", 1, 5)],
)
def test_a_signal_in_the_third_step(words, out, monkeypatch, name, signals, steps):
    """Ctrl-C and a hang-up finish that step and save it; a second signal does not wait. Under nohup
    hang-ups stay ignored."""
    number = getattr(signal, name.split()[0])
    learning_rate = train.learning_rate  # is called once a step
    calls = []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            for _ in range(signals):
                os.kill(os.getpid(), number)
        return learning_rate(*args)

    words = (*words, "--steps", 5, "--save-every", 2)
    with monkeypatch.context() as patch:
        patch.setattr(train, "learning_rate", interrupted)
        former = signal.getsignal(number)
        signal.signal(number, signal.SIG_IGN if "ignored" in name else signal.default_int_handler)
        done = run_train(*words)
        signal.signal(number, former)
    assert done.status == (0 if steps == 5 else 130 if signals == 2 else 128 + number)
    assert f"{steps} steps; {out} holds the model of step {steps}" in done.out
    assert num_logged(out) == steps and checkpoints(out)[-1] == f"step-{steps:08d}"
    assert is_refused(
        run_train(*words, "--resume", "--lr", 0.1), f"--lr 0.1: the run in {out} has 5e-06"
    )
    done = run_train(*words, "--resume")
    assert done.status == 0 and f"resumed at step {steps}" in done.out and "5 steps; " in done.out
    assert num_logged(out) == 5


@pytest.mark.parametrize("is_all", [False, True])
def test_a_reader_that_goes_away(words, out, is_all):
    """After `train.py ... | head -1`, or a dying `|& tee`, the run goes on to its end, silently."""
    pipes = {"stderr": subprocess.STDOUT} if is_all else {}  # the bar and the errors, too
    process = start(*words, **pipes)
    process.stdout.readline()
    process.stdout.close()
    err = "" if is_all else process.stderr.read()
    assert process.wait(timeout=60) == 0 and err == ""
    assert num_logged(out) == 3 and checkpoints(out)[-1] == "step-00000003"
    assert (out / "model.safetensors").exists() and not list(out.rglob("*.tmp"))


# Torch's own is not even an Exception, and does not say that the disk is full: our line asks.
FULL_DISK = api.CheckpointException(
    "write", {0: api._wrap_exception(RuntimeError("unexpected pos 704"))}
)


def test_a_disk_that_fills_up_while_a_checkpoint_is_written(words, out, monkeypatch):
    """The third checkpoint: nothing of it is left, the two before it and the log are as they were,
    and with room again the run goes on from there."""
    write = module.write_json

    def full(path, content):
        if "step-00000003" in str(path):
            raise FULL_DISK
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_json", full)
        done = run_train(*words)
    assert done.status == 2 and done.err.count("\n") == 1, done.err
    assert "step-00000003: not saved (is the disk full?); others are intact" in done.err
    assert "holds the model of step 2" in done.out
    assert checkpoints(out) == ["step-00000001", "step-00000002"]
    assert "resumed at step 2" in run_train(*words, "--resume").out


# `train.py` in a process that dies, as if killed, while it writes the model.
DYING = "import os, train, plumbing.files; from plumbing.errors import run_main; "
DYING += "plumbing.files.save_file = lambda *_, **__: os._exit(9); run_main(train.main)"


def test_a_kill_while_the_model_is_written(words, out):
    """The half-written model is not left on the disk when the run is over; the whole one is, also
    if there is no step left to make."""
    words = (*words, "--steps", 1)
    process = start(*words, script=("-c", DYING))
    process.communicate()
    assert process.returncode == 9 and checkpoints(out) == ["step-00000001"]
    assert not (out / "config.json").exists()
    assert "resumed at step 1" in run_train(*words, "--resume").out
    assert (out / "model.safetensors").exists() and not list(out.rglob("*.tmp"))


def test_a_damaged_checkpoint(words, out):
    """One line says what to do, and the run goes on from the checkpoint before."""
    words = (*words, "--resume")
    done = run_train(*words)
    assert "no checkpoint to resume from; starting from the beginning" in done.out
    newest = out / "checkpoints/step-00000003"
    (newest / ".metadata").write_bytes((newest / ".metadata").read_bytes()[:100])
    done = run_train(*words)
    assert done.status == 2 and done.err.count("\n") == 1, done.err
    assert f"{newest}: damaged; delete it to resume from the one before" in done.err
    assert f"{out} holds the model of step 3" in done.out
    shutil.rmtree(newest)
    assert "resumed at step 2" in run_train(*words).out
    assert [record["step"] for record in log(out)] == [1, 2, 3]
