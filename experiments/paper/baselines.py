"""What MARS is compared with: block diffusion, 1/t weights, Jacobi decoding.

    python -m experiments.paper.baselines diffusion --model toy/sft --data toy/train.jsonl --steps 9
    python -m experiments.paper.baselines over-t --model toy/sft --data toy/train.jsonl --steps 9

The two that need training take train.py's options, and have a plain loop of their own: float32, one
example at a time, no checkpoints.

  * diffusion: the response is cut into blocks of B tokens. Each token of a block becomes a mask
    with probability t, drawn per example. The model sees the earlier blocks as they are and all of
    this block in both directions (MARS sees it causally), and predicts the masked tokens with
    weight 1/t. The output is shifted right, as in MARS and in the paper's code, so the window of a
    block begins with the token before the block. Decoding takes one forward for the prompt, then
    one per token, the most confident mask first, and after each block one that puts it into the
    cache.
  * over-t: MARS, with the loss of every example multiplied by 1/t, t uniform in (0.001, 1). The
    paper's code does this where it leaves out the clean loss (--ar-weight 0).
  * Jacobi decoding needs no training. The guesses are what the ordinary model predicted after its
    last guesses, right or wrong. It is lossless.
"""

import json
import random
import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import trange

import train
from model import Qwen2, load, visible
from plumbing.arguments import find_device
from plumbing.config import config_json
from plumbing.data import Dataset, Example
from plumbing.errors import UserError, run_main
from plumbing.files import save
from plumbing.jsonl import JsonlFile
from plumbing.packing import round_up
from plumbing.scheduler import num_in_common


class Answer(NamedTuple):
    tokens: list[int]
    forwards: int


def is_complete(tokens: list[int], model: Qwen2, max_new: int) -> bool:
    return len(tokens) >= max_new or not set(model.config.eos_token_id).isdisjoint(tokens)


def through_end(tokens: list[int], model: Qwen2, max_new: int) -> list[int]:
    """The tokens up to the first that ends a turn, at most max_new."""
    for count, token in enumerate(tokens, 1):
        if token in model.config.eos_token_id or count == max_new:
            return tokens[:count]
    return tokens


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
    doc = torch.zeros_like(pos)
    mask = visible(q_pos[:, None], prefix[:, None], doc[:, None], pos, prefix, doc)
    return model(tokens[None], pos[None], mask[None, None])[0]


def diffusion_loss(model: Qwen2, example: Example, args) -> Tensor:
    layout = diffusion_layout(example, args.block, model.config.mask_token_id)
    tokens, pos, prefix, target, weight = (field.to(model.device) for field in layout)
    hidden = diffusion_states(model, tokens, pos, prefix)
    at = weight > 0
    each = F.cross_entropy(model.logits(hidden[at]), target[at], reduction="none")
    return (each * weight[at]).sum() / example.targets


@torch.inference_mode()
def diffuse(model: Qwen2, prompt: list[int], max_new: int = 256) -> Answer:
    """An answer, block after block: each forward sets the block's most confident mask.

    Nothing is cached here. Forwards are counted as if it were: one for the prompt, unless it is the
    single token that opens the first window; and for each block one more than its tokens.
    """
    mask_id = model.config.mask_token_id
    new = []
    forwards = int(len(prompt) > 1)
    while not is_complete(new, model, max_new):
        block = [mask_id] * model.config.block
        for _ in range(len(block)):
            logits = window_logits(model, prompt + new, len(prompt), block)
            confidence, tokens = logits.softmax(-1).max(-1)
            is_set = torch.tensor(block, device=model.device) != mask_id
            best = confidence.masked_fill(is_set, -1).argmax().item()
            block[best] = tokens[best].item()
        new += block
        forwards += len(block) + 1
    return Answer(through_end(new, model, max_new), forwards)


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


# ----------------------------------------------------------------------------------------- Jacobi


@torch.inference_mode()
def jacobi(model: Qwen2, prompt: list[int], num_guesses: int, max_new: int = 256) -> Answer:
    """An answer; each forward checks what the last one predicted after its guesses. No cache."""
    text = list(prompt)
    guesses = []
    forwards = 0
    while not is_complete(text[len(prompt) :], model, max_new):
        tokens = torch.tensor([text + guesses], device=model.device)
        positions = torch.arange(tokens.size(1), device=model.device)[None]
        hidden = model(tokens, positions, None)[0, len(text) - 1 :]
        predicted = model.logits(hidden).argmax(-1).tolist()
        held = num_in_common(predicted, guesses)
        text += predicted[: held + 1]
        forwards += 1
        guesses = predicted[held + 1 :]
        while len(guesses) < num_guesses:  # any guess will do
            guesses.append(predicted[-1])
    return Answer(through_end(text[len(prompt) :], model, max_new), forwards)


# ---------------------------------------------------------------------------------------- training


def over_t_loss(model: Qwen2, example: Example, args) -> Tensor:
    layout = train.lay_out(example, args.block, model.config.mask_token_id, 1 / example.targets)
    batch = train.Forward(*(field[None] for field in layout))  # one row
    noisy, clean = train.losses(model, batch.to(model.device))
    return (noisy + args.ar_weight * clean) / noise(example, 0)[0]


LOSSES = {"diffusion": diffusion_loss, "over-t": over_t_loss}


def train_baseline(loss_of, args) -> None:
    """loss_of: (model, example, args) -> the mean over the example's targets."""
    model, chat = load(args.model, find_device(args.device, args.dtype)[0])  # float32
    model.requires_grad_()
    model.config.block = args.block
    ends = model.config.eos_token_id
    rows = JsonlFile(args.data)
    data = Dataset(rows, chat, ends[0], args.block, args.max_length, args.seed, args.held_out, ends)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    log = []
    for step, (examples, _, _) in zip(trange(args.steps, disable=None), data.steps(args.batch)):
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate(args.lr, (step + 0.5) / args.steps, args.warmup)
        total = 0.0
        for example in examples:
            loss = loss_of(model, example, args) / len(examples)
            loss.backward()
            total += loss.item()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip).item()
        optimizer.step()
        optimizer.zero_grad()
        log.append(json.dumps({"step": step + 1, "loss": total, "grad_norm": grad_norm}) + "\n")
    save(args.out, config_json(model.config), chat, model.state_dict())
    (args.out / "log.jsonl").write_text("".join(log))


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in LOSSES:
        names = "|".join(LOSSES)
        raise UserError(
            f"usage: python -m experiments.paper.baselines {names} [train.py's options]"
        )
    args = train.parse_arguments(sys.argv[2:])
    if not args.steps:
        raise UserError("--steps: how many?")
    if args.resume and (args.out / "log.jsonl").exists():
        return  # it is complete: the log is written last
    train_baseline(LOSSES[sys.argv[1]], args)


if __name__ == "__main__":
    run_main(main)
