"""Sequences, and which of them sits in which row of the cache."""

from collections import deque
from typing import NamedTuple

# The most in a prefill, padding included. A prompt longer than this is fed alone, in one forward.
MOST_POSITIONS = 4096


class Position(NamedTuple):
    """What a forward is fed at one place: `visible` in model.py says what pos and prefix mean."""

    token: int
    pos: int
    prefix: int  # how many tokens it sees that are no masks: text, and guesses fed as text

    @property
    def is_mask(self) -> bool:
        return self.prefix <= self.pos


class Sequence:
    """A prompt and the tokens accepted after it. `Decoder.add` makes them."""

    def __init__(self, prompt: list[int], config, max_new: int, tau: float | None, index: int = 0):
        """index: with the seed it fixes the random draws."""
        self.token_ids = [int(token) for token in prompt]  # then every accepted token
        self.prompt_length = len(prompt)
        self.max_new = int(max_new)
        self.tau = tau  # read before and after every forward: it may be set between two
        self.index = index
        self.stop = set(config.eos_token_id)
        self.state = None  # what the decoding method keeps from one forward to the next
        self.done = False  # set it to cancel the sequence
        # An entry for each forward, prefill included:
        self.num_accepted: list[int] = []  # number of accepted tokens
        self.widths: list[int] = []  # number of positions computed, masks and padding included

    @property
    def tokens(self) -> list[int]:
        """The accepted tokens, with the end-of-turn token if it came."""
        return self.token_ids[self.prompt_length :]

    @property
    def forwards(self) -> int:
        return len(self.num_accepted)

    def take(self, tokens: list[int], width: int) -> list[int]:
        """Accept what a forward gave, up to an end of turn and max_new. Returns what was taken."""
        taken = []
        for token in tokens:
            if self.done:
                break
            self.token_ids.append(token)
            taken.append(token)
            is_full = len(self.token_ids) == self.prompt_length + self.max_new
            self.done = token in self.stop or is_full
        if self.done:
            self.state = None  # it may be larger than the text
        self.num_accepted.append(len(taken))
        self.widths.append(width)
        return taken


class Scheduler:
    """The rows of a cache; a row that is done takes the next sequence of `queue`: see `admit`."""

    def __init__(self, cache, rows: int, block: int):
        """block: B, the most masks that a prefill has after the prompt."""
        self.cache = cache
        self.block = block
        self.queue: deque[Sequence] = deque()
        self.sequences: list[Sequence | None] = [None] * rows  # in each row
        self.waiting: set[int] = set()  # what `cache.waiting` said last; after a prefill empty

    def schedule(self) -> tuple[dict[int, Sequence], bool]:
        """The rows that the next forward feeds, each with its sequence; and is it a prefill?

        No rows: all sequences are done. A prefill feeds only rows whose prompts are not in the
        cache yet.
        """
        # A new text would have an open block, and the rows that wait (only a BlockCache has any)
        # would wait for that, too. So none begins before they go on. (A row that waits and is done
        # was cancelled.)
        if all(self.sequences[row].done for row in self.waiting):
            self.admit()
        running = {}
        for row, sequence in enumerate(self.sequences):
            if sequence and not sequence.done:
                running[row] = sequence
        held = self.cache.lengths
        new = [row for row, sequence in running.items() if held[row] < sequence.prompt_length]
        if new:
            self.waiting = set()
            return {row: running[row] for row in self.first_that_fit(new)}, True
        if running:
            self.empty_done_rows()
        lengths = {row: len(sequence.token_ids) for row, sequence in running.items()}
        self.waiting = self.cache.waiting(lengths)
        for row in self.waiting:
            del running[row]
        return running, False

    def admit(self) -> None:
        """Give each free row a sequence of the queue."""
        for row, sequence in enumerate(self.sequences):
            while self.queue and self.queue[0].done:  # cancelled
                self.queue.popleft()
            is_free = sequence is None or sequence.done
            if is_free and self.queue:
                new = self.queue.popleft()
                self.cache.begin(row, new.prompt_length, self.shared_prefix(row, new))
                self.sequences[row] = new

    def empty_done_rows(self) -> None:
        """Empty each row that is done and got no new text, so that attention need not span it.

        Only if other rows run: while none does, a row keeps its text for `shared_prefix`.
        """
        for row, sequence in enumerate(self.sequences):
            if sequence and sequence.done:
                self.sequences[row] = None
                self.cache.begin(row)

    def first_that_fit(self, rows: list[int]) -> list[int]:
        """The first of these rows, as many as fit one prefill; at least one."""
        for count in range(len(rows), 1, -1):
            held = [self.cache.lengths[row] for row in rows[:count]]
            texts = [len(self.sequences[row].token_ids) for row in rows[:count]]
            width = max(text - n for text, n in zip(texts, held)) + self.block
            # Each row is padded to `width`, after what it holds.
            if count * width <= MOST_POSITIONS and max(held) + width <= self.cache.capacity:
                return rows[:count]
        return rows[:1]

    def shared_prefix(self, row: int, new: Sequence) -> int:
        """How many tokens of a new prompt the row holds already: a conversation, a system message.

        The last token of a prompt is always fed: it predicts the first new one.
        """
        if self.sequences[row] is None:
            return 0
        held = self.sequences[row].token_ids[: self.cache.lengths[row]]
        return num_in_common(held, new.token_ids[:-1])


def num_in_common(one: list[int], other: list[int]) -> int:
    """How many tokens two lists begin with in common."""
    count = 0
    for token, other_token in zip(one, other):
        if token != other_token:
            break
        count += 1
    return count
