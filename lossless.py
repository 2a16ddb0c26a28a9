"""Lossless decoding: several tokens per forward, with the output of plain autoregression (AR).

This is not in the MARS paper. A MARS model is still an autoregressive model, so it can check its
own guesses: the next forward carries them as if they were real tokens. Nobody knows yet how many
will hold, so that forward also carries groups of masks. Group j is B masks that see the text and
the first j guesses (all groups: "quadratic decoding", arXiv 2507.11851). With B = 4, two guesses
g1 g2 after the last token x, and the groups 0, 1 and 2:

    feed             x    g1    g2  | M M M M | M M M M  | M M M M
    it sees          ..x  ..g1  ..g2| ..x     | ..g1     | ..g2
    AR's next token  g1   y  (unused)         |          |

After x AR says g1: the first guess holds. After g1 AR says y, which is not g2: the second fails,
and y takes its place. Accepted are g1 and y. Group 1 saw x and g1, and no guess that failed. Its
first mask stands where y is now, and predicts the token after y: a new guess.

Why this is exact: x, g1 and g2 see the tokens before them and never a mask, so the output at x is
what AR says after x. If that is g1, the output at g1 is what AR says next, and so on, up to the
first guess that AR disagrees with. Every forward gives at least one token.

How good the guesses are decides the speed, never the text. Guesses that hold are already in their
slots of the cache. tau says how sure a guess must be to be worth checking. A group that is missing
costs nothing but time: if it was the one needed, the next forward has no guesses to check.

At a temperature every position of the text has its own `dice`. A guess is drawn with the dice of
its position, and AR's token with the same, so that both often come out alike (Gumbel coupling,
arXiv 2408.07978). The text is the one that AR draws with these dice.

All this is up to floating-point rounding: a wider forward may round differently, and where the
scores of two tokens almost tie either may come. In bfloat16 such ties are common: see
docs/lossless.md.
"""

import hashlib

import torch
from torch import Tensor

LEAST_PROBABILITY = 0.05  # a group that is needed less often than that is left out


def likely_groups(chances: list[float], most: int) -> list[int]:
    """Which groups of masks to feed: the likeliest to be needed, at most `most` of them.

    chances: for each guess, how likely it holds if all before it do (its probability). Group j is
    needed if exactly j guesses hold. That has the probability c1 c2 ... cj (1 - c(j+1)); for all K
    guesses, c1 c2 ... cK.
    """
    probability = []
    all_so_far = 1.0
    for chance in chances:
        probability.append(all_so_far * (1 - chance))
        all_so_far *= chance
    probability.append(all_so_far)
    groups = sorted(range(len(probability)), key=lambda j: probability[j], reverse=True)
    return sorted(j for j in groups[:most] if probability[j] >= LEAST_PROBABILITY)


def mask_groups(end: int, groups: list[int], num_masks: int) -> list[tuple[int, int]]:
    """(pos, prefix) of the masks that follow a text of length `end` and its guesses in the feed.

    The paper's masks are group 0.
    mask_groups(9, [0, 2], 2) is [(9, 9), (10, 9), (11, 11), (12, 11)].
    """
    masks = []
    for j in groups:
        for pos in range(end + j, end + j + num_masks):
            masks.append((pos, end + j))
    return masks


def count_held(ar_tokens: Tensor, guesses: list[list[int]]) -> Tensor:
    """How many of each row's guesses hold (R, 1), given AR's tokens (R, C) after x, g1, g2, ...

    A guess holds if it is AR's token and all guesses before it hold.
    """
    no_guess = [-1] * ar_tokens.size(1)
    padded = [(tokens + no_guess)[: ar_tokens.size(1)] for tokens in guesses]
    holds = ar_tokens == torch.tensor(padded, device=ar_tokens.device)
    return holds.long().cumprod(-1).sum(-1, keepdim=True)


def candidate_columns(
    last_column: Tensor,
    num_guesses: list[int],
    groups: list[list[int]],
    num_masks: list[int],
    held: Tensor,
) -> tuple[Tensor, Tensor]:
    """Two results: the columns of each row's feed that predict the next candidates, of the shape
    (R, 1 + max(num_masks)); and whether the feed has the group of masks that is needed, (R, 1).

    First the column of the last guess that holds (of x if none does), then those of the group that
    saw exactly the guesses that hold (arbitrary if it is missing). last_column (R, 1) is that of x;
    held (R, 1) counts the guesses that hold.
    """
    # Where group j is among the row's groups, -1 if it is missing: (R, 1 + max(num_guesses)).
    indices = [[-1] * (1 + max(num_guesses)) for _ in groups]
    for row, row_groups in zip(indices, groups):
        for index, j in enumerate(row_groups):
            row[j] = index
    device = last_column.device
    index = torch.tensor(indices, device=device).gather(1, held)
    mask_offsets = torch.arange(max(num_masks), device=device)
    num_guesses = torch.tensor(num_guesses, device=device)[:, None]
    num_masks = torch.tensor(num_masks, device=device)[:, None]
    first_mask = last_column + 1 + num_guesses + index.clamp(min=0) * num_masks
    return torch.cat([last_column + held, first_mask + mask_offsets], dim=1), index >= 0


def dice(seed: int, index: int, position: int, like: Tensor) -> Tensor:
    """Gumbel noise (V,) for the token at `position` of the text `index`; `like` is any (V,).

    A function of (seed, index, position) and nothing else: no neighbour, no order of forwards and
    no guess that failed changes it. The three are hashed, not added, or neighbours would share
    their dice. Float32 in a model of any dtype, so that a seed means the same in all on a device.
    """
    key = hashlib.blake2b(f"{seed} {index} {position}".encode(), digest_size=7).digest()
    generator = torch.Generator(like.device).manual_seed(int.from_bytes(key, "big"))
    exponential = torch.empty(len(like), device=like.device).exponential_(generator=generator)
    return -exponential.log()
