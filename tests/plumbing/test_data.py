"""Training data: the rows of a JSONL file, what of them is trained, the stream of steps."""

import gzip
import os
from pathlib import Path

import pytest
from common import ROOT
from training import write

from plumbing.chat import Chat
from plumbing.data import Dataset, Unusable, encode
from plumbing.errors import UserError
from plumbing.jsonl import JsonlFile

EOS = 2  # of the toy tokenizer


@pytest.fixture(scope="module")
def chat():
    return Chat(ROOT / "toy/base")


# -------------------------------------------------------------------------------------- the file


def test_rows_are_found_by_byte_offset(tmp_path):
    """A BOM, characters of several bytes, blank lines, Windows line ends, no newline at the end."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes('\ufeff{"a": "né 🙂"}\n\n{"a": "2"}\r\n   \n{"a": "三"}'.encode())
    rows = JsonlFile(path)
    assert len(rows) == 3 and [rows[i]["a"] for i in (2, 0, 1)] == ["三", "né 🙂", "2"]


def test_a_pipe_is_refused():
    """As in `--data <(zcat rows.jsonl.gz)`: rows are read in any order."""
    reader, writer = os.pipe()
    os.close(writer)
    with pytest.raises(UserError, match="a pipe, but rows are read in any order"):
        JsonlFile(Path(f"/dev/fd/{reader}"))
    os.close(reader)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "empty"),
        (b'{"a": 1}\n{"a": \n', r"bad.jsonl:2: not JSON"),
        (b'{"a": 1}\n\n[1, 2]\n', r"bad.jsonl:3: not a JSON object"),
        (b"\xff\xfe{\x00", r"bad.jsonl:1: not JSON"),
        (b'{"a": "1"}\r\n{"a": "2', r"bad.jsonl:2: not JSON"),  # a download that broke off
        (gzip.compress(b"{}", mtime=0), "bad.jsonl:1: not JSON; .*compressed or parquet?"),
        (b"PAR1\x15\x04", "bad.jsonl:1: not JSON; .*unpack or convert it to JSONL"),
    ],
)
def test_bad_data_files(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        JsonlFile(path)


# -------------------------------------------------------------------------------------- a row


def test_the_last_assistant_turn_is_trained(chat):
    user, assistant = ({"role": r, "content": f"the {r}"} for r in ("user", "assistant"))
    last = {"role": "assistant", "content": "So Mia has 12 plums."}
    row = {"messages": [user, assistant, user, last, {"role": "user", "content": "Thanks!"}]}
    example = encode(row, chat, EOS, 512)
    assert chat.decode(example.response) == "So Mia has 12 plums."
    assert example.tokens[-1] == EOS
    assert example.tokens[: example.prompt_length] == chat.encode(
        chat.prompt([user, assistant, user])
    )
    answered = {"id": 1, "messages": [user, assistant, user], "response": last["content"]}
    assert encode(answered, chat, EOS, 512) == example  # as apps.batch writes it
    pair = encode({"prompt": "the user", "response": "So Mia has 12 plums."}, chat, EOS, 512)
    assert pair == encode({"messages": [user, last]}, chat, EOS, 512)


def test_a_cut_response_has_no_end_of_turn_target(chat):
    """Cut here, or where it was made (by max_new): or a model would learn to stop in a sentence."""
    row = {"prompt": "How many?", "response": "So Mia has 12 plums now."}
    whole = encode(row, chat, EOS, 512)
    cut = encode(row, chat, EOS, len(whole.tokens) - 1)
    assert whole.tokens[-1] == EOS
    assert cut.tokens == whole.tokens[:-1] and EOS not in cut.response
    assert encode({**row, "finish_reason": "stop"}, chat, EOS, 512) == whole
    assert encode({**row, "finish_reason": "length"}, chat, EOS, 512) == cut


def test_unusable_rows_say_why(chat):
    turn = {"role": "user", "content": "Hi"}
    reply = {"role": "assistant", "content": "Hello"}
    for row, reason in (
        ({"text": "Hi"}, "neither messages nor prompt and response"),
        ({"messages": "user: ?"}, "neither messages"),
        ({"prompt": ["?"], "response": "!"}, "content that is not text"),
        ({"prompt": "Hi", "response": None}, "content that is not text"),
        ({"prompt": "Hi", "response": ""}, "an empty response"),
        ({"messages": [turn]}, "no assistant turn"),
        ({"messages": [turn, {**reply, "function_calls": "f(1)"}, turn, reply]}, "a tool call"),
        ({"messages": [turn, {**reply, "tool_calls": [{}]}, turn, reply]}, "a tool call"),
        ({"prompt": "Hi", "response": "half \ud83d"}, "not valid Unicode"),
        ({"prompt": "Hi", "response": "a <|mask|> here"}, "a mask or end-of-turn token"),
        ({"prompt": "Hi", "response": "<|im_end|>"}, "a mask or end-of-turn token"),
        ({"messages": [{"content": "Hi"}, reply]}, "content that is not text, or no role"),
        ({"prompt": "Hi " * 600, "response": "Hello"}, "prompt of 512 tokens or more"),
    ):
        with pytest.raises(UserError, match=reason):
            encode(row, chat, EOS, 512)


def test_a_turn_that_the_template_drops(chat, tmp_path):
    """Qwen2.5's shows no role that it does not know, without a word; ChatML shows all of them."""
    template = ROOT / "tests/fixtures/qwen2.5/chat_template.jinja"
    (tmp_path / "chat_template.jinja").write_bytes(template.read_bytes())
    (tmp_path / "tokenizer.json").write_bytes((ROOT / "toy/base/tokenizer.json").read_bytes())
    tool = {"role": "environment", "content": " 12 "}
    row = {"messages": [{"role": "user", "content": "Hi"}, tool]}
    row["messages"].append({"role": "assistant", "content": "Hello"})
    assert "12" in chat.decode(encode(row, chat, EOS, 512).tokens)
    with pytest.raises(Unusable, match="a turn that the chat template drops"):
        encode(row, Chat(tmp_path), EOS, 512)


# -------------------------------------------------------------------------------------- the stream


def test_the_stream_is_every_row_once_an_epoch(chat, tmp_path):
    """Shuffled anew each epoch, held-out rows never among them, the same on every run."""
    rows = write(tmp_path / "d.jsonl", [{"prompt": "?", "response": str(i)} for i in range(50)])
    data = Dataset(rows, chat, EOS, phases=4, max_length=512, seed=0, num_held_out=5)
    stream = data.steps(15)
    epochs = [[e for _ in range(3) for e in next(stream).examples] for _ in range(3)]
    texts = [[chat.decode(e.response) for e in epoch] for epoch in epochs]
    held_out = {chat.decode(e.response) for e in data.held_out}
    assert len(held_out) == 5
    assert all(sorted(t) == sorted(set(map(str, range(50))) - held_out) for t in texts)
    assert texts[0] != texts[1] != texts[2]
    phases = [[e.phase for e in epoch] for epoch in epochs]
    assert phases[0] != phases[1] and {0, 1, 2, 3} == set(phases[0])
    for consumed in (0, 15, 45, 60):
        again = Dataset(rows, chat, EOS, phases=4, max_length=512, seed=0, num_held_out=5)
        step = next(again.steps(15, consumed))
        assert step.examples == (epochs[0] + epochs[1])[consumed : consumed + 15]
    other = Dataset(rows, chat, EOS, phases=4, max_length=512, seed=1, num_held_out=5)
    assert {chat.decode(e.response) for e in other.held_out} != held_out
    assert [e.phase for e in next(other.steps(45)).examples] != phases[0]


@pytest.mark.parametrize("count", [3, 40])
def test_a_file_without_a_usable_row_stops(chat, tmp_path, count):
    """Also if held-out rows are among the skipped ones: nobody looks for one forever."""
    rows = write(tmp_path / "d.jsonl", [{"text": "Hi"}] * count)
    with pytest.raises(UserError, match=f"no usable row: {count} neither messages"):
        Dataset(rows, chat, EOS, phases=1, max_length=512, seed=0, num_held_out=64)
