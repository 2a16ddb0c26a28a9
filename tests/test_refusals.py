"""What cannot run is refused: one clear line, exit status 2, and nothing is written."""

import json
import shlex
from math import inf, nan

import numpy as np
import pytest
from commands import MARS, PROMPT, command, is_refused
from common import ROOT, endless_model

from decode import generate
from plumbing.errors import UserError

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
    ("decode --mod toy/mars", "unrecognized arguments: --mod"),  # it was taken for --model
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
    # What they write in was looked at last, after a model was loaded, downloaded or converted.
    ("train --model no/such --out data.jsonl", "--out: data.jsonl is a file; choose another dir"),
    ("apps.low_rank --model no/such --out data.jsonl/x", "data.jsonl is a file; choose another"),
    ("apps.patch apply no/such no.gz data.jsonl", "data.jsonl is a file; choose another"),
    ("apps.from_gguf no.gguf data.jsonl/x", "data.jsonl is a file; choose another"),
    ("apps.smollm2 data.jsonl", "data.jsonl is a file; choose another"),
    (f"apps.smollm2 {ROOT / 'toy/mars'}", "toy/mars has a model; choose another directory"),
]


@pytest.mark.parametrize("line, message", BAD_OPTIONS, ids=[line[:40] for line, _ in BAD_OPTIONS])
def test_bad_options(line, message):
    name, *words = shlex.split(line)
    assert is_refused(command(name, *USUAL.get(name, ()), *words), message)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tau": nan}, "tau: expected float from 0 to 1, not nan"),
        ({"tau": "0.7"}, "tau: expected float from 0 to 1, not '0.7'"),
        ({"tau": inf, "metric": "entropy"}, "tau: expected float from 0 to 100, not inf"),
        ({"block": 1000}, "block: expected int from 1 to 999, not 1000"),
        ({"block": 2.5}, "block: expected int from 1 to 999, not 2.5"),
        ({"block_cache": 0, "tau": 0.9}, "block_cache: expected int from 1 "),
        ({"max_new": None}, "max_new: expected int from 1 "),
        ({"temperature": inf}, "temperature: expected float from 0 "),
        ({"seed": 2**70}, "seed: expected int from 0 "),
        ({"metric": None}, "metric: must be one of probability, margin, entropy"),
        ({"rows": 0}, "rows 0: must be at least 1"),
        ({"metric": "entropy"}, "need a --tau"),
        ({"block_cache": 4}, "need a --tau"),
        ({"guard": True}, "need a --tau"),
    ],
)
def test_bad_options_in_python(options, message):
    with pytest.raises(UserError, match=message):
        generate(endless_model(), [[2, 3]], **options)


@pytest.mark.parametrize("kind", [np.uint16, np.int8])
def test_ids_of_kinds_of_numpy_are_a_prompt(kind):
    [ours, theirs] = generate(endless_model(), [[3] * 20, [kind(3)] * 20], tau=0.5, max_new=10)
    assert theirs.tokens == ours.tokens


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
        ([{"messages": [SYSTEM]}], "row 1: an empty prompt"),
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
