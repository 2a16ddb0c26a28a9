"""How the examples of a step become forwards: packed into rows, or next to others like them."""

import math
import random
from dataclasses import replace

from common import MASK, cases, random_prompt

from plumbing.data import Example
from plumbing.packing import own_rows, shared_rows
from train import Recipe, forward_inputs, lay_out


def test_packing():
    """Every example once, no row too full, and nearly as few rows as there could be."""
    for seed in cases(50, 500):
        rng = random.Random(seed)
        width = rng.choice([32, 128, 1024])
        lengths = [rng.randint(1, width) for _ in range(rng.randint(1, 200))]
        lengths.sort(reverse=True)
        forwards = shared_rows(lengths, width, positions=1, num_processes=1)
        rows = [row for [row], _ in forwards]
        assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
        filled = sorted(sum(lengths[i] for i in row) for row in rows)
        assert 0 < filled[0] and filled[-1] <= width
        fewest = max(math.ceil(sum(lengths) / width), sum(2 * length > width for length in lengths))
        assert len(rows) <= 11 / 9 * fewest + 1
        assert len(rows) == 1 or filled[0] + filled[1] > width  # no row could hold two of them


def test_examples_of_one_length_share_a_forward():
    """One of them once had a forward of its own: padded, they are more than their lengths' sum."""
    [(rows, width)] = own_rows([511] * 8, positions=4096, num_processes=1)
    assert (len(rows), width) == (8, 512)


def test_the_forwards_of_a_step():
    """As many in every process, or they would wait for each other forever. Packed, they have one
    shape. Otherwise rows of similar length share a forward."""
    for seed in cases(20, 200):
        rng = random.Random(seed)
        worlds = 1 + seed % 4
        examples = []
        for _ in range(rng.randint(worlds, 128)):
            tokens = random_prompt(rng, 2 + rng.randint(5, 400))
            examples.append(Example(tokens, rng.randint(1, 5)))
        positions = rng.choice([1024, 4096])
        packed = Recipe(MASK, rng.randint(1, 8), batch_tokens=positions, row_width=1216)
        total = sum(len(lay_out(example, packed).tokens) for example in examples)
        for recipe in (packed, replace(packed, row_width=None)):
            each = [forward_inputs(examples, recipe, rank, worlds) for rank in range(worlds)]
            assert len({len(some) for some in each}) == 1
            together = [inputs for some in each for inputs in some]
            assert total == sum(int((inputs.doc >= 0).sum()) for inputs in together)
            for inputs in together:
                rows, width = inputs.tokens.shape
                assert width % 32 == 0 and rows * width <= max(width, recipe.batch_tokens)
                if recipe.row_width:
                    assert (rows, width) == (max(1, recipe.batch_tokens // 1216), 1216)
                    continue
                real = (inputs.doc >= 0).sum(1)
                assert rows == 1 or real.min() >= 7 / 8 * width - 32
                assert all(len(set(row.tolist()) - {-1}) <= 1 for row in inputs.doc)
        if len(examples) >= 8 * worlds:  # none of the processes is left without work
            shares = [sum(int((inputs.doc >= 0).sum()) for inputs in some) for some in each]
            assert min(shares) > 0
