"""experiments/paper/baselines.py, held to versions that spell out who sees what."""

import math
import random
from unittest import mock

import torch
from common import EOS, MASK, cases, random_prompt, tiny_model, unpacked

import train
from decode import generate
from experiments.paper.baselines import (
    REPLACED,
    diffuse,
    diffusion_layout,
    diffusion_length,
    diffusion_states,
    jacobi,
    noise,
    over_t,
)
from plumbing.data import Example


def window_logits(model, text: list[int], prompt: int, window: list[int]) -> torch.Tensor:
    """Logits of a window whose first token is a copy of the text's last one; nothing is cached.

    The text is causal up to the response and sees whole blocks after that. Who sees what is spelled
    out in loops.
    """
    block_size = len(window) - 1
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
                block_end = prompt + ((q - prompt) // block_size + 1) * block_size
                sees[q, k] = k < min(block_end, len(text))
    hidden = model(torch.tensor([ids]), torch.tensor([pos]), sees[None, None])
    return model.logits(hidden[0, len(text) :])


def random_example(rng: random.Random) -> Example:
    prompt = random_prompt(rng, rng.randint(1, 12))
    response = random_prompt(rng, rng.randint(1, 9))
    return Example([*prompt, *response, EOS], len(prompt))


@torch.inference_mode()
def test_diffusion_trains_what_it_decodes():
    """In the training layout every window gets what it would get after its text alone."""
    for seed in cases(15, 300):
        rng = random.Random(seed)
        model = tiny_model(rng)
        block_size = rng.randint(1, 6)
        examples = [random_example(rng) for _ in range(4)]
        layouts = []
        for doc, example in enumerate(examples):
            layouts.append(diffusion_layout(example, block_size, MASK, 1.0, doc))
            assert len(layouts[-1].tokens) == diffusion_length(example, block_size)
        hidden = diffusion_states(model, unpacked(layouts))
        num_weighted = 0
        for example, layout, states in zip(examples, layouts, hidden):
            num_padding = -example.targets % block_size
            tokens = example.tokens + [EOS] * num_padding
            t, masked = noise(example, len(tokens))
            num_blocks = (len(tokens) - example.prompt) // block_size
            first = len(layout.tokens) - num_blocks * (block_size + 1)
            for start in range(example.prompt, len(tokens), block_size):
                places = range(start, start + block_size)
                window = tokens[start - 1 : start]
                window += [MASK if masked[i] else tokens[i] for i in places]
                expected = window_logits(model, tokens[:start], example.prompt, window)
                part = slice(first, first + block_size + 1)
                torch.testing.assert_close(model.logits(states[part]), expected)
                weights = [1 / t if masked[i] else 0.0 for i in places] + [0.0]
                torch.testing.assert_close(
                    layout.noisy_weight[part].tolist(), weights, rtol=1e-6, atol=0
                )
                assert layout.target[part][:-1].tolist() == tokens[start : start + block_size]
                num_weighted += sum(weight > 0 for weight in weights)
                first += block_size + 1
        assert num_weighted


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
    num_ended = 0
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
            num_ended += answer.tokens[-1] == EOS
    assert num_ended


@torch.inference_mode()
def naive_jacobi(model, prompt: list[int], num_guesses: int, max_new: int) -> list[int]:
    """How many tokens each forward gives."""
    new = []
    guesses = []
    accepted = []
    while len(new) < max_new and EOS not in new:
        ids = prompt + new + guesses
        hidden = model(torch.tensor([ids]), torch.arange(len(ids))[None], None)
        first = len(ids) - len(guesses) - 1
        predicted = model.logits(hidden[0, first:]).argmax(-1).tolist()
        num_held = 0
        while num_held < len(guesses) and guesses[num_held] == predicted[num_held]:
            num_held += 1
        tokens = predicted[: num_held + 1][: max_new - len(new)]
        if EOS in tokens:
            tokens = tokens[: tokens.index(EOS) + 1]
        new += tokens
        accepted.append(len(tokens))
        guesses = predicted[num_held + 1 :]
        guesses += predicted[-1:] * (num_guesses - len(guesses))
    return accepted


def test_jacobi_is_lossless():
    """And it gives more than one token per forward, where a text repeats itself."""
    num_tokens = 0
    num_forwards = 0
    for seed in cases(15, 300):
        rng = random.Random(seed)
        model = tiny_model(rng)
        prompts = [random_prompt(rng, rng.randint(1, 70)) for _ in range(5)]
        max_new = rng.randint(1, 40)
        num_guesses = rng.randint(1, 9)
        answers = [jacobi(model, prompt, num_guesses, max_new) for prompt in prompts]
        expected = generate(model, prompts, tau=1.0, max_new=max_new)
        assert [a.tokens for a in answers] == [a.tokens for a in expected]
        for prompt, answer in zip(prompts, answers):
            assert answer.accepted == naive_jacobi(model, prompt, num_guesses, max_new)
            num_tokens += len(answer.tokens)
            num_forwards += answer.forwards
    assert num_tokens > 1.2 * num_forwards


def test_over_t_weights_whole_examples():
    examples = [Example([5, 6, 7, n, EOS], 2) for n in range(2, 8)]
    plain = train.target_weights(examples, "sequence")
    for example, weight, weighted in zip(examples, plain, over_t(examples, "sequence")):
        assert 1 <= weighted / weight <= 1000
        assert math.isclose(weighted / weight, 1 / noise(example, 0)[0])


def test_noise_differs_with_the_phase():
    """Once every epoch masked the same tokens; and the padding after the end was always masked,
    with weights of up to 1000, so that diffusion learnt mostly to end."""
    ts = set()
    num_masked = 0
    for phase in range(100):
        t, masked = noise(Example([5, 6, 7, EOS], 2, phase), 50)
        ts.add(t)
        num_masked += masked.sum().item()
    assert len(ts) == 100
    assert 0.4 < num_masked / 5000 < 0.6


def test_train_uses_what_a_baseline_replaces():
    """If train.py called its functions by another way, a baseline would silently train MARS."""
    rng = random.Random(0)
    model = tiny_model(rng)
    model.config.block = 4
    examples = [random_example(rng) for _ in range(3)]
    args = train.parse_arguments(["--data", "unused"])

    def noisy_loss():
        batches = train.batches(examples, model.config, args)
        return sum(train.losses(model, batch)[0].item() for batch in batches)

    found = {noisy_loss()}
    for functions in REPLACED.values():
        with mock.patch.multiple(train, **functions):
            found.add(noisy_loss())
    assert len(found) == 1 + len(REPLACED)
