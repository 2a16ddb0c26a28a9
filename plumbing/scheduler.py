"""Which sequence sits in which row of the cache."""

from collections import deque

PREFILL = 4096  # positions of prompts, padding included, in one forward; more only for one prompt


class Scheduler:
    """The rows of a cache; a row that is done takes the next sequence of `waiting` at once.

    A sequence has its `text` (token ids), its `prompt_length`, and is `done` or not.
    """

    def __init__(self, cache, rows: int, block: int):
        """block: B, how many masks a prefill has after the prompt."""
        self.cache = cache
        self.block = block
        self.waiting = deque()
        self.sequences = [None] * rows  # in each row a sequence, or None

    def num_waiting(self) -> int:
        return sum(not sequence.done for sequence in self.waiting)

    def admit(self) -> None:
        """Give each free row a waiting sequence."""
        for row, sequence in enumerate(self.sequences):
            if sequence and not sequence.done:
                continue
            while self.waiting and (self.waiting[0].done or self.waiting[0] in self.sequences):
                self.waiting.popleft()  # cancelled, or admitted when Ctrl-C came
            if not self.waiting:
                return
            new = self.waiting[0]
            self.cache.begin(row, self.shared_prefix(row, new), new.prompt_length)
            self.sequences[row] = new
            self.waiting.popleft()  # last: Ctrl-C loses no sequence

    def rows_to_prefill(self) -> slice:
        """The first adjacent rows whose prompts are not in the cache, if they fit one forward."""
        needs_prefill = []
        for sequence, length in zip(self.sequences, self.cache.lengths):
            is_running = sequence is not None and not sequence.done
            needs_prefill.append(is_running and length < sequence.prompt_length)
        if True not in needs_prefill:
            return slice(0)
        first = needs_prefill.index(True)
        end = first
        most_kept = 0
        widest = 0
        while end < len(needs_prefill) and needs_prefill[end]:
            num_kept = self.cache.lengths[end]
            most_kept = max(most_kept, num_kept)
            widest = max(widest, len(self.sequences[end].text) - num_kept + self.block)
            is_too_much = widest * (end + 1 - first) > PREFILL
            is_too_long = most_kept + widest > self.cache.capacity
            if end > first and (is_too_much or is_too_long):
                break
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
