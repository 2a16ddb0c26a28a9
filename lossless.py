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

`Lossless` is a decoding method as `Threshold` in decode.py is: the decoder feeds the real tokens,
`feed` adds guesses and groups, `decide` says what is accepted. The cache keeps the real tokens and
the guesses that hold.
"""

import itertools
import operator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plumbing.sampling import with_dice
from plumbing.scheduler import num_in_common

LEAST_PROBABILITY = 0.2  # guesses and groups less likely to be of use than this are left out
RUN = 3  # tokens that must have occurred before, for a guess from the text
FIRST_LOOKED_UP = 4  # guesses from the text to begin with, so that a short answer wastes few
MOST_LOOKED_UP = 10  # and at most, where they were right


class Lossless:
    """The decoding method of `verify`."""

    def __init__(self, block: int, options, mask_id: int, is_batch_on_cpu: bool):
        """block: B. options: decode.Options, of which temperature, seed and groups matter here."""
        self.block = block
        self.mask_id = mask_id
        self.temperature = options.temperature
        self.seed = options.seed
        most_likely = int(1 / LEAST_PROBABILITY)  # the probabilities of all groups add up to 1
        self.most_groups = min(options.groups or block + 1, most_likely)
        if is_batch_on_cpu and not options.groups:
            self.most_groups = 1  # every row is as wide as the widest, and each position costs
        self.looks_up = not is_batch_on_cpu
        self.widest = 1 + block + self.most_groups * block  # x, the masks' guesses, the groups
        if self.looks_up:
            self.widest += MOST_LOOKED_UP

    def feed(self, sequence, room: float, num_waiting: int) -> list[tuple[int, int, int]]:
        """The guesses and groups of masks that follow a text: (token, pos, prefix) of each.

        After the text a b c, the guess d and the groups 0 and 1 of B = 2 masks. (prefix: `visible`
        in model.py. Neither the room in a cache block nor the waiting prompts matter here.)

            token    d | M M | M M
            pos      3 | 3 4 | 4 5
            prefix   4 | 3 3 | 4 4
        """
        if sequence.state is None:
            sequence.state = State()
        positions = []
        end = len(sequence.text)
        for pos, guess in enumerate(sequence.state.guesses, start=end):
            positions.append((guess, pos, pos + 1))
        for j in sequence.state.groups:
            prefix = end + j
            for pos in range(prefix, prefix + self.block):
                positions.append((self.mask_id, pos, prefix))
        return positions

    def decide(
        self, model, hidden: Tensor, last: list[int], sequences: list
    ) -> list[tuple[list[int], list[float], int]]:
        """For each row the accepted tokens, their probabilities, and how many were fed as guesses.

        hidden (R, T, D) of what was fed; last: the column of x, the last real token of each row. (A
        row without a sequence is None.)
        """
        guesses = [sequence.state.guesses if sequence else [] for sequence in sequences]
        most = 1 + max(map(len, guesses))
        columns = [list(range(first, first + most)) for first in last]
        logits = model.logits_at(hidden, torch.tensor(columns, device=hidden.device))
        ahead = [0] * len(sequences)
        scores = with_dice(logits, sequences, self.temperature, self.seed, ahead)
        best = scores.argmax(-1)  # of each row: AR's tokens after x, g1, g2, ...
        probabilities = logits.softmax(-1).gather(-1, best[..., None])[..., 0]
        decisions = []
        for said, sure, guessed in zip(best.tolist(), probabilities.tolist(), guesses):
            held = num_in_common(said, guessed)
            decisions.append((said[: held + 1], sure[: held + 1], held))
        self.look_ahead(model, hidden, last, sequences, decisions)
        return decisions

    def look_ahead(
        self, model, hidden: Tensor, last: list[int], sequences: list, decisions: list
    ) -> None:
        """Set the guesses and groups that the next forward is fed."""
        columns = []
        num_useful = []
        for sequence, first, (_, _, held) in zip(sequences, last, decisions):
            masks = sequence.state.useful_masks(held, self.block) if sequence else range(0)
            num_useful.append(len(masks))
            num_padding = self.block - len(masks)
            columns.append([first + place for place in masks] + [0] * num_padding)
        # The first guess is for the place after the accepted tokens.
        ahead = [len(accepted) for accepted, _, _ in decisions]
        logits = model.logits_at(hidden, torch.tensor(columns, device=hidden.device))  # (R, B, V)
        scores = with_dice(logits, sequences, self.temperature, self.seed, ahead)
        candidates = scores.argmax(-1).tolist()
        # An estimate of how likely a candidate is AR's choice. (At a temperature AR will roll the
        # same dice, so a score that leads by far usually leads there, too.)
        chances = scores.softmax(-1).amax(-1).tolist()
        for row, sequence in enumerate(sequences):
            if sequence is None:
                continue
            state = sequence.state
            state.checked.append(len(state.guesses))
            count = num_useful[row]
            state.plan(candidates[row][:count], chances[row][:count], self.most_groups)
            if self.looks_up:
                accepted, _, _ = decisions[row]
                state.guesses += state.lookup.guesses(sequence.text + accepted, state.guesses)


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
        last_run = (text[-RUN:] + from_masks)[-RUN:]
        place = self.place_after.get(tuple(last_run), len(text))
        self.from_masks = list(from_masks)
        self.found = text[place : place + MOST_LOOKED_UP]
        return self.found[: self.most]

    def judge(self, text: list[int]) -> None:
        """Set how many to offer, by how many of those that were found last have come."""
        came = text[self.num_read :]
        num_masks = len(self.from_masks)
        if self.found and len(came) > num_masks and came[:num_masks] == self.from_masks:
            num_right = num_in_common(came[num_masks:], self.found)
            self.most = min(MOST_LOOKED_UP, max(1, 2 * num_right))


@dataclass
class State:
    """What a sequence keeps between two forwards, in `sequence.state`."""

    guesses: list[int] = field(default_factory=list)  # tokens for the next forward to check
    groups: list[int] = field(default_factory=lambda: [0])  # of masks: the numbers j
    lookup: Lookup = field(default_factory=Lookup)
    checked: list[int] = field(default_factory=list)  # number of guesses, of each forward

    def useful_masks(self, held: int, block: int) -> range:
        """Which masks predict a place that is open, and saw no guess that failed.

        Positions are counted from x, the last real token: after it come the guesses, then the
        groups, `block` masks each. The best group saw the most guesses, all of which hold. If it
        saw j of the `held` guesses, its first held - j masks predict guesses that hold.
        """
        saw_no_failure = [j for j in self.groups if j <= held]
        if not saw_no_failure:
            return range(0)
        j = max(saw_no_failure)
        start = 1 + len(self.guesses) + self.groups.index(j) * block
        return range(start + held - j, start + block)

    def plan(self, candidates: list[int], chances: list[float], most_groups: int) -> None:
        """Set the guesses, as far as they are worth a position, and the groups to feed with them.

        chances: of each candidate, how likely it holds if all before it do.
        """
        num_worth = 0
        for all_hold in itertools.accumulate(chances, operator.mul):
            if all_hold >= LEAST_PROBABILITY:
                num_worth += 1
        self.guesses = candidates[:num_worth]
        self.groups = likely_groups(chances[:num_worth], most_groups)


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
