"""The cache: its mask is the mask rule, its arithmetic and drawing, and what does not fit."""

import random

import pytest
import torch
from common import cases, tiny_model

from kv_cache import KVCache
from model import visible


def random_positions(rng: random.Random, start: int) -> list[tuple[int, int]]:
    """(pos, prefix) of a feed: clean tokens from `start` on, then blocks of masks, which see all of
    them or fewer. So Decoder.feed makes them."""
    end = start + rng.randint(1, 9)
    fed = [(pos, pos + 1) for pos in range(start, end)]
    block = rng.randint(1, 5)
    for prefix in sorted(rng.sample(range(start + 1, end + 1), rng.randint(0, end - start))):
        fed += [(pos, prefix) for pos in range(prefix, prefix + block)]
    return fed


def test_the_mask_of_the_loop_is_the_mask_rule():
    """`visible` in terms of slots: [committed | clean tokens | blocks | padding | left over]."""
    for seed in cases(25, 200):
        rng = random.Random(seed)
        cache = KVCache(tiny_model(rng).config, 2, 200, "cpu", torch.float64)
        cache.lengths = [rng.randint(0, 70), rng.randint(0, 70)]  # the longer decides on the span
        feeds = [random_positions(rng, length) for length in cache.lengths]
        width = max(map(len, feeds))
        for row, length in enumerate(cache.lengths):
            cache.pos_prefix[row] = torch.tensor(rng.choice(feeds[row]))  # left by earlier forwards
            cached = torch.arange(length)
            cache.pos_prefix[row, :length] = torch.stack([cached, cached + 1], dim=-1)
        padded = [feed + [(200, 201)] * (width - len(feed)) for feed in feeds]
        places = torch.tensor(padded)
        pos, prefix = places.unbind(-1)
        cache.reserve(width, [0, 1])
        mask = cache.mask(places)
        assert mask.shape == (2, 1, width, cache.span) and mask.dtype == torch.bool
        for row, (length, feed) in enumerate(zip(cache.lengths, feeds)):
            fed_pos = pos[row, : len(feed)]
            fed_prefix = prefix[row, : len(feed)]
            cached = torch.arange(length)
            k_pos = torch.cat([cached, fed_pos])
            k_prefix = torch.cat([cached + 1, fed_prefix])
            expected = visible(fed_pos[:, None], fed_prefix[:, None], 0, k_pos, k_prefix, 0)
            end = length + len(feed)
            assert torch.equal(mask[row, 0, : len(feed), :end], expected)
            assert not mask[row, 0, : len(feed), end:].any()
            assert mask[row].any(-1).all()  # padding, too, sees something: no NaN


def test_the_cache_refuses_what_does_not_fit():
    """Before anything is written; only real positions count, and a new text may keep some."""
    model = tiny_model(random.Random(0))
    cache = KVCache(model.config, 2, 10, "cpu", torch.float64)
    cache.reserve(10, [0, 1])  # what just fits
    cache.commit({0: 8, 1: 3})
    with pytest.raises(ValueError, match="11 positions exceed the cache's capacity of 10"):
        cache.reserve(3, [0, 1])
    assert cache.lengths == [8, 3]
    cache.begin(0, prompt_length=9, num_kept=2)
    cache.reserve(3, [0, 1])
    assert cache.slots.tolist() == [[2, 3, 4], [3, 4, 5]]
    with pytest.raises(ValueError, match="row 0 holds 2 positions, not 5"):
        cache.begin(0, prompt_length=9, num_kept=5)
    cache.begin(0)
    assert cache.lengths == [0, 3]
    assert cache.room(1, 3) == 7 and cache.waiting({0: 4, 1: 5}) == set()


def test_the_drawing_by_hand():
    """The docstring's two rows: writing after each row's length, then commit({0: 2, 1: 1})."""
    config = tiny_model(random.Random(0)).config
    cache = KVCache(config, 2, 64, "cpu", torch.float64)
    cache.lengths = [4, 6]
    cache.reserve(5, [0, 1])
    assert cache.slots.tolist() == [[4, 5, 6, 7, 8], [6, 7, 8, 9, 10]]
    new = torch.arange(1.0, 6.0).double()[:, None]  # position i is filled with i + 1
    new = new.expand(2, config.num_key_value_heads, 5, config.head_dim)
    keys, values = cache.write(0, new, -new)
    assert keys[0, 0, :, 0].tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 5] + [0] * 55
    assert values[1, -1, :, -1].tolist() == [0] * 6 + [-1, -2, -3, -4, -5] + [0] * 53
    cache.commit({0: 2, 1: 1})
    assert cache.lengths == [6, 7]
    cache.reserve(2, [1])  # one row alone: the other keeps everything
    cache.write(0, new[:1, :, :2] + 10, new[:1, :, :2])
    assert keys[0, 0, :, 0].tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 5] + [0] * 55
    assert keys[1, 0, :, 0].tolist() == [0] * 6 + [1, 11, 12, 4, 5] + [0] * 53


def test_the_span_is_the_longest_row_rounded_up():
    """Few shapes for the kernels; a row that is not reserved does not count."""
    config = tiny_model(random.Random(0)).config
    cache = KVCache(config, 3, 300, "cpu", torch.float64)
    cache.lengths = [59, 290, 60]
    for rows, span in (([0], 64), ([0, 2], 128), ([0, 1, 2], 300)):
        cache.reserve(5, rows)
        assert cache.span == span


def test_the_cache_is_empty_at_first():
    """Attention multiplies what it does not see by zero: fresh memory may hold NaN, and 0 * NaN
    is not 0."""
    model = tiny_model(random.Random(0))
    torch.use_deterministic_algorithms(True)  # torch then fills fresh memory with NaN
    try:
        cache = KVCache(model.config, 1, 10, "cpu", torch.float64)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not any(part.any() for layer in cache.layers for part in layer)
