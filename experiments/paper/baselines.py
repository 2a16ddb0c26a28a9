"""What MARS is compared with: block diffusion, 1/t weights, Jacobi decoding.

    python -m experiments.paper.baselines diffusion --data toy/train.jsonl --model toy/sft
    python -m experiments.paper.baselines over-t --ar-weight 0 --model toy/sft --data train.jsonl

The two that need training are train.py with a few functions replaced, and take its options.

  * diffusion: the response is cut into blocks of B tokens. Each token of a block becomes a mask
    with probability t, drawn per example. The model sees the earlier blocks as they are and all of
    this block in both directions (MARS sees it causally), and predicts the masked tokens with
    weight 1/t. The output is shifted right, as in MARS and in the paper's code, so the window of a
    block begins with the token before the block. Decoding takes one forward for the prompt, then
    one per token, the most confident mask first, and after each block one that puts it into the
    cache.
  * over-t: MARS, with the loss of every example multiplied by 1/t, t uniform in (0.001, 1). The
    paper's code does this where it leaves out the clean loss.
  * Jacobi decoding needs no training. The guesses are what the ordinary model predicted after its
    last guesses, right or wrong. It is lossless.
"""

import random
import sys
from unittest import mock

import torch
from torch import Tensor

import train
from decode import Sequence
from lossless import count_held
from model import Qwen2, visible
from plumbing.data import Example
from plumbing.errors import UserError, run_main
from plumbing.packing import round_up
from train import Batch

# -------------------------------------------------------------------------------- block diffusion


def noise(example: Example, num_tokens: int) -> tuple[float, Tensor]:
    """t, and which of the first num_tokens tokens are masked.

    They follow from the example and its block phase, which most often differs in the next epoch.
    """
    rng = random.Random(f"{example.tokens} {example.phase}")
    t = rng.uniform(0.001, 1)
    masked = [rng.random() < t for _ in range(num_tokens)]
    return t, torch.tensor(masked)


def diffusion_length(example: Example, block_size: int) -> int:
    return len(diffusion_layout(example, block_size, mask_id=0, weight=1.0).tokens)


def prefix_of_clean(pos: Tensor, prompt: int, block_size: int) -> Tensor:
    """How many tokens the clean ones see: causal in the prompt, whole blocks after it."""
    block_end = pos + block_size - (pos - prompt) % block_size
    return torch.where(pos < prompt, pos + 1, block_end)


def diffusion_layout(
    example: Example, block_size: int, mask_id: int, weight: float, doc: int = 0
) -> Batch:
    """[clean; a window of B + 1 per block]. Column 0 of a window is the clean token before it.

    The end token is repeated up to the end of the last block, and a target each time.
    """
    prompt = example.prompt
    num_targets = round_up(example.targets, block_size)
    num_padding = num_targets - example.targets
    x = torch.tensor(example.tokens + [example.tokens[-1]] * num_padding)

    # No window sees the last block.
    clean = torch.arange(len(x) - block_size)
    clean_prefix = prefix_of_clean(clean, prompt, block_size)

    t, masked = noise(example, len(x))
    column = torch.arange(block_size + 1).repeat(num_targets // block_size)
    first = torch.arange(prompt - 1, len(x) - 1, block_size).repeat_interleave(block_size + 1)
    pos = first + column
    following = (pos + 1).clamp(max=len(x) - 1)  # the last column has no target and weight 0
    is_target = masked[following] & (column < block_size)
    return Batch(
        tokens=torch.cat([x[clean], torch.where(masked[pos] & (column > 0), mask_id, x[pos])]),
        pos=torch.cat([clean, pos]),
        prefix=torch.cat([clean_prefix, first]),
        doc=torch.full((len(clean) + len(pos),), doc),
        target=torch.cat([x[clean], x[following]]),
        noisy_weight=torch.cat([torch.zeros(len(clean)), torch.where(is_target, weight / t, 0.0)]),
        clean_weight=torch.zeros(len(clean) + len(pos)),
    )


def diffusion_mask(pos: Tensor, prefix: Tensor, doc: Tensor) -> Tensor:
    """`visible`, except that each position of a window sees what the last position may see."""
    q_pos = torch.where(prefix <= pos, pos.max(), pos)  # in a window: of its last position
    queries = [field[:, None, :, None] for field in (q_pos, prefix, doc)]
    keys = [field[:, None, None, :] for field in (pos, prefix, doc)]
    return visible(*queries, *keys)


def diffusion_states(model: Qwen2, batch: Batch) -> Tensor:
    mask = diffusion_mask(batch.pos, batch.prefix, batch.doc)
    return model(batch.tokens, batch.pos, mask)


@torch.inference_mode()
def diffuse(model: Qwen2, prompt: list[int], max_new: int = 256) -> Sequence:
    """An answer, block after block: each forward sets the block's most confident mask.

    Nothing is cached here. Forwards are counted as if it were: one for the prompt, and for each
    block one more than its tokens, which puts it into the cache.
    """
    block_size = model.config.block
    mask_id = model.config.mask_token_id
    answer = Sequence(prompt, model.config, max_new, tau=None)
    if len(prompt) > 1:  # the last token opens the first window
        answer.accepted.append(0)
    while not answer.done:
        block = [mask_id] * block_size
        for _ in range(block_size):
            logits = window_logits(model, answer, block)
            confidence, tokens = logits.softmax(-1).max(-1)
            is_set = torch.tensor(block, device=model.device) != mask_id
            best = confidence.masked_fill(is_set, -1).argmax().item()
            block[best] = tokens[best].item()
        answer.take(block, num_positions=block_size + 1)
        answer.accepted += [0] * block_size
    return answer


def window_logits(model: Qwen2, answer: Sequence, block: list[int]) -> Tensor:
    """What the model predicts for the tokens of a block (B, V) that follows an answer's text.

    As in training: after the text comes a window, a copy of the last token and then the block.
    """
    text = torch.tensor(answer.text, device=model.device)
    clean = torch.arange(len(text), device=model.device)
    window = torch.arange(len(text) - 1, len(text) + len(block), device=model.device)
    tokens = torch.cat([text, text[-1:], torch.tensor(block, device=model.device)])
    pos = torch.cat([clean, window])
    clean_prefix = prefix_of_clean(clean, answer.prompt_length, len(block))
    prefix = torch.cat([clean_prefix, torch.full_like(window, len(text) - 1)])
    mask = diffusion_mask(pos[None], prefix[None], torch.zeros_like(pos)[None])
    hidden = model(tokens[None], pos[None], mask)
    return model.logits(hidden[0, len(text) : -1])


# ----------------------------------------------------------------------------------------- over t

target_weights = train.target_weights  # before it is replaced


def over_t(examples: list[Example], normalization: str) -> list[float]:
    weights = target_weights(examples, normalization)
    return [weight / noise(example, 0)[0] for weight, example in zip(weights, examples)]


# ----------------------------------------------------------------------------------------- Jacobi


@torch.inference_mode()
def jacobi(model: Qwen2, prompt: list[int], num_guesses: int, max_new: int = 256) -> Sequence:
    """An answer; each forward checks what the last one predicted after its guesses. No cache."""
    answer = Sequence(prompt, model.config, max_new, tau=None)
    guesses = []
    while not answer.done:
        tokens = torch.tensor([answer.text + guesses], device=model.device)
        positions = torch.arange(tokens.size(1), device=model.device)[None]
        hidden = model(tokens, positions, None)[0, len(answer.text) - 1 :]
        predicted = model.logits(hidden).argmax(-1).tolist()
        held = count_held(predicted, guesses)
        answer.take(predicted[: held + 1], num_positions=1 + len(guesses))
        guesses = predicted[held + 1 :]
        while len(guesses) < num_guesses:  # any guess will do
            guesses.append(predicted[-1])
    return answer


# ------------------------------------------------------------------------------- the command line

REPLACED = {
    "diffusion": {
        "lay_out": diffusion_layout,
        "stream_length": diffusion_length,
        "hidden_states": diffusion_states,
    },
    "over-t": {"target_weights": over_t},
}


def main() -> None:
    names = "|".join(REPLACED)
    if len(sys.argv) < 2 or sys.argv[1] not in REPLACED:
        raise UserError(
            f"usage: python -m experiments.paper.baselines {names} [options of train.py]"
        )
    baseline = sys.argv.pop(1)
    with mock.patch.multiple(train, **REPLACED[baseline]):
        train.main()


if __name__ == "__main__":
    run_main(main)
