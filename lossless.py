"""Lossless decoding: several tokens per forward, with the output of plain autoregression (AR).

This is ours, not the paper's. A MARS model is still an autoregressive model, so it can check its
own guesses: the next forward carries them as if they were real tokens. Nobody knows yet how many
will hold, so that forward also carries a group of B masks for each possible number. With B = 4 and
two guesses g1 g2 after the last token x:

    feed             x    g1    g2  | M M M M | M M M M  | M M M M
    it sees          ..x  ..g1  ..g2| up to x | up to g1 | up to g2
    AR's next token  g1   y     -   |         |          |

After x AR says g1: the first guess holds. After g1 AR says y, which is not g2: the second fails,
and y takes its place. Accepted are g1 and y. The middle group of masks saw what is true, the text
up to g1. Its first mask stands in the place of y and predicts the token after y: a new guess.

Why this is exact: x, g1 and g2 see the tokens before them and never a mask, so the output at x is
what AR says after x. If that is g1, the output at g1 is what AR says next, and so on, up to the
first guess that AR disagrees with. Every forward gives at least one token. At temperature > 0 AR's
token is a draw, and a guess holds if it equals that draw: the samples have AR's distribution.

How good the guesses are decides the speed, never the text. Guesses that hold are already in their
slots of the cache. tau says how sure a guess must be to be worth checking.

All this is up to floating-point rounding: in bfloat16 a wider forward rounds differently, and where
two tokens are almost equally likely either may come.
"""

import torch
from torch import Tensor


def mask_groups(end: int, num_guesses: int, num_masks: int) -> list[tuple[int, int]]:
    """(pos, prefix) of the masks that follow a text of length `end` and its guesses in the feed.

    Group j sees the text and the first j guesses; without guesses there is one group, the paper's.
    mask_groups(9, 1, 2) is [(9, 9), (10, 9), (10, 10), (11, 10)].
    """
    masks = []
    for prefix in range(end, end + num_guesses + 1):
        for pos in range(prefix, prefix + num_masks):
            masks.append((pos, prefix))
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
    last_column: Tensor, num_guesses: list[int], num_masks: list[int], held: Tensor
) -> Tensor:
    """The columns of each row's feed that predict the next candidates: (R, 1 + max(num_masks)).

    The first is predicted by the last token that holds, the others by the group of masks that saw
    exactly the guesses that hold. last_column (R, 1) is that of x; held (R, 1) counts the guesses
    that hold.
    """
    window = torch.arange(max(num_masks), device=last_column.device)
    num_guesses = torch.tensor(num_guesses, device=last_column.device)[:, None]
    num_masks = torch.tensor(num_masks, device=last_column.device)[:, None]
    first_mask = last_column + 1 + num_guesses + held * num_masks
    return torch.cat([last_column + held, first_mask + window], dim=1)
