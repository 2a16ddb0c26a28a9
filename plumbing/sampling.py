"""Sampling: a token is the best of its scores, logits + T * dice.

That is a draw from p^(1/T). (logits / T + dice have the same order, but T may be tiny.)
"""

import functools
import hashlib

import torch
from torch import Tensor


def dice_of_rows(seed: int, wanted: list[tuple], columns: Tensor, num_tokens: int) -> Tensor:
    """Dice (R, C, V) for columns (R, C); wanted: of each row its sequence, and a position each."""
    noise = torch.zeros(*columns.shape, num_tokens, device=columns.device)
    for of_row, (sequence, positions) in zip(noise, wanted):
        for of_column, position in zip(of_row, positions):
            of_column += dice(seed, sequence.index, position, num_tokens, noise.device)
    return noise


@functools.lru_cache(maxsize=128)  # a guess and its check roll the same; 3 ms each with Qwen2.5's V
def dice(seed: int, index: int, position: int, num_tokens: int, device: torch.device) -> Tensor:
    """Gumbel noise (V,) for the token at `position` of the sequence `index`.

    A function of (seed, index, position) and nothing else: no neighbour, no order of forwards and
    no guess that failed changes it. The three are hashed, not added, or neighbours would share
    their dice. Float32 in a model of any dtype, so that a seed means the same in all on a device.
    """
    key = hashlib.blake2b(f"{seed} {index} {position}".encode(), digest_size=7).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(key, "big"))
    exponential = torch.empty(num_tokens, device=device).exponential_(generator=generator)
    return -exponential.log()
