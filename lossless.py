"""Lossless decoding: several tokens per forward, with the output of plain autoregression (AR).

This is ours, not the MARS paper's. A MARS model is still an autoregressive model, so it can check
its own guesses: the next forward carries them as if they were real tokens. Nobody knows yet how
many will hold, so that forward also carries groups of masks. Group j is up to B masks that see the
text and the first j guesses. To feed all groups is "quadratic decoding" (arXiv 2507.11851); here at
most the three likeliest are fed (only one for a batch on a CPU). With B = 4, two guesses g1 g2
after the last token x, and the groups 0, 1 and 2:

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
if there are none, the next forward has no guesses from masks. That costs time, and changes no
token. On a CPU each position costs: there a group is short where masks' guesses seldom hold.

Not all guesses come from masks. If the text's last tokens stood earlier in it, what followed them
there is a guess, too (`PromptLookup`), but not in a batch on a CPU. At each place the likelier of
the two is taken.

At a temperature every position of the text has its own noise (plumbing/sampling.py). A guess is
drawn with the noise of its position, and AR's token with the same, so that both often come out
alike (Gumbel coupling, arXiv 2408.07978). The text is the one that AR draws with this noise.

`Lossless` is a decoding method, as `Threshold` in decode.py is. (`witness` and `guarded` are for
decode.py's `Guarded`: with --guard the text checks what a tau accepted.)
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from scheduler import Position, Sequence, num_in_common

LEAST_PROBABILITY = 0.2  # guesses and groups less likely to be of use than this are left out
MOST_GROUPS = 3  # a fourth costs more than it gains
MORE_THAN_B = 16  # a forward has at most B + 16 guesses: room for long copies of the text
LEAST_FOR_A_MASK = 0.7  # on a CPU, add a mask while all before it hold with at least this chance

# How likely guesses hold at first: those of masks, and those that followed a repeated run of 2, 4
# or 8 tokens. These become means over the guesses that were checked; the newest counts RATE.
FIRST_MASK_CHANCE = 0.9
FIRST_RUN_CHANCES = {2: 0.5, 4: 0.8, 8: 0.95}
RUN_LENGTHS = tuple(FIRST_RUN_CHANCES)  # ascending: `next_token` relies on it
RATE = 0.05


# ---------------------------------------------------------------------------- what the text says


class PromptLookup:
    """Finds where a text's final tokens stood in it before, and says which token followed there."""

    def __init__(self):
        self.goes_on_at: dict[tuple[int, ...], int] = {}  # run -> place of the next token
        self.next_place = 0  # the first that is not in goes_on_at yet

    def next_token(self, text: list[int], guesses: list[int]) -> tuple[int | None, int]:
        """The token that the text itself suggests after text + guesses, and the length of the run.

        text + guesses ends with a run of tokens. If the text had it before, the suggestion is what
        followed the last time. The longest run counts; without any it is (None, 0).
        """
        for place in range(self.next_place, len(text)):
            for length in RUN_LENGTHS:
                if length <= place:
                    self.goes_on_at[tuple(text[place - length : place])] = place
        self.next_place = len(text)
        tail = text[-max(RUN_LENGTHS) :] + guesses
        found = (None, 0)
        for length in RUN_LENGTHS:
            place = self.goes_on_at.get(tuple(tail[-length:]))
            if place is None:  # then no longer run is there: it would end with this one
                break
            found = (text[place], length)
        return found


def witness(sequence: Sequence, accepted: list[int], token: int) -> str:
    """What the text says of a token that a mask predicts: confirmed, contradicted or silent.

    accepted: what stands between the text and this token. A token that repeats the one before it
    is contradicted, for that is how masks slip most often.
    """
    if token == accepted[-1]:
        return "contradicted"
    if sequence.state is None:
        sequence.state = PromptLookup()
    follows, _ = sequence.state.next_token(sequence.token_ids, accepted)
    if follows is None:
        return "silent"
    if follows == token:
        return "confirmed"
    return "contradicted"


def guarded(sequence: Sequence, accepted: list[int], is_sure: list[bool]) -> list[int]:
    """Accepted tokens up to the first that the text does not support: --guard (docs/lossless.md).

    A token that the text confirms stays, one that it contradicts does not. Where the text is silent
    the mask must be surer than tau asks: is_sure says so of each token. The first token is AR's.
    """
    for i in range(1, len(accepted)):
        said = witness(sequence, accepted[:i], accepted[i])
        if said == "contradicted" or (said == "silent" and not is_sure[i]):
            return accepted[:i]
    return accepted


# -------------------------------------------------------------------------------------- the method


class Guess(NamedTuple):
    token: int | None
    chance: float  # that it holds if all before it do
    run: int | None = None  # the length of the run that it followed in the text; None: of a mask


NO_GUESS = Guess(token=None, chance=0.0)  # it ends a chain


@dataclass
class Plan:
    """What a forward of a sequence is fed after the text; kept in `sequence.state`."""

    lookup: PromptLookup = field(default_factory=PromptLookup)  # of the sequence's text
    guesses: list[Guess] = field(default_factory=list)  # to check
    groups: list[int] = field(default_factory=list)  # of masks: the numbers j
    group_size: int = 0  # masks in each group
    from_masks: list[Guess] = field(default_factory=list)  # of the forward before


class Lossless:
    """The decoding method without a tau: see `Method` in decode.py."""

    def __init__(self, block: int, mask_id: int, on_cpu: bool, rows: int = 1):
        """block: the most masks in a group, B. on_cpu: there each position takes time."""
        self.block = block
        self.mask_id = mask_id
        self.on_cpu = on_cpu
        self.looks_up = True
        self.most_groups = MOST_GROUPS
        if on_cpu and rows > 1:  # every row is as wide as the widest
            self.looks_up = False
            self.most_groups = 1
        self.mask_chance = FIRST_MASK_CHANCE  # decides how many masks are in a group
        self.run_chances = dict(FIRST_RUN_CHANCES)

    @property
    def widest(self) -> int:
        """The most positions of a row: the text's last token, the guesses, the groups."""
        return 1 + self.block + MORE_THAN_B + self.most_groups * self.block

    def group_size(self) -> int:
        """How many masks a group has now."""
        if not self.on_cpu:
            return self.block
        size = 1
        while size < self.block and self.mask_chance**size >= LEAST_FOR_A_MASK:
            size += 1
        return size

    def additions(self, sequence: Sequence) -> list[Position]:
        """Plan the forward, in sequence.state. Returns its guesses and groups of masks.

        After the text a b c, the guess d and the groups 0 and 1 of B = 2 masks:

            token    d | M M | M M
            pos      3 | 3 4 | 4 5
            prefix   4 | 3 3 | 4 4
        """
        if sequence.state is None:
            sequence.state = Plan()
        plan = sequence.state
        if sequence.forwards > 0:  # the first, a prefill, has room for masks only (Scheduler)
            plan.guesses = self.chain(plan.lookup, sequence.token_ids, plan.from_masks)
        plan.groups = likely_groups([guess.chance for guess in plan.guesses], self.most_groups)
        plan.group_size = self.group_size()
        positions = []
        end = len(sequence.token_ids)
        for pos, guess in enumerate(plan.guesses, start=end):
            positions.append(Position(guess.token, pos, prefix=pos + 1))
        for j in plan.groups:
            prefix = end + j
            for pos in range(prefix, prefix + plan.group_size):
                positions.append(Position(self.mask_id, pos, prefix))
        return positions

    def confidence(self, logits: Tensor, scores: Tensor, tokens: Tensor) -> Tensor:
        """The softmax of the scores at each token: its probability, with the noise.

        AR's token will be drawn with the same noise. So this says better than the probability
        without it whether a guess will hold.
        """
        return scores.softmax(-1).gather(-1, tokens[..., None])[..., 0]

    def accept(self, sequence: Sequence, tokens: list[int], confidences: list[float]) -> list[int]:
        """The guesses that hold, and AR's token after them.

        Also keeps what the useful masks predict, for the next plan, and learns how likely guesses
        hold. tokens: AR's after x, g1, g2, ..., then what the masks of each group predict.
        """
        plan = sequence.state
        num_held = num_in_common(tokens, [guess.token for guess in plan.guesses])
        self.update_chances(plan.guesses, num_held)
        useful = useful_masks(plan, num_held)
        plan.from_masks = [Guess(tokens[i], confidences[i]) for i in useful]
        return tokens[: num_held + 1]

    def update_chances(self, checked: list[Guess], num_held: int) -> None:
        """Learn how likely guesses hold, from those that were checked."""
        for place, guess in enumerate(checked[: num_held + 1]):  # nothing is known of later ones
            has_held = float(place < num_held)
            if guess.run is None:
                self.mask_chance += RATE * (has_held - self.mask_chance)
            else:
                self.run_chances[guess.run] += RATE * (has_held - self.run_chances[guess.run])

    def chain(self, lookup: PromptLookup, text: list[int], from_masks: list[Guess]) -> list[Guess]:
        """What a forward checks: at each place a mask's guess or the text's, the likelier.

        It ends where all guesses together are no longer likely to hold. from_masks: what the useful
        masks predict.
        """
        guesses = []
        tokens = []
        all_hold = 1.0
        while len(guesses) < self.block + MORE_THAN_B:
            guess = NO_GUESS
            if len(guesses) < len(from_masks):
                guess = from_masks[len(guesses)]
            if self.looks_up:
                token, run = lookup.next_token(text, tokens)
                if run and self.run_chances[run] > guess.chance:
                    guess = Guess(token, self.run_chances[run], run)
            all_hold *= guess.chance
            if all_hold < LEAST_PROBABILITY:
                break
            guesses.append(guess)
            tokens.append(guess.token)
        return guesses


def useful_masks(plan: Plan, num_held: int) -> range:
    """Which predictions of a forward are for places after the accepted tokens: their indices.

    They are those of one group of masks: among the groups that saw only guesses that held (j <=
    num_held), the one with the largest j. Prediction 0 is that of x, the last real token; then come
    the guesses', then the groups', `group_size` each.
    """
    useful = range(0)
    begin = 1 + len(plan.guesses)  # of a group
    for j in plan.groups:  # the group that saw the fewest guesses comes first
        if j <= num_held:
            num_known = num_held - j  # its first masks predict places whose tokens are known now
            useful = range(begin + num_known, begin + plan.group_size)
        begin += plan.group_size
    return useful


def likely_groups(chances: list[float], most: int) -> list[int]:
    """Which groups of masks to feed: the likeliest to be needed, at most `most` of them.

    chances: for each of the K guesses, how likely it holds if all before it do. Group j < K is
    needed if exactly j guesses hold. That has the probability c1 c2 ... cj (1 - c(j+1)). Group K is
    needed if all hold: c1 c2 ... cK.
    """
    probability = []
    all_so_far = 1.0
    for chance in chances:
        probability.append(all_so_far * (1 - chance))
        all_so_far *= chance
    probability.append(all_so_far)
    groups = []
    likeliest_first = sorted(range(len(probability)), key=lambda j: probability[j], reverse=True)
    for j in likeliest_first[:most]:
        if probability[j] >= LEAST_PROBABILITY:
            groups.append(j)
    return sorted(groups)
