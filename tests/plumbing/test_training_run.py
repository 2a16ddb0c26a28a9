"""The directory of a run: what may be written there, what a resumed run must have, the log."""

import itertools
import json
import shutil
from unittest import mock

from commands import is_refused
from common import ROOT
from training import DRAFT, contents, log, run_train, write

import train
from plumbing import training_run
from plumbing.jsonl import JsonlFile


def test_a_model_is_not_destroyed(data, out, monkeypatch):
    """Neither a finished run's, nor the one that a run starts from."""
    assert run_train(*DRAFT, "--data", data, "--out", out, "--steps", 2).status == 0
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


def test_only_what_is_its_own_is_removed(data, out):
    """A run deletes no file that it did not make."""
    words = (*DRAFT, "--data", data, "--out", out, "--steps", 3, "--save-every", 1)
    kept = ["notes.txt", "mine.tmp/a", "checkpoints/best/a", "checkpoints/mine.tmp/a"]
    kept += ["checkpoints/step-00000002-good/a", "checkpoints/notes.tmp", "log.jsonl.bak"]
    for name in kept:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)
    assert run_train(*words).status == 0
    assert run_train(*words, "--resume").status == 0
    assert [(out / name).read_text() for name in kept] == kept


def test_a_step_has_no_row_twice(tmp_path, out):
    """Of nine rows, a batch of 128 had each 14 times, and five epochs were one step.

    Epochs are counted in rows that can be used: two among a hundred were seen fifty times as often.
    """
    rows = [{"prompt": "?", "response": f"12 plums and {i}"} for i in range(7)] + 2 * [{}]
    data = write(tmp_path / "data.jsonl", rows).path
    done = run_train(*DRAFT, "--data", data, "--out", out, "--batch", 128, "--epochs", 7)
    assert done.status == 0, done.err
    said = "9 rows, 0 held out, of the first 9 skipped: 2 neither messages nor a prompt; "
    assert said + "7 steps of 7 examples" in done.out
    assert "fewer than ten rows held out" in done.out and "fewer than 50 steps" in done.out
    clean = [record["clean"] for record in log(out)]
    assert f"clean, mean of the last 1 steps: {clean[-1]:.3f}" in done.out
    progress = json.loads((out / "checkpoints/step-00000007/progress.json").read_text())
    assert 6 * 9 < progress["consumed"] <= 7 * 9  # an epoch a step, of 9 rows with those skipped


def test_a_line_a_minute_where_there_is_no_bar(data, out, monkeypatch):
    """A run whose output is a file was silent for its first minutes, and looked as if it hung."""
    clock = itertools.count(0, 40).__next__  # of three steps the second comes after a minute
    monkeypatch.setattr(training_run, "time", mock.Mock(monotonic=clock))
    done = run_train(*DRAFT, "--data", data, "--out", out, "--steps", 3)
    assert "\n 67%: step=2, noisy=" in done.out and done.out.count("noisy=") == 1


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
    text = data.read_text()
    data.write_text(text.replace("12 plums", "13 plums", 1))
    assert len(data.read_text()) == len(text) and settings() != before
