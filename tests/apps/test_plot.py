"""The pictures of a run and of a table."""

import json
from xml.etree import ElementTree

import pytest
from commands import command, is_refused
from common import ROOT

pytest.importorskip("matplotlib")


def texts(picture) -> list[str]:
    svg = ElementTree.fromstring(picture.read_text())
    return [each.text for each in svg.iter() if each.tag.endswith("}text")]


def test_the_picture_of_a_run(tmp_path):
    """A curve for each loss and each distance. A log with step 0 alone ended in a traceback."""
    rows = [{"step": i, "noisy": 4 / (i + 1), "clean": 0.0} for i in range(4)]
    (tmp_path / "log.jsonl").write_text(json.dumps(rows[0]))
    assert command("apps.plot", tmp_path).status == 0
    rows[1]["look_ahead"] = [0.9, 0.2]
    rows[3]["look_ahead"] = [0.9, 0.6]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = command("apps.plot", tmp_path)
    assert done.status == 0 and done.out == f"{tmp_path}/log.svg\n"
    names = {"step", "loss", "noisy", "clean", "share", "right 1 ahead", "right 2 ahead"}
    assert names <= set(texts(tmp_path / "log.svg"))


def test_the_bundled_picture_is_that_of_its_table(tmp_path):
    """Every label is there as often as in the table, and every group."""
    (tmp_path / "right.json").write_bytes((ROOT / "patches/qwen2.5/right.json").read_bytes())
    assert command("apps.plot", tmp_path / "right.json").status == 0
    said = texts(ROOT / "patches/qwen2.5/right.svg")
    assert sorted(said) == sorted(texts(tmp_path / "right.svg"))
    for label, group, _, _ in json.loads((tmp_path / "right.json").read_text())["rows"]:
        assert group in said and (not label or label in said)


def test_what_is_no_run(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"prompt": "?"}')
    assert is_refused(command("apps.plot", tmp_path), "log.jsonl: not the log of a training")
