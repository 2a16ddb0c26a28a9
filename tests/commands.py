"""What the tests of commands share: calling one, and what bad input must give."""

import contextlib
import importlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

from common import ROOT

from decode import Decoder
from plumbing import errors

PROMPT = "Mia has 5 bags with 12 plums in each. She gives away 17 plums. "
PROMPT += "How many plums does Mia have now?"
MARS = ("--model", ROOT / "toy/mars")  # by name, so that no note says that it is the bundled one


class Done(NamedTuple):
    status: int
    out: str
    err: str


def command(name: str, *words: object) -> Done:
    """`python NAME.py ...`, or `python -m NAME ...`, in this process."""
    module = importlib.import_module(name)
    status = 0
    with (
        mock.patch.object(sys, "argv", [name, *map(str, words)]),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            errors.run_main(module.main)
        except SystemExit as stop:
            status = stop.code or 0
    return Done(status, out.getvalue(), err.getvalue())


def process(*words: object, before: str = "", redirect: str = "", **environment: str) -> Done:
    """`python WORDS` as a process of its own, in the directory of the project.

    before, redirect: what a shell is to add, such as "echo Hi |" and "| head -c 3".
    """
    script = f'{before} "$0" "$@" {redirect}'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    return Done(done.returncode, done.stdout, done.stderr)


def interrupt(monkeypatch, when: Callable[[Decoder], bool]) -> None:
    """Let Ctrl-C come once, in the first step of a decoder at which this is so."""
    step = Decoder.step
    interrupted = []

    def interrupted_step(self):
        if not interrupted and when(self):
            interrupted.append(self)
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Decoder, "step", interrupted_step)


def is_refused(done: Done, message: str) -> bool:
    """One clear line on standard error, nothing on standard output, exit status 2."""
    assert message in done.err, done.err
    assert done.err.startswith("error: ") and done.err.count("\n") == 1, done.err
    assert done.out == ""
    return done.status == 2


def tables(out: str) -> list[dict[str, list[str]]]:
    """Every table of the output: its rows by the first cell, head and ruler left out."""
    found = []
    for block in out.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        table = {}
        for row in rows[2:]:
            cells = [cell.strip() for cell in row.strip("|").split("|")]
            table[cells[0]] = cells[1:]
        if table:
            found.append(table)
    return found


def tables_of(name: str, *words: object) -> list[dict[str, list[str]]]:
    """The tables that a command prints; it must end well."""
    done = command(name, *words)
    assert done.status == 0, done.err
    return tables(done.out)


def number(cell: str) -> float:
    """Of "2.52 (2.41 to 2.63)" the first."""
    return float(cell.split()[0].strip("%"))
