"""The benchmarks: the columns that do not depend on the machine, and one line for bad input."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from commands import command, is_refused, number, tables
from common import ROOT

import train
from bench import common, depth, quality
from decode import Options, generate
from model import load
from plumbing.chat import Chat
from plumbing.data import Example
from plumbing.sampling import dice

TOY = ("--model", ROOT / "toy/mars", "--data", ROOT / "toy/test.jsonl")


def cells(table: dict, row: str) -> dict[str, str]:
    """A row of bench.quality's table by its columns, for problems with answers."""
    return dict(zip(["accuracy", "than tau 1", *quality.COLUMNS], table[row], strict=True))


def same_as_tau_1(table: dict, row: str) -> list[str]:
    """How many answers are those of tau 1, parted from them at a tie, and are different."""
    return table[row][-3:]


# ------------------------------------------------------------------------------- what they share


def test_all_ways_run_in_turn():
    log = []
    ways = {name: lambda name=name: log.append(name) or name for name in ("a", "b")}
    results, seconds = common.in_turn(ways, 3, torch.device("cpu"))
    assert log == ["a", "b"] * 3 and results == {"a": "a", "b": "b"}
    assert all(len(times) == 3 for times in seconds.values())


def test_the_last_number_of_an_answer_counts():
    """Whether it is written as 78, 78.0 or 1,078."""
    assert common.last_number("1,080 plums, then 3. The answer is -12.5.") == -12.5
    assert common.last_number("1,080 plums") == 1080
    assert common.last_number("none") is None
    _, chat = load(str(ROOT / "toy/mars"))
    answer = SimpleNamespace(tokens=chat.encode("So Mia has 78 plums."))
    for right, wanted in [(True, 78.0), (True, "78"), (False, 78.5)]:
        assert common.are_right(chat, [answer], [{"answer": wanted}]) == [right]


def test_problems_as_their_authors_publish_them():
    """GSM8K has a question and worked steps; IFEval's prompts have no answers."""
    [first, *_] = common.read_problems(ROOT / "bench/data/gsm8k/test.jsonl")
    [question] = first["messages"]
    assert question["content"].startswith("Janet") and common.last_number(first["answer"]) == 18
    prompts = common.read_problems(ROOT / "bench/data/ifeval/test.jsonl", limit=2)
    assert len(prompts) == 2 and "answer" not in prompts[0]


def test_a_conversation_as_a_problem(tmp_path):
    """With its system message, up to what the assistant is to say."""
    chat = Chat(ROOT / "toy/mars")
    system, user, reply = (
        {"role": role, "content": text}
        for role, text in [("system", "Be brief."), ("user", "Name a fruit."), ("assistant", "A")]
    )
    row = json.dumps({"messages": [system, user, reply]})
    (tmp_path / "data.jsonl").write_text(row)
    [tokens] = common.encode(chat, common.read_problems(tmp_path / "data.jsonl"))
    assert tokens == chat.encode(chat.prompt([system, user]))


@pytest.mark.parametrize(
    "rows, message",
    [
        ([{"answer": "1"}], "row 1: needs a prompt, a question or"),
        ([{"messages": [{"role": "assistant", "content": "a"}]}], "nothing before the assistant's"),
        ([{"prompt": "a", "answer": "many"}], "row 1: the answer is not a number: many"),
        ([{"prompt": "a", "answer": "1"}, {"prompt": "b"}], "row 2: either all rows must have an"),
    ],
)
def test_rows_that_would_count_as_wrong_answers_are_refused(tmp_path, rows, message):
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert is_refused(command("bench.quality", "--data", tmp_path / "data.jsonl"), message)


@pytest.mark.parametrize(
    "module, words, message",
    [
        ("quality", ("--limit", 0), "--limit: must be at least 1, not 0"),
        ("quality", ("--tau", 1, 3), "tau 3.0: must be between 0 and 1"),
        ("quality", ("--verify", "--tau", 1), "--verify takes no --tau"),
        ("quality", ("--data", "nowhere.jsonl"), "nowhere.jsonl: "),
        ("speed", (), "choose --lossless, --transformers, --block-caches, --widths or --training"),
        ("speed", ("--lossless", "--shape", "0.5B"), "--shape has random weights: only --tr"),
    ],
)
def test_bad_options(module, words, message):
    assert is_refused(command(f"bench.{module}", *words), message)


def test_an_optional_package_that_is_missing(monkeypatch):
    """One line, before a model is loaded."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = command("bench.speed", "--transformers")
    assert is_refused(done, "transformers is not installed: pip")


# ------------------------------------------------------------------------------------- quality


def test_answers_that_repeat_themselves():
    """At least a tenth of the 6-grams occurred before. Of 14 tokens that come again, 9 did."""
    different = list(range(100))
    assert quality.repeats_itself(different[:81] + different[:14])  # 9 of 90
    assert not quality.repeats_itself(different[:82] + different[:14])  # 9 of 91
    assert quality.repeats_itself([1] * 7) and not quality.repeats_itself([1] * 6)
    assert not quality.repeats_itself([])


def test_tokens_per_forward_of_answers_without_repetition(monkeypatch):
    """By hand: 40 tokens in 4 forwards that repeat themselves, and 8 in 4, 9 in 3 that do not."""
    monkeypatch.setattr(quality, "nats_per_token", lambda model, answers: 0.0)
    texts = (([1] * 40, 4), (list(range(8)), 4), (list(range(9)), 3))
    answers = []
    for tokens, forwards in texts:
        answers.append(SimpleNamespace(tokens=tokens, forwards=forwards, widths=[1] * forwards))
    found = dict(zip(quality.COLUMNS, quality.figures(None, answers, gaps=[]), strict=True))
    assert found["tokens/forward"] == "5.18"  # 57 / 11
    assert found["median"] == "3.00"  # of 10, 2 and 3
    assert found["repeat themselves"] == "33.3%"
    assert found["without"] == "2.43, 2.50"  # 17 / 7


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


def test_how_well_given_responses_are_predicted(tmp_path):
    """Those that greedy decoding gave are greedy's choice; a cut one does not end there."""
    model, chat = load(str(ROOT / "toy/mars"))
    [problem] = common.read_problems(ROOT / "toy/test.jsonl", 1)
    [answer] = generate(model, common.encode(chat, [problem]), tau=1.0)
    row = problem | {"response": chat.decode(answer.tokens)}
    [given] = quality.given_responses(model, chat, [row])
    assert given.tokens == answer.text
    nats = quality.nats_per_token(model, [answer])
    expected = f"{nats:.3f} nats/token; greedy would have chosen 100.0% of their tokens"
    assert quality.prediction(model, [given], None) == expected
    [cut] = quality.given_responses(model, chat, [row | {"finish_reason": "length"}])
    assert cut.tokens == answer.text[:-1]
    assert quality.given_responses(model, chat, [row, {"prompt": "a"}]) == []
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "response": ""}')
    done = command("bench.quality", "--data", tmp_path / "data.jsonl")
    assert is_refused(done, "--data: row 1: an empty response")
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}')
    done = command("bench.quality", "--data", tmp_path / "data.jsonl", "--against", "toy/mars")
    assert is_refused(done, "--against needs rows with an answer each, or a response each")


def test_predictions_against_those_of_another_model():
    """Two rows: a bootstrap draws one of them twice half the time, so the interval is from one to
    the other."""
    model, chat = load(str(ROOT / "toy/mars"))
    other, _ = load(str(ROOT / "toy/mars"))
    other.model.norm.weight *= 0.5  # less sure
    prompts = common.encode(chat, common.read_problems(ROOT / "toy/test.jsonl", 2))
    answers = generate(model, prompts, tau=1.0)
    rows = [Example(each.text, each.prompt_length) for each in answers]
    text = quality.prediction(other, rows, model)
    more = []  # of the first, the second, both
    for some in (answers[:1], answers[1:], answers):
        more.append(quality.nats_per_token(other, some) - quality.nats_per_token(model, some))
    *ends, mean = more
    expected = f"{mean:+.3f} nats/token (95 %: {min(ends):+.3f} to {max(ends):+.3f})"
    assert mean > 0 and text.endswith(expected)


def test_accuracy_against_that_of_another():
    """Two more of three are right; and one is, another no longer."""
    rivals = [[False, False, False], [True, False, True]]
    expected = ["66.7%", "+66.7 (+0.0 to +100.0)", "+0.0 (-100.0 to +100.0)"]
    assert quality.accuracies([True, True, False], rivals) == expected
    mean, low, high = quality.mean_and_interval([1, 0, -1, 1] * 100, [1] * 400)
    deviation = (11 / 16 / 400) ** 0.5  # of a mean of 400 draws
    assert mean == 0.25 and low == pytest.approx(0.25 - 1.96 * deviation, abs=0.01)
    assert high == pytest.approx(0.25 + 1.96 * deviation, abs=0.01)
    words = (*TOY, "--limit", 12, "--tau", 0.5, "--against", ROOT / "toy/sft")
    status, out, _ = command("bench.quality", *words)
    [table] = tables(out)
    assert status == 0 and f"points more than tau 1 | points more than {ROOT / 'toy/sft'} |" in out
    assert len(table["tau 0.5"]) == 3 + len(quality.COLUMNS)
    _, alone, _ = command("bench.quality", "--model", ROOT / "toy/sft", "--limit", 12, "--tau", 1)
    itself = cells(tables(alone)[0], "tau 1")
    accuracy, *_, nats = table[str(ROOT / "toy/sft")][:4]
    assert (accuracy, nats) == (itself["accuracy"], itself["nats/token"])


def test_another_tokenizer_would_read_other_text(tmp_path):
    shutil.copytree(ROOT / "toy/sft", tmp_path / "other")
    tokenizer = tmp_path / "other/tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|endoftext|>", "<|other|>"))
    done = command("bench.quality", *TOY, "--against", tmp_path / "other")
    assert is_refused(done, "other: has another tokenizer than --model")


def test_verified_answers_are_those_of_tau_1():
    status, out, _ = command("bench.quality", *TOY, "--verify", "--limit", 12)
    [table] = tables(out)
    one, verified = cells(table, "tau 1"), cells(table, "verify")
    assert status == 0 and list(table) == ["tau 1", "verify"]
    assert number(one["accuracy"]) > 80 and one["than tau 1"] == "+0.0 (+0.0 to +0.0)"
    assert one["tokens/forward"] == "1.00" and float(verified["tokens/forward"]) > 2
    assert one["without"] == "1.00, 1.00" and one["positions/forward"] == "1.0"
    assert 0 < float(one["nats/token"]) < 0.1
    assert verified["nats/token"] == one["nats/token"]  # the same text is as likely
    assert same_as_tau_1(table, "tau 1") == same_as_tau_1(table, "verify") == ["12", "0", "0"]
    words = ("--verify", "--limit", 12, "--temperature", 1, "--seed", 3)
    status, out, _ = command("bench.quality", *TOY, *words)
    assert status == 0 and same_as_tau_1(tables(out)[0], "verify") == ["12", "0", "0"]


def test_the_gap_where_sampled_answers_part():
    """It is that of the scores that were compared: logits with the noise of the dice."""
    model, chat = load(str(ROOT / "toy/mars"), dtype=torch.float64)
    prompts = common.encode(chat, common.read_problems(ROOT / "toy/test.jsonl", 3))
    options = Options(temperature=1.5, tau=1, seed=7, max_new=20)
    [*_, answer] = generate(model, prompts, **vars(options))
    for num_tokens in range(len(prompts[2]), len(answer.text)):
        text = torch.tensor([answer.text[:num_tokens]])
        logits = model.logits(model(text, torch.arange(num_tokens)[None], None)[0, -1:])[0]
        scores = logits + 1.5 * dice(7, 2, num_tokens, *logits.shape, logits.device)
        best, second = scores.sort(descending=True).values[:2]
        assert scores.argmax() == answer.text[num_tokens]
        found = quality.gap_between_best(model, answer, num_tokens, options)
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
    right = quality.decode

    def wrong(model, prompts, rows, options, label):
        answers = right(model, prompts, rows, options, label)
        if options.verify:
            answers[0].text[answers[0].prompt_length + 3] += 1
        return answers

    monkeypatch.setattr(quality, "decode", wrong)
    monkeypatch.setattr(quality, "TIE", tie)
    words = ("--verify", "--limit", 3, "--dtype", dtype)
    found, out, _ = command("bench.quality", *TOY, *words)
    assert found == status and same_as_tau_1(tables(out)[0], "verify") == counts
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
    verified = [cells for name, cells in table.items() if name.startswith("verify")]
    assert all(cells[-1] == "100.0%" for cells in verified), "the text of AR"


def test_the_table_of_block_caches():
    """Small blocks cut a forward short; without a cache the whole text is computed each time."""
    options = ("--limit", 4, "--rows", 4, "--rounds", 1, "--max-new", 24)
    status, out, _ = command("bench.speed", *TOY, "--block-caches", *options)
    [table] = tables(out)
    per_forward = {name: number(cells[2]) for name, cells in table.items()}
    assert status == 0 and number(table["AR"][1]) == per_forward["AR"] == 1
    assert per_forward["tau 0.95"] == per_forward["blocks of 256"] == per_forward["no cache"] > 2
    assert per_forward["blocks of 4"] < per_forward["tau 0.95"]
    assert number(table["no cache"][3]) > 40 > number(table["blocks of 256"][3])  # positions


def test_next_to_transformers(monkeypatch):
    """transformers' own model around our tensors says the same."""
    words = ("--limit", 3, "--rounds", 1, "--rows", 1, 3, "--max-new", 12, "--device", "cpu")
    status, out, err = command("bench.speed", *TOY, "--transformers", *words)
    assert status == 0, err
    alone, batch = tables(out)
    assert alone.keys() - batch.keys() == {"prompt lookup", "verify, no lookup"}
    assert alone["prompt lookup"][2] == alone["AR"][3] == "1.00 (1.00 to 1.00)"
    for cells in [*alone.values(), *batch.values()]:
        assert cells[-1] == "100.0%", "the text of transformers"
    monkeypatch.setitem(common.SHAPES, "0.5B", (64, 128, 2, 4, 2, 640, True))
    status, out, err = command("bench.speed", *TOY, "--transformers", "--shape", "0.5B", *words)
    assert status == 0, err
    assert [list(table) for table in tables(out)] == [
        ["transformers", "prompt lookup", "AR"],
        ["transformers", "AR"],
    ]


def test_the_table_of_widths():
    status, out, _ = command("bench.speed", *TOY, "--widths", "--rounds", 1)
    [table] = tables(out)
    assert status == 0 and list(table) == ["1", "5", "9", "25"]
    assert table["1"][1] == "1.00 (1.00 to 1.00)" and number(table["25"][0]) > 0


def test_the_table_of_training_steps(monkeypatch):
    """SFT computes the clean stream, MARS a mask for each target but the first, too."""
    seen = set()
    add_gradients = train.add_gradients

    def listen(model, forwards, *settings):
        num_positions = sum((forward.doc >= 0).sum().item() for forward in forwards)  # no padding
        seen.add((model.config.block, num_positions))
        return add_gradients(model, forwards, *settings)

    monkeypatch.setattr(train, "add_gradients", listen)
    words = ("--training", "--rounds", 1, "--rows", 2, 3, "--max-new", 32, "--device", "cpu")
    status, out, _ = command("bench.speed", *TOY, *words)
    [table] = tables(out)
    assert status == 0 and list(table) == ["SFT, 2", "MARS, 2", "SFT, 3", "MARS, 3"]
    assert seen == {(None, 2 * 63), (4, 2 * 94), (None, 3 * 63), (4, 3 * 94)}


# ------------------------------------------------------------------------------------- depth


def test_tokens_per_forward_of_a_part():
    """A forward belongs to the part of its first token; what repeats an earlier part counts."""
    tokens = [*range(251), *range(150), *range(300, 399)]
    answer = SimpleNamespace(tokens=tokens, accepted=[2] * 124 + [3] + [5] * 49 + [4])
    assert depth.part_of([answer], 0) == "2.01 (0%)"
    repeated = 145 / 245  # of the 6-grams that begin at 250 to 494
    assert depth.part_of([answer], 250) == f"{249 / 50:.2f} ({repeated:.0%})"
    assert depth.part_of([answer], 500) == ""


def test_a_prompt_of_so_many_tokens():
    _, chat = load(str(ROOT / "toy/mars"))
    problems = common.read_problems(ROOT / "toy/test.jsonl", 20)
    empty, short, long = (depth.make_prompt(chat, problems, n) for n in (0, 40, 400))
    assert len(short) - len(empty) in range(35, 45) and len(long) - len(empty) in range(390, 410)
    assert problems[0]["messages"][0]["content"] in chat.decode(long)
