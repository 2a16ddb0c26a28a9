"""The benchmarks: the columns that do not depend on the machine."""

import io
import json
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from commands import command, number, tables, tables_of
from common import ROOT

from bench import common, quality, speed
from decode import generate
from model import load
from plumbing.chat import Chat

TOY = ("--model", ROOT / "toy/mars", "--data", ROOT / "toy/test.jsonl")


@pytest.fixture(scope="module")
def toy():
    return load(str(ROOT / "toy/mars"))


def toy_prompts(chat: Chat, count: int) -> list[list[int]]:
    return common.encode(chat, common.read_problems(ROOT / "toy/test.jsonl", count))


# ------------------------------------------------------------------------------- what they share


def test_the_last_number_of_an_answer_counts(toy):
    """Whether it is written as 78, 78.0 or 1,078."""
    assert common.last_number("1,080 plums, then 3. The answer is -12.5.") == -12.5
    assert common.last_number("1,080 plums") == 1080
    assert common.last_number("none") is None
    answer = SimpleNamespace(tokens=toy[1].encode("So Mia has 78 plums."))
    for right, wanted in [(True, 78.0), (True, "78"), (False, 78.5)]:
        assert common.are_right(toy[1], [answer], [{"answer": wanted}]) == [right]


def test_figures_by_hand():
    """Tokens over forwards, of all answers together; a mean with twice its error, nearly."""
    interval = common.mean_and_interval(np.array([0.0, 1, 1, 2] * 8))
    assert interval == pytest.approx((1, 1 - 1.96 / 8, 1 + 1.96 / 8))
    answers = [SimpleNamespace(tokens=[1] * 40, forwards=4)]
    answers.append(SimpleNamespace(tokens=[1] * 8, forwards=4))
    assert common.tokens_per_forward(answers) == 48 / 8


# ------------------------------------------------------------------------------------- quality


def test_nats_are_the_cross_entropy_of_transformers(toy):
    """Of the answer's tokens alone, one token ahead; with its own padding and shift."""
    model, chat = toy
    theirs = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "toy/mars", dtype="float32")
    for answer in generate(model, toy_prompts(chat, 3), tau=0.5, max_new=30):
        labels = [-100] * answer.prompt_length + answer.tokens  # -100: does not count
        expected = theirs(
            torch.tensor([answer.token_ids]), labels=torch.tensor([labels])
        ).loss.item()
        nats, _ = quality.predict(model, answer.token_ids, answer.prompt_length)
        assert nats.mean().item() == pytest.approx(expected, rel=1e-3)


def test_how_well_given_responses_are_predicted(toy):
    """Those that greedy decoding gave are greedy's choice."""
    model, chat = toy
    [problem] = common.read_problems(ROOT / "toy/test.jsonl", 1)
    [answer] = generate(model, common.encode(chat, [problem]), tau=1.0)
    row = problem | {"response": chat.decode(answer.tokens)}
    [given] = quality.given_responses(model, chat, [row])
    assert given.tokens == answer.token_ids
    other, _ = load(str(ROOT / "toy/mars"))
    other.model.norm.weight *= 0.5  # less sure
    nats = quality.predict(model, answer.token_ids, answer.prompt_length)[0].mean()
    more = quality.predict(other, answer.token_ids, answer.prompt_length)[0].mean() - nats
    expected = f"{nats:.3f} nats/token; greedy would have chosen 100.0% of their tokens; "
    expected += f"{-more:+.3f} nats/token (95 %: {-more:+.3f} to {-more:+.3f})"
    assert more > 0 and quality.prediction(model, [given], other) == expected
    assert quality.given_responses(model, chat, [row, {"prompt": "a"}]) == []


def test_accuracy_against_that_of_another(toy, monkeypatch):
    """Of three answers two more are right; or one more, and another no longer."""
    answers = dict.fromkeys(["AR", "none", "others"], [SimpleNamespace(tokens=[1], forwards=1)] * 3)
    verdicts = [[True, True, False], [False, False, False], [True, False, True]]
    for rival, gain in (("none", "+66.7 (+13.3 to +120.0)"), ("others", "+0.0 (-92.4 to +92.4)")):
        monkeypatch.setattr(common, "are_right", mock.Mock(side_effect=verdicts))
        [table] = tables(quality.make_table(toy[1], [{"answer": "1"}], answers, rival))
        assert table["AR"][:2] == ["66.7%", gain]


def test_the_table_of_qualities():
    """Another model has a row, and a column of differences: both are its own."""
    sft = str(ROOT / "toy/sft")
    words = ("--limit", 12, "--tau", 1, 0.5, "--against", sft)
    status, out, _ = command("bench.quality", *TOY, *words)
    [table] = tables(out)
    assert status == 0 and list(table) == ["AR", "tau 0.5", sft]
    assert f"| accuracy | points more than {sft} |" in " ".join(out.split())
    _, alone, _ = command("bench.quality", "--model", sft, *TOY[2:], "--limit", 12, "--tau", 1)
    [own] = tables(alone)
    assert table[sft][0] == own["AR"][0] and table[sft][1] == "+0.0 (+0.0 to +0.0)"
    assert number(table["AR"][0]) > 80 and table["AR"][2:] == ["1.00", "12 of 12"]
    assert number(table["tau 0.5"][2]) > 2
    assert "The responses in --data: " in out


@pytest.mark.parametrize("drawn", [(), ("--temperature", 1, "--seed", 3)], ids=["greedy", "drawn"])
def test_verified_answers_are_those_of_ar(drawn):
    status, out, _ = command("bench.quality", *TOY, "--limit", 12, *drawn)
    [table] = tables(out)
    assert status == 0 and list(table) == ["AR", "lossless"]
    assert table["lossless"][-1] == "12 of 12" and float(table["lossless"][2]) > 1.5


# ---------------------------------------------------------------------------------------- speed

SAME, TOKENS = -2, -1  # columns


def test_the_table_of_speeds():
    [table] = tables_of("bench.speed", *TOY, "--limit", 4, "--rows", 1, "--rounds", 1)
    per_forward = {name: number(cells[TOKENS]) for name, cells in table.items()}
    assert number(table["AR"][1]) == per_forward["AR"] == 1
    assert per_forward["lossless"] > per_forward["tau 0.95"] > 2
    assert table["lossless"][SAME] == "4 of 4", "the text of AR"


def test_the_table_of_block_caches(monkeypatch):
    """Small blocks cut a forward short; without a cache the whole text is computed each time."""
    widths = set()
    commit = speed.NoCache.commit

    def listen(cache, counts):
        widths.add(cache.width)
        commit(cache, counts)

    monkeypatch.setattr(speed.NoCache, "commit", listen)
    options = ("--limit", 4, "--rows", 4, "--rounds", 1, "--max-new", 24)
    [table] = tables_of("bench.speed", *TOY, "--block-caches", *options)
    per_forward = {name: number(cells[TOKENS]) for name, cells in table.items()}
    assert number(table["AR"][1]) == per_forward["AR"] == 1
    assert per_forward["tau 0.95"] == per_forward["blocks of 256"] == per_forward["no cache"] > 2
    assert per_forward["blocks of 4"] < per_forward["tau 0.95"]
    assert min(widths) > 40


def test_next_to_transformers(monkeypatch):
    """transformers' own model around our tensors says the same."""
    words = ("--limit", 3, "--rounds", 1, "--rows", 1, 3, "--max-new", 12, "--device", "cpu")
    alone, batch = tables_of("bench.speed", *TOY, "--transformers", *words)
    assert alone.keys() - batch.keys() == {"prompt lookup"}
    assert alone["transformers"][1] == "1.00 (1.00 to 1.00)"
    for cells in [*alone.values(), *batch.values()]:
        assert cells[SAME] == "3 of 3", "the text of transformers"
    tiny = {"vocab_size": 640, "hidden_size": 64, "intermediate_size": 128}
    tiny |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(common.SHAPES, "0.5B", tiny | {"tie_word_embeddings": True})
    found = tables_of("bench.speed", *TOY, "--transformers", "--shape", "0.5B", *words)
    names = [list(table) for table in found]
    assert names == [["transformers", "prompt lookup", "AR"], ["transformers", "AR"]]


def test_next_to_llama_cpp(toy, monkeypatch):
    """A stand-in for llama-server: it says what tau 1 says, and that each second draft held."""
    model, _ = toy

    def urlopen(request):
        asked = json.loads(request.data)
        assert request.full_url == "http://there/completion" and asked["temperature"] == 0
        assert asked["cache_prompt"] is False
        [answer] = generate(model, [asked["prompt"]], tau=1.0, max_new=asked["n_predict"])
        num_tokens = len(answer.tokens)
        timings = {"predicted_n": num_tokens, "draft_n_accepted": num_tokens // 2}
        return io.BytesIO(json.dumps({"tokens": answer.tokens, "timings": timings}).encode())

    words = ("--limit", 2, "--rounds", 1, "--max-new", 12, "--device", "cpu", "--llama-cpp")
    monkeypatch.setattr(speed, "urlopen", urlopen)
    table, after = tables_of("bench.speed", *TOY, *words, "http://there")
    assert table["llama.cpp http://there"][SAME:] == ["2 of 2", "2.00"]
    assert list(after) == list(table)


def test_the_table_of_widths():
    [table] = tables_of("bench.speed", *TOY, "--widths", "--rounds", 1)
    assert list(table) == ["1", "5", "9", "25"]
    assert table["1"][1] == "1.00 (1.00 to 1.00)" and number(table["25"][0]) > 0
