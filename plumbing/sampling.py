"""Sampling: a token is the best of its scores, at a temperature with dice of its place."""

import functools
import hashlib

import torch
from torch import Tensor


def with_dice(
    logits: Tensor, sequences: list, temperature: float, seed: int, ahead: list[int]
) -> Tensor:
    """Scores (R, C, V) from logits (R, C, V); the token with the best score is the one to take.

    Without a temperature they are the logits. At T > 0 they are logits + T * dice, of which the
    best is a draw from p^(1/T). (logits / T + dice have the same order, but T may be tiny.)

    Column c of a row is for the place len(text) + ahead + c of its sequence. (A row
    without a sequence is None.)
    """
    if temperature == 0:
        return logits
    noise = torch.zeros_like(logits)
    for of_row, sequence, num_ahead in zip(noise, sequences, ahead):
        if sequence:
            place = len(sequence.text) + num_ahead
            for position, of_column in enumerate(of_row, start=place):
                of_column += dice(seed, sequence.index, position, len(of_column), logits.device)
    return logits + temperature * noise


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
