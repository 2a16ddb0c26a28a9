"""Which sequence sits in which row of the cache."""

from collections import deque
from os.path import commonprefix  # works on lists, too

PREFILL = 4096  # positions of prompts, padding included, in one forward; more only for one prompt


class Scheduler:
    """The rows of a cache; a row that is done takes the next sequence of `waiting` at once.

    A sequence has its `text` (token ids), the length of its prompt, and is `done` or not.
    """

    def __init__(self, cache, rows: int, num_masks: int):
        """num_masks: how many positions a prefill needs after the prompt."""
        self.cache = cache
        self.num_masks = num_masks
        self.waiting = deque()
        self.rows = [None] * rows

    def admit(self) -> slice:
        """Give waiting sequences the first free rows that are adjacent; returns these rows."""
        free = [sequence is None or sequence.done for sequence in self.rows]
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
            widest = max(widest, len(new.text) - num_kept + self.num_masks)
            is_too_much = widest * (end + 1 - first) > PREFILL
            is_too_long = most_kept + widest > self.cache.capacity
            if end > first and (is_too_much or is_too_long):
                break
            self.cache.begin(end, num_kept, len(new.text))
            self.rows[end] = self.waiting.popleft()  # after `begin`, in case of Ctrl-C
            end += 1
        return slice(first, end)

    def shared_prefix(self, row: int, new) -> int:
        """How many tokens of a new prompt the row holds already: a conversation, a system message.

        The last token of a prompt is always fed: it predicts the first new one.
        """
        if self.rows[row] is None:
            return 0
        held = self.rows[row].text[: self.cache.lengths[row]]
        return len(commonprefix([held, new.text[:-1]]))

    def clear_done(self) -> None:
        """Empty the rows that are done, or attention would still span their positions."""
        for row, sequence in enumerate(self.rows):
            if sequence and sequence.done:
                self.rows[row] = None
                self.cache.begin(row)
