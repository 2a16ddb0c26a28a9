"""Lossless decoding: several tokens per forward, with the output of plain autoregression (AR).

This is ours, not the MARS paper's. A MARS model is still an autoregressive model, so it can check
its own guesses: the next forward carries them as if they were real tokens. Nobody knows yet how
many will hold, so that forward also carries groups of masks. Group j is B masks that see the text
and the first j guesses (all groups: "quadratic decoding", arXiv 2507.11851). With B = 4, two
guesses g1 g2 after the last token x, and the groups 0, 1 and 2:

    feed             x    g1    g2  | M M M M | M M M M  | M M M M
    it sees          ..x  ..g1  ..g2| ..x     | ..g1     | ..g2
    AR's next token  g1   y   (void)          |          |

After x AR says g1: the first guess holds. After g1 AR says y, which is not g2: the second fails,
y takes its place, and what AR says after g2 is void. Accepted are g1 and y. Group 1 saw x and g1,
and no guess that failed. Its first mask stands where y is now, and predicts the token after y: a
new guess.

Why this is exact: x, g1 and g2 see the tokens before them and never a mask, so the output at x is
what AR says after x. If that is g1, the output at g1 is what AR says next, and so on, up to the
first guess that AR disagrees with. Every forward gives at least one token. How good the guesses are
decides the speed, never the text. (All this is up to floating-point rounding: docs/lossless.md.)

Guesses that hold are already in their slots of the cache. A forward need not have all groups. If
the one that would be needed is missing, the masks of a group that saw fewer guesses take its place;
if there is none, the next forward has no guesses from masks. That costs time, and changes no token.

After the masks' guesses come some from the text itself, if its last tokens occurred before: what
followed them then (`Lookup`).

At a temperature every position of the text has its own dice (plumbing/sampling.py). A guess is
drawn with the dice of its position, and AR's token with the same, so that both often come out alike
(Gumbel coupling, arXiv 2408.07978). The text is the one that AR draws with these dice.

`Lossless` is a decoding method as `Threshold` in decode.py is.
"""

from dataclasses import dataclass, field

from plumbing.scheduler import Decision, Position, Sequence, num_in_common

LEAST_PROBABILITY = 0.2  # guesses and groups less likely to be of use than this are left out
RUN = 3  # tokens that must have occurred before, for a guess from the text
FIRST_LOOKED_UP = 4  # guesses from the text to begin with, so that a short answer wastes few
MOST_LOOKED_UP = 10  # and at most, where they were right


class Lossless:
    """The decoding method without a tau: see `Method` in plumbing/scheduler.py."""

    metric = "probability"
    confidence_with_noise = True  # a guess that its noise favours by far is likely to hold

    def __init__(self, block: int, mask_id: int, is_batch_on_cpu: bool):
        """block: the number of masks in a group, B."""
        self.block = block
        self.mask_id = mask_id
        # The probabilities of all groups add up to 1: no more than 1 / .2 of them can be likely.
        self.most_groups = min(block + 1, int(1 / LEAST_PROBABILITY))
        self.looks_up = not is_batch_on_cpu
        if is_batch_on_cpu:
            self.most_groups = 1  # every row is as wide as the widest, and each position costs

    @property
    def widest(self) -> int:
        """The last token, the masks' guesses, those from the text, the groups."""
        return 1 + self.block + MOST_LOOKED_UP + self.most_groups * self.block

    def additions(self, sequence: Sequence) -> list[Position]:
        """The guesses and groups of masks that follow a text.

        After the text a b c, the guess d and the groups 0 and 1 of B = 2 masks:

            token    d | M M | M M
            pos      3 | 3 4 | 4 5
            prefix   4 | 3 3 | 4 4
        """
        if sequence.state is None:
            sequence.state = Plan()
        positions = []
        end = len(sequence.token_ids)
        for pos, guess in enumerate(sequence.state.guesses, start=end):
            positions.append((guess, pos, pos + 1))
        for j in sequence.state.groups:
            prefix = end + j
            for pos in range(prefix, prefix + self.block):
                positions.append((self.mask_id, pos, prefix))
        return positions

    def decide(self, sequence: Sequence, tokens: list[int], confidences: list[float]) -> Decision:
        """The guesses that hold, and AR's token after them; then the plan of the next forward.

        tokens: AR's after x, g1, g2, ..., then what the masks of each group predict.
        """
        fed = sequence.state
        num_held = num_in_common(tokens, fed.guesses)
        accepted = tokens[: num_held + 1]
        useful = useful_masks(fed, num_held, self.block)
        chances = [confidences[i] for i in useful]
        num_worth = count_worth(chances)
        from_masks = [tokens[i] for i in useful[:num_worth]]
        from_text = []
        if self.looks_up:
            from_text = fed.lookup.next_guesses(sequence.token_ids + accepted, from_masks)
        groups = likely_groups(chances[:num_worth], self.most_groups)
        sequence.state = Plan(from_masks + from_text, groups, useful, fed.lookup)
        return Decision(accepted, num_held)


class Lookup:
    """Guesses from a text itself: what followed the last occurrence of its last RUN tokens.

    Whenever all the masks' guesses held, the number to offer becomes twice as many as were right,
    but at least one; otherwise it stays. So a text that does not repeat itself costs hardly a
    position, and one that does soon gets MOST_LOOKED_UP.
    """

    def __init__(self):
        self.goes_on_at: dict[tuple, int] = {}  # of each run of tokens: where the text goes on
        self.length = 0  # of the text at the last call
        self.most = FIRST_LOOKED_UP
        self.from_masks: list[int] = []  # the masks' guesses of the last call
        # What the last call found, also beyond what it offered: if all offered guesses hold, AR's
        # token after them counts as one more that is right, if it is the next one found.
        self.found: list[int] = []

    def next_guesses(self, text: list[int], from_masks: list[int]) -> list[int]:
        """Guesses for what comes after a text and the masks' guesses."""
        self.judge(came=text[self.length :])
        for end in range(max(RUN, self.length), len(text)):  # nothing follows the last run yet
            self.goes_on_at[tuple(text[end - RUN : end])] = end
        self.length = len(text)
        last_run = (text[-RUN:] + from_masks)[-RUN:]
        begin = self.goes_on_at.get(tuple(last_run), len(text))  # if it is new, nothing follows
        self.from_masks = list(from_masks)
        self.found = text[begin : begin + MOST_LOOKED_UP]
        return self.found[: self.most]

    def judge(self, came: list[int]) -> None:
        """Set how many to offer, by how many of those found last are in the text that came."""
        num_masks = len(self.from_masks)
        if self.found and came[:num_masks] == self.from_masks:
            num_right = num_in_common(came[num_masks:], self.found)
            self.most = min(MOST_LOOKED_UP, max(1, 2 * num_right))


@dataclass
class Plan:
    """What a forward of a sequence is fed after the text; kept in `sequence.state`."""

    guesses: list[int] = field(default_factory=list)  # tokens to check
    groups: list[int] = field(default_factory=lambda: [0])  # of masks: the numbers j
    useful: range = range(0)  # `useful_masks` of the forward before; apps/trace.py shows them
    lookup: Lookup = field(default_factory=Lookup)


def useful_masks(plan: Plan, num_held: int, block: int) -> range:
    """The indices of those predictions of a forward that say what comes after AR's token.

    They are of masks of one group: the one that saw most guesses, of those that saw none that
    failed. Prediction 0 is that of x, the last real token; then come the guesses', then the
    groups', `block` each.
    """
    useful = range(0)
    begin = 1 + len(plan.guesses)  # of a group
    for j in plan.groups:  # the group that saw the fewest guesses comes first
        if j <= num_held:
            num_known = num_held - j  # its first masks predict places whose tokens are known now
            useful = range(begin + num_known, begin + block)
        begin += block
    return useful


def count_worth(chances: list[float]) -> int:
    """How many candidates are worth a position: as long as all up to there are likely to hold.

    chances: of each candidate, how likely it holds if all before it do.
    """
    all_hold = 1.0
    for count, chance in enumerate(chances):
        all_hold *= chance
        if all_hold < LEAST_PROBABILITY:
            return count
    return len(chances)


def likely_groups(chances: list[float], most: int) -> list[int]:
    """Which groups of masks to feed: the likeliest to be needed, at most `most` of them.

    chances: for each of the masks' K guesses, how likely it holds if all before it do. Group j < K
    is needed if exactly j guesses hold. That has the probability c1 c2 ... cj (1 - c(j+1)). Group K
    is needed if all hold, whatever becomes of the guesses from the text: c1 c2 ... cK.
    """
    probability = []
    all_so_far = 1.0
    for chance in chances:
        probability.append(all_so_far * (1 - chance))
        all_so_far *= chance
    probability.append(all_so_far)
    groups = sorted(range(len(probability)), key=lambda j: probability[j], reverse=True)
    return sorted(j for j in groups[:most] if probability[j] >= LEAST_PROBABILITY)
