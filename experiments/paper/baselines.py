"""What MARS is compared with: block diffusion, and Jacobi decoding.

    python -m experiments.paper.baselines diffusion --model toy/sft --data toy/train.jsonl --steps 9

  * diffusion: the response is cut into blocks of B tokens. Each token of a block becomes a mask
    with probability t, drawn per example. The model sees the earlier blocks as they are and all of
    this block in both directions (MARS sees it causally), and predicts the masked tokens with
    weight 1/t. The output is shifted right, as in MARS and in the paper's code, so the window of a
    block begins with the token before the block. Decoding takes one forward for the prompt, then
    one per token, the most confident mask first, and after each block one that puts it into the
    cache.
  * Jacobi decoding needs no training. The guesses are what the ordinary model predicted after its
    last guesses, right or wrong. It is lossless.

Training takes train.py's options, and has a plain loop of its own: float32, one example at a time,
no checkpoints.
"""

import argparse
import random
import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import trange

import train
from decode import Sequence
from model import Qwen2, load, visible
from plumbing.arguments import find_device
from plumbing.config import config_json
from plumbing.data import Dataset, Example
from plumbing.errors import UserError, run_main
from plumbing.files import has_model, save
from plumbing.jsonl import JsonlFile
from plumbing.packing import round_up
from plumbing.scheduler import num_in_common

# -------------------------------------------------------------------------------- block diffusion


def noise(example: Example, num_tokens: int) -> tuple[float, Tensor]:
    """t, and which of the first num_tokens tokens are masked.

    They follow from the example and its block phase, which most often differs in the next epoch.
    """
    rng = random.Random(f"{example.tokens} {example.phase}")
    t = rng.uniform(0.001, 1)
    masked = [rng.random() < t for _ in range(num_tokens)]
    return t, torch.tensor(masked)


def prefix_of_clean(pos: Tensor, prompt: int, block: int) -> Tensor:
    """How many tokens the clean ones see: causal in the prompt, whole blocks after it."""
    block_end = pos + block - (pos - prompt) % block
    return torch.where(pos < prompt, pos + 1, block_end)


class Layout(NamedTuple):
    """[clean; a window of B + 1 per block]; every field (T,)."""

    tokens: Tensor
    pos: Tensor
    prefix: Tensor  # see `visible` in model.py
    target: Tensor
    weight: Tensor


def diffusion_layout(example: Example, block: int, mask_id: int) -> Layout:
    """Column 0 of a window is the clean token before its block, and predicts the block's first.

    The end token is repeated up to the end of the last block, and a target each time.
    """
    prompt = example.prompt
    num_targets = round_up(example.targets, block)
    num_padding = num_targets - example.targets
    x = torch.tensor(example.tokens + [example.tokens[-1]] * num_padding)
    clean = torch.arange(len(x) - block)  # no window sees the last block

    t, masked = noise(example, len(x))
    column = torch.arange(block + 1).repeat(num_targets // block)
    first = torch.arange(prompt - 1, len(x) - 1, block).repeat_interleave(block + 1)
    pos = first + column
    following = (pos + 1).clamp(max=len(x) - 1)  # the last column has no target and weight 0
    is_target = masked[following] & (column < block)
    return Layout(
        tokens=torch.cat([x[clean], torch.where(masked[pos] & (column > 0), mask_id, x[pos])]),
        pos=torch.cat([clean, pos]),
        prefix=torch.cat([prefix_of_clean(clean, prompt, block), first]),
        target=torch.cat([x[clean], x[following]]),
        weight=torch.cat([torch.zeros(len(clean)), torch.where(is_target, 1 / t, 0.0)]),
    )


def diffusion_states(model: Qwen2, tokens: Tensor, pos: Tensor, prefix: Tensor) -> Tensor:
    """Hidden states (T, D); a position of a window sees what the window's last one may see."""
    q_pos = torch.where(prefix <= pos, pos.max(), pos)  # in a window: of its last position
    mask = visible(q_pos[:, None], prefix[:, None], 0, pos, prefix, 0)
    return model(tokens[None], pos[None], mask[None, None])[0]


def diffusion_loss(model: Qwen2, example: Example) -> Tensor:
    """The mean over the example's targets."""
    layout = diffusion_layout(example, model.config.block, model.config.mask_token_id)
    tokens, pos, prefix, target, weight = (field.to(model.device) for field in layout)
    hidden = diffusion_states(model, tokens, pos, prefix)
    at = weight > 0
    each = F.cross_entropy(model.logits(hidden[at]), target[at], reduction="none")
    return (each * weight[at]).sum() / example.targets


@torch.inference_mode()
def diffuse(model: Qwen2, prompt: list[int], max_new: int = 256) -> Sequence:
    """An answer, block after block: each forward sets the block's most confident mask.

    Nothing is cached here. Forwards are counted as if it were: one for the prompt, unless it is the
    single token that opens the first window; and for each block one more than its tokens.
    """
    mask_id = model.config.mask_token_id
    answer = Sequence(prompt, model.config, max_new, tau=None)
    if len(prompt) > 1:
        answer.take([], width=len(prompt))
    while not answer.done:
        block = [mask_id] * model.config.block
        for _ in range(len(block)):
            logits = window_logits(model, answer.text, len(prompt), block)
            confidence, tokens = logits.softmax(-1).max(-1)
            is_set = torch.tensor(block, device=model.device) != mask_id
            best = confidence.masked_fill(is_set, -1).argmax().item()
            block[best] = tokens[best].item()
            answer.take([], width=1 + len(block))
        answer.take(block, width=len(block))
    return answer


def window_logits(model: Qwen2, text: list[int], prompt: int, block: list[int]) -> Tensor:
    """What the model predicts for the tokens of a block (B, V) that follows a text.

    As in training: after the text comes a window, a copy of the last token and then the block.
    """
    tokens = torch.tensor(text + text[-1:] + block, device=model.device)
    clean = torch.arange(len(text), device=model.device)
    window = torch.arange(len(text) - 1, len(text) + len(block), device=model.device)
    clean_prefix = prefix_of_clean(clean, prompt, len(block))
    prefix = torch.cat([clean_prefix, torch.full_like(window, len(text) - 1)])
    hidden = diffusion_states(model, tokens, torch.cat([clean, window]), prefix)
    return model.logits(hidden[len(text) : -1])


def train_diffusion(args: argparse.Namespace) -> None:
    model, chat = load(args.model, find_device(args.device, args.dtype)[0])  # float32
    model.requires_grad_()
    model.config.block = args.block
    ends = model.config.eos_token_id
    rows = JsonlFile(args.data)
    data = Dataset(rows, chat, ends[0], args.block, args.max_length, args.seed, args.held_out, ends)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step, (examples, _, _) in zip(trange(args.steps, disable=None), data.steps(args.batch)):
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate(args.lr, (step + 0.5) / args.steps, args.warmup)
        for example in examples:
            loss = diffusion_loss(model, example) / len(examples)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
    save(args.out, config_json(model.config), chat, model.state_dict())


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
        held = num_in_common(predicted, guesses)
        answer.take(predicted[: held + 1], width=1 + len(guesses))
        guesses = predicted[held + 1 :]
        while len(guesses) < num_guesses:  # any guess will do
            guesses.append(predicted[-1])
    return answer


def main() -> None:
    if sys.argv[1:2] != ["diffusion"]:
        raise UserError(
            "usage: python -m experiments.paper.baselines diffusion [train.py's options]"
        )
    args = train.parse_arguments(sys.argv[2:])
    if not args.steps:
        raise UserError("--steps: how many?")
    if not (args.resume and has_model(args.out)):  # it would be complete
        train_diffusion(args)


if __name__ == "__main__":
    run_main(main)
