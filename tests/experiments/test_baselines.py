"""experiments/paper/baselines.py, held to versions that spell out who sees what."""

import math
import random

import pytest
import torch
from commands import command
from common import EOS, MASK, ROOT, cases, random_prompt, rows_of, tiny_model

from decode import generate
from experiments.paper import baselines
from experiments.paper.baselines import diffuse, draw_noise, jacobi
from model import load
from plumbing.data import Example

WORDS = ("--model", ROOT / "toy/sft", "--data", ROOT / "toy/test.jsonl", "--device", "cpu")
WORDS += ("--batch", 4, "--lr", 1e-3)


def window_logits(model, text: list[int], prompt: int, window: list[int]) -> torch.Tensor:
    """Logits of a window whose first token is a copy of the text's last one; nothing is cached.

    The text is causal up to the response and sees whole blocks after that. Who sees what is spelled
    out in loops.
    """
    block = len(window) - 1
    before = len(text) - 1  # the window sees the text up to here, and all of itself
    ids = text + window
    pos = [*range(len(text)), *range(before, before + len(window))]
    sees = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    for q in range(len(ids)):
        for k in range(len(ids)):
            if q >= len(text):
                sees[q, k] = k < before or k >= len(text)
            elif q < prompt:
                sees[q, k] = k <= q
            else:
                block_end = prompt + ((q - prompt) // block + 1) * block
                sees[q, k] = k < min(block_end, len(text))
    hidden = model(torch.tensor([ids]), torch.tensor([pos]), sees[None, None])
    return model.logits(hidden[0, len(text) :])


@torch.inference_mode()
def test_diffusion_trains_what_it_decodes(monkeypatch):
    """Every block's loss is that of a window after its text alone, with weight 1/t at its masks."""
    for seed in cases(15, 300):
        rng = random.Random(seed)
        model = tiny_model(rng)
        block = model.config.block = rng.randint(1, 6)
        prompt = random_prompt(rng, rng.randint(1, 12))
        response = random_prompt(rng, rng.randint(1, 9))
        example = Example([*prompt, *response, EOS], len(prompt))
        num_targets = len(response) + 1
        tokens = example.tokens + [EOS] * (-num_targets % block)
        t, masked = draw_noise(len(tokens))
        monkeypatch.setattr(baselines, "draw_noise", lambda *_, noise=(t, masked): noise)
        expected = 0.0
        for start in range(example.prompt_length, len(tokens), block):
            window = tokens[start - 1 : start]
            for place in range(start, start + block):
                window.append(MASK if masked[place] else tokens[place])
            logits = window_logits(model, tokens[:start], example.prompt_length, window)
            for logprobs, place in zip(logits.log_softmax(-1), range(start, start + block)):
                if masked[place]:
                    expected -= logprobs[tokens[place]].item() / t
        loss = baselines.diffusion_loss(model, example).item()
        assert loss == pytest.approx(expected / num_targets, rel=1e-6)


@torch.inference_mode()
def naive_diffusion(model, prompt: list[int], max_new: int) -> list[int]:
    block_size = model.config.block
    new = []
    while len(new) < max_new and EOS not in new:
        block = [MASK] * block_size
        for _ in range(block_size):
            text = prompt + new
            logits = window_logits(model, text, len(prompt), text[-1:] + block)
            confidence, tokens = logits.softmax(-1).max(-1)
            open_places = [i for i in range(block_size) if block[i] == MASK]
            best = max(open_places, key=lambda i: confidence[i].item())
            block[best] = tokens[best].item()
        new += block
    if EOS in new:
        new = new[: new.index(EOS) + 1]
    return new[:max_new]


def test_diffusion_by_hand():
    """The tokens; and the forwards that it would take with a cache."""
    for seed in cases(10, 200):
        rng = random.Random(seed)
        model = tiny_model(rng)
        block_size = model.config.block = rng.randint(1, 6)
        max_new = rng.randint(1, 20)
        for length in (1, rng.randint(2, 70)):
            prompt = random_prompt(rng, length)
            answer = diffuse(model, prompt, max_new)
            assert answer.tokens == naive_diffusion(model, prompt, max_new)
            num_blocks = math.ceil(len(answer.tokens) / block_size)
            num_prefills = int(len(prompt) > 1)
            assert answer.forwards == num_prefills + num_blocks * (block_size + 1)


def test_jacobi_is_lossless():
    """And it gives more than one token per forward, where a text repeats itself."""
    num_tokens = 0
    num_forwards = 0
    for seed in cases(15, 300):
        rng = random.Random(seed)
        model = tiny_model(rng)
        prompts = [random_prompt(rng, rng.randint(1, 70)) for _ in range(5)]
        max_new = rng.randint(1, 40)
        for prompt, expected in zip(prompts, generate(model, prompts, tau=1.0, max_new=max_new)):
            answer = jacobi(model, prompt, rng.randint(1, 9), max_new)
            assert answer.tokens == expected.tokens
            alone = jacobi(model, prompt, 0, max_new)
            assert alone.tokens == expected.tokens and alone.forwards == len(alone.tokens)
            num_tokens += len(answer.tokens)
            num_forwards += answer.forwards
    assert num_tokens > 1.2 * num_forwards


def train(*words) -> list[dict]:
    """The log of a training on problems of the toy."""
    assert command("experiments.paper.baselines", *WORDS, *words).status == 0
    return rows_of(words[-1] / "log.jsonl")


def test_another_weight_of_the_clean_loss(tmp_path):
    """MARS of the same losses, and other gradients: of the clean loss as well, or not at all."""
    one, other = (train("--steps", 1, "--ar-weight", w, "--out", tmp_path / str(w)) for w in (1, 0))
    assert one[0]["noisy"] == other[0]["noisy"] and one[0]["clean"] == other[0]["clean"] > 0
    assert one[0]["grad_norm"] != other[0]["grad_norm"]


def test_block_diffusion_learns(tmp_path):
    """It is trained by train.py, with its options."""
    records = train("--steps", 12, "--out", tmp_path)
    assert records[-1]["noisy"] < 0.8 * records[0]["noisy"]
    model, _ = load(str(tmp_path))
    assert model.config.block == 4
