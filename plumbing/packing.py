"""Pack sequences of unequal length into few rectangular forwards."""


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least n."""
    return (n + multiple - 1) // multiple * multiple


# Which sequences one forward holds: a list of their indices for every row, and the rows' width.
Layout = tuple[list[list[int]], int]


def shared_rows(lengths: list[int], width: int, positions: int, num_processes: int) -> list[Layout]:
    """Several sequences share a row of `width`; a forward has at most `positions`, or one row.

    lengths: the longest first. Each goes to the first row with room for it (a classic of bin
    packing: of many rows at most 11/9 of the fewest). All forwards have the same shape, and their
    number is a multiple of num_processes.
    """
    rows: list[list[int]] = []
    for i, length in enumerate(lengths):
        with_room = [row for row in rows if sum(lengths[j] for j in row) + length <= width]
        if with_room:
            with_room[0].append(i)
        else:
            rows.append([i])
    height = max(1, positions // width)
    while len(rows) % (height * num_processes):
        rows.append([])
    return [(rows[i : i + height], width) for i in range(0, len(rows), height)]


def own_rows(lengths: list[int], positions: int, num_processes: int) -> list[Layout]:
    """One sequence per row, next to others of similar length; at most `positions`, or one row.

    lengths: the longest first. Widths are multiples of 32, so that there are few shapes. No row is
    much shorter than the longest. The number of forwards is a multiple of num_processes.
    """
    if num_processes > 1:  # leave work for every process
        positions = min(positions, sum(lengths) // num_processes)
    forwards: list[Layout] = []
    for i, length in enumerate(lengths):
        if forwards:
            rows, width = forwards[-1]
            has_room = (len(rows) + 1) * width <= positions
            is_similar = length >= 7 / 8 * width - 32
            if has_room and is_similar:
                rows.append([i])
                continue
        forwards.append(([[i]], round_up(length, 32)))
    while len(forwards) % num_processes:
        forwards.append(([[]], 32))
    return forwards
