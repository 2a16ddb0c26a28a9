"""Jacobi decoding, which MARS is compared with: it needs no training, and is lossless.

The guesses are what the ordinary model predicted after its last guesses, right or wrong.
"""

import torch

from decode import Sequence
from model import Qwen2
from scheduler import num_in_common


@torch.inference_mode()
def jacobi(model: Qwen2, prompt: list[int], num_guesses: int, max_new: int = 256) -> Sequence:
    """An answer; each forward checks what the last one predicted after its guesses. No cache."""
    answer = Sequence(prompt, model.config, max_new, tau=None)
    guesses = []
    while not answer.done:
        tokens = torch.tensor([answer.token_ids + guesses], device=model.device)
        positions = torch.arange(tokens.size(1), device=model.device)[None]
        hidden = model(tokens, positions, None)[0, len(answer.token_ids) - 1 :]
        predicted = model.logits(hidden).argmax(-1).tolist()
        num_held = num_in_common(predicted, guesses)
        answer.take(predicted[: num_held + 1], width=1 + len(guesses))
        guesses = predicted[num_held + 1 :]
        while len(guesses) < num_guesses:  # any guess will do
            guesses.append(predicted[-1])
    return answer
