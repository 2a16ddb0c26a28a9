"""Pack sequences of unequal length into few rectangular forwards."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least n."""
    return (n + multiple - 1) // multiple * multiple


# Which sequences one forward holds: a list of their indices for every row, and the rows' width.
Layout = tuple[list[list[int]], int]


def packed(lengths: list[int], width: int, positions: int, num_processes: int) -> list[Layout]:
    """Several sequences share a row of `width`; every forward has `positions` or one row.

    All forwards have the same shape, and their number is a multiple of num_processes.
    """
    height = max(1, positions // width)
    rows = pack(lengths, width)
    while len(rows) % (height * num_processes):
        rows.append([])
    return [(rows[i : i + height], width) for i in range(0, len(rows), height)]


def pack(lengths: list[int], width: int) -> list[list[int]]:
    """Which sequences share a row: the longest first, each in the fullest row with room for it.

    (Best-fit decreasing, a classic of bin packing: of many rows at most 11/9 of the fewest.)
    """
    rows: list[list[int]] = []
    room: list[int] = []  # in each row
    for i in longest_first(lengths):
        fits = [row for row in range(len(rows)) if room[row] >= lengths[i]]
        if fits:
            row = min(fits, key=lambda row: room[row])
        else:
            row = len(rows)
            rows.append([])
            room.append(width)
        rows[row].append(i)
        room[row] -= lengths[i]
    return rows


def grouped(lengths: list[int], positions: int, num_processes: int) -> list[Layout]:
    """One sequence per row, next to others of similar length; at most `positions`, or one row.

    Widths are multiples of 32, so that there are few shapes. No row is much shorter than the
    longest. The number of forwards is a multiple of num_processes.
    """
    if num_processes > 1:  # leave work for every process
        positions = min(positions, sum(lengths) // num_processes)
    forwards: list[Layout] = []
    for i in longest_first(lengths):
        if forwards:
            rows, width = forwards[-1]
            has_room = (len(rows) + 1) * width <= positions
            is_similar = lengths[i] >= 7 / 8 * width - 32
            if has_room and is_similar:
                rows.append([i])
                continue
        forwards.append(([[i]], round_up(lengths[i], 32)))
    while len(forwards) % num_processes:
        forwards.append(([[]], 32))
    return forwards


def longest_first(lengths: list[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])


def fill_rows(
    rows: list[list[NamedTuple]], width: int, padding: Callable[[int], NamedTuple]
) -> NamedTuple:
    """Join the sequences of each row and pad it to `width`: every field becomes (rows, width).

    A sequence is a NamedTuple of tensors (T,); `padding(T)` is one that fills T positions.
    """
    filled = []
    for row in rows:
        num_free = width - sum(len(sequence[0]) for sequence in row)
        filled.append(combine(torch.cat, [*row, padding(num_free)]))
    return combine(torch.stack, filled)


def combine(function: Callable[[list[Tensor]], Tensor], parts: list[NamedTuple]) -> NamedTuple:
    """One NamedTuple of several, field by field: `function` is torch.cat or torch.stack."""
    kind = type(parts[0])
    fields = {name: function([getattr(part, name) for part in parts]) for name in kind._fields}
    return kind(**fields)
