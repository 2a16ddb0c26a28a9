"""The key-value cache, preallocated: `KVCache` is ours, `BlockCache` the paper's (section 4.5).

A forward writes the keys and values of T new positions after each row's length. `commit` then says
how many of them count. The others (masks, guesses that failed) are scratch: no later forward sees
them, and later ones overwrite them. So rejecting costs nothing: nothing is copied or moved for it.
"""

from math import ceil

import torch
from torch import Tensor

from model import visible
from plumbing.errors import UserError

UNIT = 64  # attention spans a multiple of so many slots, so that few shapes occur
COMPILED_UNIT = 256  # with --compile, which compiles each shape: still fewer


class KVCache:
    """Keys and values of every layer, (rows, kv_heads, capacity, head_dim) each; a length per row.

        slot     0 1 2 3 4 5 6 7 8 9 ...
        row 0    c c c c a a M M M           length 4; after commit 6
        row 1    c c c c c c a M M M .       length 6; after commit 7

    One forward: c was cached before it. It writes five positions to each row: a are tokens that
    were accepted last time, M is one of B = 3 masks, and . is padding. commit({0: 2, 1: 1})
    then says what counts.

    A text starts with `begin`. Then every forward, in this order:
        reserve   its T positions get the slots after each row's length
        mask      which slots each of them sees
        write     once per layer: put in the new keys and values, get those of all slots
        commit    how many of the T positions count: the lengths grow by so many
    """

    def __init__(self, config, rows: int, capacity: int, device, dtype, unit=UNIT):
        """Attention spans the slots of the longest row, rounded up to a multiple of `unit`."""
        if rows < 1:
            raise UserError(f"rows {rows}: must be at least 1")
        self.capacity = capacity
        self.unit = unit
        self.device = torch.device(device)
        self.dtype = dtype
        self.lengths = [0] * rows  # committed positions, on the host
        # pos and prefix of what is in each slot, as `visible` wants them
        self.pos_prefix = torch.zeros(rows, capacity, 2, dtype=torch.long, device=device)
        self.layers: list[tuple[Tensor, Tensor]] = []
        shape = (rows, config.num_key_value_heads, capacity, config.head_dim)
        for _ in range(config.num_hidden_layers):
            keys = torch.zeros(shape, device=device, dtype=dtype)  # torch.empty may hold NaN
            values = torch.zeros(shape, device=device, dtype=dtype)
            self.layers.append((keys, values))

    def begin(self, row: int, prompt_length: int = 0, num_kept: int = 0) -> None:
        """A new text begins in a row, which holds the first num_kept tokens of its prompt already.

        Without a prompt the row is empty, and attention need not span its slots. (Only a
        BlockCache uses prompt_length.)
        """
        if not 0 <= num_kept <= self.lengths[row]:
            raise ValueError(f"row {row} holds {self.lengths[row]} positions, not {num_kept}")
        self.lengths[row] = num_kept

    def reserve(self, width: int, rows: list[int]) -> None:
        """Reserve `width` slots after the length of each of these rows (in ascending order).

        `mask` and `write` are about these rows until the next call. ValueError if the capacity is
        too small, before anything is written.
        """
        lengths = [self.lengths[row] for row in rows]
        end = max(lengths) + width
        if end > self.capacity:
            raise ValueError(f"{end} positions exceed the cache's capacity of {self.capacity}")
        self.width = width
        self.span = min(self.capacity, ceil(end / self.unit) * self.unit)
        first = torch.tensor(lengths, device=self.device)[:, None]
        self.slots = first + torch.arange(width, device=self.device)  # (R, width)
        self.row_index = torch.tensor(rows, device=self.device)[:, None]  # (R, 1)
        # Index of these rows in pos_prefix and the layers; for all rows a slice: it copies nothing.
        self.at = slice(None) if len(rows) == len(self.lengths) else self.row_index[:, 0]

    def mask(self, pos_prefix: Tensor) -> Tensor:
        """`model.visible` for the reserved positions: bool (R, 1, T, span).

        pos_prefix (R, T, 2): of each position; they are kept for later forwards. Padding has pos =
        capacity and prefix = pos + 1: a clean token after every text, which no text and no mask
        sees. Slots after the reserved ones hold scratch. They get the document -1, so that no
        position sees them.
        """
        self.pos_prefix[self.row_index, self.slots] = pos_prefix
        pos, prefix = pos_prefix[:, None, :, None].unbind(-1)  # (R, 1, T, 1)
        in_slots = self.pos_prefix[self.at][:, None, None, : self.span]
        slot_pos, slot_prefix = in_slots.unbind(-1)  # (R, 1, 1, span)
        is_after = torch.arange(self.span, device=self.device) > self.slots[:, None, None, -1:]
        slot_doc = torch.where(is_after, -1, 0)
        return visible(pos, prefix, 0, slot_pos, slot_prefix, slot_doc)

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put k, v (R, kv_heads, T, head_dim) into the reserved slots; return the whole span."""
        keys, values = self.layers[layer]
        # keys[row, :, slot] is (R, T, kv_heads, head_dim): indexed dimensions come first.
        keys[self.row_index, :, self.slots] = k.transpose(1, 2)
        values[self.row_index, :, self.slots] = v.transpose(1, 2)
        return keys[self.at, :, : self.span], values[self.at, :, : self.span]

    def commit(self, counts: dict[int, int]) -> None:
        """Keep the first counts[row] of what was just written to a row; without a count none."""
        for row, count in counts.items():
            self.lengths[row] += count

    def room(self, row: int, text_length: int) -> int:
        """How many positions (masks, guesses) may follow the row's text in a forward.

        Here always enough for all that a method adds; a BlockCache limits it.
        """
        return self.capacity - text_length

    def waiting(self, text_lengths: dict[int, int]) -> set[int]:
        """The rows that the next forward leaves out. text_lengths: of every row that runs."""
        return set()


class BlockCache(KVCache):
    """The paper's way: an answer enters the cache in whole blocks of N tokens, here N = 4.

    The tokens of an open (not yet full) block are fed again by every forward. A full block is fed
    once more, by the forward that opens the next one, and kept. As in the paper a row opens its
    next block only when no other row has an open one; until then it waits. (Not for ever: a row
    with an open block gets a token in each forward, so its block fills; and while a row waits no
    new prompt is admitted.)

        cached      | cache block | fed by the next forward
        p p p p p p | a . . .     | a M M       three places are free: two masks, three candidates
        p p p p p p | a a a .     | a a a       one is free: no mask, one candidate
        p p p p p p | a a a a     | nothing     full: this row waits until no row has an open block
        p p p p p p | a a a a     | a a a a M M M     then it is fed as a whole, and kept

    (p: the prompt, a: accepted, M: one of B = 3 masks.) The blocks are counted from the end of the
    prompt. `KVCache` needs none of this; BlockCache is here to compare with.
    """

    def __init__(self, config, rows: int, capacity: int, size: int, **settings):
        """size: N, the number of tokens in a cache block; the others are KVCache's."""
        super().__init__(config, rows, capacity, **settings)
        self.size = size
        self.prompt_lengths = [0] * rows

    def begin(self, row: int, prompt_length: int = 0, num_kept: int = 0) -> None:
        super().begin(row, prompt_length, num_kept)
        self.prompt_lengths[row] = prompt_length

    def num_in_open_block(self, row: int, text_length: int) -> int:
        """How many tokens of a text of this length are in an open block; 0: all blocks are full."""
        return (text_length - self.prompt_lengths[row]) % self.size

    def commit(self, counts: dict[int, int]) -> None:
        """Of the first counts[row] positions keep the prompt and full blocks, but no open block."""
        super().commit(counts)
        for row in counts:
            self.lengths[row] -= self.num_in_open_block(row, self.lengths[row])

    def room(self, row: int, text_length: int) -> int:
        """One fewer than the free places of the row's open block; without one, of its next block.

        For the last real token predicts the first free place, and each mask one more.
        """
        return self.size - self.num_in_open_block(row, text_length) - 1

    def waiting(self, text_lengths: dict[int, int]) -> set[int]:
        """The rows whose last block is full, as long as another row has an open one."""
        full = {row for row, n in text_lengths.items() if self.num_in_open_block(row, n) == 0}
        if len(full) == len(text_lengths):
            return set()
        return full


def make_cache(model, rows: int, num_slots: int, options) -> KVCache:
    """The cache for a model and decode.Options; num_slots: the least that a row needs."""
    unit = COMPILED_UNIT if options.compile else UNIT
    capacity = ceil(num_slots / unit) * unit
    settings = {"device": model.device, "dtype": model.dtype, "unit": unit}
    if options.block_cache:
        return BlockCache(model.config, rows, capacity, options.block_cache, **settings)
    return KVCache(model.config, rows, capacity, **settings)
