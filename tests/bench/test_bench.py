"""The benchmarks: the columns that do not depend on the machine, and one line for bad input."""

import json
import math
import os
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from commands import command, is_refused, number, tables
from common import ROOT, cases, endless_model, random_prompt, tiny_model
from safetensors.torch import load_file, save_file

from bench import common, likelihood, quality, speed
from decode import Decoder, Options, generate
from model import load
from plumbing.data import Example
from plumbing.sampling import dice

TOY = ("--model", ROOT / "toy/mars", "--data", ROOT / "toy/test.jsonl")


# ------------------------------------------------------------------------------- what they share


def test_a_table_is_aligned():
    lines = common.table(["name", "x"], [["a", "1.00"], ["longer", "10.00"]]).splitlines()
    assert lines == [
        "| name   |     x |",
        "|:-------|------:|",
        "| a      |  1.00 |",
        "| longer | 10.00 |",
    ]


def test_all_ways_run_in_turn():
    log = []
    ways = {name: lambda name=name: log.append(name) or name for name in ("a", "b")}
    results, seconds = common.in_turn(ways, 3, torch.device("cpu"))
    assert log == ["a", "b"] * 3 and results == {"a": "a", "b": "b"}
    assert all(len(times) == 3 for times in seconds.values())


def test_the_last_number_of_a_text():
    assert common.last_number("1,080 plums, then 3. The answer is -12.5.") == -12.5
    assert common.last_number("1,080 plums") == 1080
    assert common.last_number("none") is None


def test_answers_are_compared_as_numbers():
    """78.0, as pandas writes it, was another answer than 78."""
    _, chat = load(str(ROOT / "toy/mars"))
    answer = SimpleNamespace(tokens=chat.encode("So Mia has 78 plums."))
    for right, wanted in [("100.0%", 78.0), ("100.0%", "78"), ("0.0%", 78.5)]:
        assert common.accuracy(chat, [answer], [{"answer": wanted}]) == right


def test_problems_as_their_authors_publish_them():
    """GSM8K has a question and worked steps; IFEval's prompts have no answers."""
    [first, *_] = common.read_problems(ROOT / "bench/data/gsm8k/test.jsonl")
    assert first["prompt"].startswith("Janet") and common.last_number(first["answer"]) == 18
    prompts = common.read_problems(ROOT / "bench/data/ifeval/test.jsonl", limit=2)
    _, chat = load(str(ROOT / "toy/mars"))
    assert len(prompts) == 2 and common.accuracy(chat, [], prompts) == ""


def test_all_rows_have_an_answer_or_none(tmp_path):
    """The accuracy of some rows would pass for that of all."""
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b"}\n')
    message = "row 2: either all rows must have an answer or none"
    assert is_refused(command("bench.quality", "--data", file), message)


@pytest.mark.parametrize(
    "row, message",
    [
        ({"answer": "1"}, "row 1 lacks a prompt"),
        ({"prompt": 1, "answer": "1"}, "row 1 lacks a prompt"),
        ({"prompt": "a", "answer": "many"}, "row 1: the answer is not a number: many"),
        ({"prompt": "a", "answer": None}, "row 1: the answer is not a number: None"),
    ],
)
def test_rows_without_a_number_are_refused(tmp_path, row, message):
    """They were counted as wrong answers: a silent 0.0 %."""
    (tmp_path / "data.jsonl").write_text(json.dumps(row))
    assert is_refused(command("bench.quality", "--data", tmp_path / "data.jsonl"), message)


@pytest.mark.parametrize(
    "module, words, message",
    [
        ("quality", ("--limit", 0), "--limit: must be at least 1, not 0"),
        ("quality", ("--rows", 0), "--rows: must be at least 1, not 0"),
        ("quality", ("--tau", 1, 3), "tau 3.0: must be between 0 and 1"),
        ("quality", ("--verify", "--tau", 1), "--verify takes no --tau"),
        ("quality", ("--verify", "--block-cache", 4), "--verify and --block-cache cannot be"),
        ("quality", ("--data", "nowhere.jsonl"), "nowhere.jsonl: "),
        ("speed", (), "choose --lossless, --transformers, --widths or --long"),
        ("speed", ("--lossless", "--rounds", 0), "--rounds: must be at least 1, not 0"),
        ("speed", ("--long", 10), "--long: must be at least 100, not 10"),
        ("speed", ("--lossless", "--shape", "0.5B"), "--lossless needs a trained model"),
    ],
)
def test_bad_options(module, words, message):
    assert is_refused(command(f"bench.{module}", *words), message)


def test_an_optional_package_that_is_missing(monkeypatch):
    """One line, before a model is loaded."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = command("bench.speed", "--transformers")
    assert is_refused(done, "transformers is not installed: pip")


@pytest.mark.parametrize("module", ["quality", "speed"])
def test_help(module):
    status, out, _ = command(f"bench.{module}", "--help")
    assert status == 0 and "--model" in out and "default: " in out
    assert os.environ.get("HOME", "?") not in out


# ------------------------------------------------------------------------------------- quality


def test_the_table_over_tau():
    status, out, _ = command("bench.quality", *TOY, "--limit", 12, "--tau", 1, 0.9)
    [table] = tables(out)
    accuracy, nats, per_forward, positions, same, ties, different = table["tau 1"]
    assert status == 0 and number(accuracy) > 80
    assert (per_forward, positions) == ("1.00", "1.0")
    assert (same, ties, different) == ("12", "0", "0")
    assert float(table["tau 0.9"][2]) > 2
    assert 0 < float(nats) < 0.1


def test_nats_are_the_cross_entropy_of_transformers():
    """Of the answer's tokens alone, one token ahead; with its own padding and shift."""
    model, chat = load(str(ROOT / "toy/mars"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "toy/mars", dtype="float32")
    prompts = common.encode(chat, common.read_problems(ROOT / "toy/test.jsonl", 3))
    answers = generate(model, prompts, tau=0.5, max_new=30)
    total = 0.0
    for answer in answers:
        labels = [-100] * answer.prompt_length + answer.tokens  # -100: does not count
        loss = theirs(torch.tensor([answer.text]), labels=torch.tensor([labels])).loss
        total += loss.item() * len(answer.tokens)
    expected = total / sum(len(answer.tokens) for answer in answers)
    assert quality.nats_per_token(model, answers) == pytest.approx(expected, rel=1e-3)


def test_one_token_decoding_in_blocks_is_measured_as_such():
    _, out, _ = command("bench.quality", *TOY, "--limit", 3, "--tau", 1, "--block-cache", 8)
    [table] = tables(out)
    assert table["tau 1"][2] == "1.00" and float(table["tau 1"][3]) > 1


def test_verified_answers_are_those_of_tau_1():
    status, out, _ = command("bench.quality", *TOY, "--verify", "--limit", 12)
    [table] = tables(out)
    assert status == 0 and list(table) == ["tau 1", "verify"]
    assert table["tau 1"][2] == "1.00" and float(table["verify"][2]) > 2
    assert table["verify"][1] == table["tau 1"][1]  # the same text is as likely
    assert table["verify"][4:] == ["12", "0", "0"]
    words = ("--verify", "--limit", 12, "--temperature", 1, "--seed", 3)
    status, out, _ = command("bench.quality", *TOY, *words)
    assert status == 0 and tables(out)[0]["verify"][4:] == ["12", "0", "0"]


def test_the_gap_where_sampled_answers_part():
    """It is that of the scores that were compared: logits with the noise of the dice."""
    model, chat = load(str(ROOT / "toy/mars"), dtype=torch.float64)
    prompts = common.encode(chat, common.read_problems(ROOT / "toy/test.jsonl", 3))
    [*_, answer] = generate(model, prompts, temperature=1.5, tau=1, seed=7, max_new=20)
    for num_tokens in range(len(prompts[2]), len(answer.text)):
        text = torch.tensor([answer.text[:num_tokens]])
        logits = model.logits(model(text, torch.arange(num_tokens)[None], None)[0, -1:])[0]
        scores = logits + 1.5 * dice(7, 2, num_tokens, logits)
        best, second = scores.sort(descending=True).values[:2]
        assert scores.argmax() == answer.text[num_tokens]
        found = quality.gap_between_best(model, answer, num_tokens, 1.5, 7)
        assert found == pytest.approx((best - second).item())


@pytest.mark.parametrize(
    "dtype, tie, status, counts",
    [
        ("float32", quality.TIE, 1, ["2", "0", "1"]),
        ("bfloat16", quality.TIE, 0, ["2", "0", "1"]),
        ("float32", 100.0, 0, ["2", "1", "0"]),
    ],
)
def test_a_verified_answer_that_differs(monkeypatch, dtype, tie, status, counts):
    """It fails the command, unless it parted at a tie or bfloat16 may be the reason."""
    right = quality.generate

    def wrong(*args, verify, **options):
        answers = right(*args, verify=verify, **options)
        if verify:
            answers[0].text[answers[0].prompt_length + 3] += 1
        return answers

    monkeypatch.setattr(quality, "generate", wrong)
    monkeypatch.setattr(quality, "TIE", tie)
    words = ("--verify", "--limit", 3, "--dtype", dtype)
    found, out, _ = command("bench.quality", *TOY, *words)
    assert found == status and tables(out)[0]["verify"][4:] == counts
    assert "Where answers parted, the two best scores were at most" in out


# ---------------------------------------------------------------------------------------- speed


def test_the_table_of_lossless_speeds():
    options = ("--limit", 4, "--rows", 1, "--rounds", 1)
    status, out, _ = command("bench.speed", *TOY, "--lossless", *options)
    [table] = tables(out)
    per_forward = {name: number(cells[2]) for name, cells in table.items()}
    positions = {name: number(cells[3]) for name, cells in table.items()}
    assert status == 0 and per_forward["AR"] == positions["AR"] == 1
    assert per_forward["verify"] > per_forward["tau 0.95"] > 2
    assert per_forward["verify"] > per_forward["verify, groups 1"]
    assert 25 > positions["verify"] > positions["verify, groups 1"]
    for name, cells in table.items():
        if name.startswith("verify"):
            assert cells[8] == "100.0%", "the text of AR"
            shares = [float(share) for share in cells[5].split()]
            assert 1 >= shares[0] > shares[3] > 0.4
            median, high = map(float, cells[7].split(", "))
            assert 0 <= median < high


def test_how_many_guesses_held():
    """Two forwards: of three guesses two held; of one guess none did."""
    sequence = Decoder(endless_model(), Options(max_new=9), rows=1, longest=10).add([2])
    sequence.checked = [0, 3, 1]
    sequence.accepted = [1, 3, 1]
    assert speed.held_ahead([sequence]) == "0.50 1.00 0.00"


def test_the_gaps_between_tokens():
    """Of four tokens, two came together."""
    answer = speed.Answer([5, 6, 7, 8], moments=[0.0, 0.2, 0.2, 0.3], sequence=None)
    assert speed.gaps([answer]) == "100.0, 200.0"


def test_next_to_transformers(monkeypatch):
    """transformers' own model around our tensors says the same."""
    pytest.importorskip("transformers", reason="pip install -r bench/requirements.txt")
    words = ("--limit", 3, "--rounds", 1, "--rows", 1, 3, "--max-new", 12, "--device", "cpu")
    status, out, err = command("bench.speed", *TOY, "--transformers", *words)
    assert status == 0, err
    alone, batch = tables(out)
    assert alone.keys() - batch.keys() == {"prompt lookup", "ours, verify, no lookup"}
    assert len(batch) == 5
    assert number(batch["ours, verify, B 3"][-7]) < number(batch["ours, verify"][-7])  # positions
    assert alone["prompt lookup"][2] == alone["ours, AR"][3] == "1.00 (1.00 to 1.00)"
    for cells in [*alone.values(), *batch.values()]:
        assert number(cells[0]) > 0 and number(cells[-4]) > 0
        assert cells[-2] == "100.0%", "the text of transformers"
    monkeypatch.setitem(common.SHAPES, "0.5B", (64, 128, 2, 4, 2, 640, True))
    status, out, err = command("bench.speed", *TOY, "--transformers", "--shape", "0.5B", *words)
    assert status == 0, err
    assert [list(table) for table in tables(out)] == [
        ["transformers", "prompt lookup", "ours, AR"],
        ["transformers", "ours, AR"],
    ]


def test_the_table_of_widths():
    status, out, _ = command("bench.speed", *TOY, "--widths", "--rounds", 1)
    [table] = tables(out)
    assert status == 0 and list(table) == ["1", "5", "9", "25"]
    assert table["1"][1] == "1.00 (1.00 to 1.00)" and table["1"][2].endswith("%")


def test_one_long_answer():
    """In one row: once it was measured among seven empty ones, in a cache eight times as large."""
    status, out, _ = command("bench.speed", *TOY, "--long", 300)
    assert "cache 0.4 MiB" in out  # 2 x 5 layers x 310 positions x 32 x 4 bytes
    [table] = tables(out)
    assert status == 0 and len(table) == 8 and list(table)[-1] == "300"


def test_the_memory_of_a_long_answer_is_that_of_its_steps(monkeypatch):
    """Once it included what making the decoder takes for a moment: a copy of the largest matrix."""

    class Wasteful(speed.Decoder):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            torch.ones(2**26, dtype=torch.uint8)  # 64 MiB, freed at once

    monkeypatch.setattr(speed, "Decoder", Wasteful)
    status, out, _ = command("bench.speed", *TOY, "--long", 300, "--device", "cpu")
    [table] = tables(out)
    assert status == 0 and all(number(cells[-1]) < 64 for cells in table.values())


# ------------------------------------------------------------------------------------- likelihood


def test_likelihood_is_that_of_one_token_after_another():
    """Nats, greedy's choices and divergence, against a forward for every token of the answer."""
    for seed in cases(3, 30):
        rng = random.Random(seed)
        model = tiny_model(rng)
        base = tiny_model(rng)
        examples = []
        for _ in range(4):
            tokens = random_prompt(rng, rng.randint(3, 20))
            examples.append(Example(tokens, prompt=rng.randint(1, len(tokens) - 1)))
        found = likelihood.predict(model, examples, base)
        for example, nats, right, count, divergence in zip(examples, *found):
            expected_nats = 0.0
            expected_right = 0
            expected_divergence = 0.0
            for end in range(example.prompt, len(example.tokens)):
                odds = next_odds(model, example.tokens[:end])
                expected_nats -= math.log(odds[example.tokens[end]])
                expected_right += odds.index(max(odds)) == example.tokens[end]
                for p, q in zip(next_odds(base, example.tokens[:end]), odds):
                    expected_divergence += p * math.log(p / q) if p else 0
            assert nats == pytest.approx(expected_nats, abs=1e-5)
            assert (right, count) == (expected_right, example.targets)
            assert divergence == pytest.approx(expected_divergence, abs=1e-5)


@torch.no_grad()
def next_odds(model, text: list[int]) -> list[float]:
    hidden = model(torch.tensor([text]), torch.arange(len(text))[None], None)
    return model.logits(hidden[0, -1:])[0].softmax(-1).tolist()


def test_an_interval_of_likelihood_covers_the_truth():
    """In about 95 of 100 samples, with rows of unequal length."""
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        counts = rng.integers(5, 100, 150).astype(float)
        values = counts * (0.5 + rng.normal(0, 0.2, 150))
        mean, low, high = likelihood.interval(values, counts)
        assert mean == pytest.approx(values.sum() / counts.sum())
        inside += low < 0.5 < high
    assert 0.9 <= inside / 200 <= 0.99


def test_the_command_that_prints_likelihood(tmp_path):
    mars, sft = ROOT / "toy/mars", ROOT / "toy/sft"
    done = command("bench.likelihood", ROOT / "toy/test.jsonl", sft, mars, sft, "--limit", 5)
    [table] = tables(done.out)
    assert 0 < number(table[str(mars)][0]) < 0.2 and table[str(sft)][1].startswith("+0.000 (")
    assert number(table[str(sft)][2]) == 0 < number(table[str(mars)][2]) < 0.2
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}')
    message = "row 1: neither messages nor prompt and response"
    assert is_refused(command("bench.likelihood", tmp_path / "data.jsonl", mars), message)


def test_likelihood_refuses_another_vocabulary(tmp_path):
    """Qwen2.5's sizes have one tokenizer, and vocabularies padded to unequal sizes: this once
    ended in a traceback of unequal shapes."""
    wider = shutil.copytree(ROOT / "toy/sft", tmp_path / "wider")
    weights = load_file(wider / "model.safetensors")
    name = "model.embed_tokens.weight"
    weights[name] = torch.nn.functional.pad(weights[name], (0, 0, 0, 8))
    save_file(weights, wider / "model.safetensors", {"format": "pt"})
    config = json.loads((wider / "config.json").read_text())
    config["vocab_size"] += 8
    (wider / "config.json").write_text(json.dumps(config))
    done = command("bench.likelihood", ROOT / "toy/test.jsonl", ROOT / "toy/sft", wider)
    assert is_refused(done, f"{wider}: its vocabulary is not that of {ROOT / 'toy/sft'}")
