"""docs/change-it.md: each diff applies, has at most ten lines, and gives what the page prints."""

import re
import shlex
import shutil
import subprocess
import sys

import commands
import pytest
from common import ROOT

PAGE = (ROOT / "docs/change-it.md").read_text()
BLOCKS = re.findall(r"```diff\n(.*?)```\n.*?```\n(python .*?)```\n```\n(.*?)```", PAGE, re.DOTALL)
NEEDED = ["decode.py", "kv_cache.py", "lossless.py", "model.py", "train.py", "plumbing", "toy"]


@pytest.fixture
def copy(tmp_path):
    for name in NEEDED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name)
        else:
            shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def run(*words: str, cwd, input: str = "") -> str:
    done = subprocess.run(
        words, cwd=cwd, input=input, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_page_has_three_changes():
    assert len(BLOCKS) == PAGE.count("```diff") == 3


@pytest.mark.parametrize("diff, command, printed", BLOCKS, ids=["confidence", "grid", "top-p"])
def test_a_change(copy, diff, command, printed):
    """Every line that the page prints begins a line of the output; rates and seconds may follow."""
    added = [line for line in diff.splitlines() if re.match(r"\+(?!\+)", line)]
    assert len(added) <= 10
    run("git", "apply", "-", cwd=copy, input=diff)
    output = run(sys.executable, *shlex.split(command)[1:], cwd=copy).splitlines()
    for line in printed.splitlines():
        assert any(found.startswith(line) for found in output), output


def test_top_p_keeps_verify_lossless(copy):
    """What the page prints with --verify is what the changed sampling says one token at a time."""
    diff, command, printed = BLOCKS[2]
    run("git", "apply", "-", cwd=copy, input=diff)
    words = [word for word in shlex.split(command)[1:] if word != "--verify"]
    plain = run(sys.executable, *words, "--tau", "1", cwd=copy).splitlines()
    assert plain[-2] == printed.splitlines()[0]
    unchanged = commands.command("decode", *words[1:], "--tau", 1)
    assert unchanged.status == 0 and plain[-2] not in unchanged.out
