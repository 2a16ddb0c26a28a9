"""The one key-value cache: preallocated, a length per row, and nothing is ever copied or moved.

A forward writes the keys and values of T new positions behind each row's own committed length. What
is not committed afterwards (masks, rejected guesses) is scratch, which the next forward overwrites:
rejecting tokens costs nothing, and rewinding a row is setting its length.

    slot     0 1 2 3 4 5 6 7 8 9 ...
    row 0    p p p p a a M M M           length 4, five positions written behind it
    row 1    p p p p p p a M M M M       length 6, likewise; commit([2, 1]) makes them 6 and 7
"""

import math

import torch
from torch import Tensor

from model import Config, UserError

NARROW = 96  # positions of a forward


class KVCache:
    def __init__(self, config: Config, rows: int, capacity: int, device, dtype, unit: int = 64):
        """Attention spans the longest row, rounded up to a multiple of `unit`: few shapes."""
        shape = (rows, config.num_key_value_heads, capacity, config.head_dim)
        layers, self.capacity, self.unit, self.device = [], capacity, unit, torch.device(device)
        self.kv_heads = config.num_key_value_heads
        self.group = config.num_attention_heads // self.kv_heads
        try:  # zeros, not empty: a masked NaN would still be a NaN
            for _ in range(config.num_hidden_layers):
                layers.append([torch.zeros(shape, device=device, dtype=dtype) for _ in "kv"])
        except RuntimeError:
            size = 2 * config.num_hidden_layers * math.prod(shape) * dtype.itemsize / 2**30
            raise UserError(
                f"a cache of {rows} rows x {capacity} positions needs {size:.1f} GiB, more than "
                "there is: use fewer rows or a smaller max_new"
            ) from None
        self.layers = layers  # a (k, v) for each
        self.lengths = [0] * rows  # committed positions, on the host: no wait for the device

    def reserve(self, width: int, rows: slice = slice(None)) -> Tensor:
        """Open `width` positions behind the length of each of these rows; their slots (R, width).

        `write` and `commit` are about these rows until the next call. Raises ValueError when the
        capacity does not suffice, before anything is written.
        """
        longest = max(self.lengths[rows])
        if longest + width > self.capacity:
            raise ValueError(
                f"{longest} + {width} positions exceed the capacity of {self.capacity}"
            )
        self.rows = rows
        self.span = min(self.capacity, -(-(longest + width) // self.unit) * self.unit)
        lengths = torch.tensor(self.lengths[rows], device=self.device)
        self.slots = lengths[:, None] + torch.arange(width, device=self.device)
        return self.slots

    def mask(self, pos: Tensor, start: Tensor) -> Tensor:
        """`model.visible` for what was reserved, pos and start (R, width): (R, 1, G * width, span).

        G is 1, or how many query heads share a key head, and they attend as if they were so many
        positions of one head. The products are the same, but a CPU computes those of one token of
        eight rows twice as fast so in float32, six times in bfloat16. With many positions there is
        nothing to gain, and with fewer key heads than threads some would idle.

        Up to a window's start the slots hold clean tokens, each at the position of its number; and
        a window's masks lie side by side, so that its first is `pos - start` slots back. All else
        is other windows, padding, or left over from earlier forwards.
        """
        slot = torch.arange(self.span, device=self.device)
        pos, start, own = (field[:, None, :, None] for field in (pos, start, self.slots))
        mask = (slot < start) | ((own - (pos - start) <= slot) & (slot <= own))
        idle = self.device.type == "cpu" and len(mask) * self.kv_heads < torch.get_num_threads()
        return mask if idle or mask.size(2) > NARROW else torch.cat([mask] * self.group, dim=2)

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put k, v (R, kv_heads, width, head_dim) into the reserved slots; views of the span."""
        kept_k, kept_v = (kept[self.rows] for kept in self.layers[layer])
        row = torch.arange(len(k), device=k.device)[:, None]
        kept_k[row, :, self.slots] = k.transpose(1, 2)
        kept_v[row, :, self.slots] = v.transpose(1, 2)
        return kept_k[:, :, : self.span], kept_v[:, :, : self.span]

    def commit(self, counts: list[int]) -> None:
        """Keep the first counts[i] positions just written to the i-th of the reserved rows."""
        for row, count in zip(range(len(self.lengths))[self.rows], counts, strict=True):
            self.lengths[row] += count

    def rewind(self, row: int, length: int = 0) -> None:
        """Forget what row `row` holds behind its first `length` positions."""
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(f"row {row} holds {self.lengths[row]} positions, not {length}")
        self.lengths[row] = length
