"""decode.py as a command: what is printed where, and one clear line for every bad input."""

import io
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import MARS, PROMPT, command, is_refused, process
from common import BASE, ROOT, save_model
from safetensors.torch import load_file, save_file

import decode
from model import load
from plumbing import arguments, errors, terminal
from plumbing.chat import Chat
from plumbing.errors import UserError

TEXT = "The 5 bags hold 5 * 12 = 60 plums. Then Mia has 60 - 17 = 43 plums left. "
TEXT += "So Mia has 43 plums now. The answer is 43.\n"

# ------------------------------------------------------------------------------- what is printed


def test_the_main_command_solves_a_problem():
    """As a person runs it, from another directory.

    Standard output has the text alone, so that a pipe gets nothing else; figures go to standard
    error. (With one prompt they once went to standard output, with many to standard error.)
    """
    words = [sys.executable, ROOT / "decode.py", "--prompt", PROMPT, "--tau", "0.8"]
    done = subprocess.run(words, cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout == TEXT
    note, statistics = done.stderr.splitlines()
    assert "toy/mars" in note
    assert re.fullmatch(
        r"51 tokens in 11 forwards: 4\.64 tokens per forward, \d+ tok/s", statistics
    )


def test_verify_says_what_tau_1_says():
    plain = command("decode", "--prompt", PROMPT, "--tau", 1)
    checked = command("decode", "--prompt", PROMPT, "--verify")
    assert plain.out == checked.out
    assert "in 51 forwards" in plain.err and "in 11 forwards" in checked.err


def test_only_whole_characters_are_shown():
    """Every token of this text is a byte or so: none may show up as half a character."""
    chat = Chat(BASE)
    text = "你好 🙂👩‍👩‍👧 é plums! ok"
    tokens = chat.encode(text)
    assert len(tokens) > 30
    for step in (1, 2, 3, 5):
        stream = terminal.TextStream(chat)
        pieces = [stream.add(tokens[i : i + step]) for i in range(0, len(tokens), step)]
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)
    stream = terminal.TextStream(chat)
    half = [stream.add([token]) for token in chat.encode("ok 🙂")[:-1]]
    assert "".join(half) == "ok "  # a text that ends within a character


def test_a_stray_byte_does_not_stop_the_stream():
    """A lone continuation byte is a real U+FFFD, shown as soon as something follows it."""
    chat = Chat(BASE)
    tokens = [chat.encode("🙂")[-1], *chat.encode(" ok")]
    stream = terminal.TextStream(chat)
    assert "".join(stream.add([token]) for token in tokens) == "\ufffd ok"


def test_shading():
    """--show shades the text of every forward by how many tokens came together."""
    done = command("decode", "--prompt", PROMPT, "--show", *MARS)
    _, legend = done.err.splitlines()
    pieces = re.findall(r"\033\[38;5;16;48;5;(\d+)m(.*?)\033\[0m", done.out)
    assert done.status == 0 and re.sub(r"\033\[[\d;]*m", "", done.out) == TEXT
    shaded = "".join(text for _, text in pieces)
    assert shaded.replace(" ", "") == TEXT.strip().replace(" ", "")
    keys = re.findall(r"\033\[38;5;16;48;5;(\d+)m(\d) \033\[0m", legend)
    shades = {blue for blue, _ in keys}
    assert [number for _, number in keys] == list("12345") and "or more" not in legend
    assert len(shades) == 5 and {blue for blue, _ in pieces} <= shades
    assert pieces[0] == (keys[0][0], "The")  # the first forward gave one token
    assert terminal.shade("a\nb", 9).count("\033[0m") == 2  # no colour runs to the end of a line
    assert terminal.legend(9).endswith("or more")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("shaded", [False, True])
def test_control_characters_are_shown_and_not_sent_to_the_terminal(monkeypatch, shaded):
    """An answer could clear the screen, change its colours, or set the title of the window."""
    chat = Chat(BASE)
    text = "a\x1b[2J\x07\r\x00\x7f\x9bb\tc\nd"
    steps = [(None, chat.encode(text))]
    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    terminal.print_answer(steps, chat, shaded)
    plain = re.sub(r"\033\[[\d;]*m", "", shown.getvalue())  # without our own colours
    assert plain == "a␛[2J␇␍␀␡\ufffdb\tc\nd\n"
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # a file gets the text as it is
    terminal.print_answer(steps, chat, shaded=False)
    assert sys.stdout.getvalue() == text + "\n"


def test_a_system_message_and_a_dtype_are_used(monkeypatch):
    seen = {}

    def spy(decoder, prompt):
        seen["text"] = chat.tokenizer.decode(prompt, skip_special_tokens=False)
        seen["model"] = decoder.model
        raise UserError("enough")

    chat = Chat(BASE)
    monkeypatch.setattr(decode.Decoder, "add", spy)
    words = ("--system", "Be brief.", "--dtype", "bfloat16")
    assert is_refused(command("decode", *MARS, "--prompt", PROMPT, *words), "enough")
    assert "<|im_start|>system\nBe brief.<|im_end|>" in seen["text"] and PROMPT in seen["text"]
    assert seen["model"].dtype == torch.bfloat16


# ---------------------------------------------------------------------------------- how it ends


def test_interrupting_keeps_the_text_so_far(monkeypatch):
    """Ctrl-C: the text and its statistics stay, no traceback, exit status 130."""
    step = decode.Decoder.step
    calls = itertools.count()

    def interrupted(self):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(decode.Decoder, "step", interrupted)
    done = command("decode", "--prompt", PROMPT, "--tau", 0.8)
    assert done.status == 130 and done.out.startswith("The 5 bags")
    assert "in 3 forwards" in done.err and "Traceback" not in done.err


@pytest.mark.parametrize(
    "error, status, message",
    [
        (MemoryError(), 2, "error: out of memory: use smaller batches"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), 2, "out of memory"),
        (OSError(28, "No space left on device"), 2, "error: No space left on device"),
        (OSError(2, "No such file or directory", "x"), 2, "error: x: No such file or directory"),
        (UserError("what to do"), 2, "error: what to do"),
        (UserError("tensor a\nb\x1b[2J: surplus"), 2, "error: tensor a␊b␛[2J: surplus"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_how_a_script_ends(capsys, error, status, message):
    def main():
        raise error

    with pytest.raises(SystemExit) as stop:
        errors.run_main(main)
    err = capsys.readouterr().err
    assert stop.value.code == status and message in err and err.count("\n") <= 1


def test_a_bug_of_ours_keeps_its_traceback():
    def main():
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        errors.run_main(main)


def test_a_reader_that_goes_away():
    """`decode.py | head -c 3`: no traceback."""
    done = process("decode.py", "--prompt", PROMPT, redirect="| head -c 3")
    assert done.out == "The" and "Traceback" not in done.err, done.err


@pytest.mark.parametrize("redirect", [">&-", "<&-", "2>&-"])
def test_a_closed_stream(redirect):
    """`>&-` ended in "AttributeError: 'NoneType' object has no attribute 'flush'"."""
    done = process("decode.py", "--prompt", PROMPT, "--tau", "0.8", redirect=redirect)
    assert done.status == 0 and "Traceback" not in done.err, done.err
    assert done.out == ("" if redirect == ">&-" else TEXT)


def test_a_terminal_that_lacks_a_character(tmp_path):
    """An answer outside of the terminal's encoding was a UnicodeEncodeError; now it has "?"s."""
    torch.manual_seed(0)
    model, chat = load(str(ROOT / "toy/mars"))
    for weight in model.parameters():
        if weight.dim() == 2:  # such a model answers with any bytes
            weight.data = 0.3 * torch.randn_like(weight)
    save_model(model, chat, tmp_path)
    words = ("decode.py", "--prompt", PROMPT, "--model", tmp_path, "--max-new", 20)
    done = process(*words, PYTHONIOENCODING="utf-8")
    assert "\ufffd" in done.out  # the character for a byte that is none
    done = process(*words, PYTHONIOENCODING="cp1252")
    assert done.status == 0 and "?" in done.out and "Traceback" not in done.err, done.err


# -------------------------------------------------------------------------------------- bad input


def test_compiling_without_a_compiler(tmp_path):
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    words = ("decode.py", *MARS, "--prompt", PROMPT, "--device", "cpu", "--compile")
    done = process(*words, CXX="/nonexistent", **cache)
    assert done.status == 2 and "Traceback" not in done.err
    assert done.err.endswith(
        "error: --compile needs a C++ compiler: install one, or leave it out\n"
    )


@pytest.fixture
def broken(tmp_path):
    """A copy of the toy checkpoint to break."""
    shutil.copytree(ROOT / "toy/mars", tmp_path / "broken")
    return tmp_path / "broken"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def set_config(directory: Path, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (directory / "generation_config.json").unlink()


BREAKAGES = {
    "config.json damaged": (
        lambda d: (d / "config.json").write_text("{"),
        "config.json: cannot be read",
    ),
    "config.json missing": (lambda d: (d / "config.json").unlink(), "config.json: no such file"),
    "tokenizer missing": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json: missing"),
    "tokenizer damaged": (lambda d: truncate(d / "tokenizer.json"), "tokenizer.json: missing or"),
}


@pytest.mark.parametrize("how", BREAKAGES)
def test_broken_checkpoints(broken, how):
    breakage, message = BREAKAGES[how]
    breakage(broken)
    assert is_refused(command("decode", "--prompt", PROMPT, "--model", broken), message)


def test_an_empty_chat_template(broken):
    """Was "a prompt must be token ids below 640, at least one", which names nothing to mend."""
    (broken / "chat_template.jinja").write_text("")
    done = command("decode", "--prompt", PROMPT, "--model", broken)
    assert is_refused(done, "chat template")


@pytest.mark.parametrize("words", [["--tau", 0.5], ["--tau", 1], ["--verify"]])
@pytest.mark.parametrize("name", ["embed_tokens", "layers.2.mlp.down_proj", "norm"])
def test_weights_that_are_not_numbers(broken, name, words):
    """NaN weights gave an empty answer and exit status 0."""
    file = broken / "model.safetensors"
    weights = load_file(file)
    weights[f"model.{name}.weight"][-1] = float("nan")
    save_file(weights, file)
    done = command("decode", "--prompt", PROMPT, "--model", broken, *words)
    assert is_refused(done, "NaN")


@pytest.mark.parametrize(
    "words, message",
    [
        (("--model", "no/such/place"), "'no/such/place': no such directory"),
        (("--model", ""), "'': no such directory"),
        (("--tau", "1.5"), "tau 1.5: must be between 0 and 1"),
        (("--tau", "low"), "--tau: must be a number, not 'low'"),
        (("--metric", "luck"), "--metric: invalid choice: 'luck'"),
        (("--block", "0"), "--block: must be at least 1, not 0"),
        (("--block", 5000), "5000"),
        (("--block-cache", 0), "--block-cache: must be at least 1, not 0"),
        (("--verify", "--block-cache", 8), "--verify and --block-cache cannot be combined"),
        (("--verify", "--tau", 0.9), "--verify takes no --tau"),
        (("--max-new", "5000"), "exceed the model's 2048 positions"),
        (("--prompt", "plums " * 3000), "exceed the model's 2048 positions"),
        (("--prompt", "  "), "--prompt is empty"),
        (("--prompt", "half \ud83d"), "not valid Unicode"),
        (("--temperature", "-1"), "--temperature: must be at least 0, not -1"),
        (("--temperature", "inf"), "--temperature: must be below 1e+30"),
        (("--device", "cuda:99"), "--device cuda:99: this machine has "),
        (("--device", "abacus"), "--device abacus: this machine has "),
        # An option was once named as the library names it, or a range was not stated:
        (("--max-new", "0"), "--max-new: must be at least 1, not 0"),
        (("--seed", "-1"), "--seed: must be at least 0, not -1"),
        (("--seed", 2**70), "--seed: must be below 4.61169e+18, not 1180591620717411303424"),
    ],
)
def test_bad_options(words, message):
    assert is_refused(command("decode", *MARS, "--prompt", PROMPT, *words), message)


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "the following arguments are required: --prompt"),
        (("--prompt",), "--prompt: expected one argument"),
        (("--prompt", PROMPT, "--taux", 1), "unrecognized arguments: --taux 1"),
        (("--prompt", PROMPT, "--dtype", "int8"), "--dtype: invalid choice: 'int8'"),
    ],
)
def test_wrong_words_are_told_in_one_line(words, message):
    """argparse printed its whole usage before the line."""
    assert is_refused(command("decode", *words), message)


def test_the_first_of_one_cpu():
    """--device cpu:0 was refused."""
    done = command("decode", *MARS, "--prompt", PROMPT, "--tau", 0.8, "--device", "cpu:0")
    assert done.status == 0 and done.out == TEXT


def test_too_little_memory_says_what_lowers_it(broken):
    set_config(broken, max_position_embeddings=2**31)
    words = ("--prompt", PROMPT, "--model", broken, "--max-new", 2 * 10**9)
    done = process("decode.py", *words)
    assert is_refused(done, "out of memory: use a smaller --max-new or a shorter prompt")


@pytest.mark.parametrize(
    "device, dtype, expected",
    [
        ("auto", None, ("cuda:0", "bfloat16")),
        ("cuda", "float32", ("cuda:0", "float32")),
        ("cuda:1", None, ("cuda:1", "bfloat16")),
        ("cpu", None, ("cpu", "float32")),
        ("cpu:0", "bfloat16", ("cpu", "bfloat16")),
        ("mps:0", None, ("mps", "float32")),
    ],
)
def test_the_device_and_dtype_that_are_meant(monkeypatch, device, dtype, expected):
    available = ["cuda:0", "cuda:1", "mps", "cpu"]
    monkeypatch.setattr(arguments, "available_devices", lambda: available)
    found = arguments.find_device(device, dtype)
    assert found == (torch.device(expected[0]), getattr(torch, expected[1]))
