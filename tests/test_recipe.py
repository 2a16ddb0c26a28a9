"""The trainings of the pages: README's first, and thirty rows with a toy in place of SmolLM2."""

import re

from commands import command
from common import ROOT, THOROUGH
from training import log


def test_thirty_rows(tmp_path, monkeypatch):
    """No row is skipped, and a few epochs of each of the page's trainings lower its loss."""
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/training.md").read_text()
    commands = re.findall(r"^python (?:-m )?(.*captain\.jsonl.*)", page, re.MULTILINE)
    model = "toy/draft"
    few = (("clean", 2, 5e-3), ("noisy", 6, 3e-3))  # loss, epochs, rate
    for words, (loss, epochs, rate) in zip(commands, few, strict=True):
        name, *options = words.replace(".py", "").split()
        out = tmp_path / name
        small = ("--model", model, "--epochs", epochs, "--lr", rate, "--out", out)
        done = command(name, *options, *small)
        assert done.status == 0 and "skipped" not in done.out + done.err
        assert "fewer than ten rows held out" in done.out
        losses = [step[loss] for step in log(out)]
        assert sum(losses[-3:]) < 0.9 * sum(losses[:3]), losses
        model = out


def test_the_first_training_keeps_the_answer(tmp_path, monkeypatch):
    """After README's first training the model still answers README's question.

    With a rate of 1e-3 it said "The 5 bags and and and 5 plums." (Here fewer steps by default.)
    """
    monkeypatch.chdir(ROOT)
    page = (ROOT / "README.md").read_text()
    [words] = re.findall(r"^python train.py (--model toy/sft [^#\n]*)", page, re.MULTILINE)
    [answer] = re.findall(r"^The 5 bags hold .*", page, re.MULTILINE)
    few = () if THOROUGH else ("--steps", 20)
    done = command("train", *words.split(), *few, "--out", tmp_path)
    assert done.status == 0, done.err
    question = "Mia has 5 bags with 12 plums in each. How many plums is that?"
    for tau in (("--tau", 1), ()):
        done = command("decode", "--model", tmp_path, *tau, "--prompt", question)
        assert done.out.strip() == answer
