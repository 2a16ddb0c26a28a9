"""decode.py as a command: what is printed where, and how it ends."""

import io
import itertools
import random
import re
import shutil
import subprocess
import sys
from unittest import mock

import pytest
import torch
from commands import MARS, PROMPT, command, interrupt, is_refused, process
from common import BASE, ROOT, cases

import decode
from model import load
from plumbing import arguments, errors, terminal
from plumbing.chat import Chat
from plumbing.errors import UserError


@pytest.fixture(scope="module")
def text():
    """What the bundled model says at tau 0.8, and a line's end: by `naive`."""
    model, chat = load(str(ROOT / "toy/mars"))
    prompt = chat.encode(chat.prompt([{"role": "user", "content": PROMPT}]))
    return chat.decode(decode.naive(model, prompt, tau=0.8, block=4, max_new=256)) + "\n"


# ------------------------------------------------------------------------------- what is printed


def test_the_main_command_solves_a_problem(text):
    """As a person runs it, from another directory.

    Standard output has the text alone, so that a pipe gets nothing else; figures go to standard
    error.
    """
    words = [sys.executable, ROOT / "decode.py", "--prompt", PROMPT, "--tau", "0.8"]
    done = subprocess.run(words, cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout == text and text.endswith("The answer is 43.\n")
    note, statistics = done.stderr.splitlines()
    assert "toy/mars" in note
    pattern = r"(\d+) tokens in (\d+) forwards: (\S+) tokens per forward, \d+ tok/s"
    num_tokens, num_forwards, per_forward = re.fullmatch(pattern, statistics).groups()
    assert per_forward == f"{int(num_tokens) / int(num_forwards):.2f}" and float(per_forward) > 2


def test_text_as_it_comes_is_the_text():
    """In whole characters, however many tokens each has."""
    chat = Chat(BASE)
    for seed in cases(100, 10000):
        rng = random.Random(seed)
        stream = terminal.TextStream(chat)
        words = [chat.encode(word) for word in ("你", "🙂👩‍👩‍👧", " é", "plums")]
        tokens = sum(rng.choices([[0], [1], [2], *words], k=40), [])  # 0 has no text
        shown = ""
        while tokens:
            count = rng.randint(1, 5)
            new = stream.add(tokens[:count])
            assert "\ufffd" not in new
            shown += new
            tokens = tokens[count:]
        assert shown == chat.decode(stream.tokens)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_shading(monkeypatch, text):
    """On a terminal the text of every forward is shaded by how many tokens came together."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("io.StringIO", Terminal)
    done = command("decode", "--prompt", PROMPT, "--tau", 0.8, *MARS)
    _, legend = done.err.splitlines()
    pieces = re.findall(r"\033\[38;5;16;48;5;(\d+)m(.*?)\033\[0m", done.out)
    assert done.status == 0 and re.sub(r"\033\[[\d;]*m", "", done.out) == text
    shaded = "".join(piece for _, piece in pieces)
    assert shaded.replace(" ", "") == text.strip().replace(" ", "")
    keys = re.findall(r"\033\[38;5;16;48;5;(\d+)m(\d) \033\[0m", legend)
    shades = {blue for blue, _ in keys}
    assert [number for _, number in keys] == list("123456") and legend.endswith("or more")
    assert len(shades) == 6 and {blue for blue, _ in pieces} <= shades
    assert terminal.shade("a\nb", 9).count("\033[0m") == 2  # no colour runs to the end of a line
    monkeypatch.setenv("NO_COLOR", "1")
    assert command("decode", "--prompt", PROMPT, "--tau", 0.8, *MARS).out == text


# ---------------------------------------------------------------------------------- how it ends


def test_a_model_that_has_not_learnt_masks_says_so():
    """With a tau that is not AR's. It asked for tau < 1 alone; for entropy 0 is AR, 2 is not."""
    words = ["--prompt", PROMPT, "--max-new", 6, "--model", ROOT / "toy/sft"]
    warning = "was not trained with masks: what this tau accepts is garbage"
    for others in ("--tau 0.8", "--metric entropy --tau 2"):
        assert warning in command("decode", *words, *others.split()).err
    for others in ("", "--tau 1", "--tau 0.8 --block 4", "--metric entropy --tau 0"):
        assert warning not in command("decode", *words, *others.split()).err


def test_a_model_without_a_chat_template_says_so(tmp_path):
    """A newcomer's base model went on and on: nothing said that it had learnt no chat."""
    shutil.copytree(ROOT / "toy/sft", tmp_path / "base")
    words = ["--prompt", PROMPT, "--max-new", 6, "--model", tmp_path / "base"]
    done = command("decode", *words)
    assert "chat template" not in done.err and done.err.endswith("tok/s, cut by --max-new\n")
    for name in ("chat_template.jinja", "tokenizer_config.json"):  # a template may be in either
        (tmp_path / "base" / name).unlink()
    assert "base: has no chat template, so it may not" in command("decode", *words).err


def test_interrupting_keeps_the_text_so_far(monkeypatch, text):
    """Ctrl-C: the text and its statistics stay, no traceback, exit status 130."""
    steps = itertools.count()
    interrupt(monkeypatch, when=lambda _: next(steps) == 3)
    done = command("decode", "--prompt", PROMPT, "--tau", 0.8)
    assert done.status == 130 and len(done.out) > 3 and text.startswith(done.out.strip())
    assert "in 3 forwards" in done.err and "Traceback" not in done.err


@pytest.mark.parametrize(
    "error, message",
    [
        (MemoryError(), "error: out of memory: use smaller batches"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "out of memory"),
        (UserError("tensor a\nb: surplus"), "error: tensor a b: surplus"),
    ],
)
def test_errors_are_one_line(monkeypatch, error, message):
    monkeypatch.setattr(decode, "main", mock.Mock(side_effect=error))
    assert is_refused(command("decode"), message)


def test_a_bug_of_ours_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="shape mismatch"):
        errors.run_main(mock.Mock(side_effect=RuntimeError("shape mismatch")))


def test_a_reader_that_goes_away():
    done = process("decode.py", "--prompt", PROMPT, "--tau", "0.8", redirect="| head -c 3")
    assert done.status == 0 and "Traceback" not in done.err and done.out == "The"


# ------------------------------------------------------------------------------------ the device


@pytest.mark.parametrize(
    "device, dtype, expected",
    [
        ("cuda:1", None, torch.bfloat16),
        ("cuda:1", "float32", torch.float32),
        ("mps", None, torch.float32),
        ("cpu", None, torch.float32),
        ("cpu", "auto", "auto"),  # load decides
    ],
)
def test_the_dtype_that_is_meant(monkeypatch, device, dtype, expected):
    monkeypatch.setattr(arguments, "available_device", torch.device)
    assert arguments.find_device(device, dtype) == (torch.device(device), expected)
