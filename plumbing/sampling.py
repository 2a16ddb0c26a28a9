"""Sampling: a token is the best of its scores, logits + T * dice.

That is a draw from p^(1/T). (logits / T + dice have the same order, but T may be tiny.)
"""

import functools
import hashlib

import torch
from torch import Tensor


def dice_of_rows(
    seed: int, sequences: list, positions: list[list[int]], shape: tuple, device: torch.device
) -> Tensor:
    """Dice (R, C, V), the shape: for the tokens at these positions of each row's sequence."""
    noise = torch.zeros(shape, device=device)
    for of_row, sequence, of_sequence in zip(noise, sequences, positions):
        for of_column, position in zip(of_row, of_sequence):
            of_column += dice(seed, sequence.index, position, len(of_column), device)
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
