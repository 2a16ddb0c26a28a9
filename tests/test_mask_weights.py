"""`--mask-weight expected`: against loops over blocks, and its gradient.

That packing and accumulation change nothing is in test_packing.py, for both kinds of weights.
"""

import math
import random

import pytest
import torch.nn.functional as F
from common import cases, tiny_model
from training import arguments, gradient, random_example

import train
from plumbing.data import Example
from train import expected_weights, losses


def smoothed(p: float) -> float:
    return (p + train.SMOOTHING) / (1 + train.SMOOTHING)


def slow_weights(example: Example, block: int, p: dict[int, float]) -> dict[int, float]:
    """Of every mask by its position; p: how likely its target is."""
    blocks = []
    for pos in range(example.prompt_length, len(example.tokens) - 1):
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


def test_the_weights_are_the_slow_ones_and_constants():
    """Of examples that share rows. The gradient is that with the same weights, given as numbers."""
    for seed in cases(10, 100):
        rng = random.Random(seed)
        model = tiny_model(rng)
        block = model.config.block = rng.randint(1, 8)
        examples = [random_example(rng, block) for _ in range(3)]
        args = arguments("--batch-tokens", 640)
        [forward] = train.forward_inputs(
            examples, model.config, args, row_width=rng.choice([160, 320])
        )
        at = train.positions_with_target(forward)
        logits = model.logits(train.hidden_states(model, forward)[at])
        nats = F.cross_entropy(logits, forward.target[at], reduction="none").detach()
        weights = expected_weights(nats, forward, at, block)

        found = [{} for _ in examples]
        p = [{} for _ in examples]
        doc, pos, prefix = (
            field[at].tolist() for field in (forward.doc, forward.pos, forward.prefix)
        )
        for n in range(len(nats)):
            if prefix[n] > pos[n]:
                assert weights[n] == 1  # a clean token
            else:
                found[doc[n]][pos[n]] = weights[n].item()
                p[doc[n]][pos[n]] = math.exp(-nats[n])
        for example, ours, probabilities in zip(examples, found, p):
            assert ours == pytest.approx(slow_weights(example, block, probabilities))

        noisy, _ = losses(model, forward, "expected")
        constant = forward.noisy_weight.double()
        constant[at] *= weights
        plain, _ = losses(model, forward._replace(noisy_weight=constant))
        assert plain.item() == pytest.approx(noisy.item())
        expected = gradient(plain, model)
        assert (gradient(noisy, model) - expected).abs().max() < 1e-6 * expected.abs().max()
