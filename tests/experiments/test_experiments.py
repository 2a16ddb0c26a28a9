"""The experiments' commands: the columns that do not depend on the machine, and bad input."""

import json
import os
import random
import shutil

import pytest
from commands import command, is_refused, number, tables
from common import ROOT, cases, tiny_model, unpacked
from training import random_example, two_stream_loss

from bench import common
from decode import Options
from experiments import serving, training_cost
from model import load
from train import losses

TOY = ("--model", ROOT / "toy/mars", "--data", ROOT / "toy/test.jsonl")


@pytest.mark.parametrize(
    "module, words, message",
    [
        ("serving", ("--calm", 0), "--calm: must be at least 0.001, not 0"),
        ("serving", ("--limit", 3), "--waves 2: needs at least 4 problems"),
        ("paper.tables", (), "choose --table5 or --table6"),
        ("training_cost", ("--shares", 2), "--shares: must be below 0.91, not 2"),
        ("training_cost", ("--rows", 1), "--rows: must be at least 1000, not 1"),
    ],
)
def test_bad_options(module, words, message):
    assert is_refused(command(f"experiments.{module}", *words), message)


def test_an_optional_package_that_is_missing(monkeypatch):
    """One line, before a model is loaded."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = command("experiments.serving", "--plot", "queue.png")
    assert is_refused(done, "matplotlib is not installed: pip")


@pytest.mark.parametrize("module", ["serving", "training_cost", "paper.tables"])
def test_help(module):
    status, out, _ = command(f"experiments.{module}", "--help")
    assert status == 0 and "--model" in out and "default: " in out
    assert os.environ.get("HOME", "?") not in out


@pytest.mark.parametrize(
    "name, message",
    [
        ("picture.xyz", "must end with .png, .pdf or .svg"),
        ("picture", "must end with .png, .pdf or .svg"),
        ("nowhere/picture.png", "there is no directory nowhere"),
    ],
)
def test_a_plot_that_cannot_be_written(monkeypatch, name, message):
    """It was found out after all the work."""
    monkeypatch.setattr(serving, "load", lambda *_: pytest.fail("work was done"))
    assert is_refused(command("experiments.serving", "--plot", name), message)


def test_a_plot_is_not_written_over_a_folder(tmp_path):
    """It was found out after all the work."""
    folder = tmp_path / "queue.png"
    folder.mkdir()
    assert is_refused(command("experiments.serving", "--plot", folder), "is a directory")


# ----------------------------------------------------------------------------------------- serving


def test_the_waiting_time_of_a_single_queue():
    """One row, one token at a time: start when the last one ended, but not before arriving."""
    model, chat = load(str(ROOT / "toy/mars"))
    problems = common.read_problems(ROOT / "toy/test.jsonl", 8)
    coming = serving.arrivals(8, calm=60, burst=5, waves=2)
    prompts = common.encode(chat, problems)
    done = serving.replay(model, prompts, coming, Options(tau=1.0), rows=1)
    free = 0.0
    for answer, waited, arrival in zip(done.answers, done.waits, coming):
        start = max(free, arrival.time)
        free = start + len(answer.tokens)
        assert waited == pytest.approx(start + 1 - arrival.time)
    assert done.moments[-1].time == pytest.approx(free) and max(done.waits) > 40


def test_the_table_of_waves(tmp_path):
    """What the knob is for: less waiting than a fixed 0.95, more right than a fixed 0.5."""
    pytest.importorskip("matplotlib", reason="the plot needs bench/requirements.txt")
    options = ("--limit", 30, "--waves", 1, "--burst", 1, "--plot", tmp_path / "queue.png")
    status, out, _ = command("experiments.serving", *TOY, *options)
    [table] = tables(out)
    waits = {name: float(cells[2]) for name, cells in table.items()}
    assert status == 0 and (tmp_path / "queue.png").stat().st_size > 10_000
    assert waits["1"] > waits["0.95"] > waits["0.95 to 0.5"] >= waits["0.5"]


# ------------------------------------------------------------------------------------------ tables


def test_the_table_of_caches():
    options = ("--limit", 6, "--rows", 1, 4, "--rounds", 1, "--max-new", 24)
    status, out, _ = command("experiments.paper.tables", *TOY, "--table5", *options)
    found = tables(out)
    assert status == 0 and [len(table) for table in found] == [10, 10]
    for table in found:
        per_forward = {name: number(cells[2]) for name, cells in table.items()}
        assert number(table["AR"][1]) == per_forward["AR"] == 1
        cursor = per_forward["MARS, cursor"]
        assert cursor == per_forward["MARS, B_cache 256"] == per_forward["MARS, no cache"] > 2
        assert per_forward["MARS, B_cache 4"] < cursor
        assert number(table["MARS, no cache"][3]) > 40  # positions: the whole text


def test_the_table_of_drafts():
    options = ("--table6", ROOT / "toy/draft", "--limit", 3, "--rounds", 1)
    status, out, _ = command("experiments.paper.tables", *TOY, *options)
    [table] = tables(out)
    per_forward = {name: number(cells[2]) for name, cells in table.items()}
    assert status == 0 and per_forward["AR"] == 1
    assert per_forward["MARS draft + MARS"] > per_forward["AR draft + AR"] > 3
    assert per_forward["MARS, verify"] > per_forward["MARS"] > 2
    assert table["AR draft + AR"][-2:] == ["100.0%", "100.0%"] == table["MARS, verify"][-2:]


def test_a_draft_of_another_vocabulary(tmp_path):
    shutil.copytree(ROOT / "toy/draft", tmp_path / "draft")
    path = tmp_path / "draft/tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][-1] | {"id": 640, "content": "<x>"})
    path.write_text(json.dumps(tokenizer))
    done = command("experiments.paper.tables", *TOY, "--table6", tmp_path / "draft", "--limit", 3)
    assert is_refused(done, "its tokenizer is not that of ")


# ----------------------------------------------------------------------------------- training cost


def test_the_papers_form_in_the_cost_bench():
    """What is timed there as "2L" has the loss of the two streams as they are written above."""
    for seed in cases(5, 50):
        rng = random.Random(700 + seed)
        model = tiny_model(rng)
        example = random_example(rng, training_cost.BLOCK)
        layout = training_cost.two_streams(example, model.config.mask_token_id, 1.0)
        expected = two_stream_loss(model, example, training_cost.BLOCK)
        for ours, theirs in zip(losses(model, unpacked([layout])), expected):
            assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)


def test_the_tables_of_training_cost(monkeypatch):
    """A process of its own for every peak would take too long here."""
    monkeypatch.setattr(training_cost, "alone", lambda function, *args: function(*args))
    words = ("--batch", 2, "--length", 32, "--rounds", 1, "--shares", 0.5, "--device", "cpu")
    status, out, _ = command("experiments.training_cost", *words)
    [table] = tables(out)
    assert status == 0 and list(table) == list(training_cost.FORMS)
    assert number(table["AR SFT"][2]) == 1
    assert all(number(cells[1]) > 0 and number(cells[2]) > 0 for cells in table.values())
    status, out, _ = command("experiments.training_cost", "--rows", 1000)
    assert status == 0 and out.startswith("1000 rows") and "MiB of memory" in out
