"""What a run says before its first step: rows, steps, memory, and what is too little."""

import json
import os
import re
from types import SimpleNamespace
from unittest import mock

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
    progress = json.loads((out / "checkpoints/step-00000009/progress.json").read_text())
    assert 8 * 9 < progress["consumed"] <= 9 * 9  # an epoch a step, of 9 rows with those skipped


FEW = {
    "a step has 9 examples, not 128": {"asked": 128},
    "fewer than ten rows: none is held out": {"held_out": 0},
    "fewer than ten rows held out": {"held_out": 9},
    "fewer than 50 steps teach little": {"steps": 49},
    "": {"steps": 49, "chosen": 49},  # whoever says --steps 49 knows that it is few
}


@pytest.mark.parametrize("message, change", FEW.items())
def test_what_is_too_little_is_said(message, change):
    """In one line each; and nothing is said of what is enough."""
    case = {"asked": 9, "held_out": 10, "steps": 50, "chosen": None} | change
    args = SimpleNamespace(batch=case["asked"], steps=case["chosen"])
    recipe = SimpleNamespace(batch=9, steps=case["steps"])
    data = mock.MagicMock(first=[mock.Mock(tokens=[0])], held_out=[0] * case["held_out"])
    data.skipped.total.return_value = data.unusable.total.return_value = 0
    with mock.patch.object(plan, "say") as say:
        plan.say_steps(args, data, recipe)
    _, *warnings = [call.args[0] for call in say.call_args_list]
    assert len(warnings) == bool(message) and message in "".join(warnings)


@pytest.mark.parametrize("options", ["", "--checkpoint-layers", "--dtype bfloat16"])
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
