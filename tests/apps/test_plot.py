"""The pictures of a run and of a table."""

import re

import pytest
from commands import command, is_refused
from common import ROOT

pytest.importorskip("matplotlib")


def texts(picture) -> list[str]:
    return sorted(re.findall(">(.+)</text>", picture.read_text()))


def test_pictures(tmp_path):
    """The bundled one is that of its table."""
    log = '{"step": 1, "noisy": 4.0, "drift": 0.0}\n{"step": 2, "noisy": 2.0, "drift": 0.1}\n'
    (tmp_path / "log.jsonl").write_text(log)
    assert command("apps.plot", tmp_path).out == f"{tmp_path}/log.svg\n"
    assert {"step", "loss", "noisy", "drift"} <= set(texts(tmp_path / "log.svg"))
    for name in ("right.json", "right.svg"):
        (tmp_path / name).write_bytes((ROOT / "patches/qwen2.5" / name).read_bytes())
    bundled = texts(tmp_path / "right.svg")
    assert command("apps.plot", tmp_path / "right.json").status == 0
    assert texts(tmp_path / "right.svg") == bundled and "lossless" in " ".join(bundled)
    (tmp_path / "log.jsonl").write_text('{"prompt": "?"}')
    assert is_refused(command("apps.plot", tmp_path), "not the directory of a run, nor a table")
