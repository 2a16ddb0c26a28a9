"""The recipe for thirty rows in docs/training.md, with a toy in place of SmolLM2."""

import re

from commands import command
from common import ROOT
from training import log


def test_thirty_rows(tmp_path, monkeypatch):
    """No row is skipped, and two epochs of each of the page's trainings lower its loss."""
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/training.md").read_text()
    commands = re.findall(r"^python (?:-m )?(.*captain\.jsonl.*)", page, re.MULTILINE)
    model = "toy/draft"
    for words, loss in zip(commands, ("clean", "noisy"), strict=True):
        name, *options = words.replace(".py", "").split()
        out = tmp_path / name
        small = ("--model", model, "--epochs", 2, "--lr", 5e-3, "--out", out)
        done = command(name, *options, *small)
        assert done.status == 0 and "skipped" not in done.out + done.err
        assert "fewer than ten rows held out" in done.out
        losses = [step[loss] for step in log(out)]
        assert sum(losses[-3:]) < 0.9 * sum(losses[:3]), losses
        model = out
