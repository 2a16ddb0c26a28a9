"""`--mask-weight expected`: against loops over blocks, and its gradient.

That packing and accumulation change nothing is in test_packing.py, for both kinds of weights.
"""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from common import cases, random_prompt, tiny_model
from training import arguments, gradient, random_example

import train
from plumbing.data import Example
from plumbing.packing import collate
from train import PADDING, Forward, expected_weights, forwards, lay_out


def smoothed(p: float) -> float:
    return (p + train.SMOOTHING) / (1 + train.SMOOTHING)


def slow_weights(example: Example, block: int, p: dict[int, float]) -> dict[int, float]:
    """Of every mask by its position; p: how likely its target is."""
    blocks = []
    for pos in range(example.prompt, len(example.tokens) - 1):
        if not blocks or (pos + example.phase) % block == 0:
            blocks.append([])
        blocks[-1].append(pos)
    gain = {}
    for masks in blocks:
        for k, pos in enumerate(masks):
            gain[pos] = 0.0
            for m in range(k, len(masks)):
                gain[pos] += math.prod(smoothed(p[q]) for q in masks[: m + 1])
    return {pos: value * len(gain) / sum(gain.values()) for pos, value in gain.items()}


def weights(rows: list[list[Example]], block: int, p: list[dict[int, float]]) -> list[dict]:
    """train.py's, of the examples of a packed forward: of every mask by its position.

    The clean tokens' cross-entropies are random, as no weight depends on them.
    """
    filled = []
    for row in rows:
        num_before = sum(map(len, filled))
        filled.append([lay_out(x, block, 1, 0.5, num_before + i) for i, x in enumerate(row)])
    width = 3 + max(sum(len(streams.pos) for streams in row) for row in filled)
    forward = Forward(*collate(filled, width, PADDING))
    at = train.positions_with_target(forward)
    doc, pos, prefix = (field[at].tolist() for field in (forward.doc, forward.pos, forward.prefix))
    masks = [n for n in range(len(pos)) if prefix[n] <= pos[n]]
    nats = torch.rand(len(pos)).double()
    for n in masks:
        nats[n] = -math.log(p[doc[n]][pos[n]])
    found = expected_weights(nats, forward, at, block)
    result = [{} for _ in p]
    for n in masks:
        result[doc[n]][pos[n]] = found[n].item()
        found[n] = 1
    assert (found == 1).all()  # of clean tokens
    return result


def test_a_block_by_hand():
    """A prompt of 4, one block of 3 masks."""
    a, b, c = smoothed(0.9), smoothed(0.5), smoothed(0.1)
    gains = [a + a * b + a * b * c, a * b + a * b * c, a * b * c]
    example = Example(random_prompt(random.Random(0), 8), 4, phase=0)
    [found] = weights([[example]], 4, [{4: 0.9, 5: 0.5, 6: 0.1}])
    assert list(found) == [4, 5, 6]
    assert list(found.values()) == pytest.approx([3 * gain / sum(gains) for gain in gains])


def test_against_loops_over_blocks():
    for seed in cases(30, 300):
        rng = random.Random(seed)
        block = rng.randint(1, 8)
        rows = []
        for _ in range(rng.randint(1, 3)):
            rows.append([random_example(rng, block) for _ in range(rng.randint(1, 3))])
        examples = [example for row in rows for example in row]
        p = [{pos: rng.random() for pos in range(len(example.tokens))} for example in examples]
        for example, found, of_example in zip(examples, weights(rows, block, p), p):
            assert found == pytest.approx(slow_weights(example, block, of_example))


def test_the_weights_are_constants():
    """The gradient of the loss is that with the same weights, given as numbers."""
    for seed in cases(5, 50):
        rng = random.Random(seed)
        model = tiny_model(rng)
        block = model.config.block = rng.randint(2, 6)
        examples = [random_example(rng, block) for _ in range(3)]
        [forward] = forwards(examples, model.config, arguments("--batch-tokens", 9999), 300)
        noisy, _ = train.losses(model, forward, "expected")
        found = gradient(noisy, model)

        at = train.positions_with_target(forward)
        logits = model.logits(train.hidden_states(model, forward)[at])
        nats = F.cross_entropy(logits, forward.target[at], reduction="none").detach()
        constant = forward.noisy_weight.double()
        constant[at] *= expected_weights(nats, forward, at, block)
        plain, _ = train.losses(model, forward._replace(noisy_weight=constant))
        assert plain.item() == pytest.approx(noisy.item())
        expected = gradient(plain, model)
        assert (found - expected).abs().max() < 1e-6 * expected.abs().max()

        uniform = gradient(train.losses(model, forward)[0], model)
        assert (found - uniform).abs().max() > 1e-3 * expected.abs().max()
