"""What a run can be resumed from: full disks, damage, and checkpoints from a stranger."""

import io
import json
import logging
import os
import pickle
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from commands import is_refused
from torch.distributed.checkpoint import api
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from training import DRAFT, checkpoints, contents, log, run_train, start

from plumbing import checkpoints as module

# ----------------------------------------------------------------------------------- full disks


@pytest.fixture
def small_disk(tmp_path) -> Path:
    """A disk of 8 MiB: room for two checkpoints of toy/draft, not for three."""
    directory = tmp_path / "disk"
    directory.mkdir()
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("only root can mount a small disk")
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", directory]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a small disk: {done.stderr}")
    yield directory
    subprocess.run(["umount", "-l", directory], check=True)


def test_a_disk_that_is_full(data, small_disk):
    """A full disk was once reported as "unexpected pos 704 vs 598".

    Nothing is left of the checkpoint that found no room, and with room the run goes on.
    """
    words = (*DRAFT, "--data", data, "--out", small_disk / "out", "--steps", 4, "--save-every", 1)
    done = run_train(*words)
    path = small_disk / "out/checkpoints/step-00000003"
    assert done.status == 2
    message = f"error: {path}: not saved; those before it are intact (no space left on device"
    assert done.err.startswith(message) and done.err.count("\n") == 1, done.err
    assert "CheckpointException" not in done.err
    assert checkpoints(small_disk / "out") == ["step-00000001", "step-00000002"]
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    assert "resumed at step 2" in run_train(*words, "--resume").out
    assert [record["step"] for record in log(small_disk / "out")] == [1, 2, 3, 4]


def test_the_error_that_torch_raises_on_a_full_disk(data, out, monkeypatch):
    """The same with torch's own kind of error, which is not even an Exception."""

    def full(*_, **__):
        error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704")
        raise api.CheckpointException("write", {0: api._wrap_exception(error)})

    usage = shutil.disk_usage(data)
    monkeypatch.setattr(module.dcp, "save", full)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage._replace(free=0))
    done = run_train(*DRAFT, "--data", data, "--out", out, "--steps", 1)
    assert done.status == 2 and done.err.count("\n") == 1, done.err
    assert "step-00000001: not saved" in done.err and "no space left" in done.err
    assert "CheckpointException" not in done.err
    assert checkpoints(out) == []


def test_a_disk_that_fills_up_while_the_model_is_written(data, out, monkeypatch):
    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("plumbing.files.save_file", full)
    done = run_train(*DRAFT, "--data", data, "--out", out, "--steps", 1)
    assert done.status == 2 and "error: " in done.err and "No space left on device" in done.err
    assert not list(out.glob("model*"))


def test_a_disk_that_fills_up_while_a_checkpoint_is_written(data, out, monkeypatch):
    """The third checkpoint: nothing of it is left, the two before it and the log are as they were,
    and with room again the run goes on from there."""
    write = module.atomic_write

    def full(path, writer):
        if "step-00000003" in str(path):
            raise OSError(28, "No space left on device")
        write(path, writer)

    monkeypatch.setattr(module, "atomic_write", full)
    words = (*DRAFT, "--data", data, "--out", out, "--steps", 5, "--save-every", 1)
    done = run_train(*words)
    assert done.status == 2
    assert "step-00000003: not saved; those before it are intact" in done.err
    assert "No space left on device" in done.err and "Traceback" not in done.err
    assert "holds the model of step 2" in done.out
    assert checkpoints(out) == ["step-00000001", "step-00000002"]
    monkeypatch.undo()
    done = run_train(*words, "--resume")
    assert done.status == 0 and "resumed at step 2" in done.out


# ------------------------------------------------------------------------------ kills and damage

# `train.py` in a process that dies, as if killed, while it writes the model.
DYING = "import os, train, plumbing.files; from plumbing.errors import run_main; "
DYING += "plumbing.files.save_file = lambda *_, **__: os._exit(9); run_main(train.main)"


@pytest.mark.parametrize("steps", [1, 2])
def test_a_kill_while_the_model_is_written(data, out, steps):
    """The half-written model is not left on the disk when the run is over; the whole one is, also
    if there is no step left to make."""
    words = (*DRAFT, "--data", data, "--out", out, "--steps", steps, "--save-every", 1)
    process = start(*words, script=("-c", DYING))
    process.communicate()
    assert process.returncode == 9 and checkpoints(out) == ["step-00000001"]
    assert not (out / "config.json").exists()
    done = run_train(*words, "--resume")
    assert done.status == 0 and "resumed at step 1" in done.out
    assert (out / "model.safetensors").exists() and not list(out.rglob("*.tmp"))


def test_a_damaged_checkpoint(data, out):
    words = (*DRAFT, "--data", data, "--out", out, "--steps", 4, "--save-every", 1, "--resume")
    done = run_train(*words)
    assert done.status == 0
    assert "no checkpoint to resume from; starting from the beginning" in done.out
    newest = out / "checkpoints/step-00000004"
    [part] = newest.glob("*.distcp")
    part.write_bytes(part.read_bytes()[:1000])
    done = run_train(*words)
    message = "step-00000004: damaged; delete it to resume from the one before"
    assert done.status == 2 and message in done.err and "Traceback" not in done.err
    (newest / "progress.json").write_text("{")
    done = run_train(*words)
    assert done.status == 2 and "progress.json: cannot be read as JSON" in done.err
    (newest / "progress.json").write_text("{}")  # was once taken for no checkpoint at all
    done = run_train(*words)
    assert done.status == 2 and message in done.err
    shutil.rmtree(newest)
    done = run_train(*words)
    assert done.status == 0 and "resumed at step 3" in done.out
    for _ in range(2):  # steps that are made again were once logged twice, after the log was lost
        (out / "log.jsonl").write_text("")
        shutil.rmtree(newest)
        assert run_train(*words).status == 0
        assert [record["step"] for record in log(out)] == [4]


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 1},  # the run went on as step 2, and deleted the checkpoints that it had
        {"step": -3},
        {"step": 2.5},
        {"consumed": "4"},
        {"consumed": -4},
        {"consumed": 4.0},
        {"skipped": ["a"]},
        {"skipped": {"a": "b"}},
        {"finished": "no"},
        {"run": None},
    ],
)
def test_progress_that_no_run_writes(data, out, changes):
    """Most were tracebacks."""
    words = (*DRAFT, "--data", data, "--out", out, "--steps", 2, "--save-every", 1)
    assert run_train(*words).status == 0
    path = out / "checkpoints/step-00000002/progress.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    before = contents(out)
    done = run_train(*words, "--resume")
    assert is_refused(done, f"{path.parent}: damaged; delete it to resume from the one before")
    assert contents(out) == before


@pytest.mark.parametrize("name", ["log.jsonl", "checkpoints/step-00000002/__0_0.distcp"])
def test_a_pipe_in_place_of_a_file(data, out, name):
    """Opening one waited for ever for somebody to write into it."""
    words = (*DRAFT, "--data", data, "--out", out, "--steps", 2, "--save-every", 1)
    assert run_train(*words).status == 0
    (out / name).unlink()
    os.mkfifo(out / name)
    done = run_train(*words, "--resume")
    assert done.status == 2 and done.err.count("\n") == 1
    assert f"{name}: not an ordinary file" in done.err


def test_a_checkpoint_that_cannot_be_read_is_no_missing_model(data, out):
    """The line at the end said that OUT holds no model of this run, although it does."""
    words = (*DRAFT, "--data", data, "--out", out, "--steps", 2, "--save-every", 1)
    assert run_train(*words).status == 0
    (out / "checkpoints/step-00000002/.metadata").write_bytes(b"")
    done = run_train(*words, "--resume")
    assert done.status == 2 and f"{out} holds the model of step 2" in done.out


@pytest.mark.parametrize("damage", ["garbage", "half", "empty", "missing"])
def test_damaged_metadata_is_one_line(data, out, damage, caplog):
    """Two of torch's tracebacks once came before the line that says what to do."""
    words = (*DRAFT, "--data", data, "--out", out, "--steps", 2, "--save-every", 1)
    assert run_train(*words).status == 0
    path = out / "checkpoints/step-00000002/.metadata"
    whole = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes({"garbage": b"garbage", "half": whole[:3000], "empty": b""}[damage])
    before = contents(out)
    caplog.clear()
    done = run_train(*words, "--resume")
    assert done.status == 2
    assert done.err.startswith(f"error: {path.parent}: damaged; delete it to resume"), done.err
    assert done.err.count("\n") == 1 and "CheckpointException" not in done.err, done.err
    assert not [entry for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert contents(out) == before


# ---------------------------------------------------------------------- checkpoints from a stranger


class Program:
    """Makes a directory when it is unpickled: the least that shows that a stranger's code runs."""

    def __init__(self, directory: Path):
        self.directory = directory

    def __reduce__(self):
        return os.mkdir, (str(self.directory),)


def pickled(program: Program) -> bytes:
    file = io.BytesIO()
    torch.save(program, file)
    return file.getvalue()


def with_a_program_for_metadata(checkpoint: Path, program: Program) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(program))


def with_a_program_in_metadata(checkpoint: Path, program: Program) -> None:
    """All else is as torch wrote it."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    metadata.planner_data = program
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def with_programs_for_entries(checkpoint: Path, program: Program) -> None:
    """Every entry is bytes instead of a tensor: torch unpickles these."""
    content = pickled(program)
    (checkpoint / "entry.distcp").write_bytes(content)
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    [*_, place] = metadata.storage_data.values()
    kind = type(place)
    for name in metadata.state_dict_metadata:
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(name)] = kind("entry.distcp", 0, len(content))
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


CRAFTED = (with_a_program_for_metadata, with_a_program_in_metadata, with_programs_for_entries)


@pytest.mark.parametrize("craft", CRAFTED, ids=lambda craft: craft.__name__)
def test_a_strangers_checkpoint_runs_no_code(data, out, tmp_path, craft):
    """--resume once ran whatever a pickle in checkpoints/ told it to run."""
    words = (*DRAFT, "--data", data, "--out", out, "--steps", 2, "--save-every", 1)
    assert run_train(*words).status == 0
    trap = tmp_path / "trap"
    checkpoint = out / "checkpoints/step-00000002"
    craft(checkpoint, Program(trap))
    done = run_train(*words, "--resume")
    assert not trap.exists()
    assert done.status == 2 and done.err.startswith(f"error: {checkpoint}: refused: "), done.err
    assert done.err.count("\n") == 1


def test_what_a_program_would_do(tmp_path):
    """The crafted files are real: whoever unpickles one makes the directory."""
    pickle.loads(pickle.dumps(Program(tmp_path / "trap")))
    assert (tmp_path / "trap").is_dir()
    torch.load(io.BytesIO(pickled(Program(tmp_path / "other"))), weights_only=False)
    assert (tmp_path / "other").is_dir()


def test_every_checkpoint_of_ours_is_data_only(data, out):
    """Of every kind of option: what is written can be resumed from."""
    for number, words in enumerate(
        (("--objective", "sft"), ("--checkpoint-layers",), ("--dtype", "bfloat16"))
    ):
        words = (*DRAFT, "--data", data, "--out", out / str(number), "--save-every", 1, *words)
        assert run_train(*words, "--steps", 2).status == 0
        is_mars = "sft" not in words
        assert is_mars == ("noisy" in log(out / str(number))[0])
        assert is_mars == ("block" in (out / str(number) / "config.json").read_text())
        newest = out / str(number) / "checkpoints/step-00000002"
        shutil.rmtree(newest)
        assert "resumed at step 1" in run_train(*words, "--steps", 2, "--resume").out
        assert json.loads((newest / "progress.json").read_text())["finished"]
