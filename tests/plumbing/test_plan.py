"""What a run says before its first step: rows, steps, memory, and what is too little."""

import json
import os
import re

import pytest
from common import ROOT
from training import DRAFT, run_train, start, write

import model
from plumbing import plan


def test_a_step_has_no_row_twice(tmp_path, out):
    """Of nine rows, a batch of 128 had each 14 times, and five epochs were one step."""
    rows = [{"prompt": "?", "response": f"12 plums and {i}"} for i in range(7)] + 2 * [{}]
    data = write(tmp_path / "data.jsonl", rows).path
    done = run_train(*DRAFT, "--data", data, "--out", out, "--batch", 128, "--epochs", 7)
    assert done.status == 0, done.err
    assert "9 rows, 0 held out, 2 of the first 9 skipped; 9 steps of 7 examples" in done.out
    for warning in (
        "a step has 7 examples, not 128",
        "fewer than ten rows: none is held out",
        "fewer than 50 steps: enough if all responses are alike",
    ):
        assert warning in done.out
    progress = json.loads((out / "checkpoints/step-00000009/progress.json").read_text())
    assert 8 * 9 < progress["consumed"] <= 9 * 9  # an epoch a step, of 9 rows with those skipped


@pytest.mark.parametrize("options", ["", "--dtype bfloat16"])
def test_the_memory_is_what_it_says(tmp_path, options):
    """Within a quarter, for a forward that takes more than Python and the toy."""
    words = ("--model", ROOT / "toy/sft", "--data", ROOT / "toy/train.jsonl", "--out", tmp_path)
    sizes = ("--device", "cpu", "--steps", 2, "--batch", 128, "--batch-tokens", 16384)
    process = start(*words, *sizes, *options.split())
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, process.stderr.read()
    expected = float(re.search("memory: about ([0-9.]+) GB", said)[1])
    assert expected == pytest.approx(usage.ru_maxrss * 1024 / 1e9, rel=0.25), said
    assert plan.LOGITS_AT_A_TIME == model.LOGITS_AT_A_TIME
