"""The number of torch's threads follows the cores that other programs leave free."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from commands import command
from common import ROOT, endless_model

from decode import generate
from plumbing import attention, threads

USED_10_SECONDS = "cpu  500 100 300 70000 40 60 40 9 0 0\ncpu0 250 50 150 35000 20 30 20 4 0 0\n"


@pytest.fixture
def machine(monkeypatch):
    """Four cores; `pass_time(seconds, others, own)` adds that much work of other programs and of
    this one."""
    state = {"now": 100.0, "others": 10.0, "own": 1.0, "threads": 4}
    monkeypatch.setattr(threads, "is_own_command", lambda: True)
    monkeypatch.setattr(threads, "CHOSEN_BY_USER", False)
    monkeypatch.setattr(threads, "STAT", FakeStat(state))
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(threads.time, "monotonic", lambda: state["now"])
    monkeypatch.setattr(threads.time, "process_time", lambda: state["own"])
    monkeypatch.setattr(torch, "get_num_threads", lambda: state["threads"])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: state.update(threads=n))
    return state


class FakeStat:
    """Stands for /proc/stat."""

    def __init__(self, state: dict):
        self.state = state

    def exists(self) -> bool:
        return True

    def read_text(self) -> str:
        ticks = round((self.state["others"] + self.state["own"]) * threads.os.sysconf("SC_CLK_TCK"))
        return f"cpu  {ticks} 0 0 70000 0 0 0 0 0 0\n"


def pass_time(state: dict, seconds: float, others: float, own: float = 0.0) -> None:
    state["now"] += seconds
    state["others"] += others
    state["own"] += own


def test_used_adds_up_work_but_not_idleness():
    ticks = threads.os.sysconf("SC_CLK_TCK")
    assert threads.used(USED_10_SECONDS) * ticks == 500 + 100 + 300 + 60 + 40


def test_busy_neighbours_take_threads_away_and_give_them_back(machine):
    """The bug: with one busy neighbour decoding was 3 to 40 times slower, training 9 times."""
    cores = threads.FreeCores()
    for busy_cores, expected in [(0, 4), (1, 3), (0.5, 3), (0.2, 4), (2, 2), (9, 1), (0, 4)]:
        pass_time(machine, 1.0, others=busy_cores, own=3.0)
        cores.use()
        assert machine["threads"] == expected, busy_cores


def test_looks_only_now_and_then(machine):
    cores = threads.FreeCores()
    pass_time(machine, 0.1, others=0.1)
    cores.use()
    assert machine["threads"] == 4
    pass_time(machine, 0.2, others=0.2)
    cores.use()
    assert machine["threads"] == 3


def test_what_the_user_or_the_program_around_us_set_stays(machine, monkeypatch):
    set_while_running = threads.FreeCores()
    machine["threads"] = 2
    pass_time(machine, 1.0, others=4.0)
    set_while_running.use()
    assert machine["threads"] == 2

    for name, value in [("CHOSEN_BY_USER", True), ("is_own_command", lambda: False)]:
        with monkeypatch.context() as patch:
            patch.setattr(threads, name, value)
            cores = threads.FreeCores()
            pass_time(machine, 1.0, others=4.0)
            cores.use()
            assert machine["threads"] == 2, name


def test_every_forward_looks(monkeypatch, tmp_path):
    """Once training looked at the beginning of a step only, and a step may take a minute."""
    looks = []
    monkeypatch.setattr(threads.FreeCores, "use", lambda self: looks.append(self))
    [answer] = generate(endless_model(), [[3, 4, 5]], tau=1, max_new=7)
    assert len(looks) == answer.forwards + 1  # the last look finds that all is done
    looks.clear()
    words = ["--model", ROOT / "toy/sft", "--data", ROOT / "toy/test.jsonl"]
    words += ["--out", tmp_path / "out", "--steps", 3, "--batch", 4]
    assert command("train", *words, "--batch-tokens", 1).status == 0  # an example per forward
    assert len(looks) == 3 * 4


def test_a_compiled_model_keeps_its_threads(monkeypatch):
    """Or each number of threads would be compiled anew."""
    monkeypatch.setattr(threads.free_cores, "enabled", True)
    attention.compile_forward(endless_model())
    assert not threads.free_cores.enabled


def test_a_program_that_imports_us_keeps_its_signals_and_threads(tmp_path):
    """Only our own commands end quietly at Ctrl-C while torch is imported, and choose threads."""
    project = tmp_path / "project"
    shutil.copytree(ROOT / "plumbing", project / "plumbing")
    (project / "apps").mkdir()
    text = f"import sys; sys.path.insert(0, {str(project)!r}); import plumbing, signal; "
    text += "from plumbing.threads import free_cores; "
    text += "print(signal.getsignal(signal.SIGINT) == signal.SIG_DFL, free_cores.enabled)"
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("OMP_")}
    is_linux = threads.STAT.exists()
    for place, expected in ((tmp_path, "False False"), (project / "apps", f"True {is_linux}")):
        (place / "program.py").write_text(text)
        command = [sys.executable, place / "program.py"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.stdout.strip() == expected, done.stderr
