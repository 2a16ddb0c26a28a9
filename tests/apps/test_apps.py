"""The programs around the decoder: a conversation, and a file of prompts."""

import json
import re
import sys
from unittest import mock

import pytest
from commands import MARS, PROMPT, Done, command, interrupt
from common import ROOT, rows_of

from decode import Decoder, Sequence, generate
from model import load

# -------------------------------------------------------------------------------- a conversation


def converse(monkeypatch, *lines: object, options=("--tau", 0.8)) -> Done:
    """A conversation in which these lines are typed; an exception is raised, as by a key."""
    monkeypatch.setattr("builtins.input", mock.Mock(side_effect=[*lines, EOFError]))
    return command("apps.chat", *MARS, *options)


@pytest.fixture
def answers(monkeypatch):
    """Every sequence that is added to a Decoder, in order."""
    added = []
    add = Decoder.add

    def spy(self, *args, **options):
        added.append(add(self, *args, **options))
        return added[-1]

    monkeypatch.setattr(Decoder, "add", spy)
    return added


def prompt_of(sequence: Sequence) -> list[int]:
    return sequence.token_ids[: sequence.prompt_length]


def test_a_conversation(monkeypatch, answers):
    """/tau acts at once, a bad one changes nothing, /reset forgets, and the cache is used."""
    lines = [PROMPT, "/tau 1", "And now?", "/tau 7", "/tau x", KeyboardInterrupt, "/nonsense"]
    done = converse(monkeypatch, *lines, "", "/reset", PROMPT)
    turns = re.findall(r"forwards: (\S+) tokens per forward", done.err)
    assert done.status == 0 and len(turns) == 3
    assert float(turns[0]) > 2 and turns[1] == "1.00"
    assert done.out.count("The answer is 43.") == 2  # again after /reset
    first, second, third = answers
    assert prompt_of(third) == prompt_of(first)
    assert second.token_ids[: len(first.token_ids)] == first.token_ids
    assert first.widths[0] == len(prompt_of(first)) + 4  # all of it, and the masks
    assert second.widths[0] < 20 and third.widths[0] == 1  # only what is new
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 3
    assert "tau: expected float from 0 to 1, not 7.0" in errors[0] and "'x'" in errors[1]
    assert "/nonsense: no such command" in errors[2] and "/reset" in errors[2]


def test_interrupting_an_answer_keeps_the_conversation(monkeypatch, answers):
    """After Ctrl-C the half answer is part of the conversation, which goes on."""
    interrupt(monkeypatch, when=lambda _: answers[0].forwards == 3)
    done = converse(monkeypatch, PROMPT, PROMPT)
    first, second = answers
    assert done.status == 0 and "Traceback" not in done.err
    assert first.done and first.forwards == 3 and second.forwards > 3
    assert second.token_ids[: len(first.token_ids)] == first.token_ids
    [alone] = generate(load(str(ROOT / "toy/mars"))[0], [prompt_of(second)], tau=0.8)
    assert second.tokens == alone.tokens


def test_a_conversation_without_a_knob(monkeypatch):
    """There is no tau to set, and each answer is that of tau 1."""
    done = converse(monkeypatch, "/tau 0.5", PROMPT, options=())
    assert "error: there is no tau to set: start the conversation with --tau" in done.err
    assert done.out == command("decode", *MARS, "--prompt", PROMPT, "--tau", 1).out


# ------------------------------------------------------------------------------ a file of prompts


@pytest.fixture
def answer(tmp_path):
    """Answers a file with these lines: texts, or the rows of JSONL."""

    def run(lines: list[str | dict], *words: object, separator="\n") -> list[dict]:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / "in").write_text(separator.join(texts))
        done = command("apps.batch", *MARS, tmp_path / "in", "--tau", 0.95, *words)
        assert done.status == 0
        rows = [json.loads(line) for line in done.out.splitlines()]
        count = len(rows)
        note = rf"{count} of {count} answers, \d+ tokens: \S+ tokens per forward, \d+ tok/s\n"
        assert re.fullmatch(note, done.err), done.err
        return rows

    return run


def test_prompts_from_a_file(answer):
    """Answers in input order, whatever is done first; a tau and an id of one's own."""
    problems = rows_of(ROOT / "toy/test.jsonl")[:7]
    given = [{"prompt": problem["prompt"]} for problem in problems]
    given[1] |= {"id": "slow", "tau": 1}
    given[3] = {"question": given[3]["prompt"], "answer": "as in GSM8K"}
    given[2] = {"messages": [{"role": "user", "content": given[2]["prompt"]}], "id": None}
    with_mark = "\ufeff" + json.dumps(given[0])  # as some editors begin a file
    rows = answer([with_mark, *given[1:]], "--rows", 3, separator="\r\n\n")
    shape = ["id", "prompt", "response", "tokens", "forwards", "finish_reason"]
    assert list(rows[0]) == shape and list(rows[2]) == [shape[0], "messages", *shape[2:]]
    assert [row["id"] for row in rows] == [1, "slow", None, 7, 9, 11, 13]  # else the line
    for row, asked, problem in zip(rows, given, problems):
        for name in ("prompt", "question", "messages"):
            assert row.get(name) == asked.get(name)
        assert row["response"].endswith(f"The answer is {problem['answer']}.")
        assert row["finish_reason"] == "stop"
    assert rows[1]["tokens"] == rows[1]["forwards"]
    assert all(row["tokens"] > 2 * row["forwards"] for row in rows[2:])
    plain = answer([problem["prompt"] for problem in problems], "--block-cache", 8)
    assert [row["response"] for row in plain] == [row["response"] for row in rows]


def test_answers_come_as_soon_as_those_before_are_done(answer, monkeypatch):
    """The first is slow, so the second waits for it; but nothing waits for the third."""
    begun = []
    printed = []
    step = Decoder.step

    def spy(self):
        if not begun:
            begun.extend(self.scheduler.queue)
        printed.append(sys.stdout.getvalue().count("\n"))
        done = [sequence.done for sequence in begun] + [False]
        assert printed[-1] == done.index(False)
        return step(self)

    monkeypatch.setattr(Decoder, "step", spy)
    slow = {"prompt": PROMPT, "tau": 1}
    rows = answer([slow, {"prompt": PROMPT}, slow], "--rows", 2)
    assert [row["id"] for row in rows] == [1, 2, 3] and set(printed) == {0, 2, 3}


def test_interrupting_a_file_says_how_far_it_came(tmp_path, monkeypatch):
    """Ctrl-C ended it without a word."""
    file = tmp_path / "prompts.txt"
    file.write_text(f"{PROMPT}\n{PROMPT}\n")
    interrupt(monkeypatch, when=lambda decoder: not decoder.scheduler.queue)
    done = command("apps.batch", *MARS, file, "--rows", 1)
    assert done.status == 130 and "1 of 2 answers, " in done.err
    assert json.loads(done.out)["response"].endswith("The answer is 43.")


def test_text_that_looks_like_json(answer):
    """A prompt may stand in quotes, or begin with a brace after the first line."""
    lines = ["[1, 2] + [3]?", "{x} is a set. What is it?", '"Mia has 5 bags?"', "42"]
    rows = answer(lines, "--max-new", 4, separator="\r")
    assert [row["prompt"] for row in rows] == lines
    assert {row["finish_reason"] for row in rows} == {"length"}
