"""docs/change-it.md: each change has at most ten lines, and gives what the page prints."""

import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from common import ROOT

PAGE = (ROOT / "docs/change-it.md").read_text()
[LESSON] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
BLOCKS = re.findall(r"```diff\n(.*?)```\n.*?```\n(python .*?)```\n```\n(.*?)```", PAGE, re.DOTALL)
NEEDED = ["decode.py", "kv_cache.py", "lossless.py", "model.py", "scheduler.py", "train.py"]
NEEDED += ["plumbing", "toy"]


@pytest.fixture
def copy(tmp_path):
    for name in NEEDED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name)
        else:
            shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def apply(diff: str, folder) -> None:
    """Make a change where its lines stand: once in the file, wherever that is."""
    name, _, hunks = diff.removeprefix("--- ").partition("\n")
    text = (folder / name).read_text()
    for hunk in hunks.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] != "+")
        after = "".join(line[1:] for line in lines if line[0] != "-")
        assert text.count(before) == 1, f"{name} has {text.count(before)} times:\n{before}"
        text = text.replace(before, after)
    (folder / name).write_text(text)


def run(command: str, folder) -> list[str]:
    """The lines that a command of the page prints, on both streams."""
    words = [sys.executable, *shlex.split(command)[1:]]
    output = subprocess.STDOUT
    done = subprocess.run(words, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=output)
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


def test_the_page_has_three_changes():
    assert len(BLOCKS) == PAGE.count("```diff") == 2


def test_the_rule(copy):
    """A Method of ten lines, which the notebook has, too. It and the paper's give what is said."""
    [rule] = re.findall(r"^class .*?\n(?=\n)", LESSON, re.DOTALL | re.MULTILINE)
    assert len(rule.splitlines()) <= 10
    cells = json.loads((ROOT / "mars.ipynb").read_text())["cells"]
    assert any(rule in "".join(cell["source"]) for cell in cells)
    lesson = copy / "lesson.py"
    lesson.write_text(LESSON)
    [with_rule] = run("python lesson.py", copy)
    assert f"# {with_rule}\n" in LESSON
    lesson.write_text(LESSON.replace(", method=rule", ""))
    [without] = run("python lesson.py", copy)
    [forwards, answer] = re.findall(r"# Without .*: (\d+) forwards.* is (\d+)\.", LESSON)[0]
    assert without.startswith(f"{forwards} forwards") and without.endswith(f" {answer}.")


@pytest.mark.parametrize("diff, command, printed", BLOCKS, ids=["grid", "top-p"])
def test_a_change(copy, diff, command, printed):
    """Every line that the page prints begins a line of the output; rates and seconds may follow."""
    assert len(re.findall(r"^\+", diff, re.MULTILINE)) <= 10
    apply(diff, copy)
    output = run(command, copy)
    for line in printed.splitlines():
        assert any(found.startswith(line) for found in output), output


def test_top_p_keeps_decoding_lossless(copy):
    """The page's text is what the changed sampling says one token at a time."""
    diff, command, printed = BLOCKS[-1]
    assert "--tau" not in command
    plain = command.replace("--prompt", "--tau 1 --prompt")
    assert "packs3" in run(plain, copy)[-2]  # before the change
    apply(diff, copy)
    assert run(plain, copy)[-2] == printed.splitlines()[0]
