"""The picture of a run."""

import json
from xml.etree import ElementTree

from commands import command, is_refused


def test_the_picture_of_a_run(tmp_path):
    """A curve for each loss and each distance; the last noisy loss is a quarter of the first."""
    rows = [{"step": i, "noisy": 4 / i, "clean": 0.0} for i in (1, 2, 3, 4)]
    rows[1]["look_ahead"] = [0.9, 0.2]
    rows[3]["look_ahead"] = [0.9, 0.6]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = command("apps.plot", tmp_path)
    assert done.status == 0 and done.out.startswith("noisy 4.000 ████") and "▂ 1.000" in done.out
    svg = ElementTree.fromstring((tmp_path / "log.svg").read_text())
    curves = [each.get("points").split() for each in svg if each.tag.endswith("polyline")]
    assert [len(points) for points in curves] == [5, 5, 3, 3]
    assert curves[0][0] == "200.0,20.0" and curves[0][-1] == "680.0,200.0"
    assert curves[3][:2] == ["360.0,486.7", "680.0,380.0"]
    names = [each.text for each in svg if each.tag.endswith("text")]
    assert names == ["4", "noisy", "clean", "0.9", "right 1 ahead", "right 2 ahead"]


def test_what_is_no_run(tmp_path):
    assert is_refused(command("apps.plot", tmp_path), "log.jsonl: No such file")
    (tmp_path / "log.jsonl").write_text('{"prompt": "?"}\n')
    assert is_refused(command("apps.plot", tmp_path), "log.jsonl: not the log of a training")
