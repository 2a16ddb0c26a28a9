"""The MARS loss against the paper's two-stream form, the mask rule, the training loop."""

import math
import random
from dataclasses import replace
from unittest import mock

import pytest
import torch
from common import MASK, ROOT, cases, random_prompt, tiny_model, unpacked
from safetensors.torch import load_file
from training import (
    DRAFT,
    checkpoint_tensors,
    clean_logits,
    gradient,
    log,
    mask_predictions,
    random_example,
    run_train,
    two_stream_loss,
    whole_step,
    write,
)

import train
from decode import generate
from model import MLP, load
from plumbing import attention
from plumbing.data import Example
from train import Recipe, forward_inputs, lay_out, losses, naive_loss

# ------------------------------------------------------------------------------------ the losses


def test_response_only_masks_give_the_two_stream_loss(monkeypatch):
    """And so does `naive_loss`. Without masks it is the clean loss.

    However a step is packed, accumulated and split among processes, and its logits cut into chunks.
    """
    for seed in cases(25, 200):
        rng = random.Random(seed)
        model = tiny_model(rng)
        block = rng.randint(1, 8)
        weight = rng.random()
        examples = [random_example(rng, block) for _ in range(5)]
        width = rng.choice([None, 200])
        tokens = rng.choice([1, 600])
        recipe = Recipe(MASK, block, weight, batch_tokens=tokens, row_width=width)
        monkeypatch.setattr("model.LOGITS_AT_A_TIME", rng.choice([1, 8 * 7, 2**26]))
        worlds = rng.randint(1, 3)
        noisy, clean = sum(two_stream_loss(model, each, block) for each in examples) / 5
        naive = 0
        for example in examples:
            prompt = example.tokens[: example.prompt_length]
            naive = naive + naive_loss(model, prompt, example.response, block, weight) / 5
        theirs = gradient(noisy + weight * clean, model)
        assert (gradient(naive, model) - theirs).abs().max() < 1e-6 * theirs.abs().max()
        ours = whole_step(model, examples, recipe, worlds)
        assert ours[:2].tolist() == pytest.approx([noisy.item(), clean.item()], rel=1e-6)
        assert (ours[2:] - theirs).abs().max() < 1e-6 * theirs.abs().max()
        plain = whole_step(model, examples, replace(recipe, block=None), worlds)
        assert plain[:2].tolist() == pytest.approx([0, clean.item()], rel=1e-6)


@torch.inference_mode()
def test_look_ahead_is_what_a_decoder_would_guess():
    """Against the plain way: after the true text before every block count the hits."""
    B = 3
    right = [0] * (B + 1)
    count = [0] * (B + 1)
    rng = random.Random(9)
    model = tiny_model(rng)
    examples = [random_example(rng, B) for _ in range(12)]
    for example in examples:
        predictions = mask_predictions(model, example, B)
        for logits, token in zip(clean_logits(model, example), example.response):
            predictions.append((1, logits, token))
        for ahead, logits, token in predictions:
            right[ahead - 1] += logits.argmax().item() == token
            count[ahead - 1] += 1
    expected = [round(r / c, 4) for r, c in zip(right, count)]
    assert len(set(expected)) == 4
    for block, num in ((B, 4), (None, 1)):  # 0.000 was printed for what nothing had to predict
        recipe = Recipe(MASK, block, batch_tokens=200)
        shares = train.look_ahead(model, forward_inputs(examples, recipe), recipe)
        assert shares == expected[:num]


def test_logits_exist_a_few_at_a_time(monkeypatch):
    """Of targets only. The backward pass makes all but the last few of each loss again."""
    model = tiny_model(random.Random(2))
    example = Example(random_prompt(random.Random(2), 20), 6)
    monkeypatch.setattr("model.LOGITS_AT_A_TIME", 8 * 5)
    model.logits = mock.Mock(wraps=model.logits)
    noisy, clean = losses(model, unpacked([lay_out(example, Recipe(MASK, 4))]))
    (noisy + clean).backward()
    sizes = [len(call.args[0]) for call in model.logits.call_args_list]
    assert sizes == 2 * [5, 5, 4] + 2 * [5, 5]


@torch.inference_mode()
def test_flex_attention_sees_what_the_dense_mask_shows(monkeypatch):
    """FlexAttention as it runs on CUDA, but on the CPU and not compiled: the same hidden states."""
    from torch.nn.attention.flex_attention import flex_attention

    kernel = mock.Mock(wraps=flex_attention)
    monkeypatch.setattr(attention, "compiled_flex_attention", lambda: kernel)
    for seed in cases(5, 50):
        rng = random.Random(seed)
        model = tiny_model(rng).float()
        examples = [random_example(rng, 4) for _ in range(6)]
        recipe = Recipe(MASK, batch_tokens=512, row_width=rng.choice([None, 160]))
        for inputs in forward_inputs(examples, recipe):
            dense = train.hidden_states(model, inputs)
            with monkeypatch.context() as patch:
                patch.setattr(train, "can_use_flex", lambda *_: True)
                flex = train.hidden_states(model, inputs)
            assert (dense - flex).abs().max() < 1e-4
    assert kernel.called


# ------------------------------------------------------------------------------------ the loop


def test_a_step_by_hand(monkeypatch):
    """The loss and its weights, clipping, AdamW and the learning rate, written out plainly."""
    block = 3
    rng = random.Random(3)
    examples = [random_example(rng, block) for _ in range(5)]
    monkeypatch.setattr(train, "WARMUP", 0.25)
    monkeypatch.setattr(train, "CLIP", 0.5)
    ours = tiny_model(random.Random(1))
    theirs = tiny_model(random.Random(1))
    recipe = Recipe(MASK, block, ar_weight=0.3, lr=0.02, steps=4, batch_tokens=128)
    run = mock.Mock(second_loss="clean")
    run.data.next_batch.return_value = examples
    run.resume.return_value = run.stop_signal.number = 0
    assert train.train(ours, [], run, recipe) == 0
    records = [call.args[0] for call in run.log.call_args_list]
    rates = [0.01] + [0.01 * (1 + math.cos(math.pi * sixths / 6)) for sixths in (1, 3, 5)]
    optimizer = torch.optim.AdamW(theirs.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for record, rate in zip(records, rates, strict=True):
        noisy, clean = sum(two_stream_loss(theirs, each, block) for each in examples) / 5
        optimizer.zero_grad()
        (noisy + 0.3 * clean).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        assert record["noisy"] == pytest.approx(noisy.item(), abs=1e-4)
        assert record["clean"] == pytest.approx(clean.item(), abs=1e-4)
    for mine, yours in zip(ours.parameters(), theirs.parameters()):
        assert (mine - yours).abs().max() < 1e-5


def test_recomputed_layers_change_nothing():
    """But every layer runs twice."""
    rng = random.Random(5)
    model = tiny_model(rng)
    examples = [random_example(rng, 4) for _ in range(5)]
    with mock.patch.object(MLP, "forward", autospec=True, side_effect=MLP.forward) as forward:
        plain = whole_step(model, examples, Recipe(MASK))
        num_calls = forward.call_count
        train.processes.recompute_layers(model)
        assert torch.equal(plain, whole_step(model, examples, Recipe(MASK)))
        assert forward.call_count == 3 * num_calls


def test_bfloat16_is_of_the_arithmetic_only(tmp_path, data):
    """--dtype bfloat16 changes the loss a little. The weights in training stay float32: a step of
    5e-6 would vanish in bfloat16. The model that is written is bfloat16."""
    clean = []
    for dtype in ("float32", "bfloat16"):
        out = tmp_path / dtype
        words = ("--data", data, "--out", out, "--steps", 1, "--dtype", dtype)
        assert run_train(*DRAFT, *words).status == 0
        clean.append(log(out)[0]["clean"])
        saved = load_file(out / "model.safetensors")
        assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
        state = checkpoint_tensors(out / "checkpoints/step-00000001", tmp_path)
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert 0 < abs(clean[0] - clean[1]) < 0.05


def test_from_scratch_to_several_tokens_per_forward(tmp_path):
    """Both stages on one sentence, from random weights: MARS learns to give it in few forwards."""
    row = {"prompt": "How many?", "response": "So Mia has 12 plums now. The answer is 12."}
    data = write(tmp_path / "data.jsonl", 20 * [row]).path
    common = ("--data", data, "--batch", 2, "--steps", 60, "--lr", 3e-3)
    sft = tmp_path / "sft"
    mars = tmp_path / "mars"
    done = run_train("--objective", "sft", "--model", ROOT / "toy/base", "--out", sft, *common)
    assert done.status == 0 and "toy/base: has no weights" in done.out
    words = ("--model", sft, "--out", mars, "--block", 3, "--save-every", 20)
    assert run_train(*words, *common).status == 0
    records = log(mars)
    assert records[-1]["noisy"] < 0.1 * records[0]["noisy"] and records[-1]["clean"] < 0.1
    measured = [record["look_ahead"] for record in records if "look_ahead" in record]
    assert [len(shares) for shares in measured] == [4, 4, 4] and measured[-1][0] > 0.95
    model, chat = load(str(mars))
    assert model.config.block == 3 and load(str(sft))[0].config.block is None
    assert log(sft)[0]["noisy"] == 0
    prompt = chat.encode_prompt([{"role": "user", "content": "How many?"}])
    [answer] = generate(model, [prompt])
    assert chat.decode(answer.tokens) == row["response"]
    assert answer.tokens[-1] == model.config.eos_token_id[0]
    assert len(answer.tokens) / answer.forwards > 2


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_learning_rate_that_is_too_high(tmp_path, data, monkeypatch, norm):
    """Weights that exploded: the run stops, and the checkpoint before it stays."""
    norms = iter([1.0, norm])
    monkeypatch.setattr(train.processes, "clip_gradients", lambda *_: next(norms))
    out = tmp_path / "out"
    done = run_train(*DRAFT, "--data", data, "--out", out, "--steps", 5, "--save-every", 1)
    message = f"error: step 2: the gradient's norm is {norm:g}; try a smaller --lr\n"
    assert done.status == 2 and done.err == message
    assert f"{out} holds the model of step 1" in done.out
