"""What the tests of decoding share: random options, and slow decoders that use nothing of ours."""

import random

import torch
from common import EOS, MASK

from decode import METRICS, Answer
from model import Qwen2


def random_options(rng: random.Random) -> dict:
    """A tau so low that a model of 8 tokens accepts several at a time; sometimes plain AR."""
    metric = rng.choice(METRICS)
    taus = {"probability": (0.15, 0.5), "margin": (0.0, 0.2), "entropy": (1.0, 2.0)}
    if rng.random() < 0.1:
        tau = one_token_tau(metric)
    else:
        tau = rng.uniform(*taus[metric])
    return {
        "tau": tau,
        "metric": metric,
        "block": rng.randint(1, 8),
        "max_new": rng.choice([1, 2, 7, 20, 40, 63, 64, 65]),
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.0]),
        "seed": rng.randrange(100),
    }


def one_token_tau(metric: str) -> float:
    """The tau that is plain AR."""
    return 0.0 if metric == "entropy" else 1.0


def random_block_cache(rng: random.Random, max_new: int) -> int:
    """Blocks that divide max_new, miss it by one, or have nothing to do with it."""
    return max(1, rng.choice([1, 2, 3, 4, 8, 16, 32, max_new - 1, max_new, max_new + 1]))


def same(result: Answer, expected: Answer) -> bool:
    """Are they equal, token for token and forward for forward?"""
    return result.tokens == expected.tokens and result.accepted == expected.accepted


def mean(numbers: list[int]) -> float:
    return sum(numbers) / len(numbers)


@torch.inference_mode()
def predictions(model: Qwen2, ids: list[int], num_masks: int) -> list[tuple[float, int]]:
    """(probability, token) of the best guess after the last of ids, and after each mask."""
    feed = torch.tensor([ids + [MASK] * num_masks])
    hidden = model(feed, torch.arange(feed.size(1))[None], None)
    probs = model.logits(hidden[0, len(ids) - 1 :]).softmax(-1)
    best = probs.max(-1)
    return list(zip(best.values.tolist(), best.indices.tolist()))


@torch.inference_mode()
def greedy(model: Qwen2, prompt: list[int], count: int) -> list[int]:
    """Plain autoregression in six lines, without anything of decode.py."""
    tokens = list(prompt)
    for _ in range(count):
        hidden = model(torch.tensor([tokens]), torch.arange(len(tokens))[None], None)
        tokens.append(model.logits(hidden[0, -1:]).argmax().item())
        if tokens[-1] in model.config.eos_token_id:
            break
    return tokens[len(prompt) :]


def blocks_by_hand(model, prompt: list[int], tau, block: int, block_cache: int, max_new: int):
    """The paper's block decoding, greedy and slow: the tokens, and how many each forward gave.

    At most `block` masks, and no candidate beyond the end of a block of `block_cache`. tau may be a
    function of the step.
    """
    tokens = []
    accepted = []
    while tokens[-1:] != [EOS] and len(tokens) < max_new:
        room = block_cache - len(tokens) % block_cache
        threshold = tau(len(accepted)) if callable(tau) else tau
        count = 0
        for probability, token in predictions(model, prompt + tokens, min(block, room - 1)):
            is_over = count > 0 and (tokens[-1] == EOS or len(tokens) == max_new)
            is_unsure = count > 0 and (threshold >= 1 or probability < threshold)
            if is_over or is_unsure:
                break
            tokens.append(token)
            count += 1
        accepted.append(count)
    return tokens, accepted
