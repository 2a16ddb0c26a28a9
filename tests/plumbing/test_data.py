"""Training data: the rows of a JSONL file, what of them is trained, the stream of steps."""

import gzip
import os
from unittest import mock

import pytest
from common import BASE
from training import write

from plumbing import data
from plumbing.chat import Chat
from plumbing.data import Dataset, encode_prompt, make_example
from plumbing.errors import UserError
from plumbing.jsonl import JsonlFile, read_rows

ENDS = (2, 0)  # of the toy tokenizer


@pytest.fixture(scope="module")
def chat():
    return Chat(BASE)


# -------------------------------------------------------------------------------------- the file


def test_rows_are_found_by_byte_offset(tmp_path):
    """A BOM, characters of several bytes, blank lines, Windows line ends, no newline at the end."""
    path = tmp_path / "rows.jsonl"
    text = '\ufeff{"prompt": "né 🙂"}\n\n{"prompt": "2"}\r\n   \n{"prompt": "三"}'
    path.write_bytes(text.encode())
    rows = JsonlFile(path)
    assert len(rows) == 3 and [rows[i]["prompt"] for i in (2, 0, 1)] == ["三", "né 🙂", "2"]
    by_line = {number: row["prompt"] for number, row in read_rows(path).items()}
    assert by_line == {1: "né 🙂", 3: "2", 5: "三"}


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "empty"),
        (b'{"a": 1}\n\n[1, 2]\n', "bad.jsonl:3: expected JSONL, .*TypeError: not an object"),
        (b'{"a": "1"}\r\n{"a": "2', "bad.jsonl:2: expected JSONL, .* is the line cut short"),
        (gzip.compress(b"{}", mtime=0), "bad.jsonl:1: expected .* or the file compressed?"),
        # A CSV file was said to be cut short or compressed.
        (b"prompt,response\n?,!\n", 'bad.jsonl:1: expected JSONL, lines like {"prompt": "...", "r'),
    ],
)
def test_bad_data_files(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        JsonlFile(path)


# -------------------------------------------------------------------------------------- a row


def example_of(row: dict, chat: Chat, max_length: int = 512) -> data.Example:
    return make_example(row, chat, ENDS, max_length)


def test_the_last_assistant_turn_is_trained(chat):
    user, assistant = ({"role": r, "content": f"the {r}"} for r in ("user", "assistant"))
    last = {"role": "assistant", "content": "So Mia has 12 plums."}
    row = {"messages": [user, assistant, user, last, {"role": "user", "content": "Thanks!"}]}
    example = example_of(row, chat)
    assert chat.decode(example.response) == "So Mia has 12 plums."
    assert example.tokens[-1] == ENDS[0]
    assert example.tokens[: example.prompt_length] == chat.encode_prompt([user, assistant, user])
    answered = {"id": 1, "messages": [user, assistant, user], "response": last["content"]}
    assert example_of(answered, chat) == example  # as apps.batch writes it
    expected = example_of({"messages": [user, last]}, chat)
    for asks, answers in (("prompt", "response"), ("question", "completion")):  # GSM8K's, TRL's
        row = {"messages": [], "prompt": None, "response": None}
        row |= {asks: user["content"], answers: last["content"]}
        assert example_of(row, chat) == expected


def test_a_cut_response_has_no_end_of_turn_target(chat):
    """Cut here, or where it was made (by max_new): or a model would learn to stop in a sentence."""
    row = {"prompt": "How many?", "response": "So Mia has 12 plums now."}
    whole = example_of(row, chat)
    cut = example_of(row, chat, len(whole.tokens) - 1)
    assert whole.tokens[-1] == ENDS[0]
    assert cut.tokens == whole.tokens[:-1] and ENDS[0] not in cut.response
    assert example_of({**row, "finish_reason": "stop"}, chat) == whole
    assert example_of({**row, "finish_reason": "length"}, chat) == cut
    assert whole.has_masks and not example_of({**row, "masks": False}, chat).has_masks


def test_a_prompt_is_what_training_has(chat):
    """The ids of a row that asks, whether it has an answer already or not."""
    row = {"prompt": "How many?"}
    answered = example_of(row | {"response": "12"}, chat)
    prompt = answered.tokens[: answered.prompt_length]
    for asked in (row, row | {"response": "12"}, row | {"response": None}):
        assert encode_prompt(asked, chat) == prompt
    # A template would drop all letters of a text; the others were a TypeError and a KeyError.
    for wrong in ("Hi", {"role": "user", "content": "Hi"}, [{"role": "user"}]):
        with pytest.raises(UserError, match="a list of"):
            chat.encode_prompt(wrong)


TURN = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Hello"}


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"text": "Hi"}, "neither messages nor a prompt"),
        ({"messages": "user: ?"}, "neither messages"),
        ({"prompt": ["?"], "response": "!"}, "content that is not text"),
        ({"prompt": "Hi", "response": 5}, "content that is not text"),
        ({"prompt": "Hi", "response": ""}, "an empty response"),
        ({"prompt": "Hi", "response": None}, "no assistant turn"),
        ({"messages": [TURN, {**REPLY, "function_calls": "f(1)"}, REPLY]}, "a tool call"),
        ({"messages": [TURN, {**REPLY, "tool_calls": [{}]}, TURN, REPLY]}, "a tool call"),
        ({"prompt": "Hi", "response": "half \ud83d"}, "not valid Unicode"),
        ({"prompt": "Hi", "response": "a <|mask|> here"}, "a mask or end-of-turn token"),
        ({"prompt": "Hi", "response": "<|endoftext|>"}, "a mask or end-of-turn token"),
        ({"messages": [{"content": "Hi"}, REPLY]}, "content that is not text, or no role"),
        ({"prompt": "Hi " * 600, "response": "Hello"}, "prompt of 512 .*--max-length"),
    ],
)
def test_unusable_rows_say_why(chat, row, reason):
    with pytest.raises(UserError, match=reason):
        example_of(row, chat)


# -------------------------------------------------------------------------------------- the stream


def test_the_stream_is_every_row_once_an_epoch(chat, tmp_path, monkeypatch):
    """Shuffled anew each epoch, held-out rows never among them, the same on every run."""
    monkeypatch.setattr(data, "NUM_HELD_OUT", 5)
    rows = write(tmp_path / "d.jsonl", [{"prompt": "?", "response": str(i)} for i in range(50)])
    stream = Dataset(rows, chat, ENDS, max_length=512, seed=0)
    with mock.patch.object(data.random, "Random", wraps=data.random.Random) as shuffles:
        epochs = [[e for _ in range(3) for e in stream.next_batch(15)] for _ in range(3)]
    assert shuffles.call_count == 3  # with two million rows each takes a second
    texts = [[chat.decode(e.response) for e in epoch] for epoch in epochs]
    held_out = {chat.decode(e.response) for e in stream.held_out}
    assert len(held_out) == 5
    assert all(sorted(t) == sorted(set(map(str, range(50))) - held_out) for t in texts)
    assert texts[0] != texts[1] != texts[2]
    for consumed in (0, 15, 45, 60):
        again = Dataset(rows, chat, ENDS, max_length=512, seed=0)
        again.consumed = consumed
        assert again.next_batch(15) == (epochs[0] + epochs[1])[consumed : consumed + 15]
    other = Dataset(rows, chat, ENDS, max_length=512, seed=1)
    assert {chat.decode(e.response) for e in other.held_out} != held_out


def test_a_file_without_a_usable_row_stops(chat, tmp_path):
    """Nobody looks for one forever."""
    rows = write(tmp_path / "bad.jsonl", [{"instruction": "Hi", "output": "Ho"}] * 8)
    with pytest.raises(UserError, match="8 neither messages .* the keys .*instruction"):
        Dataset(rows, chat, ENDS, max_length=512, seed=0)


@pytest.mark.parametrize(
    "edit, seconds",
    [
        (lambda text: text[:99], 0),
        (lambda text: text.replace("Mia", "Tom"), 1),  # all lines keep their lengths
        (lambda text: text.replace("{", "?"), 0),  # a file system's clock may be coarse
    ],
)
def test_a_file_that_changes_meanwhile_stops(chat, tmp_path, edit, seconds):
    """Its rows were skipped as if they were unusable, and the run looked for one forever. An edit
    that moved no line was not noticed, and trained on."""
    rows = write(tmp_path / "d.jsonl", [{"prompt": "Mia?", "response": str(i)} for i in range(50)])
    stream = Dataset(rows, chat, ENDS, max_length=512, seed=0)
    time = rows.path.stat().st_mtime_ns + seconds * 10**9
    rows.path.write_text(edit(rows.path.read_text()))
    os.utime(rows.path, ns=(time, time))
    with pytest.raises(UserError, match="d.jsonl: was changed since the start; put it back, or"):
        stream.next_batch(60)
