"""The key-value cache: preallocated, with a length per row; entries are never copied or moved.

A forward writes the keys and values of T new positions after each row's committed length. What is
not committed afterwards (mask tokens, rejected guesses) is scratch: no later forward attends to it,
and later ones overwrite it. So rejecting costs nothing, and rewinding a row is setting its length.

    slot     0 1 2 3 4 5 6 7 8 9 ...
    row 0    p p p p a a M M M           length 4; five positions are written
    row 1    p p p p p p a M M M .       length 6; commit([2, 1]) makes the lengths 6 and 7

(p: in the cache already, a: accepted last time, M: one of B = 3 masks, .: padding)
"""

import torch
from torch import Tensor

from plumbing.errors import UserError
from plumbing.packing import round_up


class KVCache:
    """Keys and values of every layer, (rows, kv_heads, capacity, head_dim) each.

    One forward, in this order: `reserve` the slots of its T positions, take the `mask` for them,
    `write` once per layer, then `commit` the positions that count.
    """

    def __init__(self, config, rows: int, capacity: int, device, dtype, unit: int = 64):
        """Attention spans the longest row, rounded up to a multiple of `unit`: few shapes occur."""
        if rows < 1:
            raise UserError(f"rows {rows}: must be at least 1")
        self.capacity = capacity
        self.unit = unit
        self.device = torch.device(device)
        self.lengths = [0] * rows  # committed positions, on the host: no GPU synchronization
        self.layers: list[tuple[Tensor, Tensor]] = []
        shape = (rows, config.num_key_value_heads, capacity, config.head_dim)
        for _ in range(config.num_hidden_layers):
            keys = torch.zeros(shape, device=device, dtype=dtype)  # torch.empty may hold NaN
            values = torch.zeros(shape, device=device, dtype=dtype)
            self.layers.append((keys, values))

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

        Slots below a position's prefix hold clean tokens, each in the slot of its position. A
        window's masks are in adjacent slots: it starts pos - prefix slots to the left of each of
        them. (That is -1 for a clean token: its window would start after it, so it is empty.) All
        other slots hold other windows, padding or scratch.
        """
        slot = torch.arange(self.span, device=self.device)
        own_slot = self.slots[:, None, :, None]
        pos = pos[:, None, :, None]
        prefix = prefix[:, None, :, None]
        window_start = own_slot - (pos - prefix)
        in_prefix = slot < prefix
        in_window = (window_start <= slot) & (slot <= own_slot)
        return in_prefix | in_window

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put k, v (R, kv_heads, T, head_dim) into the reserved slots; return the whole span."""
        keys, values = self.layers[layer]
        keys = keys[self.rows]
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

    def rewind(self, row: int, length: int = 0) -> None:
        """Forget everything in a row after its first `length` positions."""
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(f"row {row} holds {self.lengths[row]} positions, not {length}")
        self.lengths[row] = length
