"""Texts that are being generated, and which of them sits in which row of the cache."""

from collections import deque
from collections.abc import Iterable
from os.path import commonprefix  # works on lists, too

from .errors import UserError

PREFILL = 4096  # positions of prompts, padding included, in one forward; more only for one prompt


class Text:
    """A prompt and the tokens generated after it, with what each forward gave and cost."""

    def __init__(self, prompt: list[int], max_new: int, config):
        """config: the model's. UserError for a prompt too long for max_new more tokens."""
        if not prompt or not all(0 <= token < config.vocab_size for token in prompt):
            raise UserError(f"a prompt must be token ids below {config.vocab_size}, at least one")
        if len(prompt) + max_new > config.max_position_embeddings:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and up to {max_new} new ones exceed the model's "
                f"{config.max_position_embeddings} positions: shorten it, or lower --max-new"
            )
        self.max_new = max_new
        self.stop = set(config.eos_token_id)
        self.ids = list(prompt)  # the prompt, then every accepted token
        self.tokens: list[int] = []  # the accepted tokens, with the end-of-turn token if it came
        self.done = False
        # Statistics: an entry for each forward, prefill included.
        self.accepted: list[int] = []  # number of tokens
        self.positions: list[int] = []  # number of positions computed, masks and padding included

    @property
    def forwards(self) -> int:
        return len(self.accepted)

    @property
    def tokens_per_forward(self) -> float:
        return len(self.tokens) / max(1, self.forwards)

    def take(self, tokens: list[int], num_positions: int) -> list[int]:
        """Accept what one forward gave, up to an end-of-turn token and max_new."""
        kept = tokens[: self.max_new - len(self.tokens)]
        for i, token in enumerate(kept):
            if token in self.stop:
                kept = kept[: i + 1]
                self.done = True
                break
        self.ids += kept
        self.tokens += kept
        if len(self.tokens) == self.max_new:
            self.done = True
        self.accepted.append(len(kept))
        self.positions.append(num_positions)
        return kept


class Scheduler:
    """The rows of a cache, a text in each; a row that is done takes the next of `waiting` at once.

    A text also says how many positions it needs after its last token: `block`.
    """

    def __init__(self, texts: Iterable[Text], rows: int, cache):
        self.waiting = deque(texts)
        self.rows: list[Text | None] = [None] * rows
        self.cache = cache

    def admit(self) -> slice:
        """Give waiting prompts the first free rows that are adjacent; returns these rows."""
        free = [text is None or text.done for text in self.rows]
        if not self.waiting or True not in free:
            return slice(0)
        first = free.index(True)
        end = first
        most_kept = 0
        widest = 0
        while self.waiting and end < len(free) and free[end]:
            text = self.waiting[0]
            num_kept = self.shared_prefix(end, text)
            most_kept = max(most_kept, num_kept)
            widest = max(widest, len(text.ids) - num_kept + text.block)
            is_too_much = widest * (end + 1 - first) > PREFILL
            is_too_long = most_kept + widest > self.cache.capacity
            if end > first and (is_too_much or is_too_long):
                break
            self.cache.rewind(end, num_kept)
            self.rows[end] = self.waiting.popleft()  # after the rewind, in case of Ctrl-C
            end += 1
        return slice(first, end)

    def shared_prefix(self, row: int, new: Text) -> int:
        """How many tokens of a new prompt the row holds already: a conversation, a system message.

        The last token of a prompt is always fed: it predicts the first new one.
        """
        if self.rows[row] is None:
            return 0
        held = self.rows[row].ids[: self.cache.lengths[row]]
        return len(commonprefix([held, new.ids[:-1]]))

    def clear_done(self) -> None:
        """Empty the rows that are done, or attention would still span their positions."""
        for row, text in enumerate(self.rows):
            if text and text.done:
                self.rows[row] = None
                self.cache.rewind(row)
