"""The MARS loss against the paper's two-stream form, the mask rule, the training loop."""

import itertools
import math
import random

import pytest
import torch
from common import ROOT, cases, random_prompt, tiny_model, unpacked
from safetensors.torch import load_file
from training import (
    FixedData,
    NoRun,
    arguments,
    checkpoint_tensors,
    gradient,
    log,
    random_example,
    run_train,
    two_stream_loss,
    whole_step,
    write,
)

import train
from decode import generate
from model import MLP, load, visible
from plumbing import attention
from plumbing.data import Example
from train import forward_inputs, lay_out, losses, naive_loss


def test_response_only_masks_give_the_two_stream_loss():
    for seed in cases(25, 200):
        rng = random.Random(seed)
        model = tiny_model(rng)
        block = rng.randint(1, 8)
        example = random_example(rng, block)
        streams = lay_out(example, block, model.config.mask_token_id, 1.0)
        noisy, clean = losses(model, unpacked([streams]))
        expected_noisy, expected_clean = two_stream_loss(model, example, block)
        assert noisy.item() == pytest.approx(expected_noisy.item(), rel=1e-12)
        assert clean.item() == pytest.approx(expected_clean.item(), rel=1e-12)
        weight = rng.random()
        ours = gradient(noisy + weight * clean, model)
        theirs = gradient(expected_noisy + weight * expected_clean, model)
        assert (ours - theirs).abs().max() < 1e-10 * theirs.abs().max()


def test_losses_are_the_naive_loss_of_many_examples():
    """Of a step: the mean over its examples, on the paper's grid, however they share forwards."""
    for seed in cases(25, 500):
        rng = random.Random(seed)
        model = tiny_model(rng)
        block = model.config.block = rng.randint(1, 9)
        examples = []
        for _ in range(rng.randint(1, 4)):
            prompt = rng.randint(1, 20)
            examples.append(Example(random_prompt(rng, prompt + rng.randint(1, 20)), prompt))
        args = arguments("--batch-tokens", 64, "--ar-weight", rng.choice([0, 0.3, 1]))
        found = whole_step(model, examples, args, width=rng.choice([None, 64]))
        expected = 0
        for example in examples:
            prompt = example.tokens[: example.prompt_length]
            loss = naive_loss(model, prompt, example.response, block, args.ar_weight)
            expected += loss / len(examples)
        noisy, clean = found[:2]
        assert (noisy + args.ar_weight * clean).item() == pytest.approx(expected.item(), rel=1e-6)
        theirs = gradient(expected, model)
        assert (found[2:] - theirs).abs().max() < 1e-6 * theirs.abs().max()


@torch.inference_mode()
def test_look_ahead_is_what_a_decoder_would_guess():
    """Against the plain way: for every block, the true prefix, then masks, then count the hits."""
    B = 3
    right = [0] * 4
    count = [0] * 4
    rng = random.Random(9)
    model = tiny_model(rng)
    examples = [random_example(rng, B) for _ in range(12)]
    mask_id = model.config.mask_token_id

    def best_tokens(feed: list[int], at: int) -> list[int]:
        hidden = model(torch.tensor([feed]), torch.arange(len(feed))[None], None)[0, at:]
        return model.logits(hidden).argmax(-1).tolist()

    for example in examples:
        x = example.tokens
        for at in range(example.prompt_length, len(x)):
            right[0] += best_tokens(x[:at], at - 1)[0] == x[at]
            count[0] += 1
        cuts = [p for p in range(example.prompt_length + 1, len(x)) if (p + example.phase) % B == 0]
        for start, end in zip([example.prompt_length, *cuts], [*cuts, len(x)]):
            guesses = best_tokens(x[:start] + [mask_id] * (end - start), start)
            for k, (guessed, true) in enumerate(zip(guesses, x[start + 1 : end + 1])):
                right[1 + k] += guessed == true
                count[1 + k] += 1
    model.config.block = B
    streams = [lay_out(example, B, mask_id, 1.0) for example in examples]
    shares = train.look_ahead(model, [unpacked(streams[:5]), unpacked(streams[5:])])
    assert shares == [round(r / c, 4) for r, c in zip(right, count)]
    assert len(set(shares)) == 4


def test_visible_is_the_rule_in_words():
    """On all pairs of a random packing: two documents, clean tokens, blocks, in any order."""
    for seed in cases(25, 200):
        rng = random.Random(seed)
        tokens = []  # (pos, prefix, doc)
        for doc in (0, 1):
            tokens += [(p, p + 1, doc) for p in range(12)]
            for start in sorted(rng.sample(range(1, 12), 3)):
                tokens += [(start + i, start, doc) for i in range(rng.randint(1, 4))]
        rng.shuffle(tokens)
        fields = torch.tensor(tokens).unbind(-1)
        found = visible(*(field[:, None] for field in fields), *fields).tolist()
        for (q_pos, q_prefix, q_doc), row in zip(tokens, found):
            for (k_pos, k_prefix, k_doc), is_visible in zip(tokens, row):
                if q_doc != k_doc:
                    expected = False
                elif k_prefix == k_pos + 1:  # a clean key
                    expected = k_pos < q_prefix
                else:  # a mask: seen by masks of its block, of which clean tokens are not
                    expected = k_prefix == q_prefix <= q_pos and k_pos <= q_pos
                assert is_visible == expected


def test_logits_exist_a_few_at_a_time(monkeypatch):
    """Of targets only. The backward pass makes all but the last few again."""
    rng = random.Random(2)
    model = tiny_model(rng)
    example = random_example(rng, 4)
    forward = unpacked([lay_out(example, 4, 1, 1.0)])
    monkeypatch.setattr("model.LOGITS_AT_A_TIME", 8 * 5)
    logits = model.logits
    sizes = []

    def counted(hidden):
        sizes.append(len(hidden))
        return logits(hidden)

    model.logits = counted
    noisy, clean = losses(model, forward)
    targets = 2 * example.num_targets - 1
    assert sum(sizes) == targets and max(sizes) <= 5 and len(sizes) == math.ceil(targets / 5) > 2
    last = sizes[-1]
    sizes.clear()
    (noisy + clean).backward()
    assert sum(sizes) == targets - last and max(sizes) <= 5


@torch.inference_mode()
def test_flex_attention_sees_what_the_dense_mask_shows(monkeypatch):
    """FlexAttention as it runs on CUDA, but on the CPU and not compiled: the same hidden states."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(attention, "compiled_flex_attention", lambda: flex_attention)
    for seed in cases(5, 50):
        rng = random.Random(seed)
        model = tiny_model(rng).float()
        model.config.block = rng.randint(1, 8)
        examples = [random_example(rng, model.config.block) for _ in range(6)]
        options = arguments("--batch-tokens", 512)
        width = rng.choice([None, 160])  # with a width, several examples share a row
        for forward in forward_inputs(examples, model.config, options, width):
            dense = train.hidden_states(model, forward)
            with monkeypatch.context() as patch:
                patch.setattr(train, "can_use_flex", lambda *_: True)
                patch.delattr(train, "dense_mask")
                flex = train.hidden_states(model, forward)
            assert (dense - flex).abs().max() < 1e-4


# ------------------------------------------------------------------------------------ the loop


def test_a_step_by_hand():
    """The loss and its weights, clipping, AdamW and the learning rate, written out plainly."""
    block = 3
    rng = random.Random(3)
    examples = [random_example(rng, block) for _ in range(5)]
    words = ("--ar-weight", 0.3, "--lr", 0.02, "--warmup", 0, "--clip", 0.5)
    words += ("--steps", 4, "--batch-tokens", 128)
    for normalization in ("sequence", "token"):
        args = arguments(*words, "--normalization", normalization)
        ours = tiny_model(random.Random(1))
        theirs = tiny_model(random.Random(1))
        ours.config.block = block
        run = NoRun()
        assert train.train(ours, None, FixedData(examples), run, args, torch.float32) == 0
        assert len(run.records) == 4
        optimizer = torch.optim.AdamW(theirs.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
        for step, record in enumerate(run.records):
            sums = [two_stream_loss(theirs, example, block) for example in examples]
            share = [e.num_targets * len(examples) for e in examples]
            if normalization == "token":
                share = [sum(e.num_targets for e in examples)] * len(examples)
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


def test_recomputed_layers_change_nothing(monkeypatch):
    """But every layer runs twice."""
    forward = MLP.forward
    found = []
    for words in ((), ("--checkpoint-layers",)):
        calls = []

        def counted(mlp, x, calls=calls):
            calls.append(mlp)
            return forward(mlp, x)

        monkeypatch.setattr(MLP, "forward", counted)
        rng = random.Random(5)
        model = tiny_model(rng)
        model.config.block = 4
        data = FixedData([random_example(rng, 4) for _ in range(5)])
        train.train(model, None, data, NoRun(), arguments("--steps", 2, *words), torch.float32)
        found.append((torch.cat([w.flatten() for w in model.parameters()]), len(calls)))
    (plain, num_calls), (recomputed, num_more_calls) = found
    assert torch.equal(plain, recomputed) and num_more_calls == 2 * num_calls


def test_bfloat16_is_of_the_arithmetic_only(tmp_path):
    """--dtype bfloat16 changes the loss a little. The weights in training stay float32: a step of
    5e-6 would vanish in bfloat16. The model that is written is bfloat16."""
    clean = []
    for dtype in ("float32", "bfloat16"):
        out = tmp_path / dtype
        words = ("--data", ROOT / "toy/train.jsonl", "--model", ROOT / "toy/sft", "--batch", 2)
        words += ("--out", out, "--steps", 1, "--dtype", dtype, "--held-out", 1)
        assert run_train(*words).status == 0
        clean.append(log(out)[0]["clean"])
        saved = load_file(out / "model.safetensors")
        assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
        state = checkpoint_tensors(out / "checkpoints/step-00000001", tmp_path)
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert 0 < abs(clean[0] - clean[1]) < 0.05


def test_what_the_seed_and_the_phase_of_blocks_decide(tmp_path, monkeypatch):
    """The seed: the order of the rows, the phases, new weights. A fixed phase is the paper's."""
    rows = [{"prompt": "?", "response": str(i)} for i in range(30)]
    data = write(tmp_path / "d.jsonl", rows).path
    found = []

    def no_training(model, chat, data, run, args, dtype):
        examples = [step.examples[0] for step in itertools.islice(data.steps(1), 25)]
        order = [example.tokens for example in examples]
        phases = [example.phase for example in examples]
        found.append((order, phases, model.head.sum().item()))

    monkeypatch.setattr(train, "train", no_training)
    for words in (("--seed", 0), ("--seed", 7), ("--seed", 7), ("--block-phase", "fixed")):
        common = ("--data", data, "--model", ROOT / "toy/base", "--from-scratch")
        assert run_train(*common, "--out", tmp_path / "out", *words).status == 0
    first, second, third, (_, fixed_phases, _) = found
    assert all(one != other for one, other in zip(first, second)) and second == third
    assert set(first[1]) == {0, 1, 2, 3} and set(fixed_phases) == {0}


def test_learning_rate():
    rates = [train.learning_rate(2.0, progress / 100, 0.1) for progress in range(101)]
    assert rates[0] == 0 and rates[5] == pytest.approx(1.0) and rates[10] == pytest.approx(2.0)
    assert rates[55] == pytest.approx(1.0) and rates[100] == pytest.approx(0)
    assert all(a > b for a, b in zip(rates[10:], rates[11:]))
    overrun = train.learning_rate(2.0, 1.3, 0.1)  # the last step may skip rows, past the end
    assert overrun == pytest.approx(0)


def test_from_scratch_to_several_tokens_per_forward(tmp_path):
    """Both stages on one sentence, from random weights: MARS learns to give it in few forwards."""
    row = {"prompt": "How many?", "response": "So Mia has 12 plums now. The answer is 12."}
    data = write(tmp_path / "data.jsonl", 20 * [row]).path
    common = ("--data", data, "--batch", 2, "--steps", 60, "--lr", 3e-3, "--held-out", 2)
    sft = tmp_path / "sft"
    mars = tmp_path / "mars"
    for words in (
        ("--objective", "sft", "--model", ROOT / "toy/base", "--from-scratch", "--out", sft),
        ("--model", sft, "--out", mars, "--block", 3, "--ar-weight", 0.5, "--save-every", 20),
    ):
        assert run_train(*words, *common).status == 0
    records = log(mars)
    assert [record["step"] for record in records] == list(range(1, 61))
    assert records[-1]["noisy"] < 0.1 * records[0]["noisy"] and records[-1]["clean"] < 0.1
    measured = [record["look_ahead"] for record in records if "look_ahead" in record]
    assert [len(shares) for shares in measured] == [4, 4, 4]
    assert measured[-1][0] > 0.95
    model, chat = load(str(mars))
    assert model.config.block == 3
    prompt = chat.encode(chat.prompt([{"role": "user", "content": "How many?"}]))
    [answer] = generate(model, [prompt])
    assert chat.decode(answer.tokens) == row["response"]
    assert answer.tokens[-1] == model.config.eos_token_id[0]
    assert len(answer.tokens) / answer.forwards > 3
    assert not list(tmp_path.rglob("*.tmp"))
