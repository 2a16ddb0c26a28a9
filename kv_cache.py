"""The key-value cache, preallocated: `KVCache` is ours, `BlockCache` the paper's (section 4.5).

A forward writes the keys and values of T new positions after each row's length. `commit` then says
how many of them count. The others (masks, guesses that failed) are scratch: no later forward sees
them, and later ones overwrite them. So rejecting costs nothing, and nothing is copied or moved.
"""

import math

import torch
from torch import Tensor

from plumbing.errors import UserError
from plumbing.packing import round_up


class KVCache:
    """Keys and values of every layer, (rows, kv_heads, capacity, head_dim) each; a length per row.

        slot     0 1 2 3 4 5 6 7 8 9 ...
        row 0    p p p p a a M M M           length 4: two of the five count, then 6
        row 1    p p p p p p a M M M .       length 6: one of the five counts, then 7

    p was cached before. Five positions were written to each row: a are tokens accepted last time, M
    one of B = 3 masks, and . is padding. commit([2, 1]) says what counts.

    A text starts with `begin`. Then every forward, in this order:
        reserve   its T positions get the slots after each row's length
        mask      which slots each of them sees
        write     once per layer: put in the new keys and values, get those of all slots
        commit    how many of the T positions count: the lengths grow by so many
    """

    def __init__(self, config, rows: int, capacity: int, device, dtype, unit: int = 64):
        """Attention spans the longest row, rounded up to a multiple of `unit`: few shapes occur."""
        if rows < 1:
            raise UserError(f"rows {rows}: must be at least 1")
        self.capacity = capacity
        self.unit = unit
        self.device = torch.device(device)
        self.lengths = [0] * rows  # committed positions, on the host
        self.layers: list[tuple[Tensor, Tensor]] = []
        shape = (rows, config.num_key_value_heads, capacity, config.head_dim)
        for _ in range(config.num_hidden_layers):
            keys = torch.zeros(shape, device=device, dtype=dtype)  # torch.empty may hold NaN
            values = torch.zeros(shape, device=device, dtype=dtype)
            self.layers.append((keys, values))

    def begin(self, row: int, num_kept: int = 0, prompt_length: int = 0) -> None:
        """A new text begins in a row, which holds the first num_kept tokens of its prompt already.

        prompt_length: needed by BlockCache, whose blocks are counted from there.
        """
        if not 0 <= num_kept <= self.lengths[row]:
            raise ValueError(f"row {row} holds {self.lengths[row]} positions, not {num_kept}")
        self.lengths[row] = num_kept

    def reserve(self, width: int, rows: slice = slice(None)) -> Tensor:
        """Reserve `width` slots after the length of each of these rows; their indices (R, width).

        `mask`, `write` and `commit` apply to these rows until the next call. ValueError if the
        capacity is too small, before anything is written.
        """
        lengths = self.lengths[rows]
        end = max(lengths) + width
        if end > self.capacity:
            raise ValueError(
                f"{max(lengths)} + {width} positions exceed the capacity of {self.capacity}"
            )
        self.rows = rows
        self.span = min(self.capacity, round_up(end, self.unit))
        first = torch.tensor(lengths, device=self.device)
        self.slots = first[:, None] + torch.arange(width, device=self.device)
        return self.slots

    def mask(self, pos: Tensor, prefix: Tensor) -> Tensor:
        """`model.visible` for the reserved positions, pos and prefix (R, T): bool (R, 1, T, span).

        The same rule, said of slots. A clean token is in the slot of its position, so every query
        sees the slots below its prefix. A mask also sees its block, from the first mask up to
        itself. These are adjacent slots, and the first is pos - prefix slots before its own. (A
        clean token has pos - prefix = -1: its block would begin after itself, so it is empty.)

        The masks need not be in the slots of their positions: lossless.py feeds several blocks
        after one text. The third mask of a block, at pos 9 with prefix 7, may be in slot 12: it
        sees slots 0 to 6, and 10 to 12.
        """
        slot = torch.arange(self.span, device=self.device)
        own_slot = self.slots[:, None, :, None]
        pos = pos[:, None, :, None]
        prefix = prefix[:, None, :, None]
        block_start = own_slot - (pos - prefix)
        in_prefix = slot < prefix
        in_block = (block_start <= slot) & (slot <= own_slot)
        return in_prefix | in_block

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put k, v (R, kv_heads, T, head_dim) into the reserved slots; return the whole span."""
        keys, values = self.layers[layer]
        keys = keys[self.rows]  # a slice is a view: what is written to it is written to the cache
        values = values[self.rows]
        row = torch.arange(len(k), device=k.device)[:, None]
        keys[row, :, self.slots] = k.transpose(1, 2)
        values[row, :, self.slots] = v.transpose(1, 2)
        return keys[:, :, : self.span], values[:, :, : self.span]

    def commit(self, counts: list[int]) -> None:
        """Keep the first counts[i] of the positions just written to the i-th reserved row."""
        rows = range(len(self.lengths))[self.rows]  # the reserved rows' numbers
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] += count

    def room(self, row: int, text_length: int) -> float:
        """How many tokens a forward may accept for a text of this length: here any number."""
        return math.inf

    def rows_that_wait(self, text_lengths: dict[int, int]) -> set[int]:
        """The rows that must not go on before others; here there are none.

        text_lengths: of each row that has a text.
        """
        return set()


class BlockCache(KVCache):
    """The paper's way: an answer enters the cache in whole blocks of N tokens, here N = 4.

    The tokens of an open (not yet full) block are fed again by every forward. A full block is fed
    once more, by the forward that opens the next one, and kept. That forward is for all rows at
    once, so a row whose block is full waits for the others.

        cached      | cache block | fed by the next forward
        p p p p p p | a . . .     | a M M       three places are free: two masks, three candidates
        p p p p p p | a a a .     | a a a       one is free: no mask, one candidate
        p p p p p p | a a a a     | nothing     full: this row waits until no row has an open block
        p p p p p p | a a a a     | a a a a M M M     then it is fed as a whole, and kept

    (p: the prompt, a: accepted, M: one of B = 3 masks.) The blocks are counted from the end of the
    prompt. `KVCache` needs none of this; BlockCache is here to compare with.
    """

    def __init__(self, *args, size: int, **options):
        """size: N, the number of tokens in a cache block; the others are KVCache's."""
        super().__init__(*args, **options)
        self.size = size
        self.prompt_lengths = [0] * len(self.lengths)

    def begin(self, row: int, num_kept: int = 0, prompt_length: int = 0) -> None:
        super().begin(row, num_kept)
        self.prompt_lengths[row] = prompt_length

    def num_in_open_block(self, row: int, text_length: int) -> int:
        """How many tokens of a text of this length are in an open block; 0: all blocks are full."""
        return (text_length - self.prompt_lengths[row]) % self.size

    def commit(self, counts: list[int]) -> None:
        """Of the first counts[i] positions keep the prompt and full blocks, but no open block."""
        super().commit(counts)
        for row in range(len(self.lengths))[self.rows]:
            end = self.lengths[row]  # of what was fed; an idle row's is that of a full block
            self.lengths[row] = end - self.num_in_open_block(row, end)

    def room(self, row: int, text_length: int) -> int:
        """How many tokens a forward may accept: the places in the open block, or in the next."""
        return self.size - self.num_in_open_block(row, text_length)

    def rows_that_wait(self, text_lengths: dict[int, int]) -> set[int]:
        """The rows whose last block is full, as long as another row has an open one."""
        full = set()
        for row, length in text_lengths.items():
            if self.num_in_open_block(row, length) == 0:
                full.add(row)
        if len(full) == len(text_lengths):
            return set()
        return full
