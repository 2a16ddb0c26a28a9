"""What MARS is compared with, held to versions without cache, batch and packing."""

import math
import random

import torch
from common import cases, random_prompt, tiny_model, unpacked

import train
from bench.controls import (
    ARMS,
    Jacobi,
    diffuse,
    diffusion_layout,
    diffusion_length,
    diffusion_states,
    noise,
    over_t,
)
from decode import generate
from train import Example


def block_outputs(model, text: list[int], prompt: int, window: list[int]) -> torch.Tensor:
    """Logits of a window that begins with a copy of the text's last token; nothing cached.

    The text: causal up to the response, then whole blocks; who sees what is spelt out in loops.
    """
    B, before = len(window) - 1, len(text) - 1
    ids = text + window
    pos = [*range(len(text)), *range(before, before + len(window))]
    sees = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    for q in range(len(ids)):
        for k in range(len(ids)):
            if q >= len(text):  # of the window: the text before it, and all of the window
                sees[q, k] = k < before or k >= len(text)
            elif q < prompt:
                sees[q, k] = k <= q
            else:
                sees[q, k] = k < prompt + ((q - prompt) // B + 1) * B and k < len(text)
    hidden = model(torch.tensor([ids]), torch.tensor([pos]), sees[None, None])
    return model.logits(hidden[0, len(text) :])


@torch.inference_mode()
def test_diffusion_learns_what_it_decodes():
    """The training layout gives every window what it would get behind its text alone."""
    for seed in cases(15, 300):
        rng = random.Random(seed)
        model, B = tiny_model(rng), rng.randint(1, 6)
        model.config.block_size = B
        examples = [
            Example(random_prompt(rng, rng.randint(1, 9) + n) + [0], n)
            for n in (rng.randint(1, 12) for _ in range(4))
        ]
        layouts = [diffusion_layout(e, B, 1, 1.0, doc) for doc, e in enumerate(examples)]
        assert [len(x.tokens) for x in layouts] == [diffusion_length(e, B) for e in examples]
        hidden = diffusion_states(model, unpacked(layouts))
        weighed = 0
        for example, layout, states in zip(examples, layouts, hidden):
            tokens = example.tokens + [0] * (-example.targets % B)
            t, masked = noise(example)
            masked = [*masked.tolist(), *[True] * B]
            first = len(layout.tokens) - (len(tokens) - example.prompt) // B * (B + 1)
            for at in range(example.prompt, len(tokens), B):
                block = [1 if masked[i] else tokens[i] for i in range(at, at + B)]
                expected = block_outputs(
                    model, tokens[:at], example.prompt, tokens[at - 1 : at] + block
                )
                part = slice(first, first + B + 1)
                torch.testing.assert_close(model.logits(states[part]), expected)
                weights = [1 / t if masked[i] else 0.0 for i in range(at, at + B)] + [0.0]
                torch.testing.assert_close(layout.noisy[part].tolist(), weights, rtol=1e-6, atol=0)
                assert layout.target[part][:-1].tolist() == tokens[at : at + B]
                weighed += sum(w > 0 for w in weights)
                first += B + 1
        assert weighed


@torch.inference_mode()
def naive_diffusion(model, prompt: list[int], max_new: int) -> list[int]:
    text, B = list(prompt), model.config.block_size
    while len(text) - len(prompt) < max_new and 0 not in text[len(prompt) :]:
        block = [1] * B
        for _ in range(B):
            probs = block_outputs(model, text, len(prompt), text[-1:] + block).softmax(-1)
            sure, tokens = (x.tolist() for x in probs.max(-1))
            at = max((i for i in range(B) if block[i] == 1), key=lambda i: sure[i])
            block[at] = tokens[at]
        text += block
    new = text[len(prompt) :]
    return new[: min(max_new, new.index(0) + 1 if 0 in new else max_new)]


def test_diffusion_batches():
    """Ragged prompts, with a cache: what each gets alone, without."""
    ended = 0
    for seed in cases(10, 200):
        rng = random.Random(seed)
        model = tiny_model(rng)
        model.config.block_size = rng.randint(1, 6)
        prompts = [random_prompt(rng, rng.randint(1, 70)) for _ in range(4)]
        max_new = rng.randint(1, 20)
        answers = diffuse(model, prompts, max_new)
        assert answers == [naive_diffusion(model, prompt, max_new) for prompt in prompts]
        ended += sum(answer[-1] == 0 for answer in answers)
    assert ended


@torch.inference_mode()
def jacobi_by_hand(model, prompt: list[int], W: int, max_new: int) -> list[int]:
    """How many tokens each forward gives; no cache."""
    text, guesses, accepted = list(prompt), [], []
    while len(text) - len(prompt) < max_new and 0 not in text[len(prompt) :]:
        ids = text + guesses
        hidden = model(torch.tensor([ids]), torch.arange(len(ids))[None], None)
        said = model.logits(hidden[0, len(text) - 1 :]).argmax(-1).tolist()
        n = 1 + sum(said[:i] == guesses[:i] for i in range(1, len(guesses) + 1))
        new = said[:n][: max_new - len(text) + len(prompt)]
        new = new[: new.index(0) + 1] if 0 in new else new
        text, guesses = text + new, said[n:] + said[-1:] * (W - len(said[n:]))
        accepted.append(len(new))
    return accepted


def test_jacobi_is_lossless():
    """And faster than one token per forward, where a text repeats itself."""
    tokens = forwards = 0
    for seed in cases(15, 300):
        rng = random.Random(seed)
        model = tiny_model(rng)
        prompts = [random_prompt(rng, rng.randint(1, 70)) for _ in range(5)]
        options = {"max_new": rng.randint(1, 40)}
        decoder = Jacobi(model, prompts, W := rng.randint(1, 9), rows=3, **options)
        answers = list(decoder.waiting)
        for _ in decoder:
            pass
        expected = generate(model, prompts, tau=1.0, **options)
        assert [a.tokens for a in answers] == [a.tokens for a in expected]
        for prompt, answer in zip(prompts, answers):
            assert answer.accepted == jacobi_by_hand(model, prompt, W, **options)
        tokens += sum(len(a.tokens) for a in answers)
        forwards += sum(a.forwards for a in answers)
    assert tokens > 1.2 * forwards


def test_over_t_weighs_whole_examples():
    examples = [Example([5, 6, 7, n, 0], 2) for n in range(2, 8)]
    plain = train.target_weights(examples, "sequence")
    for example, weight, weighted in zip(examples, plain, over_t(examples, "sequence")):
        assert 1 <= weighted / weight <= 1000
        assert math.isclose(weighted / weight, 1 / noise(example)[0])


def test_arms_exchange_what_train_has():
    """A function renamed in train.py would leave the control without its effect."""
    for functions in ARMS.values():
        assert all(callable(getattr(train, name)) for name in functions)
