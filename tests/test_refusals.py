"""What cannot run is refused: one clear line, exit status 2, and nothing is written."""

import json
import shlex

import pytest
from commands import MARS, PROMPT, command, is_refused
from common import ROOT

USUAL = {
    "decode": (*MARS, "--prompt", PROMPT),
    "train": ("--model", ROOT / "toy/sft", "--data", "data.jsonl", "--out", "out"),
    "apps.low_rank": ("--data", "data.jsonl", "--out", "out"),
    "apps.trace": (*MARS, "--prompt", PROMPT),
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The current directory, with a row to train on; nothing may appear in it."""
    (tmp_path / "data.jsonl").write_text('{"prompt": "?", "response": "12 plums"}\n')
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert {path.name for path in tmp_path.iterdir()} - {"in", "model"} == {"data.jsonl"}


# The command and what is added to its usual options; the message.
BAD_OPTIONS = [
    ("decode --model no/such/place", "no/such/place: no such directory in "),
    ("decode --tau 1.5", "tau: expected float from 0 to 1, not 1.5"),
    ("decode --prompt ' '", "--prompt is empty"),
    (f"decode --prompt '{'plums ' * 3000}'", "new ones exceed the"),
    ("decode --device cuda:99", "device cuda:99: this machine has none"),
    ("train --block 1000", "--block: invalid int (1 to 999) value: '1000'"),
    ("train --lr nan", "--lr: invalid float (0 to 1000) value: 'nan'"),
    ("train --max-length 4096", "--max-length 4096: the model has 2048 positions"),
    (f"train --model {ROOT / 'toy'}", "toy/config.json: cannot be read; is "),
    # The data come first: a model may have to be downloaded.
    ("train --data x.jsonl --model no/such", "No such file or directory: 'x.jsonl'"),
    # It said, too, that training begins with random weights.
    (f"apps.low_rank --model {ROOT / 'toy/base'}", "toy/base/model.safetensors: missing"),
    ("apps.trace page.html --prompt ' '", "an empty prompt"),
]


@pytest.mark.parametrize("line, message", BAD_OPTIONS, ids=[line[:40] for line, _ in BAD_OPTIONS])
def test_bad_options(line, message):
    name, *words = shlex.split(line)
    assert is_refused(command(name, *USUAL[name], *words), message)


# ---------------------------------------------------------------------------- files of prompts

SYSTEM = {"role": "system", "content": "Be brief."}
REPLY = {"role": "assistant", "content": "Ho"}


@pytest.mark.parametrize(
    "content, message",
    [
        (b" \n\n", "in: empty; expected a prompt per line, or JSONL"),
        (b"?\n" + 3000 * b"plums ", "in:2: a prompt of 3"),
        (b'{"prompt": "?"}\n\n{not json}', "in:3: expected JSONL, lines like {"),
        (b'[\n{"prompt": "?"}\n]', "in: one JSON array"),
        (b"ok\n\ncaf\xe9\n", "in: cannot be read as text in UTF-8"),
        ({"prompt": "?", "tau": 2}, "in:2: tau: expected float from 0 to 1, not 2"),
    ],
)
def test_bad_files_of_prompts(here, content, message):
    """An error in any line comes before the first answer."""
    if isinstance(content, dict):
        content = b'{"prompt": "?"}\n' + json.dumps(content).encode()
    (here / "in").write_bytes(content)
    assert is_refused(command("apps.batch", *MARS, "--tau", 0.9, here / "in"), message)


@pytest.mark.parametrize(
    "rows, message",
    [
        ([{"messages": [REPLY]}], "row 1: the last message is the assistant's"),
        ([{"messages": [SYSTEM]}], "row 1: nothing that asks"),
        ([{"prompt": "a", "answer": "many"}], "row 1: the answer is not a number: many"),
        (
            [{"prompt": "a", "answer": "1"}, {"prompt": "b"}],
            "row 2: the answer is not a number: None",
        ),
        ([{"prompt": "a", "response": ""}], "row 1: an empty response"),
    ],
)
def test_problems_that_would_count_as_wrong_answers(here, rows, message):
    (here / "in").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert is_refused(command("bench.quality", *MARS, "--data", here / "in"), message)
