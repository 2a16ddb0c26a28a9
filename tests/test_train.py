"""The MARS loss against the paper's two-stream form, the mask rule, the data, the training loop."""

import gzip
import itertools
import json
import math
import os
import random
import re
import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from common import ROOT, cases, random_prompt, tiny_model, unpacked
from safetensors.torch import load_file

import train
from bench import cost
from decode import generate
from model import Chat, Config, UserError, load, visible
from train import (
    Dataset,
    Example,
    Rows,
    Trainer,
    Unusable,
    batches,
    encode,
    lay_out,
    losses,
    pack,
)


def random_example(rng: random.Random, block: int) -> Example:
    """Prompts and responses at multiples of the block, beside them, and anywhere."""
    prompt, response = (
        max(
            1, rng.choice([block, 2 * block, 4 * block]) + rng.choice([-1, 0, 1, rng.randint(0, 9)])
        )
        for _ in range(2)
    )
    return Example(random_prompt(rng, prompt + response), prompt, phase=rng.randrange(block))


def two_stream_logits(model, example: Example, block: int) -> list[torch.Tensor]:
    """Of the noisy stream and the clean one, for every token of the response.

    The paper's form, plainly: [clean L ; noisy L], a mask from loops over its three rules.
    """
    x, prompt = example.tokens, example.prompt
    length, mask_id = len(x), model.config.mask_token_id
    noisy = [x[p] if p < prompt else mask_id for p in range(length)]
    see = torch.zeros(2 * length, 2 * length, dtype=torch.bool)
    for p in range(length):
        for k in range(length):
            same_block = (p + example.phase) // block == (k + example.phase) // block
            see[p, k] = k <= p
            see[length + p, length + k] = same_block and k <= p
            see[length + p, k] = not same_block and k < p
    positions = torch.arange(length).repeat(2)[None]
    hidden = model(torch.tensor([x + noisy]), positions, see[None, None])[0]
    at = torch.arange(prompt - 1, length - 1)
    return [model.logits(hidden[at + offset]) for offset in (length, 0)]


def two_stream_loss(model, example: Example, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    targets = torch.tensor(example.tokens[example.prompt :])
    both = two_stream_logits(model, example, block)
    return tuple(F.cross_entropy(logits, targets, reduction="sum") for logits in both)


def gradient(loss, model) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def test_response_only_masks_give_the_two_stream_loss():
    for seed in cases(25, 200):
        rng = random.Random(seed)
        model, block = tiny_model(rng), rng.randint(1, 8)
        example = random_example(rng, block)
        layout = lay_out(example, block, model.config.mask_token_id, 1.0)
        noisy, clean = losses(model, unpacked([layout]))
        expected_noisy, expected_clean = two_stream_loss(model, example, block)
        assert noisy.item() == pytest.approx(expected_noisy.item(), rel=1e-12)
        assert clean.item() == pytest.approx(expected_clean.item(), rel=1e-12)
        weight = rng.random()
        ours = gradient(noisy + weight * clean, model)
        theirs = gradient(expected_noisy + weight * expected_clean, model)
        assert (ours - theirs).abs().max() < 1e-10 * theirs.abs().max()


def test_the_papers_form_in_the_cost_bench():
    """What is timed there as "2L" has the loss of the two streams as they are written above."""
    for seed in cases(5, 50):
        rng = random.Random(700 + seed)
        model, example = tiny_model(rng), random_example(rng, cost.BLOCK)
        layout = cost.two_streams(example, model.config.mask_token_id, 1.0)
        expected = two_stream_loss(model, example, cost.BLOCK)
        for ours, theirs in zip(losses(model, unpacked([layout])), expected):
            assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)


def test_distillation_by_hand():
    """Ragged batches; the first token, which no mask predicts, keeps its cross-entropy."""
    for seed in cases(10, 100):
        rng = random.Random(500 + seed)
        model, block = tiny_model(rng), rng.randint(1, 8)
        examples = [random_example(rng, block) for _ in range(rng.randint(1, 4))]
        weights = [rng.choice([0.25, 0.5, 1.0]) for _ in examples]
        layouts = [lay_out(e, block, 1, weight) for e, weight in zip(examples, weights)]
        noisy, clean = losses(model, unpacked(layouts), distill=True)
        words = [word for word in range(8) if word != 1]  # all but the mask
        expected = torch.zeros(2).double()
        for example, weight in zip(examples, weights):
            masks, teacher = two_stream_logits(model, example, block)
            first = example.tokens[example.prompt]
            p = teacher[1:, words].detach().softmax(-1)
            soft = -(p * masks[1:, words].log_softmax(-1)).sum()
            hard = -masks[0, words].log_softmax(-1)[words.index(first)]
            _, plain = two_stream_loss(model, example, block)
            expected = expected + weight * torch.stack([hard + soft, plain])
        assert noisy.item() == pytest.approx(expected[0].item(), rel=1e-12)
        assert clean.item() == pytest.approx(expected[1].item(), rel=1e-12)
        ours, theirs = gradient(noisy, model), gradient(expected[0], model)
        assert ours.isfinite().all() and (ours - theirs).abs().max() < 1e-10 * theirs.abs().max()


@torch.inference_mode()
def test_look_ahead_is_what_a_decoder_would_guess():
    """Against the plain way: for every window, the true prefix, then masks, then count the hits."""
    right, count, B = [0] * 4, [0] * 4, 3
    rng = random.Random(9)
    model = tiny_model(rng)
    examples = [random_example(rng, B) for _ in range(12)]
    mask_id = model.config.mask_token_id

    def hits(feed: list[int], at: int) -> list[int]:
        hidden = model(torch.tensor([feed]), torch.arange(len(feed))[None], None)[0, at:]
        return model.logits(hidden).argmax(-1).tolist()

    for example in examples:
        x, prompt = example.tokens, example.prompt
        for at in range(prompt, len(x)):
            right[0] += hits(x[:at], at - 1)[0] == x[at]
            count[0] += 1
        cuts = [p for p in range(prompt + 1, len(x)) if (p + example.phase) % B == 0]
        for start, end in zip([prompt, *cuts], [*cuts, len(x)]):
            guesses = hits(x[:start] + [mask_id] * (end - start), start)
            for k, (guessed, true) in enumerate(zip(guesses, x[start + 1 : end + 1])):
                right[1 + k] += guessed == true
                count[1 + k] += 1
    model.config.block_size = B
    layouts = [lay_out(example, B, mask_id, 1.0) for example in examples]
    shares = train.look_ahead(model, [unpacked(layouts[:5]), unpacked(layouts[5:])])
    assert shares == pytest.approx([r / c for r, c in zip(right, count)])
    assert len(set(shares)) == 4


def outputs(model, batch) -> torch.Tensor:
    return train.hidden_states(model, batch)[0]


@torch.inference_mode()
def test_no_clean_output_changes_when_masks_are_added():
    for seed in cases(25, 200):
        rng = random.Random(100 + seed)
        model, block = tiny_model(rng), rng.randint(1, 8)
        example = random_example(rng, block)
        mask_id, clean = model.config.mask_token_id, len(example.tokens) - 1
        plain = model(torch.tensor([example.tokens[:-1]]), torch.arange(clean)[None], None)[0]
        masked = outputs(model, unpacked([lay_out(example, block, mask_id, 1.0)]))
        assert torch.allclose(masked[:clean], plain, atol=1e-12)


@torch.inference_mode()
def test_a_mask_sees_the_clean_tokens_before_its_window_and_no_others():
    """Change one clean token: the masks whose window starts behind it change, the others do not."""
    for seed in cases(25, 200):
        rng = random.Random(200 + seed)
        model, block = tiny_model(rng), rng.randint(1, 8)
        example = random_example(rng, block)
        batch = unpacked([lay_out(example, block, model.config.mask_token_id, 1.0)])
        changed = rng.randrange(len(example.tokens) - 1)
        other = batch._replace(tokens=batch.tokens.clone())
        other.tokens[0, changed] = 2 + (batch.tokens[0, changed] - 1) % 6
        assert other.tokens[0, changed] != batch.tokens[0, changed]
        differs = (outputs(model, batch) - outputs(model, other)).abs().amax(-1) > 1e-9
        windows = (batch.start <= batch.pos) & (batch.doc == 0)
        assert torch.equal(differs[windows[0]], batch.start[windows] > changed)


def test_visible_is_the_rule_in_words():
    """On all pairs of a random packing: two documents, clean tokens, windows, in any order."""
    for seed in cases(25, 200):
        rng = random.Random(seed)
        tokens = []  # (pos, start, doc)
        for doc in (0, 1):
            tokens += [(p, p + 1, doc) for p in range(12)]
            for start in sorted(rng.sample(range(1, 12), 3)):
                tokens += [(start + i, start, doc) for i in range(rng.randint(1, 4))]
        rng.shuffle(tokens)
        for q in tokens:
            for k in tokens:
                k_clean, q_clean = k[1] == k[0] + 1, q[1] == q[0] + 1
                if q[2] != k[2]:
                    expected = False
                elif q_clean:
                    expected = k_clean and k[0] <= q[0]
                elif k_clean:
                    expected = k[0] < q[1]
                else:
                    expected = k[1] == q[1] and k[0] <= q[0]
                assert bool(visible(*map(torch.tensor, (*q, *k)))) == expected, (q, k)


# ------------------------------------------------------------------------------------ data


@pytest.fixture(scope="module")
def chat():
    return Chat(ROOT / "toy/base")


def write(path, rows) -> Rows:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return Rows(path)


def test_rows_are_found_by_byte_offset(tmp_path):
    """Characters of several bytes, blank lines, Windows line ends, no newline at the end."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"a": "né 🙂"}\n\n{"a": "2"}\r\n   \n{"a": "三"}'.encode())
    rows = Rows(path)
    assert len(rows) == 3 and [rows[i]["a"] for i in (2, 0, 1)] == ["三", "né 🙂", "2"]


def test_a_file_that_changes_while_it_is_read(tmp_path):
    rows = write(tmp_path / "d.jsonl", [{"a": 1}, {"a": 2}])
    rows.path.write_bytes(b'{"a": 1}\n{"a"')
    with pytest.raises(UserError, match="d.jsonl:byte 9, changed meanwhile: not JSON"):
        rows[1]


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)  # so that opening it does not wait
    with pytest.raises(UserError, match="pipe: cannot be read"):
        Rows(tmp_path / "pipe")
    os.close(writer)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "empty"),
        (b'{"a": 1}\n{"a": \n', r"bad.jsonl:2: not JSON"),
        (b'{"a": 1}\n\n[1, 2]\n', r"bad.jsonl:3: not a JSON object"),
        (b"\xff\xfe{\x00", r"bad.jsonl:1: not JSON"),
        (b'{"a": "\x00"}\n', r"bad.jsonl:1: not JSON"),  # a NUL as it is; as \u0000 it is text
        (b'{"a": "1"}\r\n{"a": "2', r"bad.jsonl:2: not JSON"),  # a download that broke off
        (gzip.compress(b'{"a": "1"}\n'), "bad.jsonl: is gzip, not JSONL; unpack or convert it"),
        (b"PAR1\x15\x04", "bad.jsonl: is parquet, not JSONL"),
    ],
)
def test_bad_data_files(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        Rows(path)


def test_the_last_assistant_turn_is_trained(chat):
    user, assistant = ({"role": r, "content": f"the {r}"} for r in ("user", "assistant"))
    last = {"role": "assistant", "content": "So Mia has 12 plums."}
    row = {"messages": [user, assistant, user, last, {"role": "user", "content": "Thanks!"}]}
    example = encode(row, chat, 2, 512)
    assert chat.decode(example.tokens[example.prompt :]) == "So Mia has 12 plums."
    assert example.tokens[-1] == 2
    assert example.tokens[: example.prompt] == chat.encode(chat.prompt([user, assistant, user]))
    pair = encode({"prompt": "the user", "response": "So Mia has 12 plums."}, chat, 2, 512)
    assert pair == encode({"messages": [user, last]}, chat, 2, 512)


def test_a_cut_response_has_no_end_of_turn_target(chat):
    row = {"prompt": "How many?", "response": "So Mia has 12 plums now."}
    whole = encode(row, chat, 2, 512)
    cut = encode(row, chat, 2, len(whole.tokens) - 1)
    assert cut.tokens == whole.tokens[:-1] and 2 not in cut.tokens[cut.prompt :]


def test_unusable_rows_are_counted_by_reason(chat):
    turn = {"role": "user", "content": "Hi"}
    reply = {"role": "assistant", "content": "Hello"}
    for row, reason in (
        ({"text": "Hi"}, "neither messages nor prompt and response"),
        ({"messages": ["Hi"]}, "neither messages"),
        ({"prompt": "Hi"}, "neither messages nor prompt and response"),
        ({"prompt": "Hi", "response": None}, "content that is not text"),
        ({"prompt": "Hi", "response": ""}, "an empty response"),
        ({"messages": []}, "no assistant turn"),
        ({"messages": [turn]}, "no assistant turn"),
        ({"messages": [turn, {**reply, "content": None}]}, "content that is not text"),
        ({"messages": [turn, {**reply, "function_calls": "f(1)"}, turn, reply]}, "a tool call"),
        ({"messages": [turn, {**reply, "tool_calls": [{}]}, turn, reply]}, "a tool call"),
        ({"prompt": "Hi", "response": "half \ud83d"}, "refused by the chat template or the token"),
        ({"prompt": "Hi", "response": "a <|mask|> here"}, "a mask or end-of-turn token"),
        ({"prompt": "Hi", "response": "<|im_end|>"}, "a mask or end-of-turn token"),
        ({"prompt": "Hi " * 600, "response": "Hello"}, "prompt longer than --max-length"),
    ):
        with pytest.raises(Unusable, match=reason):
            encode(row, chat, 2, 512)


def test_every_kind_of_row_there_is(chat, tmp_path, monkeypatch):
    """What a dump of the web holds, in one file with a BOM and Windows line ends: what can be
    trained on is, token for token as it is written, and the rest is counted."""
    ask = {"role": "user", "content": "Hi\n\n"}
    fine = [
        {"prompt": "السلام عليكم، كيف الحال؟", "response": "你好！नमस्ते, שלום, γειά σου"},
        {"prompt": "🙂👩‍👩‍👧‍👦🇺🇳", "response": "e\u0301 \u202e\u200b\ufeff\u2028\u0085 ok"},
        {"prompt": "a\u0000b", "response": "\u0000\u0007\t\r\n\x7f"},
        {"prompt": "", "response": " "},
        {"prompt": "<|im_end|><|mask|>", "response": "{{ 1/0 }} {% raise %} <|im_start|>"},
        {"prompt": "long", "response": "So Mia has 12 plums. " * 5000},
        {"prompt": "?", "response": "!", "extra": {"deep": [[[[None]]]]}},
        {"messages": [{"role": "system", "content": ""}, ask, {"role": "assistant"}]},
    ]
    fine[-1]["messages"][-1] |= {"content": "Yes", "function_calls": None, "functions": None}
    bad = [
        {"messages": [ask, {"role": "assistant", "content": None, "function_calls": "f()"}]},
        {"messages": [{"role": "environment", "content": "{}"}]},
        {"messages": [{"role": "user"}, {"role": "assistant", "content": "!"}]},
        {"messages": "user: ?"},
        {"messages": None},
        {"prompt": "x" * 100_000, "response": "!"},
        {"prompt": ["?"], "response": "!"},
        {"prompt": "?", "response": "!<|im_end|>!"},
        {},
    ]
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(row, ensure_ascii=i % 2 == 0) for i, row in enumerate(fine + bad)]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    args = arguments(monkeypatch, "--data", path, "--held-out", 0)
    *_, (examples, consumed, skipped) = itertools.islice(
        Dataset(Rows(path), chat, 2, 4, args).steps(len(fine)), 2
    )
    assert len(lines) < consumed <= 2 * len(lines) and sum(skipped.values()) == len(bad)
    found = {tuple(e.tokens[e.prompt :]) for e in examples}
    for row in fine:
        text = row["response"] if "response" in row else row["messages"][-1]["content"]
        response = (*chat.encode(text), 2)
        assert any(given == response[: len(given)] for given in found)
        found -= {given for given in found if given == response[: len(given)]}
    assert not found
    model = load(str(ROOT / "toy/draft"))[0]
    with torch.no_grad():
        both = [losses(model, batch) for batch in batches(examples, model.config, args)]
    assert all(noisy.isfinite() and clean.isfinite() for noisy, clean in both)


def test_a_turn_that_the_template_drops(chat, tmp_path):
    """Qwen2.5's shows no role that it does not know, without a word; ChatML shows all of them."""
    template = ROOT / "tests/fixtures/qwen2.5/chat_template.jinja"
    (tmp_path / "chat_template.jinja").write_bytes(template.read_bytes())
    (tmp_path / "tokenizer.json").write_bytes((ROOT / "toy/base/tokenizer.json").read_bytes())
    tool = {"role": "environment", "content": " 12 "}
    row = {"messages": [{"role": "user", "content": "Hi"}, tool]}
    row["messages"].append({"role": "assistant", "content": "Hello"})
    assert "12" in chat.decode(encode(row, chat, 2, 512).tokens)
    with pytest.raises(Unusable, match="a turn that the chat template drops"):
        encode(row, Chat(tmp_path), 2, 512)


def arguments(monkeypatch, *words: object):
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, words)])
    return train.parse_arguments()


def test_the_stream_is_every_row_once_an_epoch(chat, tmp_path, monkeypatch):
    """Shuffled anew each epoch, held-out rows never among them, the same on every run."""
    rows = write(tmp_path / "d.jsonl", [{"prompt": "?", "response": str(i)} for i in range(50)])
    args = arguments(monkeypatch, "--data", rows.path, "--held-out", 5)
    data = Dataset(rows, chat, 2, 4, args)
    stream = data.steps(15)
    epochs = [[e for _ in range(3) for e in next(stream).examples] for _ in range(3)]
    texts = [[chat.decode(e.tokens[e.prompt :]) for e in epoch] for epoch in epochs]
    held_out = {chat.decode(e.tokens[e.prompt :]) for e in data.held_out}
    assert len(held_out) == 5
    assert all(sorted(t) == sorted(set(map(str, range(50))) - held_out) for t in texts)
    assert texts[0] != texts[1] != texts[2]
    phases = [[e.phase for e in epoch] for epoch in epochs]
    assert phases[0] != phases[1] and {0, 1, 2, 3} == set(phases[0])
    for consumed in (0, 15, 45, 60):
        again = Dataset(rows, chat, 2, 4, args).steps(15, consumed)
        assert next(again).examples == (epochs[0] + epochs[1])[consumed : consumed + 15]


@pytest.mark.parametrize("count", [3, 40])
def test_a_file_without_a_usable_row_stops(chat, tmp_path, monkeypatch, count):
    """With held-out rows among the skipped ones, the run once looked for a usable row for ever."""
    rows = write(tmp_path / "d.jsonl", [{"text": "Hi"}] * count)
    data = Dataset(rows, chat, 2, 1, arguments(monkeypatch, "--data", rows.path))
    with pytest.raises(UserError, match=f"no usable row: {count} neither messages"):
        next(data.steps(1))


# ------------------------------------------------------------------------------------ the loop


def whole_step(model, examples: list[Example], args, worlds=1, longest=0) -> torch.Tensor:
    """Both losses and the gradient of a step, summed over the forwards of all processes."""
    model.zero_grad()
    sums = torch.zeros(2).double()
    for rank in range(worlds):
        for batch in batches(examples, model.config, args, rank, worlds, longest):
            both = torch.stack(losses(model, batch, args.distill))
            (both[0] + args.ar_weight * both[1]).backward()
            sums += both.detach()
    return torch.cat([sums, *(weight.grad.flatten() for weight in model.parameters())])


def test_how_a_step_is_packed_and_split_changes_nothing(monkeypatch):
    """Against an example to a row and to a forward: any packing, accumulation, number of processes,
    size of a chunk of logits; in both normalisations, with distillation, and for stage 1."""
    shared = 0
    for seed in cases(8, 100):
        rng = random.Random(seed)
        model, block = tiny_model(rng), rng.randint(1, 8)
        examples = [random_example(rng, block) for _ in range(rng.randint(3, 9))]
        words = ["--data", "x", "--ar-weight", rng.random(), *["--distill"] * rng.randint(0, 1)]
        words += ["--normalization", rng.choice(["sequence", "token"])]
        args = arguments(monkeypatch, *words)
        model.config.block_size = rng.choice([block, block, None])
        args.distill &= model.config.block_size is not None
        expected = 0
        weights = train.target_weights(examples, args.normalization)
        for example, weight in zip(examples, weights):
            layout = lay_out(example, model.config.block_size, 1, weight)
            layout = layout._replace(noisy=layout.noisy.double(), clean=layout.clean.double())
            model.zero_grad()
            both = torch.stack(losses(model, unpacked([layout]), args.distill))
            (both[0] + args.ar_weight * both[1]).backward()
            gradients = [weight.grad.flatten() for weight in model.parameters()]
            expected = expected + torch.cat([both.detach(), *gradients])
        for _ in range(3):
            args.batch_tokens = rng.choice([1, 128, 300, 512, 2000])
            monkeypatch.setattr("model.LOGITS_AT_A_TIME", rng.choice([1, 8 * 7, 8 * 32, 2**26]))
            worlds, longest = rng.randint(1, 3), rng.choice([0, 100, 150])
            found = whole_step(model, examples, args, worlds, longest)
            assert (found - expected).abs().max() < 1e-6 * expected.abs().max()
            first = batches(examples, model.config, args, 0, worlds, longest)
            shared += sum(int(batch.doc.max() > 0) for batch in first)
    assert shared > 10  # rows that several examples share


def test_logits_exist_a_few_at_a_time(monkeypatch):
    """Of targets only; in the backward pass they are made again, but for the last few."""
    rng = random.Random(2)
    model, example = tiny_model(rng), random_example(rng, 4)
    batch = unpacked([lay_out(example, 4, 1, 1.0)])
    monkeypatch.setattr("model.LOGITS_AT_A_TIME", 8 * 5)
    logits, sizes = model.logits, []
    model.logits = lambda hidden: sizes.append(len(hidden)) or logits(hidden)
    noisy, clean = losses(model, batch)
    targets = 2 * example.targets - 1
    assert sum(sizes) == targets and max(sizes) <= 5 and len(sizes) == -(-targets // 5) > 2
    last = sizes[-1]
    sizes.clear()
    (noisy + clean).backward()
    assert sum(sizes) == targets - last and max(sizes) <= 5


def test_packing():
    """Every example once, no row too full, and few rows: nearly as few as there could be."""
    for seed in cases(50, 500):
        rng = random.Random(seed)
        width = rng.choice([32, 128, 1024])
        lengths = [rng.randint(1, width) for _ in range(rng.randint(1, 200))]
        rows = pack(lengths, width)
        assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
        filled = [sum(lengths[i] for i in row) for row in rows]
        assert all(0 < length <= width for length in filled)
        fewest = max(-(-sum(lengths) // width), sum(2 * length > width for length in lengths))
        assert len(rows) <= 11 / 9 * fewest + 1
        # never could one row hold two of them
        assert len(rows) == 1 or min(filled) + sorted(filled)[1] > width


def test_the_forwards_of_a_step(monkeypatch):
    """As many in every process, or they would wait for each other for ever; and little padding.

    Packed, they have one shape; else rows of like length share a forward.
    """
    for seed in cases(20, 200):
        rng, worlds = random.Random(seed), 1 + seed % 4
        config = tiny_model(rng).config
        config.block_size = rng.randint(1, 8)
        examples = [
            Example(random_prompt(rng, 2 + rng.randint(5, 400)), rng.randint(1, 5))
            for _ in range(rng.randint(worlds, 128))
        ]
        args = arguments(monkeypatch, "--data", "x", "--batch-tokens", rng.choice([1024, 4096]))
        total = sum(train.stream_length(e, config.block_size) for e in examples)
        for longest in (810, 0):
            each = [batches(examples, config, args, r, worlds, longest) for r in range(worlds)]
            assert len({len(forwards) for forwards in each}) == 1
            forwards = [batch for some in each for batch in some]
            assert total == sum(int((batch.doc >= 0).sum()) for batch in forwards)
            for batch in forwards:
                rows, width = batch.tokens.shape
                assert width % 32 == 0 and rows * width <= max(width, args.batch_tokens)
            if longest:
                [(rows, width)] = {tuple(batch.tokens.shape) for batch in forwards}
                assert (rows, width) == (max(1, args.batch_tokens // 1216), 1216)
                spare = len(each[0]) * worlds + 1  # a row for each forward, at worst, and the last
                assert rows * len(forwards) <= 1.25 * total / width + spare * rows
            else:
                for batch in forwards:
                    real = (batch.doc >= 0).sum(1)
                    assert len(real) == 1 or real.min() >= 7 / 8 * batch.tokens.size(1) - 32
                assert {int(batch.doc.max()) for batch in forwards} <= {0, -1}
        if len(examples) >= 8 * worlds:  # none of the processes is left without work
            shares = [sum(int((b.doc >= 0).sum()) for b in some) for some in each]
            assert min(shares) > 0


@torch.inference_mode()
def test_flex_attention_sees_what_the_dense_mask_shows(monkeypatch):
    """FlexAttention as it runs on CUDA, but on the CPU and not compiled: the same hidden states."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr("model.flex_attention", lambda: flex_attention)
    for seed in cases(5, 50):
        rng = random.Random(seed)
        model = tiny_model(rng).float()
        model.config.block_size = rng.randint(1, 8)
        examples = [random_example(rng, model.config.block_size) for _ in range(6)]
        args = arguments(monkeypatch, "--data", "x", "--batch-tokens", 512)
        for batch in batches(examples, model.config, args):
            dense = train.hidden_states(model, batch)
            flex = model(batch.tokens, batch.pos, train.block_mask(batch))
            assert (dense - flex).abs().max() < 1e-4


def trainer(model, examples: list[Example], args) -> Trainer:
    data = type("Data", (), {"training": examples, "held_out": []})
    return Trainer(model, None, data, torch.float32, args)


def test_a_step_by_hand(monkeypatch):
    """The loss and its weights, clipping, AdamW and the learning rate, written out plainly."""
    block, rng = 3, random.Random(3)
    examples = [random_example(rng, block) for _ in range(5)]
    words = ("--data", "x", "--ar-weight", 0.3, "--lr", 0.02, "--warmup", 0, "--clip", 0.5)
    words += ("--steps", 4, "--batch-tokens", 128)
    for normalization in ("sequence", "token"):
        args = arguments(monkeypatch, *words, "--normalization", normalization)
        ours, theirs = tiny_model(random.Random(1)), tiny_model(random.Random(1))
        ours.config.block_size = block
        training = trainer(ours, examples, args)
        optimizer = torch.optim.AdamW(theirs.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
        for step in range(4):
            record = training.step(batches(examples, ours.config, args), 0)
            sums = [two_stream_loss(theirs, example, block) for example in examples]
            share = [e.targets * len(examples) for e in examples]
            if normalization == "token":
                share = [sum(e.targets for e in examples)] * len(examples)
            noisy, clean = (sum(s[i] / n for s, n in zip(sums, share)) for i in (0, 1))
            optimizer.zero_grad()
            (noisy + 0.3 * clean).backward()
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (1 + math.cos(math.pi * (step + 0.5) / 4))
            optimizer.step()
            assert record["noisy"] == pytest.approx(noisy.item(), abs=1e-4)
            assert record["clean"] == pytest.approx(clean.item(), abs=1e-4)
        for mine, yours in zip(ours.parameters(), theirs.parameters()):
            assert (mine - yours).abs().max() < 1e-5


@pytest.mark.parametrize("words", [(), ("--checkpoint-layers",)])
def test_the_memory_that_is_foretold(monkeypatch, words):
    """Against what autograd in fact keeps for the backward pass, counted tensor by tensor: of a
    model of six layers more than of one of two."""
    args = arguments(monkeypatch, "--data", "x", "--max-length", 64, *words, "--batch-tokens", 256)
    foretold, kept = [], []
    for layers in (2, 8):
        config = Config(64, 96, 320, layers, 6, 2, 512, 1e4, eos_token_id=(0,), mask_token_id=1)
        stays, step = train.memory_needed(config, args, torch.float32)
        foretold.append((step - stays) * 2**30)
        model = trainer(train.initialize(config, 0), [], args).model
        weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        storages = {}

        def keep(tensor, storages=storages, weights=weights):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = tensor, storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            mask = torch.ones(1, 1, 256, 256, dtype=torch.bool).tril()
            hidden = model(torch.zeros(1, 256, dtype=int), torch.arange(256)[None], mask)
        kept.append(sum(size for _, size in storages.values()))
        assert hidden.requires_grad
    more = (foretold[1] - foretold[0]) / (kept[1] - kept[0])
    assert 0.8 < more < 1.25


def test_recomputed_layers_change_nothing(monkeypatch):
    gradients = []
    for words in ((), ("--checkpoint-layers",)):
        rng = random.Random(5)
        model, examples = tiny_model(rng), [random_example(rng, 4) for _ in range(5)]
        model.config.block_size = 4
        args = arguments(monkeypatch, "--data", "x", *words)
        gradients.append(whole_step(trainer(model, examples, args).model, examples, args))
    assert torch.equal(*gradients)


def test_bfloat16_is_of_the_arithmetic_only(chat, tmp_path, monkeypatch):
    """--dtype bfloat16 changes the loss a little and no weight's type; checkpoints are bfloat16."""
    clean = []
    for dtype in ("float32", "bfloat16"):
        words = ["--data", ROOT / "toy/train.jsonl", "--model", ROOT / "toy/sft", "--batch", 2]
        words += ["--out", tmp_path, "--steps", 1, "--dtype", dtype, "--held-out", 1]
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, words)])
        train.main()
        clean.append(json.loads((tmp_path / "log.jsonl").read_text())["clean"])
        saved = load_file(tmp_path / "model.safetensors")
        assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert 0 < abs(clean[0] - clean[1]) < 0.05


def test_a_fixed_phase_is_the_papers_grid(chat, tmp_path, monkeypatch):
    rows = write(tmp_path / "d.jsonl", 30 * [{"prompt": "?", "response": "12"}])
    seen = {}
    monkeypatch.setattr(
        train.Trainer, "run", lambda self: seen.update({self.args.block_phase: self.data})
    )
    for phase in ("fixed", "random"):
        words = ["--data", rows.path, "--model", ROOT / "toy/sft", "--block-phase", phase]
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, words)])
        train.main()
    fixed, drawn = (
        {step.examples[0].phase for step in itertools.islice(seen[phase].steps(1), 25)}
        for phase in ("fixed", "random")
    )
    assert fixed == {0} and drawn == {0, 1, 2, 3}


def test_learning_rate():
    rates = [train.learning_rate(2.0, progress / 100, 0.1) for progress in range(101)]
    assert rates[0] == 0 and rates[5] == pytest.approx(1.0) and rates[10] == pytest.approx(2.0)
    assert rates[55] == pytest.approx(1.0) and rates[100] == pytest.approx(0)
    assert all(a > b for a, b in zip(rates[10:], rates[11:]))
    overrun = train.learning_rate(2.0, 1.3, 0.1)  # the last step may skip rows, past the end
    assert overrun == pytest.approx(0)


def test_steps_are_steps(tmp_path, monkeypatch, capsys):
    """Half of the rows cannot be used: --steps 5 once took 3 steps, for it counted rows."""
    rows = write(tmp_path / "d.jsonl", 20 * [{"prompt": "?", "response": "12"}, {"text": "12"}])
    words = ("--data", rows.path, "--model", ROOT / "toy/sft", "--out", tmp_path, "--batch", 3)
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, words), "--steps", "5"])
    train.main()
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log] == [1, 2, 3, 4, 5] and log[-1]["lr"] > 0
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, words), "--epochs", "2"])
    capsys.readouterr()
    train.main()
    assert "skipped rows: 20 neither" in capsys.readouterr().out  # each once, in all epochs
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert 11 <= len(log) <= 13  # 36 rows and 2 epochs, half of them usable, 3 to a step


def test_from_scratch_to_several_tokens_per_forward(tmp_path, monkeypatch):
    """Both stages on one sentence, from random weights: MARS learns to give it in few forwards."""
    data = tmp_path / "data.jsonl"
    row = {"prompt": "How many?", "response": "So Mia has 12 plums now. The answer is 12."}
    data.write_text(20 * (json.dumps(row) + "\n"))
    common = ["--data", data, "--batch", 4, "--steps", 60, "--lr", 3e-3, "--held-out", 2]
    sft, mars = tmp_path / "sft", tmp_path / "mars"
    for words in (
        ("--objective", "sft", "--model", ROOT / "toy/base", "--from-scratch", "--out", sft),
        ("--model", sft, "--out", mars, "--block", 3, "--ar-weight", 0.5, "--save-every", 20),
    ):
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, [*words, *common])])
        train.main()
    log = [json.loads(line) for line in (mars / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log] == list(range(1, 61))
    assert log[-1]["noisy"] < 0.1 * log[0]["noisy"] and log[-1]["clean"] < 0.1
    assert [len(record["look_ahead"]) for record in log if "look_ahead" in record] == [4, 4, 4]
    assert log[-1]["look_ahead"][0] > 0.95
    model, chat = load(str(mars))
    assert model.config.block_size == 3
    [result] = generate(
        model, [chat.encode(chat.prompt([{"role": "user", "content": "How many?"}]))]
    )
    assert chat.decode(result.tokens) == row["response"]
    assert result.tokens_per_forward > 3
    assert not list(tmp_path.rglob("*.tmp"))


# ------------------------------------------------------------------------------------ the toy world


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (ROOT / "toy" / name).read_text().splitlines()]


def test_toy_answers_are_right_and_new():
    test, training = read("test.jsonl"), read("train.jsonl")
    assert len(test) == 500
    assert not {row["prompt"] for row in test} & {row["prompt"] for row in training}
    operations = Counter()
    for row in test + training:
        for a, operator, b, result in re.findall(r"(\d+) ([+*-]) (\d+) = (\d+)", row["response"]):
            expected = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}
            assert int(result) == expected[operator]
            operations[operator] += 1
        assert row["response"].endswith(f"The answer is {row['answer']}.")
        assert 1 <= row["response"].count("=") <= 2
    assert min(operations.values()) > 1000


def test_toy_is_reproducible(tmp_path, monkeypatch):
    sys.path.insert(0, str(ROOT / "toy"))
    import make

    monkeypatch.setattr(make, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["make.py", "--out", str(tmp_path / "train.jsonl")])
    make.main()
    for name in ("train.jsonl", "test.jsonl", "base/config.json", "base/tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (ROOT / "toy" / name).read_bytes(), name
