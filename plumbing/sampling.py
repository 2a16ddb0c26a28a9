"""Choose a token from logits: the best one, or at a temperature a draw with dice of its own."""

import hashlib

import torch
from torch import Tensor


def choose(logits: Tensor, batch: list, temperature: float, seed: int, ahead: list[int]) -> Tensor:
    """The best tokens (R, C) of logits (R, C, V); at a temperature T > 0, draws from p^(1/T).

    Column c of a row is for the place len(text) + ahead + c of its sequence in `batch`. (A row
    without a sequence is None.)
    """
    if temperature == 0:
        return logits.argmax(-1)
    noise = torch.zeros_like(logits)
    for of_row, sequence, num_ahead in zip(noise, batch, ahead):
        if sequence:
            place = len(sequence.text) + num_ahead
            for position, of_column in enumerate(of_row, start=place):
                of_column += dice(seed, sequence.index, position, of_column)
    # The best of logits / T + noise is a draw. (T may be tiny, so both are multiplied by it.)
    return (logits + temperature * noise).argmax(-1)


def dice(seed: int, index: int, position: int, like: Tensor) -> Tensor:
    """Gumbel noise (V,) for the token at `position` of the sequence `index`; `like` is any (V,).

    A function of (seed, index, position) and nothing else: no neighbour, no order of forwards and
    no guess that failed changes it. The three are hashed, not added, or neighbours would share
    their dice. Float32 in a model of any dtype, so that a seed means the same in all on a device.
    """
    key = hashlib.blake2b(f"{seed} {index} {position}".encode(), digest_size=7).digest()
    generator = torch.Generator(like.device).manual_seed(int.from_bytes(key, "big"))
    exponential = torch.empty(len(like), device=like.device).exponential_(generator=generator)
    return -exponential.log()
