"""Sampling: a token is the best of its scores, at a temperature with dice of its place."""

import functools
import hashlib

import torch
from torch import Tensor


def scores(logits: Tensor, noise: Tensor | None, temperature: float) -> Tensor:
    """Scores (R, C, V) from logits (R, C, V); the token with the best score is the one to take.

    noise: dice (R, C, V), None without a temperature. The best of logits + T * dice is a draw from
    p^(1/T). (logits / T + dice have the same order, but T may be tiny.)
    """
    if noise is None:
        return logits
    return logits + temperature * noise


def noise_at(places: list[list[tuple]], num_tokens: int, device: torch.device) -> Tensor:
    """Dice (R, C, V) of places: for each row the (seed, index, position) of C tokens."""
    return torch.stack(
        [torch.stack([dice(*place, num_tokens, device) for place in row]) for row in places]
    )


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
