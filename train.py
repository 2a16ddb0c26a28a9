"""Train a Qwen2.5 to predict several tokens per forward: MARS (arXiv 2604.07023, section 3).

    python train.py --objective sft --data dolci.jsonl --out sft    # stage 1: ordinary fine-tuning
    python train.py --model sft --data dolci.jsonl                  # stage 2: the same, with masks

Two streams share one causal forward. The clean stream is the ordinary sequence. The noisy stream
repeats the response with every token replaced by `<|mask|>`, and sees what a decoder will see: the
clean tokens before its block, and the masks of its block so far. Logits stay right-shifted in both.

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
from collections import Counter
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
from plumbing.config import config_json, read_config
from plumbing.cpu import use_free_cores
from plumbing.data import Dataset, Example
from plumbing.errors import UserError, run_main
from plumbing.hub import locate
from plumbing.jsonl import JsonlFile
from plumbing.packing import collate, concatenate, grouped, packed, round_up
from plumbing.runs import Run, identity

# ------------------------------------------------------------------------------------- two streams


class Batch(NamedTuple):
    """The positions of one forward, every field (R, T); while it is built, of one example (T)."""

    tokens: Tensor
    pos: Tensor
    prefix: Tensor  # the number of clean tokens that a position sees: `visible` in model.py
    doc: Tensor
    target: Tensor  # the next token
    noisy_weight: Tensor  # of this position's cross-entropy in the noisy loss
    clean_weight: Tensor  # and in the clean loss

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(field.to(device) for field in self))


PADDING = Batch(tokens=0, pos=0, prefix=1, doc=-1, target=0, noisy_weight=0.0, clean_weight=0.0)
SMOOTHING = 0.25  # of the probabilities in expected_weights: or far masks would wait for the first


def lay_out(example: Example, block: int | None, mask_id: int, weight: float, doc=0) -> Batch:
    """One example as [clean ; masks]; if block is None, the clean stream alone.

    Clean position p predicts token p + 1, and so does the mask at p. The first response token is
    predicted by the last prompt token, never by a mask; it counts in both losses, as in the paper's
    code.
    """
    x = torch.tensor(example.tokens)
    prompt = example.prompt
    pos = torch.arange(len(x) - 1)  # the last token predicts nothing
    predicts_response = pos >= prompt - 1
    predicts_first = pos == prompt - 1
    clean_stream = Batch(
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

    mask_pos = pos[prompt:]
    grid_pos = mask_pos + example.phase
    block_start = mask_pos - grid_pos % block
    mask_stream = Batch(
        tokens=torch.full_like(mask_pos, mask_id),
        pos=mask_pos,
        prefix=block_start.clamp(min=prompt),  # a block that begins in the prompt is cut short
        doc=torch.full_like(mask_pos, doc),
        target=x[prompt + 1 :],
        noisy_weight=torch.full(mask_pos.shape, weight),
        clean_weight=torch.zeros(mask_pos.shape),
    )
    return concatenate([clean_stream, mask_stream])


def stream_length(example: Example, block: int | None) -> int:
    """Positions of both streams. The last token, which predicts nothing, is in neither."""
    clean = len(example.tokens) - 1
    return clean if block is None else clean + example.targets - 1


def target_weights(examples: list[Example], normalization: str) -> list[float]:
    """Weight of each example's targets in the WHOLE step.

    sequence: the mean over an example's targets, then over examples (the paper's); token: the mean
    over all targets.
    """
    if normalization == "token":
        num_targets = sum(example.targets for example in examples)
        return [1 / num_targets] * len(examples)
    return [1 / (example.targets * len(examples)) for example in examples]


def batches(
    examples: list[Example], config: Config, args: argparse.Namespace, rank=0, size=1, longest=0
) -> list[Batch]:
    """The forwards of process `rank` of `size`; every process has the same number of them.

    longest: the maximum stream length. If given, examples are packed into rows, and all forwards of
    all steps have one shape. If 0, every example has a row of its own, next to others of similar
    length.
    """
    lengths = [stream_length(example, config.block) for example in examples]
    if longest:
        width = round_up(3 * longest // 2, 32)  # room for the longest and a short one
        forwards = packed(lengths, width, args.batch_tokens, size)
    else:
        forwards = grouped(lengths, args.batch_tokens, size)
    weights = target_weights(examples, args.normalization)

    def stream(i: int, doc: int) -> Batch:
        return lay_out(examples[i], config.block, config.mask_token_id, weights[i], doc)

    result = []
    for rows, width in forwards[rank::size]:
        filled = [[stream(i, doc) for doc, i in enumerate(row)] for row in rows]
        result.append(collate(filled, width, PADDING))
    return result


# --------------------------------------------------------------------------------------------- loss


def dense_mask(batch: Batch) -> Tensor:
    """`visible` on all pairs of positions: (R, 1, T, T)."""
    fields = (batch.pos, batch.prefix, batch.doc)
    queries = [field[:, None, :, None] for field in fields]
    keys = [field[:, None, None, :] for field in fields]
    return visible(*queries, *keys)


def hidden_states(model: Qwen2, batch: Batch) -> Tensor:
    """Hidden states (R, T, D) of both streams."""
    if can_use_flex(model.device, model.config.head_dim):
        mask = block_mask(visible, batch.pos, batch.prefix, batch.doc)
        return model(batch.tokens, batch.pos, mask, kernel=attend_flex)
    return model(batch.tokens, batch.pos, dense_mask(batch))


def positions_with_target(batch: Batch) -> tuple[Tensor, Tensor]:
    """Their (row, column) indices."""
    return (batch.noisy_weight + batch.clean_weight).nonzero(as_tuple=True)


@torch.no_grad()
def expected_weights(cross_entropy: Tensor, batch: Batch, at: tuple, block: int) -> Tensor:
    """Factors (N,) for the weights of these positions; their mean over an example's masks is 1.

    Of a block's guesses p1 + p1 p2 + ... are expected to hold: each needs those before it. The
    derivative of this number by log p_k is the sum of p1 ... pm over m >= k: the factor of mask k.
    """
    p = (torch.exp(-cross_entropy) + SMOOTHING) / (1 + SMOOTHING)
    offset = (batch.pos - batch.prefix)[at]  # of a mask in its block; -1 at a clean token
    place = ((offset <= 0).cumsum(0) - 1, offset)  # a row for every block; a clean token's is empty
    blocks = p.new_zeros(len(p), block + 1).index_put(place, p)
    all_hold = blocks.cumprod(1)
    gain = all_hold.flip(1).cumsum(1).flip(1)[place]
    example = at[0] * batch.doc.size(1) + batch.doc[at]
    mean = torch.bincount(example, gain) / torch.bincount(example, offset >= 0)
    return torch.where(offset < 0, 1, gain / mean[example])


def losses(model: Qwen2, batch: Batch, mask_weight="uniform") -> tuple[Tensor, Tensor]:
    """(noisy, clean): two weighted sums of cross-entropies; noisy + clean is the paper's loss."""

    def cross_entropy(hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(model.logits(hidden), target, reduction="none")

    hidden = hidden_states(model, batch)
    at = positions_with_target(batch)
    each = model.in_chunks(cross_entropy, hidden[at], batch.target[at])
    weight = batch.noisy_weight[at]
    if mask_weight == "expected":
        weight = weight * expected_weights(each, batch, at, model.config.block or 0)
    noisy = (each * weight).sum()
    clean = (each * batch.clean_weight[at]).sum()
    return noisy, clean


@torch.no_grad()
def look_ahead(model: Qwen2, held_out: list[Batch]) -> list[float]:
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

    for batch in held_out:
        batch = batch.to(model.device)
        is_mask = batch.prefix <= batch.pos
        ahead = torch.where(is_mask, batch.pos - batch.prefix + 2, 1)
        at = positions_with_target(batch)
        best = model.in_chunks(best_token, hidden_states(model, batch)[at])
        is_right = (best == batch.target[at]).float()
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


def add_gradients(model: Qwen2, forwards: list[Batch], args, autocast) -> Tensor:
    """Those of a step's loss; return its parts (noisy, clean) in this process: (2,)."""
    is_mars = model.config.block is not None
    size = processes.rank_and_size()[1]
    sums = torch.zeros(2, device=model.device)
    for batch in forwards:
        with autocast:
            noisy, clean = losses(model, batch.to(model.device), args.mask_weight)
        loss = noisy + args.ar_weight * clean if is_mars else clean
        (size * loss).backward()  # FSDP takes the mean over processes; we want the sum
        sums += torch.stack([noisy, clean]).detach()
    return sums


def train(model: Qwen2, chat: Chat, data: Dataset, run: Run, args, dtype: torch.dtype) -> int:
    """Train to the end and return 0, or return the number of the signal that stopped the run."""
    rank, size = processes.rank_and_size()
    is_mars = model.config.block is not None
    longest = 0  # no packing: dense attention costs the square of the width
    if can_use_flex(model.device, model.config.head_dim):
        longest = args.max_length * (2 if is_mars else 1)
    if args.checkpoint_layers:
        processes.recompute_layers(model)
    if dist.is_initialized():
        processes.shard(model, dtype)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    autocast = processes.arithmetic_in(dtype, model.device)  # the weights stay float32
    config = config_json(model.config)
    step = 0
    consumed = 0
    with run:
        if run.found:
            step, consumed, skipped = run.resume(model, optimizer)
            data.skipped = Counter(skipped)
            run.export(model, config, chat)  # in case the run was killed before it
        done = share_done(args, step, consumed, len(data.training))
        if run.found and done >= 1:
            return 0

        for examples, consumed, skipped in data.steps(args.batch, start_at=consumed):  # noqa: B020
            began = time.perf_counter()
            before = done
            done = share_done(args, step + 1, consumed, len(data.training))
            # The rate at the middle of the step: neither the first nor the last step has rate 0.
            rate = learning_rate(args.lr, (before + done) / 2, args.warmup)
            for group in optimizer.param_groups:
                group["lr"] = rate

            forwards = batches(examples, model.config, args, rank, size, longest)
            sums = add_gradients(model, forwards, args, autocast)
            grad_norm = processes.clip_gradients(model, args.clip)
            if not 0 < grad_norm < math.inf:  # NaN, or 0 where hidden states overflow: a dead model
                what = f"step {step + 1}: the gradient's norm is {grad_norm:g}"
                raise UserError(f"{what}; try a smaller --lr")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1

            noisy, clean = processes.total(sums).tolist()
            num_tokens = sum(len(example.tokens) for example in examples)
            record = {
                "step": step,
                "noisy": round(noisy, 5),
                "clean": round(clean, 5),
                "lr": rate,
                "grad_norm": round(grad_norm, 4),
                "tokens_per_s": round(num_tokens / (time.perf_counter() - began)),
                "memory_gib": round(processes.peak_memory(model.device), 2),
            }
            if not is_mars:
                del record["noisy"]
            is_due = done >= 1 or step % args.save_every == 0
            if is_due and data.held_out:
                with autocast:
                    held_out = batches(data.held_out, model.config, args, longest=longest)
                    record["look_ahead"] = look_ahead(model, held_out)
            run.log(record, done, skipped)
            stop = run.stop_requested(model.device)
            if is_due or stop:
                run.save(model, optimizer, consumed, finished=done >= 1)
                run.export(model, config, chat)
            if done >= 1:
                return 0
            if stop:
                return stop


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
    add("--steps", type=number(int, 1), help="number of steps, instead of --epochs")
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
    phases = args.block if args.block_phase == "random" else 1
    ends = model.config.eos_token_id
    data = Dataset(rows, chat, ends[0], phases, args.max_length, args.seed, args.held_out, ends)
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
    use_free_cores(model)
    stop = train(model, chat, data, run, args, dtype)
    processes.wait_for_all()
    if stop:
        sys.exit(128 + stop)


if __name__ == "__main__":
    status = 0
    try:
        run_main(main, out_of_memory="use a smaller --batch-tokens, or --checkpoint-layers")
    except SystemExit as stop:
        status = stop.code
    processes.leave(status)
