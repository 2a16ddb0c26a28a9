"""What the tests of decoding share: random options, and the method once more, slow and plain."""

import math
import random

import torch
from torch import Tensor

from decode import Decoder, Options, Sequence
from lossless import Lossless
from model import Qwen2
from plumbing.sampling import gumbel_noise

METRICS = ("probability", "margin", "entropy")


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
        "guard": rng.random() < 0.4,
        "block": rng.randint(1, 8),
        "max_new": rng.choice([1, 2, 7, 20, 40, 63, 64, 65]),
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.0]),
        "seed": rng.randrange(100),
    }


def use_lossless(monkeypatch, groups: int, looks_up=False, on_cpu=False) -> None:
    """Let every lossless decoder have up to so many groups, in a batch on a CPU, too.

    on_cpu: of as many masks as are likely of use.
    """

    def method(block: int, mask_id: int, *_) -> Lossless:
        made = Lossless(block, mask_id, on_cpu)
        made.most_groups = groups
        made.looks_up = looks_up
        return made

    monkeypatch.setattr("decode.Lossless", method)


def one_token_tau(metric: str) -> float:
    """The tau that is plain AR."""
    return 0.0 if metric == "entropy" else 1.0


def random_block_cache(rng: random.Random, max_new: int) -> int:
    """Blocks that divide max_new, miss it by one, or have nothing to do with it."""
    return max(1, rng.choice([1, 2, 3, 4, 8, 16, 32, max_new - 1, max_new, max_new + 1]))


def mean(numbers: list[int]) -> float:
    return sum(numbers) / len(numbers)


def decode_each(model: Qwen2, prompts, taus, rows=8, **options) -> list[Sequence]:
    """`generate`, with a tau for each prompt."""
    options = Options(**options)
    longest = max(map(len, prompts)) + options.max_new
    decoder = Decoder(model, options, rows, longest)
    sequences = [decoder.add(prompt, tau) for prompt, tau in zip(prompts, taus)]
    list(decoder)
    return sequences


def alone(model: Qwen2, prompt: list[int], index=0, **options) -> Sequence:
    """The only sequence of a decoder."""
    options = Options(**options)
    decoder = Decoder(model, options, rows=1, longest=len(prompt) + options.max_new)
    sequence = decoder.add(prompt, index=index)
    list(decoder)
    return sequence


def outcome(sequence: Sequence) -> tuple[list[int], list[int]]:
    """What `by_hand` returns: token for token and forward for forward."""
    return sequence.tokens, sequence.num_accepted


# -------------------------------------------------------------------------- a slow second decoder


@torch.inference_mode()
def logits_after(model: Qwen2, text: list[int], num_masks: int) -> Tensor:
    """(1 + num_masks, V): after the last token of the text, and after each mask."""
    tokens = torch.tensor([text + [model.config.mask_token_id] * num_masks])
    hidden = model(tokens, torch.arange(tokens.size(1))[None], mask=None)
    return model.logits(hidden[0, len(text) - 1 :])


def confidence(probs: list[float], token: int, metric: str) -> float:
    if metric == "entropy":
        return -sum(p * math.log(p) for p in probs if p > 0)
    if metric == "margin":
        second, best = sorted(probs)[-2:]
        return best - second
    return probs[token]


def what_followed(text: list[int], guesses: list[int]) -> tuple[int | None, int]:
    """What followed the last time that the last 8 (or else 4, or 2) tokens of both were in a text.

    And that number.
    """
    for length in (8, 4, 2):
        run = (text + guesses)[-length:]
        for place in range(len(text) - 1, length - 1, -1):
            if text[place - length : place] == run:
                return text[place], length
    return None, 0


def by_hand(
    model: Qwen2,
    prompt: list[int],
    tau,
    block: int = 4,
    max_new: int = 256,
    metric: str = "probability",
    block_cache: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    index: int = 0,
    guard: bool = False,
) -> tuple[list[int], list[int]]:
    """The tokens, and how many each forward gave: one text, no cache, no code of decode.py.

    tau may be a function of the step. With `block_cache` no candidate is beyond the end of a block
    of so many tokens (the paper's policy).
    """
    tokens = []
    accepted = []
    while True:
        threshold = tau(len(accepted)) if callable(tau) else tau
        num_masks = block
        if block_cache:
            num_masks = min(block, block_cache - len(tokens) % block_cache - 1)
        if threshold == one_token_tau(metric):
            num_masks = 0
        accepted.append(0)
        text = prompt + tokens
        for logits in logits_after(model, prompt + tokens, num_masks):
            scores = logits.clone()
            if temperature > 0:
                position = len(prompt) + len(tokens)
                scores += temperature * gumbel_noise(
                    seed, index, position, *logits.shape, logits.device
                )
            token = scores.argmax().item()
            sure = confidence(logits.softmax(-1).tolist(), token, metric)
            passes = sure <= threshold if metric == "entropy" else sure >= threshold
            if guard and accepted[-1] > 0 and passes:
                said, _ = what_followed(text, tokens[len(text) - len(prompt) :])
                if said is None and metric == "entropy":
                    passes = sure <= threshold / 20
                elif said is None:
                    passes = sure >= 1 - (1 - threshold) / 20
                else:
                    passes = said == token
                passes = passes and token != tokens[-1]
            if accepted[-1] > 0 and not passes:
                break
            tokens.append(token)
            accepted[-1] += 1
            if token in model.config.eos_token_id or len(tokens) == max_new:
                return tokens, accepted


def greedy(model: Qwen2, prompt: list[int], count: int) -> list[int]:
    """Plain autoregression."""
    return by_hand(model, prompt, tau=1, max_new=count)[0]
