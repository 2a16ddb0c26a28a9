"""What the pages say is true: their commands are understood, their links lead somewhere."""

import argparse
import ast
import importlib
import inspect
import json
import re
import shlex
import sys

import pytest
from commands import command
from common import ROOT

from decode import naive
from plumbing.errors import UserError
from train import naive_loss

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/results/*.md")]
PAGES = sorted([*PAGES, *ROOT.glob("*/README.md"), *ROOT.glob("patches/*/README.md")])
PROGRAMS = ["decode.py", "train.py", "toy/make.py"]
SOURCES = [ROOT / name for name in PROGRAMS]
for folder in ("apps", "bench"):
    SOURCES += sorted((ROOT / folder).glob("*.py"))


def commands() -> list[str]:
    """`train.py --data ...` or `-m apps.chat ...`, as pages and docstrings have them."""
    found = {}
    for path in PAGES + SOURCES:
        if path.name == "change-it.md":  # its commands need its changes: test_change_it.py
            continue
        text = path.read_text()
        if path.suffix == ".py":
            text = ast.get_docstring(ast.parse(text)) or ""
        text = text.replace("\\\n", " ")  # a long command on two lines
        for line in re.findall(r"(?:python|torchrun) [^`\n|>&#]*", text):
            start = re.search(r"[\w/]+\.py\b|-m (apps|bench)\b", line)
            if start:
                words = line[start.start() :].rstrip(" ,;:)")
                found[words.removesuffix(" ...")] = None
    return list(found)


class Understood(BaseException):
    """The command's options were parsed; the rest of it need not run."""


@pytest.mark.parametrize("words", commands())
def test_commands_are_understood(words, monkeypatch, capsys):
    """Every option exists and takes the value that it is given."""
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self, *words, **options):
        parse(self, *words, **options)
        raise Understood

    name, *options = shlex.split(words.removeprefix("-m "))
    name = name.removesuffix(".py").replace("/", ".")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr(sys, "argv", [name, *options])
    try:
        module = importlib.import_module(name)
        module.main()
    except Understood:
        return
    except UserError as error:
        pytest.fail(str(error))
    except SystemExit:
        pytest.fail(capsys.readouterr().err)
    except ModuleNotFoundError as error:
        pytest.skip(f"needs bench/requirements.txt: {error}")
    pytest.fail("it has not asked for its options")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """To a file, and in a page to one of its headings."""
    for link in re.findall(r"\]\(((?!https?:)[^)\s]+)\)", page.read_text()):
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
            assert heading in [anchor.replace(" ", "-") for anchor in anchors], link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_code_runs(page, monkeypatch, capsys):
    """And each line that it prints is in the page. (A function is shown, not run.)"""
    text = page.read_text()
    monkeypatch.chdir(ROOT)
    for code in re.findall(r"```python\n(?!@|def )(.*?)```", text, re.DOTALL):
        exec(code, {})
        for line in capsys.readouterr().out.splitlines():
            assert line in text


def test_the_answer_that_serving_shows(tmp_path):
    """All but its text, which the page cuts short."""
    page = (ROOT / "docs/serving.md").read_text()
    shown = json.loads(re.search(r'^{"id": 2, .*}$', page, re.MULTILINE)[0])
    problems = tmp_path / "two.jsonl"
    problems.write_text("".join((ROOT / "toy/test.jsonl").open().readlines()[:2]))
    answer = json.loads(command("apps.batch", problems, "--rows", 8).out.splitlines()[1])
    del shown["prompt"], shown["response"]
    assert shown.items() <= answer.items()


@pytest.mark.parametrize("function", [naive, naive_loss], ids=lambda function: function.__name__)
def test_the_readme_shows_it_word_for_word(function):
    """But for its decorator."""
    source = inspect.getsource(function)
    shown = source[source.index("def ") :]
    assert f"```python\n{shown}```" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", ["decode", "train", "apps.chat", "apps.batch", "apps.trace"])
def test_help_shows_defaults(name):
    """But not that of a flag, nor None, nor the name of the machine's user."""
    done = command(name, "--help")
    assert done.status == 0 and done.err == ""
    text = " ".join(done.out.split())
    assert "--model" in text and "(default: " in text and str(ROOT) not in text
    assert "None" not in text and "default: False" not in text
