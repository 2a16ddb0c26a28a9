"""Sequences, and which of them sits in which row of the cache."""

from collections import deque
from typing import NamedTuple, Protocol

from .arguments import check_request

# The most positions in a prefill, padding included. A longer prompt is fed alone, in one forward.
PREFILL = 4096
RUNS = (2, 4, 8)  # how many of a text's last tokens are looked for in it


class Repeats:
    """Finds where a text's final tokens stood in it before, and says which token followed there."""

    def __init__(self):
        self.goes_on_at: dict[tuple[int, ...], int] = {}  # run -> place of the next token
        self.next_place = max(RUNS)  # the first that is not in goes_on_at yet

    def next_token(self, text: list[int], guesses: list[int]) -> tuple[int | None, int]:
        """The token that the text itself suggests after text + guesses, and the length of the run.

        text + guesses ends with a run of tokens. If the text had it before, the suggestion is what
        followed the last time. The longest run counts; without any it is (None, 0).
        """
        for place in range(self.next_place, len(text)):
            for length in RUNS:
                self.goes_on_at[tuple(text[place - length : place])] = place
        self.next_place = max(self.next_place, len(text))
        tail = text[-max(RUNS) :] + guesses
        found = (None, 0)
        for length in RUNS:
            place = self.goes_on_at.get(tuple(tail[-length:]))
            if place is None:  # then no longer run is there: it would end with this one
                break
            found = (text[place], length)
        return found


class Sequence:
    """A prompt and the tokens accepted after it. `Decoder.add` makes them."""

    def __init__(self, prompt: list[int], config, max_new: int, tau: float | None, index: int = 0):
        """index: with the seed it fixes the random draws. UserError for an impossible prompt."""
        check_request(prompt, max_new, config.vocab_size)
        self.token_ids = [int(token) for token in prompt]  # then every accepted token
        self.prompt_length = len(prompt)
        self.max_new = int(max_new)
        self.tau = tau  # read before and after every forward: it may be set between two
        self.index = index
        self.stop = set(config.eos_token_id)
        self.state = None  # what the decoding method keeps from one forward to the next
        self.repeats = Repeats()
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
        self.num_accepted.append(len(taken))
        self.widths.append(width)
        return taken


Position = tuple[int, int, int]  # token, pos and prefix: `visible` in model.py


class Decision(NamedTuple):
    tokens: list[int]  # the accepted ones
    num_held: int  # how many of them the forward was fed as guesses: they are in the cache already


class Method(Protocol):
    """How to decode. Threshold in decode.py is the paper's way, Lossless in lossless.py is ours."""

    widest: int  # the most positions of a row in a forward, prefills aside
    metric: str  # of confidence: `measure_confidence` in decode.py
    confidence_with_noise: bool  # at a temperature T: of logits + T * noise, or of the logits?

    def additions(self, sequence: Sequence) -> list[Position]:
        """What a forward is fed after the text: guesses and masks."""

    def decide(self, sequence: Sequence, tokens: list[int], confidences: list[float]) -> Decision:
        """What is accepted of the tokens that the positions predict, with their confidences.

        The last token of the text predicts tokens[0]; addition i - 1 predicts tokens[i]. (For the
        metric entropy a lower confidence is surer.)
        """


class Turn(NamedTuple):
    """A row's part in the next forward."""

    row: int  # of the cache
    sequence: Sequence | None  # None: the row is idle
    most_added: int | None  # positions that may follow its text; None: it is idle or waits


class Scheduler:
    """The rows of a cache; a row that is done takes the next sequence of `queue` at once."""

    def __init__(self, cache, rows: int, block: int, is_compiled: bool):
        """block: B, the most masks that a prefill has after the prompt."""
        self.cache = cache
        self.block = block
        # On a CPU an idle row costs as much as any. Compiled forwards have static shapes.
        self.skip_idle = cache.device.type == "cpu" and not is_compiled
        self.queue: deque[Sequence] = deque()
        self.sequences: list[Sequence | None] = [None] * rows  # in each row
        self.held_back: list[Sequence] = []  # those whose row had to wait in the last forward

    def schedule(self) -> tuple[list[Turn], bool]:
        """The turns of the next forward, and whether it is a prefill. Without turns all is done.

        A prefill has only rows that begin. Any other forward has all rows, but on a CPU idle rows
        are left out once they are half of all. (To leave out a row makes the cache copy all
        others, so for fewer it costs more than it saves.)
        """
        # While a row waits (BlockCache) no new text begins. It would have an open block, and the
        # row would have to wait for that, too. (A row that waits and is done was cancelled.)
        if all(sequence.done for sequence in self.held_back):
            self.admit()
        running = {row: each for row, each in enumerate(self.sequences) if each and not each.done}
        new = [row for row, each in running.items() if not each.num_accepted]  # no forward yet
        rows = []
        if new:
            rows = self.that_fit(new)
        elif running:
            for row, sequence in enumerate(self.sequences):
                # A done row that got no new text is emptied while others run, so that attention
                # need not span it. If none runs it keeps its text, for `shared_prefix`.
                if sequence and sequence.done:
                    self.sequences[row] = None
                    self.cache.begin(row)
            rows = list(range(len(self.sequences)))
            if self.skip_idle and 2 * len(running) <= len(rows):
                rows = list(running)
        text_lengths = {row: len(running[row].token_ids) for row in rows if row in running}
        most_added = self.cache.most_added(text_lengths)
        self.held_back = [running[row] for row, most in most_added.items() if most is None]
        turns = [Turn(row, running.get(row), most_added.get(row)) for row in rows]
        return turns, bool(new)

    def admit(self) -> None:
        """Give each free row a waiting sequence."""
        for row, sequence in enumerate(self.sequences):
            while self.queue and self.queue[0].done:  # cancelled
                self.queue.popleft()
            is_free = sequence is None or sequence.done
            if is_free and self.queue:
                new = self.queue.popleft()
                self.cache.begin(row, new.prompt_length, self.shared_prefix(row, new))
                self.sequences[row] = new

    def that_fit(self, rows: list[int]) -> list[int]:
        """The first of these rows, as many as fit one prefill; at least one."""
        for count in range(len(rows), 1, -1):
            kept = [self.cache.lengths[row] for row in rows[:count]]
            prompts = [self.sequences[row].prompt_length for row in rows[:count]]
            width = max(p - k for p, k in zip(prompts, kept)) + self.block
            # Each row is padded to `width`, after what it holds.
            if count * width <= PREFILL and max(kept) + width <= self.cache.capacity:
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
