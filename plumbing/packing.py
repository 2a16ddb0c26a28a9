"""Pack sequences of unequal length into few rectangular forwards."""


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least n."""
    return (n + multiple - 1) // multiple * multiple


# Which sequences one forward holds: a list of their indices for every row, and the rows' width.
Layout = tuple[list[list[int]], int]


def shared_rows(lengths: list[int], width: int, positions: int, num_processes: int) -> list[Layout]:
    """Several sequences share a row of `width`; a forward has at most `positions`, or one row.

    All forwards have the same shape, and their number is a multiple of num_processes.
    """
    height = max(1, positions // width)
    rows = pack(lengths, width)
    while len(rows) % (height * num_processes):
        rows.append([])
    return [(rows[i : i + height], width) for i in range(0, len(rows), height)]


def pack(lengths: list[int], width: int) -> list[list[int]]:
    """Which sequences share a row: the longest first, each in the first row with room for it.

    (First-fit decreasing, a classic of bin packing: of many rows at most 11/9 of the fewest.)
    """
    rows: list[list[int]] = []
    for i in longest_first(lengths):
        with_room = [row for row in rows if sum(lengths[j] for j in row) + lengths[i] <= width]
        if with_room:
            with_room[0].append(i)
        else:
            rows.append([i])
    return rows


def own_rows(lengths: list[int], positions: int, num_processes: int) -> list[Layout]:
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
