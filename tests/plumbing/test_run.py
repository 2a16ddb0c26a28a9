"""The directory of a run: who may write there, what an overwritten run leaves, the log."""

import json
import os
import shutil

import pytest
from commands import is_refused
from common import ROOT
from training import DRAFT, arguments, checkpoints, contents, log, run_train, write

import train
from plumbing import runs
from plumbing.jsonl import JsonlFile


def fail_at_step(monkeypatch, step: int) -> None:
    """Stop in the middle of this step, as a crash does."""
    learning_rate = train.learning_rate  # is called once a step
    calls = []

    def failing(*args):
        calls.append(args)
        if len(calls) == step:
            raise KeyboardInterrupt
        return learning_rate(*args)

    monkeypatch.setattr(train, "learning_rate", failing)


@pytest.fixture
def no_model(monkeypatch):
    """What is refused must be refused before the model is loaded."""

    def load(*_):
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(train, "load", load)


# ------------------------------------------------------------------------------------- refusals


def test_a_file_in_the_way_of_the_output(data, tmp_path, no_model):
    """An --out that cannot be a directory was once found only after the model was loaded."""
    (tmp_path / "file").write_text("in the way")
    for out in (tmp_path / "file", tmp_path / "file/below/it"):
        done = run_train(*DRAFT, "--data", data, "--out", out)
        assert is_refused(done, f"--out {out}: cannot be written to (")
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_directory_without_permission(data, tmp_path, no_model):
    """An unwritable --out was once found only after the model was loaded."""
    (tmp_path / "closed").mkdir(mode=0o500)
    for out in (tmp_path / "closed", tmp_path / "closed/below/it"):
        done = run_train(*DRAFT, "--data", data, "--out", out)
        assert is_refused(done, f"--out {out}: cannot be written to (no permission in ")


def test_an_empty_output_directory_name(data, tmp_path, monkeypatch, no_model):
    """--out "" (an unset shell variable) once wrote the model into the current directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("", " "):
        done = run_train(*DRAFT, "--data", data, "--out", name)
        assert is_refused(done, "--out: must name a file or directory")
    assert list(tmp_path.iterdir()) == [data]


def test_a_finished_run_is_not_destroyed(data, out, monkeypatch):
    """Another run into the same --out once deleted the finished one before its own first step."""
    assert run_train(*DRAFT, "--data", data, "--out", out, "--steps", 2).status == 0
    before = contents(out)
    monkeypatch.delattr(train, "load")  # refused before the model is loaded
    for words in ((), ("--steps", 2), ("--steps", 3, "--lr", 1)):
        done = run_train(*DRAFT, "--data", data, "--out", out, *words)
        assert is_refused(done, f"--out {out}: has a model; --overwrite it, or choose another")
    assert contents(out) == before


def test_weights_alone_are_a_model_too(data, out, no_model):
    """They were replaced without a word."""
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"weights")
    done = run_train(*DRAFT, "--data", data, "--out", out, "--steps", 1)
    assert is_refused(done, f"--out {out}: has a model; --overwrite it, or choose another")


@pytest.mark.parametrize("resume", [(), ("--resume",)], ids=str)
def test_the_model_that_a_run_starts_from_is_not_overwritten(data, out, no_model, resume):
    """--model sft --out sft once replaced the model it starts from; toy/README said to do so."""
    shutil.copytree(ROOT / "toy/draft", out)
    before = contents(out)
    words = (*DRAFT, "--data", data, "--model", out, "--out", out, "--steps", 1, *resume)
    assert is_refused(run_train(*words), f"--out {out}: has a model; --overwrite it, or choose")
    assert contents(out) == before


def test_a_model_may_be_overwritten_on_demand(data, out):
    shutil.copytree(ROOT / "toy/draft", out)
    before = contents(out)
    words = (*DRAFT, "--data", data, "--model", out, "--out", out, "--steps", 2, "--lr", 1e-3)
    done = run_train(*words, "--overwrite")
    assert done.status == 0 and f"{out} holds the model of step 2" in done.out
    assert contents(out)["model.safetensors"] != before["model.safetensors"]
    assert checkpoints(out) == ["step-00000002"]


# ------------------------------------------------------------------------------------ overwriting


def test_what_is_overwritten_stays_until_there_is_something_new(data, out, monkeypatch):
    """The old run's checkpoints were once deleted, and its log emptied, before the first step.

    A run that ends before its first checkpoint leaves everything of the old run, and the old run
    can be resumed.
    """
    words = (*DRAFT, "--data", data, "--out", out, "--save-every", 2)
    assert run_train(*words, "--steps", 4).status == 0
    before = contents(out)
    with monkeypatch.context() as patch:
        fail_at_step(patch, 2)
        done = run_train(*words, "--steps", 9, "--lr", 1e-3, "--overwrite")
    assert done.status == 130 and "no model" in done.out
    after = contents(out)
    assert {name: after[name] for name in before} == before
    done = run_train(*words, "--steps", 4, "--resume")
    assert done.status == 0 and "resumed at step 4" in done.out
    assert [record["step"] for record in log(out)] == [1, 2, 3, 4]


def test_an_overwriting_run_that_died_does_not_take_the_log(data, out, monkeypatch):
    """The log that a dead run had begun must not replace the log of the run that is resumed."""
    words = (*DRAFT, "--data", data, "--out", out, "--save-every", 1, "--steps", 4)
    with monkeypatch.context() as patch:
        fail_at_step(patch, 3)
        assert run_train(*words).status == 130
    first = log(out)
    with monkeypatch.context() as patch:
        fail_at_step(patch, 1)
        assert run_train(*words, "--lr", 1e-3, "--overwrite").status == 130
    assert run_train(*words, "--resume").status == 0
    assert log(out)[:2] == first and [record["step"] for record in log(out)] == [1, 2, 3, 4]


def test_the_old_files_are_there_at_every_step(data, out, monkeypatch):
    """Seen at every step of the new run: all of the old one, then nothing of it."""
    words = (*DRAFT, "--data", data, "--out", out)
    assert run_train(*words, "--steps", 6, "--save-every", 3).status == 0
    before = contents(out)
    assert checkpoints(out) == ["step-00000003", "step-00000006"]
    plain = runs.Run.log
    seen = []

    def spy(self, *args):
        seen.append(contents(out))
        plain(self, *args)

    monkeypatch.setattr(runs.Run, "log", spy)
    done = run_train(*words, "--steps", 4, "--save-every", 2, "--lr", 1e-3, "--overwrite")
    assert done.status == 0
    for files in seen[:2]:  # before the checkpoint of step 2
        assert {name: files[name] for name in before} == before
    for files in seen[2:]:
        assert {name for name in files if "checkpoints" in name}.isdisjoint(before)
        assert files["model.safetensors"] != before["model.safetensors"]
    assert checkpoints(out) == ["step-00000002", "step-00000004"]
    records = log(out)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert records[0]["lr"] > 1e-4
    assert not list(out.rglob("*.tmp"))


def test_the_same_run_again(data, out):
    """The new checkpoints have the names of the old ones."""
    words = (*DRAFT, "--data", data, "--out", out, "--steps", 4, "--save-every", 2)
    assert run_train(*words).status == 0
    (out / "log.jsonl").write_text("")
    done = run_train(*words, "--overwrite")
    assert done.status == 0, done.err
    assert checkpoints(out) == ["step-00000002", "step-00000004"]
    assert [record["step"] for record in log(out)] == [1, 2, 3, 4]


def test_only_what_is_its_own_is_removed(data, out):
    """A run once deleted every *.tmp in checkpoints/, whoever had put it there."""
    words = (*DRAFT, "--data", data, "--out", out, "--steps", 3, "--save-every", 1)
    assert run_train(*words).status == 0
    kept = ["notes.txt", "mine.tmp/a", "checkpoints/best/a", "checkpoints/mine.tmp/a"]
    kept += ["checkpoints/step-00000002-good/a", "checkpoints/notes.tmp", "log.jsonl.bak"]
    for name in kept:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(name)
    assert run_train(*words, "--overwrite").status == 0
    assert run_train(*words, "--resume").status == 0
    assert [(out / name).read_text() for name in kept] == kept


def test_what_a_kill_left_is_removed(data, out):
    """Half-written checkpoints and models may be large."""
    words = (*DRAFT, "--data", data, "--out", out, "--steps", 3, "--save-every", 1)
    assert run_train(*words).status == 0
    shutil.copytree(out / "checkpoints/step-00000003", out / "checkpoints/step-00000004.tmp")
    assert run_train(*words, "--resume").status == 0
    assert checkpoints(out) == ["step-00000002", "step-00000003"]


# --------------------------------------------------------------------------------------- resuming


def test_edited_data_is_noticed(data, out):
    """A file that was edited to the same size was once taken for the same data."""
    words = (*DRAFT, "--data", data, "--out", out, "--steps", 3)
    assert run_train(*words).status == 0
    text = data.read_text()
    data.write_text(text.replace("12 plums", "13 plums", 1))
    assert len(data.read_text()) == len(text)
    done = run_train(*words, "--resume")
    assert is_refused(done, f": the run in {out} has ") and "--data" in done.err
    data.write_text(text)
    assert run_train(*words, "--resume").status == 0


def test_skipped_rows_are_counted_once(tmp_path, out):
    """The rows that cannot be trained on are the same after a resume as without one."""
    rows = [{"prompt": "?", "response": "12"}, {"text": "12"}] * 20
    data = write(tmp_path / "data.jsonl", rows).path
    words = (*DRAFT, "--data", data, "--held-out", 4, "--epochs", 1, "--save-every", 2)
    expected = run_train(*words, "--out", tmp_path / "whole").out.splitlines()[-2]
    assert expected.startswith("skipped rows: ")
    assert run_train(*words, "--out", out).status == 0
    progress = "checkpoints/{}/progress.json"
    newest = checkpoints(out)[-1]
    shutil.rmtree(out / "checkpoints" / newest)
    assert expected in run_train(*words, "--out", out, "--resume").out.splitlines()
    ours, theirs = (
        json.loads((directory / progress.format(newest)).read_text())
        for directory in (out, tmp_path / "whole")
    )
    assert ours["skipped"] == theirs["skipped"]


def test_a_note_in_the_log(data, out):
    """Somebody's own line in log.jsonl was once a traceback."""
    words = (*DRAFT, "--data", data, "--out", out, "--steps", 1)
    assert run_train(*words).status == 0
    path = out / "log.jsonl"
    first = path.read_bytes().splitlines()[0]
    for note in (b"looks good so far", b'{"note": 1}', b"[]", b"\xff"):
        path.write_bytes(first + b"\n" + note + b"\n")
        before = path.read_bytes()
        done = run_train(*words, "--resume")
        assert done.status == 2 and "has a line that is not a step's; move it away" in done.err
        assert "Traceback" not in done.err and path.read_bytes() == before


def test_another_spelling_of_the_model_is_the_same_model(data, out):
    """A shell that completes the name of a directory adds a slash."""
    words = (*DRAFT, "--data", data, "--out", out, "--steps", 1)
    assert run_train(*words).status == 0
    done = run_train(*words, "--model", f"{ROOT}/toy//draft/", "--resume")
    assert done.status == 0, done.err


# ------------------------------------------------------------------------------------------- lock


def test_a_run_lets_go_of_its_directory(data, out, monkeypatch):
    """From one Python process, run after run: whether it ended, was stopped, or was refused."""
    words = (*DRAFT, "--data", data, "--out", out, "--steps", 3, "--save-every", 1)
    with monkeypatch.context() as patch:
        fail_at_step(patch, 2)
        assert run_train(*words).status == 130
    assert is_refused(run_train(*words), "has an unfinished run; --resume it, --overwrite it, or")
    assert is_refused(run_train(*words, "--resume", "--lr", 1), f"the run in {out} has")
    assert run_train(*words, "--resume").status == 0
    assert run_train(*words, "--overwrite").status == 0


def test_what_may_differ_when_a_run_is_resumed(data):
    """What decides where it ends must be as it was; what only decides how it gets there may not."""
    rows = JsonlFile(data)

    def identity(*words):
        return runs.identity(arguments("--data", data, *words), rows)

    for option, value in (
        ("--objective", "sft"),
        ("--block", 5),
        ("--block-phase", "fixed"),
        ("--ar-weight", 2),
        ("--normalization", "token"),
        ("--epochs", 6),
        ("--steps", 7),
        ("--batch", 9),
        ("--lr", 1e-4),
        ("--warmup", 0.1),
        ("--clip", 2),
        ("--max-length", 99),
        ("--held-out", 3),
        ("--seed", 1),
    ):
        assert identity(option, value) != identity(), option
    for words in (
        ("--out", "elsewhere"),
        ("--resume",),
        ("--save-every", 3),
        ("--batch-tokens", 99),
        ("--checkpoint-layers",),
        ("--device", "cpu"),
        ("--dtype", "bfloat16"),
    ):
        assert identity(*words) == identity(), words
