"""What a run can be resumed from: full disks, kills and damage."""

import shutil

import pytest
from torch.distributed.checkpoint import api
from training import DRAFT, checkpoints, log, run_train, start

from plumbing import checkpoints as module

# Torch's own is not even an Exception, and does not say that the disk is full: our line asks.
FULL_DISK = api.CheckpointException(
    "write", {0: api._wrap_exception(RuntimeError("unexpected pos 704"))}
)


def test_a_disk_that_fills_up_while_a_checkpoint_is_written(data, out, monkeypatch):
    """The third checkpoint: nothing of it is left, the two before it and the log are as they were,
    and with room again the run goes on from there."""
    write = module.write_json

    def full(path, content):
        if "step-00000003" in str(path):
            raise FULL_DISK
        write(path, content)

    monkeypatch.setattr(module, "write_json", full)
    words = (*DRAFT, "--data", data, "--out", out, "--steps", 5, "--save-every", 1)
    done = run_train(*words)
    assert done.status == 2 and done.err.count("\n") == 1, done.err
    assert "step-00000003: not saved (is the disk full?); others are intact" in done.err
    assert "CheckpointException" in done.err
    assert "holds the model of step 2" in done.out
    assert checkpoints(out) == ["step-00000001", "step-00000002"]
    monkeypatch.undo()
    done = run_train(*words, "--resume")
    assert done.status == 0 and "resumed at step 2" in done.out


# `train.py` in a process that dies, as if killed, while it writes the model.
DYING = "import os, train, plumbing.files; from plumbing.errors import run_main; "
DYING += "plumbing.files.save_file = lambda *_, **__: os._exit(9); run_main(train.main)"


def test_a_kill_while_the_model_is_written(data, out):
    """The half-written model is not left on the disk when the run is over; the whole one is, also
    if there is no step left to make."""
    words = (*DRAFT, "--data", data, "--out", out, "--steps", 1)
    process = start(*words, script=("-c", DYING))
    process.communicate()
    assert process.returncode == 9 and checkpoints(out) == ["step-00000001"]
    assert not (out / "config.json").exists()
    done = run_train(*words, "--resume")
    assert done.status == 0 and "resumed at step 1" in done.out
    assert (out / "model.safetensors").exists() and not list(out.rglob("*.tmp"))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "progress.json"])
@pytest.mark.parametrize("size", [100, None])
def test_a_damaged_checkpoint(data, out, name, size):
    """One line says what to do, and the run goes on from the checkpoint before."""
    words = (*DRAFT, "--data", data, "--out", out, "--steps", 3, "--save-every", 1, "--resume")
    done = run_train(*words)
    assert "no checkpoint to resume from; starting from the beginning" in done.out
    newest = out / "checkpoints/step-00000003"
    content = (newest / name).read_bytes()
    (newest / name).unlink()
    if size is not None:
        (newest / name).write_bytes(content[:size])
    done = run_train(*words)
    assert done.status == 2 and str(newest) in done.err and done.err.count("\n") == 1, done.err
    if name != "progress.json":
        assert "damaged; delete it to resume from the one before" in done.err
        assert f"{out} holds the model of step 3" in done.out
    shutil.rmtree(newest)
    done = run_train(*words)
    assert done.status == 0 and "resumed at step 2" in done.out
    assert [record["step"] for record in log(out)] == [1, 2, 3]
