"""The command line: what is printed, whole characters, and one clear line for every bad input."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from common import ROOT

import decode
import train
from bench import burst, cost, exact, pareto, peers, speculative, speed
from model import Chat, Qwen2, UserError, load, run

PROMPT = "Mia has 5 bags with 12 plums in each. She gives away 17 plums. "
PROMPT += "How many plums does Mia have now?"


@pytest.fixture
def cli(monkeypatch, capsys):
    """cli(module, word, ...) -> (exit status, standard output, standard error)."""

    def call(module, *words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [module.__name__ + ".py", *map(str, words)])
        status = 0
        try:
            run(module.main)
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        return status, out, err

    return call


def test_the_main_command_solves_a_problem():
    """As a person runs it, from another directory: the answer, then its statistics."""
    command = [sys.executable, ROOT / "decode.py", "--prompt", PROMPT, "--tau", "0.8"]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True)
    answer, statistics = done.stdout.splitlines()
    assert answer.endswith("The answer is 43.") and "5 * 12 = 60" in answer
    words = statistics.split()
    assert words[1:3] == ["tokens", "in"] and words[4] == "forwards:"
    assert int(words[0]) / int(words[3]) == pytest.approx(float(words[5]), abs=0.005)
    assert float(words[5]) > 2 and words[-1] == "tok/s"
    assert done.stderr.count("\n") == 1 and "toy/mars" in done.stderr


def test_a_model_without_masks_is_told_so_once(cli):
    status, out, err = cli(decode, "--prompt", PROMPT, "--model", ROOT / "toy/sft", "--tau", 1)
    assert status == 0 and "43" in out and err == ""
    model = ("--model", ROOT / "toy/sft")
    status, out, err = cli(decode, "--prompt", PROMPT, *model, "--tau", 0.9999)
    assert status == 0 and err.count("names no block_size") == 1 and "--tau 1" in err
    status, out, err = cli(decode, "--prompt", PROMPT, *model, "--tau", 0.9999999, "--block", 4)
    assert (
        status == 0
        and err.count("accepts 1.0 tokens per forward; train it more or use --tau 1") == 1
    )


def test_only_whole_characters_are_shown():
    """Every token of this text is a byte or so: none may show up as half a character."""
    chat = Chat(ROOT / "toy/base")
    text = "你好 🙂👩‍👩‍👧 é plums! ok"
    tokens = chat.encode(text)
    assert len(tokens) > 30
    for step in (1, 2, 3, 5):
        stream = decode.TextStream(chat)
        pieces = [stream.add(tokens[i : i + step]) for i in range(0, len(tokens), step)]
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)
    stream = decode.TextStream(chat)
    half = [stream.add([token]) for token in chat.encode("ok 🙂")[:-1]]
    assert "".join(half) == "ok "  # a text that ends within a character


def test_a_stray_byte_does_not_stop_the_stream():
    """A lone continuation byte is a real U+FFFD, shown as soon as something follows it."""
    chat = Chat(ROOT / "toy/base")
    tokens = [chat.encode("🙂")[-1], *chat.encode(" ok")]
    stream = decode.TextStream(chat)
    assert "".join(stream.add([token]) for token in tokens) == "\ufffd ok"


def test_interrupting_keeps_the_text_so_far(cli, monkeypatch):
    """Ctrl-C: the text and its statistics stay, no traceback, exit status 130."""
    step, calls = decode.Decoder.step, itertools.count()

    def interrupted(self):
        if next(calls) == 5:  # the first two are not timed
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(decode.Decoder, "step", interrupted)
    status, out, err = cli(decode, "--prompt", PROMPT)
    assert status == 130 and out.startswith("The 5 bags") and "in 3 forwards" in out
    assert "Traceback" not in err


def test_prompts_from_a_file(cli, tmp_path):
    """Results in input order, whatever finishes first; a tau and an id of one's own."""
    problems = [json.loads(line) for line in (ROOT / "toy/test.jsonl").read_text().splitlines()[:7]]
    rows = [{"prompt": problem["prompt"]} for problem in problems]
    rows[1] |= {"id": "slow", "tau": 1}
    rows[2] = {"messages": [{"role": "user", "content": rows[2]["prompt"]}], "id": None}
    (tmp_path / "in.jsonl").write_text("\ufeff" + "\r\n\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "in.txt").write_text("\n".join(problem["prompt"] for problem in problems))
    given = ("--prompts", tmp_path / "in.jsonl", "--rows", 3)
    status, out, err = cli(decode, *given)
    results = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and "tokens per forward" in err
    assert [list(row) for row in results] == 7 * [["id", "text", "tokens", "forwards"]]
    assert [row["id"] for row in results] == [1, "slow", None, 7, 9, 11, 13]  # else the line
    for row, problem in zip(results, problems):
        assert row["text"].endswith(f"The answer is {problem['answer']}.")
    assert results[1]["tokens"] == results[1]["forwards"]
    assert all(row["tokens"] > 2 * row["forwards"] for row in results[2:])

    status, out, err = cli(decode, *given, "--out", tmp_path / "out.jsonl")
    written = (tmp_path / "out.jsonl").read_text().splitlines()
    assert status == 0 and out == "" and list(map(json.loads, written)) == results
    status, out, _ = cli(decode, "--prompts", tmp_path / "in.txt", "--block-cache", 8)
    assert [json.loads(line)["text"] for line in out.splitlines()] == [r["text"] for r in results]


def test_verify_says_what_tau_1_says(cli):
    plain, checked = (
        cli(decode, "--prompt", PROMPT, *words)[1].splitlines()
        for words in (("--tau", 1), ("--verify", "--tau", 0))
    )
    assert (
        plain[0] == checked[0] and "in 51 forwards" in plain[1] and "in 11 forwards" in checked[1]
    )
    one_line(cli(decode, "--prompt", PROMPT, "--verify", "--block-cache", 8), "no block_cache")


def test_every_prompt_of_a_file_has_its_own_draws(cli, tmp_path):
    (tmp_path / "in.txt").write_text(4 * (PROMPT + "\n"))
    given = ("--prompts", tmp_path / "in.txt", "--temperature", 1.5, "--max-new", 30)
    runs = [cli(decode, *given, "--rows", rows)[1] for rows in (1, 3)]
    assert (
        runs[0] == runs[1]
        and len({json.loads(line)["text"] for line in runs[0].split("\n")[:-1]}) > 1
    )


def test_tau_falls_while_prompts_wait(cli, tmp_path):
    """--tau 1 --tau-busy .5, one row: all but the last answer several tokens at a time."""
    (tmp_path / "in.txt").write_text(3 * (PROMPT + "\n"))
    given = ("--prompts", tmp_path / "in.txt", "--rows", 1, "--tau", 1, "--tau-busy", 0.5)
    status, out, _ = cli(decode, *given)
    *busy, calm = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and calm["tokens"] == calm["forwards"]
    assert all(row["tokens"] > 3 * row["forwards"] for row in busy)


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "in: empty; expected a prompt per line, or JSONL"),
        (" \n\n", "in: empty; expected a prompt per line, or JSONL"),
        (PROMPT + "\n{not json}", "in:2: not a usable prompt (Expecting property name"),
        ('{"question": "?"}', "in:1: not a usable prompt (neither a prompt nor messages of text)"),
        ('{"prompt": null}', "neither a prompt nor messages of text"),
        ('{"messages": [{"role": "user", "content": null}]}', "nor messages of text"),
        ('{"messages": "hello"}', "nor messages of text"),
        ('{"messages": 7}', "in:1: not a usable prompt ("),
        ('{"messages": [{"role": "user"}]}', "nor messages of text"),
        ('{"prompt": "?", "tau": 2}', "in:1: not a usable prompt (tau 2.0: must be between 0"),
        ('{"prompt": "?", "tau": "low"}', "in:1: not a usable prompt (could not convert"),
        ("?\n" + 3000 * "plums ", "in:2: not a usable prompt (a prompt of 3"),
        (b"caf\xe9", "in:0: not a usable prompt ('utf-8' codec"),
        (" {} ", "neither a prompt nor messages of text"),
        ('{"prompt": ' + "[" * 100_000, "in:1: not a usable prompt ("),
        (None, "No such file or directory"),
    ],
)
def test_bad_prompt_files(cli, tmp_path, content, message):
    """An error in any line comes before the first answer, and before --out is touched."""
    if content is not None:
        path = tmp_path / "in"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    model = ("--model", ROOT / "toy/mars", "--out", tmp_path / "out")
    one_line(cli(decode, *model, "--prompts", tmp_path / "in"), message)
    assert not (tmp_path / "out").exists()


def test_a_conversation(cli, monkeypatch):
    """/tau acts at once, a bad one changes nothing, /reset forgets, an interrupted answer stays."""
    prompts, positions, step = [], [], decode.Decoder.step
    lines = [PROMPT, "/tau 1", "And now?", "/tau 7", "/tau x", "/nonsense", "", "/reset", PROMPT]
    lines.insert(5, KeyboardInterrupt())  # of a half-typed line
    typed = iter(lines)

    def spy(self):
        news = step(self)
        for answer, _ in news:
            if answer.forwards == 1:
                prompts.append(answer.ids[: -len(answer.tokens)])
                positions.append(answer.positions[0])
        return news

    def prompt(_):
        line = next(typed, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr(decode.Decoder, "step", spy)
    monkeypatch.setattr("builtins.input", prompt)
    status, out, err = cli(decode, "--chat", "--tau", 0.8, "--model", ROOT / "toy/mars")
    turns = [line for line in out.splitlines() if "tokens in" in line]
    assert status == 0 and len(turns) == 3
    assert "3.40 tokens per forward" in turns[0] and " 1.00 tokens per forward" in turns[1]
    assert out.count("The answer is 43.") == 2  # again after /reset
    assert prompts[2] == prompts[0] and prompts[1][: len(prompts[0])] == prompts[0]
    assert positions[0] == len(prompts[0]) + 4  # all of it, and the masks
    assert positions[1] < 20 and positions[2] == 1  # the rest was in the cache: only what is new
    assert (
        "error: tau 7.0: must be between 0 and 1" in err
        and err.count("error: ") == 3
        and "/nonsense: there are" in err
    )


def test_every_turn_has_its_own_draws(cli, monkeypatch):
    typed = iter([PROMPT, "/reset", PROMPT, EOFError()])

    def prompt(_):
        line = next(typed)
        if isinstance(line, EOFError):
            raise line
        return line

    monkeypatch.setattr("builtins.input", prompt)
    status, out, _ = cli(decode, "--chat", "--temperature", 1.5, "--max-new", 30)
    first, _, second, _ = out.strip().splitlines()
    assert status == 0 and first != second


@pytest.mark.parametrize("name", ["commonprefix", "rewind"])
def test_interrupting_before_the_first_forward(name, monkeypatch):
    """Ctrl-C may come between any two lines: the row must not claim keys that it does not have,
    and the answer must not wait for ever (both happened)."""
    model, chat = load(str(ROOT / "toy/mars"))
    options = decode.Options(tau=0.8, max_new=60)
    prompts = [
        chat.encode(chat.prompt([{"role": "user", "content": text}])) for text in ("", PROMPT)
    ]
    decoder = decode.Decoder(model, [], options, 1, longest=200)
    decode.say(decoder, chat, decode.Answer(prompts[0], model, options), False)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(decoder.cache if name == "rewind" else decode, name, interrupt)
        decode.say(decoder, chat, decode.Answer(prompts[1], model, options), False)
    assert not decoder.waiting
    answer = decode.Answer(prompts[1], model, options)
    decode.say(decoder, chat, answer, False)
    assert answer.tokens == decode.generate(model, [prompts[1]], tau=0.8, max_new=60)[0].tokens


def test_interrupting_an_answer_keeps_the_conversation(cli, monkeypatch):
    step, calls, seen = decode.Decoder.step, itertools.count(), []
    typed = iter([PROMPT, PROMPT, "/reset"])

    def interrupted(self):
        if next(calls) == 3:
            raise KeyboardInterrupt
        seen.extend(self.waiting)
        return step(self)

    monkeypatch.setattr(decode.Decoder, "step", interrupted)
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    with pytest.raises(StopIteration):
        cli(decode, "--chat", "--model", ROOT / "toy/mars")
    first, second = seen
    assert first.done and first.forwards == 3 and second.forwards > 3
    assert second.ids[: len(first.ids)] == first.ids  # the half answer is part of it


def test_shading(cli):
    """Off unless asked for; --show alone means on a terminal, which this is not."""
    plain = cli(decode, "--prompt", PROMPT)[1].splitlines()[0]
    assert cli(decode, "--prompt", PROMPT, "--show")[1].splitlines()[0] == plain
    status, out, _ = cli(decode, "--prompt", PROMPT, "--show", "always")
    shaded, _, legend = out.splitlines()
    pieces = re.findall(r"\033\[38;5;16;48;5;(\d+)m(.*?)\033\[0m", shaded)
    assert status == 0 and re.sub(r"\033\[[\d;]*m", "", shaded) == plain
    assert "".join(text for _, text in pieces).replace(" ", "") == plain.replace(" ", "")
    keys = re.findall(r"\033\[38;5;16;48;5;(\d+)m(\d) \033\[0m", legend)
    assert [number for _, number in keys] == list("12345") and "or more" not in legend
    assert (
        len({blue for blue, _ in keys}) == 5 and {blue for blue, _ in pieces} <= dict(keys).keys()
    )
    assert pieces[0] == (keys[0][0], "The")  # the first forward gave one token
    assert decode.shade("a\nb", 9).count("\033[0m") == 2  # no colour runs to the end of a line


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "words, message",
    [
        (("--prompt", PROMPT, "--prompts", "x"), "not allowed with argument --prompt"),
        (("--prompt", PROMPT, "--out", "x"), "--out and --tau-busy go with --prompts"),
        (("--chat", "--tau-busy", 0.5), "--out and --tau-busy go with --prompts"),
        (("--prompts", "in", "--out", "./in"), "--out would overwrite --prompts"),
        (("--tau", 0.5), "one of the arguments --prompt --prompts --chat is required"),
        (("--prompts", "in", "--tau-busy", 7), "tau 7.0: must be between 0 and 1"),
        (("--prompts", "in", "--rows", 0), "rows 0: must be at least 1"),
        (("--prompts", "in", "--block-cache", 0), "block_cache 0: must be at least 1"),
        (("--prompts", "in", "--out", "no/such/place"), "No such file or directory"),
        (("--prompts", "/"), "Is a directory"),
    ],
)
def test_options_that_do_not_go_together(cli, tmp_path, monkeypatch, words, message):
    """And whatever was in --out is still there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_text(PROMPT)
    (tmp_path / "old").write_text("old")
    words = words if "--out" in words or "--chat" in words else (*words, "--out", "old")
    status, out, err = cli(decode, *words)
    assert status == 2 and out == "" and message in err and "Traceback" not in err
    assert (tmp_path / "old").read_text() == "old"


@pytest.fixture
def broken(tmp_path):
    """A copy of the toy checkpoint to break."""
    shutil.copytree(ROOT / "toy/mars", tmp_path / "broken")
    return tmp_path / "broken"


def truncate(path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def set_config(directory, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (directory / "generation_config.json").unlink()


BREAKAGES = {
    "another architecture": (
        lambda d: set_config(d, model_type="llama"),
        "'llama' is not supported",
    ),
    "sliding window": (
        lambda d: set_config(d, use_sliding_window=True, max_window_layers=0),
        "sliding-window attention True is not supported",
    ),
    "no end of turn": (
        lambda d: set_config(d, eos_token_id=None),
        "no tokens that could end a turn",
    ),
    "config.json damaged": (
        lambda d: truncate(d / "config.json") or (d / "config.json").write_text("{"),
        "config.json: cannot be read",
    ),
    "config.json missing": (lambda d: (d / "config.json").unlink(), "config.json: no such file"),
    "weights missing": (
        lambda d: (d / "model.safetensors").unlink(),
        "no such file (to start without",
    ),
    "weights truncated": (
        lambda d: truncate(d / "model.safetensors"),
        "model.safetensors: damaged",
    ),
    "tokenizer missing": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json: missing"),
    "tokenizer damaged": (lambda d: truncate(d / "tokenizer.json"), "tokenizer.json: missing or"),
    "template damaged": (
        lambda d: (d / "chat_template.jinja").write_text("{% if %}"),
        "chat template is damaged",
    ),
}


def one_line(result, message: str) -> None:
    status, out, err = result
    assert status == 2 and message in err, err
    assert err.startswith("error: ") and err.count("\n") == 1 and out == ""


@pytest.mark.parametrize("how", BREAKAGES)
def test_broken_checkpoints(cli, broken, how):
    breakage, message = BREAKAGES[how]
    breakage(broken)
    one_line(cli(decode, "--prompt", PROMPT, "--model", broken), message)


@pytest.mark.parametrize(
    "words, message",
    [
        (("--model", "no/such/place"), "'no/such/place': no such directory"),
        (("--tau", "1.5"), "tau 1.5: must be between 0 and 1"),
        (("--tau", "-0.5"), "tau -0.5: must be between 0 and 1"),
        (("--tau", "nan"), "tau nan"),
        (("--tau", "-1", "--metric", "entropy"), "at least 0 (nats)"),
        (("--block", "0"), "block 0: must be at least 1"),
        (("--max-new", "0"), "max_new 0: must be at least 1"),
        (("--max-new", "5000"), "exceed the model's 2048 positions"),
        (("--prompt", "plums " * 3000), "exceed the model's 2048 positions"),
        (("--prompt", "  "), "--prompt is empty"),
        (("--temperature", "-1"), "temperature -1.0: must be at least 0"),
        (("--device", "cuda:99"), "device 'cuda:99': not on this machine"),
        (("--device", "abacus"), "device 'abacus': not on this machine"),
        (("--temperature", "inf"), "out of range"),
        (("--seed", 2**70), "out of range"),
        (("--block", 5000), "or 5000 masks, exceed the model's 2048 positions"),
        (("--model", ""), "'': no such directory"),
        (("--prompt", "half \ud83d"), "not valid Unicode"),
    ],
)
def test_bad_decoding_options(cli, words, message):
    status, out, err = cli(decode, "--model", ROOT / "toy/mars", "--prompt", PROMPT, *words)
    one_line((status, out, err), message)


def test_too_little_memory_says_what_is_needed(cli, broken):
    set_config(broken, max_position_embeddings=10**13)
    result = cli(decode, "--prompt", PROMPT, "--model", broken, "--max-new", 10**12)
    one_line(result, "GiB, more than there is: use fewer rows or a smaller max_new")


@pytest.mark.parametrize(
    "error, status, message",
    [
        (MemoryError(), 2, "error: out of memory: use smaller batches"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), 2, "out of memory"),
        (OSError(28, "No space left on device"), 2, "error: [Errno 28] No space left on device"),
        (UserError("what to do"), 2, "error: what to do"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_how_a_script_ends(capsys, error, status, message):
    def main():
        raise error

    with pytest.raises(SystemExit) as stop:
        run(main)
    err = capsys.readouterr().err
    assert stop.value.code == status and message in err and err.count("\n") <= 1


def test_a_bug_of_ours_keeps_its_traceback():
    def main():
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        run(main)


def test_a_reader_that_goes_away():
    """`decode.py | head -c 3`: no traceback."""
    command = f"{sys.executable} {ROOT}/decode.py --prompt '{PROMPT}' | head -c 3"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout == "The" and "Traceback" not in done.stderr, done.stderr


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(5 * (json.dumps({"prompt": "?", "response": "12"}) + "\n"))
    return path


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "cannot be read (No such file or directory)"),
        ("", "empty; expected one JSON object per line"),
        ('{"prompt": "?", "response": "1"}\nnot json\n', "data.jsonl:2: not JSON"),
        ('["prompt"]\n', "data.jsonl:1: not a JSON object"),
        ('{"question": "?"}\n', "no usable row: 1 neither messages nor prompt and response"),
    ],
)
def test_bad_data(cli, tmp_path, data, content, message):
    """An error before training writes nothing, not even the directory of --out."""
    data.unlink() if content is None else data.write_text(content)
    result = cli(train, "--model", ROOT / "toy/sft", "--data", data, "--out", tmp_path / "out")
    status, _, err = result
    assert status == 2 and message in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words, message",
    [
        (("--block", 0), "--block 0: must be at least 1"),
        (("--batch", 0), "--batch 0: must be at least 1"),
        (("--steps", 0), "--steps 0: must be at least 1"),
        (("--lr", "nan"), "--lr nan: must be at least 0"),
        (("--clip", 0), "--clip 0.0: must be at least 1e-06"),
        (("--warmup", 1), "--warmup 1.0: must be at least 0 and below 1"),
        (("--held-out", -1), "--held-out -1: must be at least 0"),
        (("--block", 1000), "--block 1000: more than --max-length 512"),
        (("--seed", 10**30), "must be at least 0 and below 9.22337e+18"),
        (("--max-length", 4096), "--max-length 4096: the model has 2048 positions"),
        (("--model", "no/such/place"), "'no/such/place': no such directory"),
        (("--model", ROOT / "toy"), "config.json: no such file; is "),
        (("--data", "/"), "/: cannot be read (Is a directory)"),
    ],
)
def test_bad_training_options(cli, tmp_path, data, words, message):
    given = ("--model", ROOT / "toy/sft", "--data", data, "--out", tmp_path / "out", *words)
    one_line(cli(train, *given), message)
    assert not (tmp_path / "out").exists()


def test_an_output_directory_that_cannot_be(cli, tmp_path, data):
    (tmp_path / "out").write_text("a file is in the way")
    given = ("--model", ROOT / "toy/sft", "--data", data, "--out", tmp_path / "out")
    status, _, err = cli(train, *given)
    assert status == 2 and "cannot be written to (File exists)" in err
    assert (tmp_path / "out").read_text() == "a file is in the way"


def test_a_disk_that_fills_up_while_training(cli, tmp_path, data, monkeypatch):
    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("model.save_file", full)
    given = ("--model", ROOT / "toy/sft", "--data", data, "--out", tmp_path / "out", "--steps", 1)
    status, _, err = cli(train, *given, "--batch", 2)
    assert status == 2 and "error: " in err and "No space left on device" in err
    assert not list((tmp_path / "out").glob("model*"))


def test_a_disk_that_fills_up_while_a_checkpoint_is_written(cli, tmp_path, data, monkeypatch):
    """The third checkpoint: nothing of it is left, the two before it and the log are as they were,
    and with room again the run goes on from there."""
    write = train.replace

    def full(writers):
        if any("step-00000003" in str(path) for path in writers):
            raise OSError(28, "No space left on device")
        write(writers)

    monkeypatch.setattr(train, "replace", full)
    given = ["--model", ROOT / "toy/sft", "--data", data, "--out", tmp_path / "out", "--batch", 2]
    given += ["--steps", 5, "--save-every", 1]
    status, out, err = cli(train, *given)
    assert status == 2 and "step-00000003: not saved; those before it are intact" in err
    assert "No space left on device" in err and "Traceback" not in err
    assert "holds the model of step 2" in out
    names = [path.name for path in sorted((tmp_path / "out/checkpoints").iterdir())]
    assert names == ["step-00000001", "step-00000002"]
    monkeypatch.undo()
    status, out, err = cli(train, *given, "--resume")
    assert status == 0 and "resumed at step 2" in out


def test_a_damaged_checkpoint(cli, tmp_path, data):
    given = ["--model", ROOT / "toy/sft", "--data", data, "--out", tmp_path, "--batch", 2]
    given += ["--steps", 4, "--save-every", 1, "--resume"]
    status, out, err = cli(train, *given)
    assert status == 0 and "no checkpoint to go on from, so from the beginning" in out
    newest = tmp_path / "checkpoints/step-00000004"
    [part] = newest.glob("*.distcp")
    part.write_bytes(part.read_bytes()[:1000])
    status, out, err = cli(train, *given)
    message = "step-00000004: damaged; without it, the one before is taken"
    assert status == 2 and message in err and "Traceback" not in err
    (newest / "progress.json").write_text("{")
    status, out, err = cli(train, *given)
    assert status == 2 and "progress.json: cannot be read as JSON" in err
    (newest / "progress.json").write_text("{}")  # was once taken for no checkpoint at all
    status, out, err = cli(train, *given)
    assert status == 2 and message in err
    shutil.rmtree(newest)
    status, out, err = cli(train, *given)
    assert status == 0 and "resumed at step 3" in out
    for _ in range(2):  # steps that are made again were once logged twice, after the log was lost
        (tmp_path / "log.jsonl").write_text("")
        shutil.rmtree(newest)
        assert cli(train, *given)[0] == 0
        lines = (tmp_path / "log.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [4]


def test_a_note_in_the_log(cli, tmp_path, data):
    """Somebody's own line in log.jsonl was once a traceback."""
    given = ["--model", ROOT / "toy/sft", "--data", data, "--out", tmp_path, "--batch", 2]
    assert cli(train, *given, "--steps", 1)[0] == 0
    status, out, _ = cli(train, *given, "--steps", 1)
    assert status == 0 and "the finished run there is replaced" in out
    log = tmp_path / "log.jsonl"
    for note in ("looks good so far", '{"note": 1}', "[]"):
        log.write_text(log.read_text().splitlines()[0] + f"\n{note}\n")
        before = log.read_text()
        status, _, err = cli(train, *given, "--steps", 1, "--resume")
        assert status == 2 and "has a line that is not a step's; move it away" in err
        assert "Traceback" not in err and log.read_text() == before


def test_too_little_memory(cli, tmp_path, data, monkeypatch):
    """It says what a step needs, and does not begin if not even weights and optimizer have room."""
    given = ("--model", ROOT / "toy/sft", "--data", data, "--out", tmp_path / "out", "--steps", 1)
    monkeypatch.setattr(train, "free_memory", lambda device: 0.01)
    one_line(cli(train, *given), "GiB per process; 0.0 GiB are free: use more GPUs (torchrun) or a")
    monkeypatch.setattr(train, "free_memory", lambda device: 0.1)
    status, out, _ = cli(train, *given)
    assert status == 0 and "0.1 GiB are free; to need less: --checkpoint-layers, a smal" in out


def test_fewer_examples_than_processes(cli, tmp_path, data, monkeypatch):
    monkeypatch.setattr(train, "rank_and_size", lambda: (0, 4))
    given = ("--model", ROOT / "toy/sft", "--data", data, "--out", tmp_path / "out", "--batch", 3)
    one_line(cli(train, *given), "--batch 3: fewer examples than processes (4)")


@pytest.mark.parametrize("presses", [1, 2])
def test_interrupting_training_says_what_there_is(cli, tmp_path, data, monkeypatch, presses):
    """Ctrl-C in the third step finishes that step and saves it; pressed again, it does not wait."""
    step = train.Trainer.step

    def third_is_interrupted(self, *args):
        if self.steps == 2:
            for _ in range(presses):
                os.kill(os.getpid(), signal.SIGINT)
        return step(self, *args)

    monkeypatch.setattr(train.Trainer, "step", third_is_interrupted)
    given = ["--model", ROOT / "toy/sft", "--data", data, "--out", tmp_path / "out", "--batch", 2]
    given += ["--steps", 5, "--save-every", 2]
    status, out, err = cli(train, *given)
    done = 3 if presses == 1 else 2
    assert status == 130 and "Traceback" not in err
    assert f"{done} steps; {tmp_path}/out holds the model of step {done}" in out
    assert len((tmp_path / "out/log.jsonl").read_text().splitlines()) == done
    monkeypatch.undo()
    for words, message in (
        ((), "out: has an unfinished run; --resume it, or take another"),
        (("--resume", "--lr", 0.1), f"--lr 0.1: the run in {tmp_path}/out has 5e-06; so"),
    ):
        status, out, err = cli(train, *given, *words)
        assert status == 2 and message in err and err.count("\n") == 1
    status, out, err = cli(train, *given, "--resume")
    assert status == 0 and f"resumed at step {done}" in out and "5 steps; " in out
    assert cli(train, *given)[0] == 0  # what is finished is overwritten, as ever
    assert len((tmp_path / "out/log.jsonl").read_text().splitlines()) == 5


def test_the_table_over_tau(cli, data):
    options = ("--model", ROOT / "toy/mars", "--data", ROOT / "toy/test.jsonl", "--limit", 12)
    status, out, _ = cli(pareto, *options, "--tau", 1, 0.9)
    table = [line.split("|")[1:-1] for line in out.splitlines() if line.startswith("|")]
    (_, first, fast) = [[cell.strip() for cell in row] for row in table[:1] + table[2:]]
    assert status == 0 and first[0] == "1" and first[2] == "1.00" and float(fast[2]) > 2
    assert float(first[1].rstrip("%")) > 80
    one_line(cli(pareto, "--data", data), "row 1 lacks prompt or answer")
    one_line(cli(pareto, "--limit", 0), "--limit 0: must be at least 1")
    one_line(cli(pareto, "--tau", 1, 3), "tau 3.0: must be between 0 and 1")


def test_the_waiting_time_of_a_single_queue():
    """One row, one token at a time: start when the last one ended, but not before arriving."""
    model, chat = load(str(ROOT / "toy/mars"))
    problems = pareto.read_problems(ROOT / "toy/test.jsonl", 8)
    times = burst.arrivals(8, calm=60, burst=5, waves=2)
    done = burst.replay(model, pareto.encode(chat, problems), times, 1.0, rows=1)
    free = 0.0
    for answer, waited, (arrival, _) in zip(done.answers, done.waited, times):
        start = max(free, arrival)
        free = start + len(answer.tokens)
        assert waited == pytest.approx(start + 1 - arrival)
    assert done.queue[-1][0] == pytest.approx(free) and max(done.waited) > 40


def test_the_table_of_the_burst(cli, tmp_path):
    """What the knob is for: less waiting than a fixed 0.95, more right than a fixed 0.5."""
    pytest.importorskip("matplotlib", reason="the plot needs bench/requirements.txt")
    options = ("--limit", 60, "--waves", 1, "--burst", 1, "--plot", tmp_path / "burst.png")
    status, out, _ = cli(burst, *options)
    rows = [line.split("|")[1:-1] for line in out.splitlines() if line.startswith("| ")][1:]
    waits = {name.strip(): float(in_bursts) for name, _, _, in_bursts, *_ in rows}
    assert status == 0 and (tmp_path / "burst.png").stat().st_size > 10_000
    assert waits["1"] > waits["0.95"] > waits["0.95 to 0.5"] >= waits["0.5"]
    one_line(cli(burst, "--calm", 0), "--calm 0.0: must be from 0.001 to 1e+06")


def figures(rows: list[list[str]]) -> dict[str, list[float]]:
    """By name; of a cell "2.52 (2.41 to 2.63)" the first."""
    return {name.strip(): [float(c.split()[0].strip("%")) for c in cells] for name, *cells in rows}


def test_the_table_of_speeds(cli):
    options = ("--limit", 6, "--rows", 1, 4, "--rounds", 1, "--max-new", 24)
    status, out, _ = cli(speed, "--table5", *options)
    rows = [line.split("|")[1:-1] for line in out.splitlines() if line.startswith("| ")]
    assert status == 0 and len(rows) == 2 * 11
    table = {
        name.strip(): [float(cell.split()[0].strip("%")) for cell in cells]
        for name, *cells in rows[1:11]
    }
    assert table["AR"][1:3] == [1, 1] and table["MARS, cursor"][2] > 2
    assert table["MARS, B_cache 256"][2] == table["MARS, no cache"][2] == table["MARS, cursor"][2]
    assert table["MARS, B_cache 4"][2] < table["MARS, cursor"][2]
    one_line(cli(speed, "--table5", "--rounds", 0), "--rounds 0: must be at least 1")
    assert cli(speed)[0] == 2


def test_the_table_of_lossless_speeds(cli):
    options = ("--limit", 4, "--rows", 1, "--rounds", 1)
    status, out, _ = cli(speed, "--lossless", *options)
    rows = [line.split("|")[1:-1] for line in out.splitlines() if line.startswith("| ")]
    table = {
        name.strip(): [float(cell.split()[0].strip("%")) for cell in cells]
        for name, *cells in rows[1:]
    }
    assert status == 0 and table["AR"][2] == table["AR"][4] == 1
    assert table["verify, tau 0"][2] > table["tau 0.95"][2] > 2
    assert table["verify, tau 0"][4] == 25 > table["verify, tau 0.9"][4]


def test_exactness_is_counted(cli, monkeypatch):
    status, out, _ = cli(exact, "--limit", 12)
    assert status == 0 and out.startswith(
        "12 answers: 12 identical, 0 parted at a tie, 0 different"
    )
    plain = decode.generate

    def wrong(model, prompts, rows, verify=False, **options):
        answers = plain(model, prompts, rows, verify=verify, **options)
        answers[0].tokens[3] += verify
        return answers

    monkeypatch.setattr(exact, "generate", wrong)
    status, out, _ = cli(exact, "--limit", 3)
    assert status == 1 and "2 identical, 0 parted at a tie, 1 different" in out


def test_the_table_of_drafts(cli):
    """A draft that is checked changes nothing; what the masks add to it is more tokens."""
    status, out, _ = cli(speculative, "--limit", 6, "--rounds", 1)
    rows = [line.split("|")[1:-1] for line in out.splitlines() if line.startswith("| ")][1:]
    table = {
        name.strip(): [float(cell.split()[0].strip("%")) for cell in cells] for name, *cells in rows
    }
    assert status == 0 and table["AR"][:2] == [1, 1]
    for name in ("AR draft + AR", "MARS --verify"):
        assert table[name][4] == 100 and table[name][0] > 2
    assert table["AR draft + MARS"][0] > table["AR draft + AR"][0]
    one_line(cli(speculative, "--k", 0), "--k 0: must be at least 1")


def test_one_long_answer(cli):
    """In one row: once it was measured among seven empty ones, in a cache eight times as large."""
    status, out, _ = cli(speed, "--long", 300)
    assert "cache 0.4 MiB" in out  # 2 x 5 layers x 310 positions x 32 x 4 bytes
    rows = [line.split("|")[1:-1] for line in out.splitlines() if line.startswith("| ")][1:]
    assert status == 0 and len(rows) == 8 and int(rows[-1][0]) == 300


def test_a_system_message_and_a_type_are_used(cli, monkeypatch):
    seen = {}

    def spy(prompt, model, options):
        seen.update(text=chat.tokenizer.decode(prompt, skip_special_tokens=False), model=model)
        raise UserError("enough")

    chat = Chat(ROOT / "toy/base")
    monkeypatch.setattr(decode, "Answer", spy)
    words = ("--system", "Be brief.", "--dtype", "bfloat16")
    one_line(cli(decode, "--model", ROOT / "toy/mars", "--prompt", PROMPT, *words), "enough")
    assert "<|im_start|>system\nBe brief.<|im_end|>" in seen["text"] and PROMPT in seen["text"]
    assert seen["model"].model.norm.weight.dtype == torch.bfloat16


def test_the_readme_is_true(capsys, monkeypatch):
    """Its Python runs as printed, its links lead somewhere, its options exist."""
    readme = (ROOT / "README.md").read_text()
    monkeypatch.chdir(ROOT)
    [code] = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out in readme
    for link in re.findall(r"\]\(((?!http)[^)#]+)\)", readme):
        assert (ROOT / link).exists(), link
    for script in ("decode.py", "train.py"):
        source = (ROOT / script).read_text()
        for command in re.findall(rf"python {script} (.*)", readme):
            for option in re.findall(r"(?<!\S)--[a-z-]+", command):
                assert f'add("{option}"' in source, option


def test_help_names_every_option(cli):
    for module in (decode, train, pareto, burst, speed, exact, speculative, peers):
        status, out, _ = cli(module, "--help")
        assert status == 0 and "--model" in out and "default" in out
        assert os.environ.get("HOME", "?") not in out


def test_the_cost_bench(cli, monkeypatch):
    """Its tables; a process of its own for every peak takes too long for here."""
    monkeypatch.setattr(cost, "alone", lambda function, *args: function(*args))
    words = ("--batch", 2, "--length", 32, "--rounds", 1, "--shares", 0.5, "--device", "cpu")
    status, out, _ = cli(cost, *words)
    rows = [line.split("|") for line in out.splitlines() if line.startswith("|    50%")]
    assert status == 0 and [row[2].strip() for row in rows] == list(cost.FORMS)
    assert float(rows[0][4]) == 1 and all(float(cell) > 0 for row in rows for cell in row[3:5])
    status, out, _ = cli(cost, "--rows", 1000)
    assert status == 0 and out.startswith("1000 rows") and "MiB of memory" in out
    one_line(cli(cost, "--shares", 2), "--shares [2.0]: must be between 0.1 and 0.9")
    one_line(cli(cost, "--rows", 1), "--rows 1: must be at least 1000")


def test_the_memory_in_the_readme():
    readme = " ".join((ROOT / "README.md").read_text().split())
    for sentence, shape, words, processes in (
        ('"a step needs about {:.1f} GiB per process", for the 0.5B', "0.5B", [], 1),
        ("instead of keeping them ({:.1f} GiB)", "0.5B", ["--checkpoint-layers"], 1),
        ("on eight GPUs ({:.1f} GiB on each", "7B", ["--checkpoint-layers"], 8),
    ):
        args = train.parse_arguments(["--data", "x", *words])
        config = speed.config_of(shape)
        _, step = train.memory_needed(config, args, torch.bfloat16, processes)
        assert sentence.format(step) in readme


def test_the_real_weights_in_the_readme():
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if " B |" in line]
    for row, shape in zip(rows, speed.SHAPES, strict=True):
        config = speed.config_of(shape)
        with torch.device("meta"):
            count = sum(p.numel() for p in Qwen2(config).parameters())
        keys = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        cells = [shape, f"{count / 1e9:.2f} B", f"{2 * count / 2**30:.1f} GiB"]
        cells += [f"{4 * count / 2**30:.1f} GiB", f"{2 * keys * 2 * 1024 / 2**20:.0f} MiB"]
        assert [cell.strip() for cell in row.strip("|").split("|")] == cells


def test_the_table_of_peers(cli, monkeypatch):
    """transformers' own model around our tensors says the same, and no column is empty."""
    words = ("--limit", 3, "--rounds", 1, "--rows", 1, 3, "--max-new", 12, "--device", "cpu")
    status, out, err = cli(peers, *words)
    assert status == 0, err
    assert out.count("3 of 3 AR answers are the same, token for token") == 2
    rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| ours")]
    assert len(rows) == 6 and all(float(row[1]) > 0 and float(row[2]) > 0 for row in rows)
    monkeypatch.setitem(speed.SHAPES, "0.5B", (64, 128, 2, 4, 2, 640, True))
    status, out, err = cli(peers, "--shape", "0.5B", *words)
    assert status == 0 and "Projection, not a measurement" in out, err
    shares = [line.split("|")[-2] for line in out.splitlines() if line.startswith("| ours, AR")]
    assert len(shares) == 2 and all(share.strip().endswith("%") for share in shares)
