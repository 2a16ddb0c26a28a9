"""Which sequence sits in which row of the cache."""

from collections import deque

PREFILL = 4096  # positions of prompts, padding included, in one forward; more only for one prompt


class Scheduler:
    """The rows of a cache; a row that is done takes the next sequence of `waiting` at once.

    A sequence has its `text` (token ids), the length of its prompt, and is `done` or not.
    """

    def __init__(self, cache, rows: int, block: int):
        """block: B, how many masks a prefill has after the prompt."""
        self.cache = cache
        self.block = block
        self.waiting = deque()
        self.sequences = [None] * rows  # in each row a sequence, or None

    def admit(self) -> slice:
        """Give waiting sequences the first free rows that are adjacent; returns these rows."""
        free = [sequence is None or sequence.done for sequence in self.sequences]
        if not self.waiting or True not in free:
            return slice(0)
        first = free.index(True)
        end = first
        most_kept = 0
        widest = 0
        while self.waiting and end < len(free) and free[end]:
            new = self.waiting[0]
            if new.done:  # cancelled while it waited
                self.waiting.popleft()
                continue
            num_kept = self.shared_prefix(end, new)
            most_kept = max(most_kept, num_kept)
            widest = max(widest, len(new.text) - num_kept + self.block)
            is_too_much = widest * (end + 1 - first) > PREFILL
            is_too_long = most_kept + widest > self.cache.capacity
            if end > first and (is_too_much or is_too_long):
                break
            self.cache.begin(end, num_kept, len(new.text))
            self.sequences[end] = self.waiting.popleft()  # after `begin`, in case of Ctrl-C
            end += 1
        return slice(first, end)

    def shared_prefix(self, row: int, new) -> int:
        """How many tokens of a new prompt the row holds already: a conversation, a system message.

        The last token of a prompt is always fed: it predicts the first new one.
        """
        if self.sequences[row] is None:
            return 0
        held = self.sequences[row].text[: self.cache.lengths[row]]
        return num_in_common(held, new.text[:-1])

    def clear_done(self) -> None:
        """Empty the rows that are done, or attention would still span their positions."""
        for row, sequence in enumerate(self.sequences):
            if sequence and sequence.done:
                self.sequences[row] = None
                self.cache.begin(row)


def num_in_common(one: list[int], other: list[int]) -> int:
    """How many tokens two lists begin with in common."""
    count = 0
    for token, other_token in zip(one, other):
        if token != other_token:
            break
        count += 1
    return count
