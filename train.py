"""Train a Qwen2.5 to predict several tokens per forward: MARS (arXiv 2604.07023, section 3).

    python train.py --objective sft --data dolci.jsonl --out sft    # stage 1: ordinary fine-tuning
    python train.py --model sft --data dolci.jsonl                  # stage 2: the same, with masks

Two streams share one forward. The clean stream is the ordinary sequence. The noisy stream
repeats the response with every token replaced by `<|mask|>`, and sees what a decoder will see: the
clean tokens before its block, and the masks of its block so far. In both streams a position
predicts the token after its own place.

What is unusual here:
  * the noisy stream holds response positions only: [clean ; masks]. The paper's also repeats the
    prompt, unmasked, which computes clean positions a second time; the loss is the same;
  * the block grid has a random phase per example and epoch, so that every token is learnt at every
    look-ahead (`--block-phase fixed` starts every block at a multiple of B, as in the paper);
  * every target is weighted relative to the whole step, so the loss does not depend on how a step
    is packed, cut into forwards and split among processes;
  * shuffle and phases are functions of (seed, epoch, row): there is no random state to save, and a
    run that was killed continues bit for bit (`--resume`, on a CPU, with as many threads).

Under torchrun the same loop shards the model and splits the forwards of each step (FSDP2).
"""

import argparse
import functools
import math
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from model import Config, Qwen2, add_mask_token, initialize, load, visible
from plumbing import processes
from plumbing.arguments import Parser, find_device, number, path
from plumbing.attention import attend_flex, block_mask, can_use_flex
from plumbing.chat import Chat
from plumbing.config import read_config
from plumbing.data import Dataset, Example
from plumbing.errors import UserError
from plumbing.hub import locate
from plumbing.jsonl import JsonlFile
from plumbing.packing import collate, concatenate, grouped, packed, round_up
from plumbing.runs import Run, identity

# --------------------------------------------------------------------------------------- the method


def naive_loss(
    model: Qwen2, prompt: list[int], response: list[int], block: int, ar_weight: float = 1.0
) -> Tensor:
    """The loss at its simplest: one example, the paper's fixed grid of blocks. Returns a scalar."""
    P = len(prompt)
    L = len(prompt + response)
    masks = [model.config.mask_token_id] * len(response)
    tokens = torch.tensor([prompt + response + masks], device=model.device)  # (1, T)
    clean_pos = torch.arange(L, device=model.device)
    mask_pos = clean_pos[P:]  # a mask stands in the place of each response token
    pos = torch.cat([clean_pos, mask_pos])
    # How many clean tokens a position sees: a clean token itself and all before it, a mask those
    # before its block. Blocks begin at 0, B, 2B, ...; one that begins in the prompt is cut short.
    block_start = mask_pos - mask_pos % block
    prefix = torch.cat([clean_pos + 1, block_start.clamp(min=P)])
    # (T, T): pos, prefix and document of the query (a column), then of the key (a row)
    sees = visible(pos[:, None], prefix[:, None], 0, pos, prefix, 0)
    hidden = model(tokens, pos[None], sees[None, None])[0]  # (T, D)
    # A position predicts the token after its own place: the last prompt token the first of the
    # response, in both losses; then each response token, or its mask, the next one.
    target = torch.tensor(response, device=model.device)
    clean = hidden[P - 1 : L - 1]
    noisy = torch.cat([hidden[P - 1 : P], hidden[L:-1]])
    clean_loss = F.cross_entropy(model.logits(clean), target)
    noisy_loss = F.cross_entropy(model.logits(noisy), target)
    return noisy_loss + ar_weight * clean_loss


# ------------------------------------------------- two streams: the same for many examples at once


class Streams(NamedTuple):
    """The two streams of one example; every field is (T,)."""

    tokens: Tensor
    pos: Tensor
    prefix: Tensor  # the number of clean tokens that a position sees: `visible` in model.py
    doc: Tensor  # the example's number in the step; -1: padding
    target: Tensor  # the next token
    noisy_weight: Tensor  # of this position's cross-entropy in the noisy loss
    clean_weight: Tensor  # and in the clean loss


class ForwardInput(Streams):
    """The streams of many examples, in rows, for one forward; every field is (R, T)."""

    def to(self, device: torch.device) -> "ForwardInput":
        return ForwardInput(*(field.to(device) for field in self))


PADDING = Streams(tokens=0, pos=0, prefix=1, doc=-1, target=0, noisy_weight=0.0, clean_weight=0.0)


def lay_out(example: Example, block: int | None, mask_id: int, weight: float, doc=0) -> Streams:
    """One example as [clean ; masks]; if block is None, the clean stream alone.

    weight: of each target (`target_weights`). What differs from `naive_loss`: the grid of blocks is
    shifted by the example's phase, and the last position of each stream, which predicts nothing, is
    left out.
    """
    x = torch.tensor(example.tokens)
    P = example.prompt_length
    pos = torch.arange(len(x) - 1)
    predicts_response = pos >= P - 1
    predicts_first = pos == P - 1  # no mask predicts the first response token
    clean_stream = Streams(
        tokens=x[:-1],
        pos=pos,
        prefix=pos + 1,
        doc=torch.full_like(pos, doc),
        target=x[1:],
        noisy_weight=weight * predicts_first,
        clean_weight=weight * predicts_response,
    )
    if block is None:
        return clean_stream._replace(noisy_weight=torch.zeros_like(clean_stream.clean_weight))

    mask_pos = pos[P:]
    grid_pos = mask_pos + example.phase
    block_start = mask_pos - grid_pos % block
    mask_stream = Streams(
        tokens=torch.full_like(mask_pos, mask_id),
        pos=mask_pos,
        prefix=block_start.clamp(min=P),  # a block that begins in the prompt is cut short
        doc=torch.full_like(mask_pos, doc),
        target=x[P + 1 :],
        noisy_weight=torch.full(mask_pos.shape, weight),
        clean_weight=torch.zeros(mask_pos.shape),
    )
    return concatenate([clean_stream, mask_stream])


def target_weights(examples: list[Example], normalization: str) -> list[float]:
    """The weight of each example's targets in the loss of the whole step.

    sequence: the mean over an example's targets, then over examples (the paper's); token: the mean
    over all targets. In each of the two losses the weights of a whole step add up to 1, however it
    is packed, cut and split.
    """
    if normalization == "token":
        num_targets = sum(example.num_targets for example in examples)
        return [1 / num_targets] * len(examples)
    return [1 / (example.num_targets * len(examples)) for example in examples]


def forward_inputs(
    examples: list[Example], config: Config, args, row_width: int | None = None, rank=0, size=1
) -> list[ForwardInput]:
    """What each forward of a step is fed, in process `rank` of `size`; all have equally many.

    row_width: examples are packed into rows of this width, and all forwards of all steps have one
    shape. None: every example has a row of its own, next to others of similar length.
    """
    weights = target_weights(examples, args.normalization)
    streams = []
    for doc, (example, weight) in enumerate(zip(examples, weights)):
        streams.append(lay_out(example, config.block, config.mask_token_id, weight, doc))
    lengths = [len(each.tokens) for each in streams]
    if row_width is None:
        plans = grouped(lengths, args.batch_tokens, size)
    else:
        plans = packed(lengths, row_width, args.batch_tokens, size)
    result = []
    for rows, width in plans[rank::size]:
        filled = [[streams[i] for i in row] for row in rows]
        result.append(ForwardInput(*collate(filled, width, PADDING)))
    return result


# --------------------------------------------------------------------------------------------- loss


def dense_mask(inputs: ForwardInput) -> Tensor:
    """`visible` on all pairs of positions: (R, 1, T, T)."""
    fields = (inputs.pos, inputs.prefix, inputs.doc)
    queries = [field[:, None, :, None] for field in fields]
    keys = [field[:, None, None, :] for field in fields]
    return visible(*queries, *keys)


def hidden_states(model: Qwen2, inputs: ForwardInput) -> Tensor:
    """Hidden states (R, T, D) of both streams."""
    if can_use_flex(model.device, model.config.head_dim):
        mask = block_mask(visible, inputs.pos, inputs.prefix, inputs.doc)
        return model(inputs.tokens, inputs.pos, mask, kernel=attend_flex)
    return model(inputs.tokens, inputs.pos, dense_mask(inputs))


def positions_with_target(inputs: ForwardInput) -> tuple[Tensor, Tensor]:
    """Row and column (N,) of each position whose prediction counts in a loss."""
    return (inputs.noisy_weight + inputs.clean_weight).nonzero(as_tuple=True)


SMOOTHING = 0.25  # of p below: without it far masks weigh nothing until the near ones are learnt


@torch.no_grad()
def expected_weights(cross_entropy: Tensor, inputs: ForwardInput, at: tuple, block: int) -> Tensor:
    """Factors (N,) for the noisy weights at these positions; over an example's masks the mean is 1.

    Guesses hold up to the first that fails, so of a block of three p1 + p1 p2 + p1 p2 p3 guesses
    are expected to hold. The factor of a mask is the sum of the products that its p is in: for the
    second p1 p2 + p1 p2 p3. (It is the derivative of the expected number by log p.)
    """
    offset = (inputs.pos - inputs.prefix)[at]  # of a mask in its block; -1: a clean token
    is_mask = offset >= 0
    offset = offset[is_mask]  # (M,)
    p = (torch.exp(-cross_entropy[is_mask]) + SMOOTHING) / (1 + SMOOTHING)
    block_number = (offset == 0).cumsum(0) - 1  # blocks are adjacent and begin with offset 0
    at_mask = (block_number, offset)
    blocks = p.new_zeros(len(p), block).index_put(at_mask, p)  # a row each; 0 after a short one
    all_hold = blocks.cumprod(1)  # p1, p1 p2, ...
    gain = all_hold.flip(1).cumsum(1).flip(1)[at_mask]  # the sum from a mask to its block's end
    example = inputs.doc[at][is_mask]
    mean = torch.bincount(example, gain) / torch.bincount(example)
    factors = torch.ones_like(cross_entropy)
    factors[is_mask] = gain / mean[example]
    return factors


def losses(model: Qwen2, inputs: ForwardInput, mask_weight="uniform") -> tuple[Tensor, Tensor]:
    """(noisy, clean): two weighted sums of cross-entropies; noisy + clean is the paper's loss."""

    def cross_entropy(hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(model.logits(hidden), target, reduction="none")

    hidden = hidden_states(model, inputs)
    at = positions_with_target(inputs)
    each = model.in_chunks(cross_entropy, hidden[at], inputs.target[at])
    weight = inputs.noisy_weight[at]
    if mask_weight == "expected" and model.config.block:
        weight = weight * expected_weights(each, inputs, at, model.config.block)
    noisy = (each * weight).sum()
    clean = (each * inputs.clean_weight[at]).sum()
    return noisy, clean


@torch.no_grad()
def look_ahead(model: Qwen2, held_out: list[ForwardInput]) -> list[float]:
    """Accuracy at predicting the token 1, 2, ... B + 1 places after the last real one.

    The clean stream predicts 1 ahead, the masks of a block predict further. If s_k is the accuracy
    k ahead, a forward would yield about 1 + s_2 + s_2 s_3 + ... tokens if every right guess were
    accepted.
    """
    bins = (model.config.block or 0) + 2
    right = torch.zeros(bins).double()
    count = torch.zeros(bins).double()

    def best_token(hidden: Tensor) -> Tensor:
        return model.logits(hidden).argmax(-1)

    for inputs in held_out:
        inputs = inputs.to(model.device)
        is_mask = inputs.prefix <= inputs.pos
        ahead = torch.where(is_mask, inputs.pos - inputs.prefix + 2, 1)
        at = positions_with_target(inputs)
        best = model.in_chunks(best_token, hidden_states(model, inputs)[at])
        is_right = (best == inputs.target[at]).float()
        right += torch.bincount(ahead[at], is_right, minlength=bins).cpu()
        count += torch.bincount(ahead[at], minlength=bins).cpu()
    shares = right / count.clamp(min=1)
    return [round(share, 4) for share in shares[1:].tolist()]


# ----------------------------------------------------------------------------------------- the loop


def learning_rate(peak: float, progress: float, warmup: float) -> float:
    """Linear warm-up, then a cosine to zero; progress and warmup are shares of the whole run."""
    if progress < warmup:
        return peak * progress / warmup
    after_warmup = min(1.0, (progress - warmup) / (1 - warmup))
    return peak * 0.5 * (1 + math.cos(math.pi * after_warmup))


def share_done(args: argparse.Namespace, step: int, consumed: int, num_rows: int) -> float:
    """Fraction of the run that is done: of --steps if given, else of the rows of all epochs."""
    if args.steps:
        return step / args.steps
    return min(1.0, consumed / (args.epochs * num_rows))  # the last step may take a few rows more


def add_gradients(model: Qwen2, step: list[ForwardInput], args, autocast) -> Tensor:
    """Add the gradients of a step's loss; its two parts (noisy, clean) in this process: (2,)."""
    size = processes.rank_and_size()[1]
    sums = torch.zeros(2, device=model.device)
    for inputs in step:
        with autocast:
            noisy, clean = losses(model, inputs.to(model.device), args.mask_weight)
        loss = clean
        if model.config.block:
            loss = noisy + args.ar_weight * clean
        (size * loss).backward()  # FSDP takes the mean over processes; we want the sum
        sums += torch.stack([noisy, clean]).detach()
    return sums


def packed_width(model: Qwen2, max_length: int) -> int | None:
    """The width of packed rows. None: no packing, for dense attention costs the width's square."""
    if not can_use_flex(model.device, model.config.head_dim):
        return None
    longest = 2 * max_length if model.config.block else max_length
    return round_up(3 * longest // 2, 32)  # room for the longest and a short one


def train(model: Qwen2, chat: Chat, data: Dataset, run: Run, args, dtype: torch.dtype) -> int:
    """Train to the end and return 0, or return the number of the signal that stopped the run."""
    rank, size = processes.rank_and_size()
    config = model.config
    width = packed_width(model, args.max_length)
    if args.checkpoint_layers:
        processes.recompute_layers(model)
    if dist.is_initialized():
        processes.shard(model, dtype)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    autocast = processes.arithmetic_in(dtype, model.device)  # the weights stay float32
    with run:
        step, consumed = run.start(model, optimizer, chat, data)
        done = share_done(args, step, consumed, len(data.training))
        batches = data.steps(args.batch, start_at=consumed)
        while done < 1:
            began = time.perf_counter()
            batch = next(batches)
            before = done
            done = share_done(args, step + 1, batch.consumed, len(data.training))
            # The rate at the middle of the step: neither the first nor the last step has rate 0.
            rate = learning_rate(args.lr, (before + done) / 2, args.warmup)
            for group in optimizer.param_groups:
                group["lr"] = rate

            step_inputs = forward_inputs(batch.examples, config, args, width, rank, size)
            sums = add_gradients(model, step_inputs, args, autocast)
            grad_norm = processes.clip_gradients(model, args.clip)
            if not 0 < grad_norm < math.inf:  # NaN, or 0 where hidden states overflow: a dead model
                what = f"step {step + 1}: the gradient's norm is {grad_norm:g}"
                raise UserError(f"{what}; try a smaller --lr")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1

            noisy, clean = processes.total(sums).tolist()
            num_tokens = sum(len(example.tokens) for example in batch.examples)
            record = {
                "step": step,
                "noisy": round(noisy, 5),
                "clean": round(clean, 5),
                "lr": rate,
                "grad_norm": round(grad_norm, 4),
                "tokens_per_s": round(num_tokens / (time.perf_counter() - began)),
                "memory_gib": round(processes.peak_memory(model.device), 2),
            }
            if config.block is None:
                del record["noisy"]
            is_due = done >= 1 or step % args.save_every == 0
            if is_due and data.held_out:
                held_out = forward_inputs(data.held_out, config, args, width)
                with autocast:
                    record["look_ahead"] = look_ahead(model, held_out)
            run.log(record, done, batch.skipped)

            stop = run.stop_requested(model.device)
            if is_due or stop:
                run.save(model, optimizer, chat, batch.consumed, finished=done >= 1)
            if stop and done < 1:
                return stop
    return 0


# ------------------------------------------------------------------------------------ command line


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        "Train a Qwen2.5 checkpoint to predict several tokens per forward (MARS).",
        usage="%(prog)s --data FILE [option ...]",
    )
    add = parser.add_argument
    flag = functools.partial(add, action="store_true")
    # fmt: off
    add("--data", type=path, required=True, help='JSONL: {"messages"} or {"prompt", "response"}')
    parser.add_model("Qwen/Qwen2.5-0.5B-Instruct", "directory or hub id to start from")
    parser.add_template_option()
    flag("--from-scratch", help="use only its config and tokenizer")
    add("--out", type=path, default=Path("out"), help="the model (bfloat16), log, checkpoints/")
    flag("--overwrite", help="replace the model or run in --out")
    flag("--resume", help="continue from the newest checkpoint in --out")
    add("--objective", choices=("mars", "sft"), default="mars", help="sft is stage 1, mars stage 2")
    add("--block", type=number(int, 1), default=4, help="B, masks in a block")
    add("--block-phase", choices=("random", "fixed"), default="random", help="fixed: the paper's")
    add("--mask-weight", choices=("uniform", "expected"), default="uniform", help="of a guess")
    add("--ar-weight", type=number(float, 0, 1e6), default=1.0, help="weight of the clean loss")
    add("--normalization", choices=("sequence", "token"), default="sequence", help="averaged over")
    add("--epochs", type=number(int, 1), default=5, help="passes over the data")
    add("--steps", type=number(int, 1, 10**9), help="number of steps, instead of --epochs")
    add("--batch", type=number(int, 1, 10**6), default=128, help="examples per step (paper: 384)")
    add("--batch-tokens", type=number(int, 1), default=4096, help="positions per forward")
    flag("--checkpoint-layers", help="less memory: compute activations twice")
    add("--lr", type=number(float, 0, 1e3), default=5e-6, help="peak learning rate")
    add("--warmup", type=number(float, 0, 1), default=0.03, help="share of the run")
    add("--clip", type=number(float, 1e-6), default=1.0, help="largest gradient norm")
    add("--max-length", type=number(int, 1), default=512, help="the rest of an example is cut")
    add("--held-out", type=number(int, 0), default=64, help="rows to evaluate on, at most a tenth")
    add("--save-every", type=number(int, 1), default=500, help="steps between checkpoints")
    add("--seed", type=number(int, 0, 2**63), default=0, help="for shuffling, phases, new weights")
    # fmt: on
    return parser.parse_args(words)


def prepare(args: argparse.Namespace, device: torch.device) -> tuple[Qwen2, Chat, Dataset, Run]:
    size = processes.rank_and_size()[1]
    rows = JsonlFile(args.data)  # first: `locate` may download for long
    directory = locate(args.model)
    config = read_config(directory, Config)
    positions = config.max_position_embeddings
    if args.batch < size:
        raise UserError(f"--batch {args.batch}: fewer examples than processes ({size})")
    if args.max_length > positions:
        raise UserError(f"--max-length {args.max_length}: the model has {positions} positions")
    if args.objective == "mars" and args.block > args.max_length:
        raise UserError(f"--block {args.block}: more than --max-length {args.max_length}")
    run = Run(args.out, identity(args, rows), args.resume, args.overwrite)
    if args.from_scratch:
        chat = Chat(directory)
        model = initialize(config, args.seed)
        add_mask_token(model, chat)
        model.to(device)
    else:
        model, chat = load(args.model, device)
        model.requires_grad_()
    chat.template_options = dict(args.template_option)
    model.config.block = args.block if args.objective == "mars" else None
    ends = model.config.eos_token_id
    data = Dataset(
        rows,
        chat,
        eos=ends[0],
        ends=ends,
        phases=args.block if args.block_phase == "random" else 1,
        max_length=args.max_length,
        seed=args.seed,
        num_held_out=args.held_out,
    )
    millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    processes.say(
        f"{args.model}: {millions:.1f} M parameters on {size} x {device}; {len(rows)} rows"
    )
    return model, chat, data, run


def main() -> None:
    args = parse_arguments()
    device, dtype = find_device(args.device, args.dtype)
    if dist.is_torchelastic_launched():
        device = processes.join(device)
    with processes.together():
        model, chat, data, run = prepare(args, device)

    stop = train(model, chat, data, run, args, dtype)
    processes.wait_for_all()
    if stop:
        sys.exit(128 + stop)


if __name__ == "__main__":
    processes.run(main, out_of_memory="use a smaller --batch-tokens, or --checkpoint-layers")
