"""Lossless decoding: several tokens per forward, with the output of plain autoregression (AR).

This is ours, not the MARS paper's. A MARS model is still an autoregressive model, so it can check
its own guesses: the next forward carries them as if they were real tokens. Nobody knows yet how
many will hold, so that forward also carries groups of masks. Group j is B masks that see the text
and the first j guesses (all groups: "quadratic decoding", arXiv 2507.11851). With B = 4, two
guesses g1 g2 after the last token x, and the groups 0, 1 and 2:

    feed             x    g1    g2  | M M M M | M M M M  | M M M M
    it sees          ..x  ..g1  ..g2| ..x     | ..g1     | ..g2
    AR's next token  g1   y  (unused)         |          |

After x AR says g1: the first guess holds. After g1 AR says y, which is not g2: the second fails,
and y takes its place. Accepted are g1 and y. Group 1 saw x and g1, and no guess that failed. Its
first mask stands where y is now, and predicts the token after y: a new guess.

Why this is exact: x, g1 and g2 see the tokens before them and never a mask, so the output at x is
what AR says after x. If that is g1, the output at g1 is what AR says next, and so on, up to the
first guess that AR disagrees with. Every forward gives at least one token. How good the guesses are
decides the speed, never the text. (All this is up to floating-point rounding: docs/lossless.md.)

Guesses that hold are already in their slots of the cache. A forward need not have all groups. If
the one that would be needed is missing, the masks of a group that saw fewer guesses take its place;
without one, the next forward has no guesses to check. That costs time, and changes no token.

After the masks' guesses come some from the text itself, if its last tokens occurred before: what
followed them then (`Lookup`).

At a temperature every position of the text has its own dice (plumbing/sampling.py). A guess is
drawn with the dice of its position, and AR's token with the same, so that both often come out alike
(Gumbel coupling, arXiv 2408.07978). The text is the one that AR draws with these dice.

decode.py meets this file in three places: `feed` is what a sequence feeds, `check` what a forward
decides, and the guesses that held are what the cache keeps besides the real tokens.
"""

import itertools
import operator
from os.path import commonprefix  # of any two lists

import torch
from torch import Tensor

from plumbing.sampling import with_dice

LEAST_PROBABILITY = 0.2  # guesses and groups that are of use less often are left out
RUN = 3  # tokens that must have occurred before, for a guess from the text
FIRST_LOOKED_UP = 4  # guesses from the text to begin with, so that a short answer wastes few
MOST_LOOKED_UP = 10  # and at most, where they were right


class Lossless:
    """What a decoder feeds and accepts with `verify`.

    Between two forwards a sequence keeps its `guesses` (tokens), and its `groups`: the numbers j of
    the groups of masks that are fed with them.
    """

    def __init__(self, block: int, options, is_batch_on_cpu: bool):
        """block: B. options: decode.Options, of which temperature, seed and groups matter here."""
        self.block = block
        self.temperature = options.temperature
        self.seed = options.seed
        most_likely = int(1 / LEAST_PROBABILITY)  # the probabilities of all groups add up to 1
        self.most_groups = min(options.groups or block + 1, most_likely)
        if is_batch_on_cpu and not options.groups:
            self.most_groups = 1  # every row is as wide as the widest, and each position costs
        self.looks_up = not is_batch_on_cpu
        self.widest = 1 + block + self.most_groups * block  # a token, B guesses, groups of B masks
        if self.looks_up:
            self.widest += MOST_LOOKED_UP

    def feed(self, sequence, num_cached: int, mask_id: int) -> list[tuple[int, int, int]]:
        """(token, pos, prefix) of the next forward: see `visible` in model.py.

        The text a b c of which a b are cached, the guess d, groups 0 and 1 of B = 2 masks:

            token    c | d | M M | M M
            pos      2 | 3 | 3 4 | 4 5
            prefix   3 | 4 | 3 3 | 4 4
        """
        entries = []
        text = sequence.text + sequence.guesses
        for pos in range(num_cached, len(text)):
            entries.append((text[pos], pos, pos + 1))
        for j in sequence.groups:
            prefix = len(sequence.text) + j
            for pos in range(prefix, prefix + self.block):
                entries.append((mask_id, pos, prefix))
        return entries

    def check(
        self, model, hidden: Tensor, last_columns: list[int], batch: list
    ) -> list[tuple[list[int], int]]:
        """For each row the accepted tokens, and how many of them are guesses that hold.

        hidden (R, T, D) of what was fed; last_columns: of x, the last real token of each row. (A
        row without a sequence is None.) The sequences get their next guesses and groups.
        """
        guesses = [sequence.guesses if sequence else [] for sequence in batch]
        num_columns = 1 + max(map(len, guesses))
        columns = [list(range(last, last + num_columns)) for last in last_columns]
        columns = torch.tensor(columns, device=hidden.device)
        logits = model.logits_at(hidden, columns)  # (R, 1 + guesses, V): after x, g1, g2, ...
        ar_tokens = self.scores(logits, batch, ahead=[0] * len(batch)).argmax(-1).tolist()
        held = [count_held(*row) for row in zip(ar_tokens, guesses)]

        columns = self.candidate_columns(last_columns, batch, held)
        logits = model.logits_at(hidden, torch.tensor(columns, device=hidden.device))
        scores = self.scores(logits, batch, ahead=held)
        candidates = scores.argmax(-1)  # (R, 1 + B)
        # An estimate of how likely a candidate is AR's choice. (At a temperature AR will roll the
        # same dice, so a score that leads by far usually leads there, too.)
        chances = scores.softmax(-1).amax(-1).tolist()

        decisions = []
        for row, (sequence, new) in enumerate(zip(batch, candidates.tolist())):
            accepted = ar_tokens[row][: held[row] + 1]
            decisions.append((accepted, held[row]))
            if sequence:
                # new[0] is AR's next token, which is in `accepted`: the guesses come after it.
                count = self.num_useful(sequence, held[row])
                sequence.guesses = new[1 : 1 + count]
                self.plan(sequence, chances[row][1 : 1 + count])
                if self.looks_up:
                    text = sequence.text + accepted
                    found = sequence.lookup.guesses(text, sequence.guesses)
                    sequence.guesses = sequence.guesses + found  # not +=: the lookup keeps the list
        return decisions

    def scores(self, logits: Tensor, batch: list, ahead: list[int]) -> Tensor:
        return with_dice(logits, batch, self.temperature, self.seed, ahead)

    def candidate_columns(
        self, last_columns: list[int], batch: list, held: list[int]
    ) -> list[list[int]]:
        """The 1 + B columns of each row's feed that predict what comes next.

        First the column of the last guess that holds (of x if none does), then those of the group
        that saw exactly the guesses that hold. If it is missing, of one that saw fewer. Its first
        masks predict guesses that hold, so they are passed over; the others are used.
        """
        columns = []
        for sequence, last, num_held in zip(batch, last_columns, held):
            first = last + 1  # any column will do where no mask is of use
            if sequence and self.num_useful(sequence, num_held):
                j = best_group(sequence.groups, num_held)
                num_masks_before = sequence.groups.index(j) * self.block + num_held - j
                first += len(sequence.guesses) + num_masks_before
            columns.append([last + num_held, *range(first, first + self.block)])
        return columns

    def num_useful(self, sequence, num_held: int) -> int:
        """How many masks predict a place that is still open, and saw no guess that failed."""
        j = best_group(sequence.groups, num_held)
        if j is None:
            return 0
        return max(0, self.block - (num_held - j))

    def plan(self, sequence, chances: list[float]) -> None:
        """Keep the new guesses that are worth a position, and set the groups to feed with them.

        chances: of each guess, how likely it holds if all guesses before it do.
        """
        num_worth = 0
        for all_so_far in itertools.accumulate(chances, operator.mul):
            if all_so_far >= LEAST_PROBABILITY:
                num_worth += 1
        sequence.guesses = sequence.guesses[:num_worth]
        sequence.groups = likely_groups(chances[: len(sequence.guesses)], self.most_groups)


class Lookup:
    """Guesses from a text itself: what followed the last occurrence of its last RUN tokens.

    They are cut to twice as many as were right the last time, but not below one. So a text that
    does not repeat itself costs hardly a position, and one that does soon gets MOST_LOOKED_UP.
    """

    def __init__(self):
        self.place_after: dict[tuple, int] = {}  # of each run of tokens: where the text goes on
        self.num_read = RUN  # tokens of the text, at the last call
        self.most = FIRST_LOOKED_UP
        self.from_masks: list[int] = []  # this and the next: of the last call
        self.found: list[int] = []  # before the cut to self.most

    def guesses(self, text: list[int], from_masks: list[int]) -> list[int]:
        """What comes after a text and the masks' guesses."""
        self.judge(text)
        for place in range(self.num_read, len(text)):
            self.place_after[tuple(text[place - RUN : place])] = place
        self.num_read = len(text)
        place = self.place_after.get(tuple((text[-RUN:] + from_masks)[-RUN:]), len(text))
        self.from_masks = from_masks
        self.found = text[place : place + MOST_LOOKED_UP]
        return self.found[: self.most]

    def judge(self, text: list[int]) -> None:
        """Set how many to offer, by how many of those that were found last have come."""
        came = text[self.num_read :]
        num_masks = len(self.from_masks)
        if self.found and len(came) > num_masks and came[:num_masks] == self.from_masks:
            num_right = len(commonprefix([came[num_masks:], self.found]))
            self.most = min(MOST_LOOKED_UP, max(1, 2 * num_right))


def count_held(ar_tokens: list[int], guesses: list[int]) -> int:
    """How many guesses hold, given AR's tokens after x, g1, g2, ...

    A guess holds if it is AR's token and all guesses before it hold.
    """
    for held, guess in enumerate(guesses):
        if guess != ar_tokens[held]:
            return held
    return len(guesses)


def best_group(groups: list[int], num_held: int) -> int | None:
    """The group that saw the most guesses, all of which hold."""
    return max((j for j in groups if j <= num_held), default=None)


def likely_groups(chances: list[float], most: int) -> list[int]:
    """Which groups of masks to feed: the likeliest to be needed, at most `most` of them.

    chances: for each guess, how likely it holds if all before it do. Group j is needed if exactly j
    guesses hold. That has the probability c1 c2 ... cj (1 - c(j+1)), or c1 c2 ... cK for all K.
    """
    probability = []
    all_so_far = 1.0
    for chance in chances:
        probability.append(all_so_far * (1 - chance))
        all_so_far *= chance
    probability.append(all_so_far)
    groups = sorted(range(len(probability)), key=lambda j: probability[j], reverse=True)
    return sorted(j for j in groups[:most] if probability[j] >= LEAST_PROBABILITY)
