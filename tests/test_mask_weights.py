"""`--mask-weight expected`: by hand, against loops over blocks, and its gradient.

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
from train import PADDING, forwards, lay_out


def blocks_of(example: Example, block_size: int) -> list[list[int]]:
    """The positions of its masks, block by block."""
    blocks: list[list[int]] = []
    for pos in range(example.prompt, len(example.tokens) - 1):
        if not blocks or (pos + example.phase) % block_size == 0:
            blocks.append([])
        blocks[-1].append(pos)
    return blocks


def slow_weights(example: Example, block_size: int, p: dict[int, float]) -> dict[int, float]:
    """Of every mask by its position; p: how likely its target is."""
    gain = {}
    for block in blocks_of(example, block_size):
        for k, pos in enumerate(block):
            gain[pos] = 0.0
            for m in range(k, len(block)):
                terms = [(p[q] + train.SMOOTHING) / (1 + train.SMOOTHING) for q in block[: m + 1]]
                gain[pos] += math.prod(terms)
    mean = sum(gain.values()) / len(gain) if gain else 1
    return {pos: value / mean for pos, value in gain.items()}


def weights(rows: list[list[Example]], B: int, p: list[dict[int, float]]) -> list[dict]:
    """train.py's, of the examples of a packed forward: of every mask by its position.

    The clean tokens' cross-entropies are random, as no weight depends on them.
    """
    filled, num_laid_out = [], 0
    for row in rows:
        filled.append([])
        for example in row:
            filled[-1].append(lay_out(example, B, 1, 0.5, doc=num_laid_out))
            num_laid_out += 1
    batch = collate(filled, 3 + max(sum(len(s.pos) for s in row) for row in filled), PADDING)
    at = train.positions_with_target(batch)
    nats = torch.rand(len(at[0])).double()
    masks = []
    for n, (row, column) in enumerate(zip(*at)):
        pos, prefix = batch.pos[row, column].item(), batch.prefix[row, column].item()
        if prefix <= pos:
            which = batch.doc[row, column].item()
            masks.append((n, which, pos))
            nats[n] = -math.log(p[which][pos])
    found = train.expected_weights(nats, batch, at, B)
    result: list[dict] = [{} for _ in p]
    for n, which, pos in masks:
        result[which][pos] = found[n].item()
        found[n] = 1
    assert (found == 1).all()  # of clean tokens
    return result


def plain_example(prompt: int, response: int, phase: int) -> Example:
    return Example(random_prompt(random.Random(0), prompt + response), prompt, phase)


def smoothed(p: float) -> float:
    return (p + train.SMOOTHING) / (1 + train.SMOOTHING)


def test_a_block_by_hand():
    """A prompt of 4, one block of 3 masks."""
    a, b, c = smoothed(0.9), smoothed(0.5), smoothed(0.1)
    gains = [a + a * b + a * b * c, a * b + a * b * c, a * b * c]
    expected = [3 * gain / sum(gains) for gain in gains]
    [found] = weights([[plain_example(4, 4, 0)]], 4, [{4: 0.9, 5: 0.5, 6: 0.1}])
    assert list(found) == [4, 5, 6]
    assert list(found.values()) == pytest.approx(expected)


def test_blocks_that_are_cut_by_hand():
    """The first by the prompt's end, after one mask; the last by the response's, after one, too."""
    p = {3: 1.0, 4: 1.0, 5: 1.0, 6: 1.0}  # as smoothed
    gains = [1, 2, 1, 1]  # blocks of 1, 2 and 1 masks
    expected = [4 * gain / sum(gains) for gain in gains]
    [found] = weights([[plain_example(3, 5, 0)]], 2, [p])
    assert list(found.values()) == pytest.approx(expected)


def test_two_examples_in_a_row_by_hand():
    """The last block of one and the first of the next are two blocks; each example has mean 1."""
    one, two = plain_example(2, 3, 0), plain_example(2, 3, 1)
    a, b = smoothed(0.3), smoothed(0.7)
    found = weights([[one, two]], 2, [{2: 0.3, 3: 0.7}, {2: 0.3, 3: 0.7}])
    gains = [a + a * b, a * b]  # a block of two masks
    assert list(found[0].values()) == pytest.approx([2 * gain / sum(gains) for gain in gains])
    gains = [a, b]  # phase 1: two blocks of one mask
    assert list(found[1].values()) == pytest.approx([2 * gain / sum(gains) for gain in gains])


def test_against_loops_over_blocks():
    for seed in cases(30, 300):
        rng = random.Random(seed)
        block_size = rng.randint(1, 8)
        rows, p = [], []
        for _ in range(rng.randint(1, 3)):
            rows.append([random_example(rng, block_size) for _ in range(rng.randint(1, 3))])
            for example in rows[-1]:
                p.append({pos: rng.random() for pos in range(len(example.tokens))})
        examples = [example for row in rows for example in row]
        for example, found, probabilities in zip(examples, weights(rows, block_size, p), p):
            expected = slow_weights(example, block_size, probabilities)
            assert found == pytest.approx(expected)
            if found:
                assert sum(found.values()) == pytest.approx(len(found))


def test_the_weights_are_constants():
    """The gradient of the loss is that with the same weights, given as numbers."""
    for seed in cases(5, 50):
        rng = random.Random(seed)
        model = tiny_model(rng)
        block_size = model.config.block = rng.randint(2, 6)
        examples = [random_example(rng, block_size) for _ in range(3)]
        [batch] = forwards(examples, model.config, arguments("--batch-tokens", 9999), row_width=320)
        noisy, _ = train.losses(model, batch, "expected")
        found = gradient(noisy, model)

        at = train.positions_with_target(batch)
        logits = model.logits(train.hidden_states(model, batch)[at])
        nats = F.cross_entropy(logits, batch.target[at], reduction="none").detach()
        constant = batch.noisy_weight.double()
        constant[at] *= train.expected_weights(nats, batch, at, block_size)
        plain, _ = train.losses(model, batch._replace(noisy_weight=constant))
        assert plain.item() == pytest.approx(noisy.item())
        expected = gradient(plain, model)
        assert (found - expected).abs().max() < 1e-6 * expected.abs().max()

        uniform = gradient(train.losses(model, batch)[0], model)
        assert (found - uniform).abs().max() > 1e-3 * expected.abs().max()
