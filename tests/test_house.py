"""The layout of the project: how long its parts are, and who imports whom (.ci/budgets.py)."""

import runpy
import subprocess
import sys

import pytest
from common import ROOT

SCRIPT = ROOT / ".ci/budgets.py"
BUDGETS = runpy.run_path(str(SCRIPT))["BUDGETS"]
PLUMBING_FILE = runpy.run_path(str(SCRIPT))["PLUMBING_FILE"]

HOUSE = {  # the smallest that has every part, with all kinds of imports that are allowed
    "README.md": "# A page\n",
    "model.py": "import json\nimport torch\nfrom plumbing.files import save\n",
    "kv_cache.py": "from plumbing import errors\n",
    "lossless.py": "import model\nimport kv_cache\n",
    "decode.py": "import lossless\nfrom model import load\nfrom kv_cache import KVCache\n",
    "train.py": "import model, plumbing.files\n",
    "plumbing/__init__.py": "",
    "plumbing/errors.py": "import os\n",
    "plumbing/files.py": "from .errors import UserError\n",
    "apps/chat.py": "import decode\nfrom train import main\n",
    "bench/__init__.py": "",
    "bench/common.py": "import lossless\nfrom apps import chat\nimport toy.make\n",
    "bench/paper/run.py": "from .. import common\nfrom . import report\n",
    "bench/paper/report.py": "from plumbing import errors\n",
    "toy/make.py": "import model\nfrom plumbing.errors import UserError\n",
    "tests/test_all.py": "import bench.common, apps.chat\n",
    ".hidden/any.py": "import bench.common\n",
    "venv/pyvenv.cfg": "",
    "venv/lib/any.py": "import bench.common\n",
}


def check(root) -> tuple[int, list[str]]:
    """Exit status of the script, and the problems that it names."""
    command = [sys.executable, str(SCRIPT), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert not done.stderr
    lines = done.stdout.splitlines()
    return done.returncode, [line for line in lines if line.startswith("error: ")]


@pytest.fixture
def house(tmp_path):
    for name, text in HOUSE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_this_project_keeps_its_rules():
    status, problems = check(ROOT)
    assert not problems
    assert status == 0


def test_a_good_house_has_no_problems(house):
    assert check(house) == (0, [])


@pytest.mark.parametrize(
    "name", ["model.py", "kv_cache.py", "decode.py", "lossless.py", "train.py", "plumbing/files.py"]
)
def test_a_file_that_is_too_long(house, name):
    budget = BUDGETS.get(name, PLUMBING_FILE)
    num_left = budget - HOUSE[name].count("\n")
    (house / name).write_text(HOUSE[name] + num_left * "# a comment\n")
    assert check(house) == (0, [])
    (house / name).write_text(HOUSE[name] + (num_left + 1) * "\n")
    assert check(house) == (1, [f"error: {name}: {budget + 1} lines, 1 too many"])


@pytest.mark.parametrize("folder", ["plumbing", "apps", "bench", "bench/paper"])
def test_a_folder_that_is_too_long(house, folder):
    """By several files, none of which is too long by itself; bench/paper is not part of bench."""
    num_left = BUDGETS[folder]
    for path in (house / folder).glob("*.py"):
        num_left -= path.read_text().count("\n")
    number = 0
    while num_left:
        num_lines = min(num_left, PLUMBING_FILE)
        (house / folder / f"new_{number}.py").write_text(num_lines * "\n")
        num_left -= num_lines
        number += 1
    assert check(house) == (0, [])
    (house / folder / "one_more.py").write_text("\n")
    assert check(house) == (1, [f"error: {folder}: {BUDGETS[folder] + 1} lines, 1 too many"])


@pytest.mark.parametrize(
    "name, line, problem",
    [
        ("plumbing/files.py", "import model", "plumbing.files: must not import model"),
        ("plumbing/files.py", "from kv_cache import KVCache", "must not import kv_cache"),
        ("plumbing/__init__.py", "import train", "plumbing: must not import train"),
        ("plumbing/files.py", "def f():\n    from bench import common", "import bench.common"),
        ("plumbing/files.py", "if 0:\n    import toy.make", "import toy.make"),
        ("kv_cache.py", "from model import Config", "kv_cache: must not import model"),
        ("model.py", "import kv_cache", "model: must not import kv_cache"),
        ("model.py", "from train import losses", "model: must not import train"),
        ("lossless.py", "from train import losses", "lossless: must not import train"),
        ("decode.py", "import train", "decode: must not import train"),
        ("decode.py", "from apps.chat import main", "decode: must not import apps.chat"),
        ("train.py", "import decode", "train: must not import decode"),
        ("train.py", "import lossless", "train: must not import lossless"),
        ("train.py", "import kv_cache", "train: must not import kv_cache"),
        ("train.py", "import bench.paper.report", "train: must not import bench.paper.report"),
        ("toy/make.py", "import decode", "toy.make: must not import decode"),
    ],
)
def test_imports_that_are_not_allowed(house, name, line, problem):
    (house / name).write_text(HOUSE[name] + line + "\n")
    status, problems = check(house)
    assert status == 1
    assert any(found.endswith(problem) for found in problems), problems


@pytest.mark.parametrize(
    "changes, cycle",
    [
        ({"lossless.py": "import decode"}, "decode, lossless"),
        (
            {"plumbing/errors.py": "def f():\n    from .files import save"},
            "plumbing.errors, plumbing.files",
        ),
        (
            {
                "plumbing/errors.py": "from . import first",
                "plumbing/first.py": "from plumbing.second import x",
                "plumbing/second.py": "import plumbing.files",
            },
            "plumbing.errors, plumbing.files, plumbing.first, plumbing.second",
        ),
        ({"apps/chat.py": "import bench.common"}, "apps.chat, bench.common"),
        ({"bench/common.py": "from .paper import run"}, "bench.common, bench.paper.run"),
        ({"plumbing/__init__.py": "from . import files\nimport plumbing"}, "plumbing"),
    ],
)
def test_cycles(house, changes, cycle):
    for name, line in changes.items():
        (house / name).write_text(HOUSE.get(name, "") + line + "\n")
    status, problems = check(house)
    assert status == 1
    assert problems[-1] == f"error: {cycle}: a cycle of imports"


def test_a_new_part_needs_a_budget(house):
    """Or it would be a place where the rules do not hold."""
    (house / "helpers.py").write_text("import bench.common\n")
    (house / "apps/more").mkdir()
    (house / "apps/more/code.py").write_text("")
    status, problems = check(house)
    assert status == 1
    assert problems == [
        "error: apps/more/code.py: has no budget",
        "error: helpers.py: has no budget",
        "error: helpers: must not import bench.common",
    ]


def test_a_readme_that_is_too_long(house):
    """Lines, words, tables, and pictures are counted."""
    table = "| a | b |\n|:--|--:|\n| 1 | 2 |\n\n"
    (house / "README.md").write_text(3 * table + 2 * "![x](y.png)\n" + 140 * (10 * "word " + "\n"))
    status, problems = check(house)
    assert status == 1 and [problem.split(" ", 2)[2] for problem in problems] == [
        "154 lines, 4 too many",
        "1435 words, 35 too many",
        "3 tables, 1 too many",
        "2 pictures, 1 too many",
    ]


def test_pip_install_says_why_not():
    """`pip install .` shows what setup.py says; it once listed the folders that it cannot sort."""
    done = subprocess.run([sys.executable, "setup.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "MARS is not a package: clone it and run it there (see README.md)\n"
