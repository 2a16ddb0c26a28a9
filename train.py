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
  * every target is weighted relative to the whole step, so the loss does not depend on how a step
    is packed, cut into forwards and split among processes (torchrun and FSDP2);
  * a run that was killed continues bit for bit (`--resume`, on a CPU, with as many threads);
  * two options are not the paper's: `--hold` holds the clean stream to what the model predicted
    before training, `--blocks every` has a block of masks at every token.
"""

import argparse
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from model import Config, Qwen2, add_mask_token, initialize, load, visible
from plumbing import processes
from plumbing.arguments import Parser, find_device, number
from plumbing.attention import attend_flex, block_mask
from plumbing.chat import Chat
from plumbing.config import read_config
from plumbing.data import Dataset, Example
from plumbing.errors import UserError
from plumbing.hub import locate
from plumbing.jsonl import JsonlFile
from plumbing.packing import fill_rows, grouped, packed, round_up
from plumbing.runs import Run, what_decides

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
    # How many clean tokens a position sees: a clean token sees itself and all before, a mask those
    # before its block. Blocks begin at 0, B, 2B, ...; one that begins in the prompt is cut short.
    block_start = mask_pos - mask_pos % block
    prefix = torch.cat([clean_pos + 1, block_start.clamp(min=P)])
    # (T, T): a row for each query, a column for each key; all are of one document, 0
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


@dataclass(frozen=True)
class Recipe:
    """What is learnt from an example, and how the examples of a step become forwards."""

    mask_id: int
    block: int | None = 4  # B; None: the clean stream alone, which is ordinary fine-tuning
    blocks: str = "grid"  # where blocks begin: see `place_masks`
    ar_weight: float = 1.0  # of the clean loss
    start: Qwen2 | None = None  # a frozen model that the clean stream is held to: see `losses`
    batch_tokens: int = 4096  # positions in a forward
    row_width: int | None = None  # examples share rows of this width; None: each has its own
    dtype: torch.dtype = torch.float32  # of the arithmetic; the weights stay float32


class Streams(NamedTuple):
    """The two streams of one example; every field is (T,). Or of many, in rows: (R, T)."""

    tokens: Tensor
    pos: Tensor
    prefix: Tensor  # the number of clean tokens that a position sees: `visible` in model.py
    doc: Tensor  # the example's number in the step; -1: padding
    target: Tensor  # the next token
    noisy_weight: Tensor  # of this position's cross-entropy in the noisy loss
    clean_weight: Tensor  # and of its term in the clean loss

    @property
    def is_mask(self) -> Tensor:
        return self.prefix <= self.pos  # a clean token sees itself, too

    def to(self, device: torch.device) -> "Streams":
        return Streams(*(field.to(device) for field in self))


PADDING = {"prefix": 1, "doc": -1}  # and 0 in all other fields


def place_masks(prompt: int, length: int, block: int, blocks: str) -> tuple[Tensor, Tensor]:
    """The position of each mask, and where its block begins: both (M,).

    grid: a mask stands in the place of each response token but the last, which has no next token.
    Blocks begin at 0, B, 2B, ...; one that begins in the prompt is cut short. every: a block of B
    masks begins in the place of each response token but the last, as a decoder may need it.
    """
    mask_pos = torch.arange(prompt, length - 1)
    if blocks == "grid":
        block_start = mask_pos - mask_pos % block
        return mask_pos, block_start.clamp(min=prompt)
    block_start = mask_pos[:, None].expand(-1, block)  # a row for each block
    mask_pos = block_start + torch.arange(block)
    has_target = mask_pos < length - 1
    return mask_pos[has_target], block_start[has_target]


def lay_out(example: Example, recipe: Recipe, doc: int = 0) -> Streams:
    """One example as [clean ; masks]; its weights are those of a mean over its predictions.

    The last position of each stream, which predicts nothing, is left out: of the L tokens L - 1 are
    in the clean stream. An example without masks has no weight in the noisy loss.
    """
    x = torch.tensor(example.tokens)
    P = example.prompt_length
    L = len(x)
    clean_pos = torch.arange(L - 1)
    mask_pos = block_start = torch.arange(0)  # none
    first_weight = 0.0
    if recipe.block is not None and example.has_masks:  # a row may say that it has none
        mask_pos, block_start = place_masks(P, L, recipe.block, recipe.blocks)
        # No mask predicts the first response token. The last prompt token does, so it counts in the
        # noisy loss, too, as in the paper. With --hold the clean stream learns no tokens at all.
        if recipe.start is None:
            first_weight = 1 / example.num_targets
    M = len(mask_pos)
    T = L - 1 + M
    noisy_weight = torch.zeros(T)
    noisy_weight[P - 1] = first_weight
    noisy_weight[L - 1 :] = (1 - first_weight) / max(1, M)  # the masks'
    clean_weight = torch.zeros(T)
    clean_weight[P - 1 : L - 1] = 1 / example.num_targets
    pos = torch.cat([clean_pos, mask_pos])
    return Streams(
        tokens=torch.cat([x[:-1], torch.full((M,), recipe.mask_id)]),
        pos=pos,
        prefix=torch.cat([clean_pos + 1, block_start]),
        doc=torch.full((T,), doc),
        target=x[pos + 1],
        noisy_weight=noisy_weight,
        clean_weight=clean_weight,
    )


def forward_inputs(examples: list[Example], recipe: Recipe, rank=0, size=1) -> list[Streams]:
    """What each forward of a step is fed, in process `rank` of `size`; all have equally many.

    Each loss of a step is the mean over its examples, the noisy one over those with masks.
    """
    num_with_masks = max(1, sum(example.has_masks for example in examples))
    streams = []
    for doc, example in enumerate(examples):
        layout = lay_out(example, recipe, doc)
        layout.noisy_weight.div_(num_with_masks)
        layout.clean_weight.div_(len(examples))
        streams.append(layout)
    lengths = [len(each.tokens) for each in streams]
    if recipe.row_width is None:
        plans = grouped(lengths, recipe.batch_tokens, size)
    else:
        plans = packed(lengths, recipe.row_width, recipe.batch_tokens, size)
    return [fill_rows(streams, rows, width, PADDING) for rows, width in plans[rank::size]]


# --------------------------------------------------------------------------------------------- loss


def can_use_flex(model: Qwen2) -> bool:
    return model.device.type == "cuda" and model.config.head_dim >= 16  # it takes no smaller heads


def hidden_states(model: Qwen2, inputs: Streams) -> Tensor:
    """Hidden states (R, T, D) of both streams, by FlexAttention where it runs."""
    fields = (inputs.pos, inputs.prefix, inputs.doc)
    if can_use_flex(model):
        return model(inputs.tokens, inputs.pos, block_mask(visible, *fields), kernel=attend_flex)
    queries = [field[:, None, :, None] for field in fields]
    keys = [field[:, None, None, :] for field in fields]
    mask = visible(*queries, *keys)  # (R, 1, T, T)
    return model(inputs.tokens, inputs.pos, mask)


@torch.no_grad()
def clean_states(model: Qwen2, inputs: Streams) -> Tensor:
    """Hidden states (R, T, D) of the clean stream alone; 0 at masks, which are not computed.

    For --hold's frozen model, which needs no masks: each example is a row of a causal forward.
    """
    is_clean = ~inputs.is_mask & (inputs.doc >= 0)
    docs, row = inputs.doc[is_clean].unique(return_inverse=True)  # row: of each clean position
    pos = inputs.pos[is_clean]
    num_rows = max(1, len(docs))  # some process may have no example left
    tokens = pos.new_zeros(num_rows, int(inputs.pos.max()) + 1)
    tokens[row, pos] = inputs.tokens[is_clean]
    all_pos = torch.arange(tokens.size(1), device=pos.device).expand_as(tokens)
    hidden = model(tokens, all_pos, None)
    result = hidden.new_zeros(*inputs.pos.shape, hidden.size(-1))
    result[is_clean] = hidden[row, pos]
    return result


def losses(model: Qwen2, inputs: Streams, start: Qwen2 | None = None) -> tuple[Tensor, Tensor]:
    """(noisy, clean): two weighted sums of cross-entropies, of which the paper's loss is the sum.

    With `start`, clean (also in the log) is the divergence KL(start || model) of the clean stream's
    predictions instead, per response token and over the whole vocabulary.
    """

    def cross_entropy(hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(model.logits(hidden), target, reduction="none")

    def divergence(hidden: Tensor, start_hidden: Tensor) -> Tensor:
        log_probs = model.logits(hidden).log_softmax(-1)
        start_log_probs = start.logits(start_hidden).log_softmax(-1)
        gaps = start_log_probs - log_probs
        gaps = gaps.masked_fill(start_log_probs.isneginf(), 0)  # of `<|mask|>`: -inf in both
        return (start_log_probs.exp() * gaps).sum(-1)

    def weighted_sum(loss, reference: Tensor, weight: Tensor) -> Tensor:
        at = weight.nonzero(as_tuple=True)  # row and column of each position that counts
        return (model.in_chunks(loss, hidden[at], reference[at]) * weight[at]).sum()

    hidden = hidden_states(model, inputs)
    noisy = weighted_sum(cross_entropy, inputs.target, inputs.noisy_weight)
    if start is None:
        clean = weighted_sum(cross_entropy, inputs.target, inputs.clean_weight)
    else:
        clean = weighted_sum(divergence, clean_states(start, inputs), inputs.clean_weight)
    return noisy, clean


def add_gradients(model: Qwen2, examples: list[Example], recipe: Recipe) -> Tensor:
    """Add the gradients of a step's loss; its two parts (noisy, clean) in this process: (2,)."""
    rank, size = processes.rank_and_size()
    sums = torch.zeros(2, device=model.device)
    for inputs in forward_inputs(examples, recipe, rank, size):
        with processes.arithmetic_in(recipe.dtype, model.device):
            noisy, clean = losses(model, inputs.to(model.device), recipe.start)
        loss = noisy + recipe.ar_weight * clean
        (size * loss).backward()  # FSDP takes the mean over processes; we want the sum
        sums += torch.stack([noisy, clean]).detach()
    return sums


@torch.no_grad()
def look_ahead(model: Qwen2, examples: list[Example], recipe: Recipe) -> list[float]:
    """Accuracy at predicting the token 1, 2, ... B + 1 places after the last real one.

    The clean stream predicts 1 ahead, the masks of a block predict further. If s_k is the accuracy
    k ahead, lossless decoding gives about 1 + s_2 + s_2 s_3 + ... tokens per forward.
    """
    bins = (recipe.block or 0) + 2
    right = torch.zeros(bins).double()
    count = torch.zeros(bins).double()
    for inputs in forward_inputs(examples, recipe):
        inputs = inputs.to(model.device)
        ahead = torch.where(inputs.is_mask, inputs.pos - inputs.prefix + 2, 1)
        at = (inputs.noisy_weight + inputs.clean_weight).nonzero(as_tuple=True)
        with processes.arithmetic_in(recipe.dtype, model.device):
            hidden = hidden_states(model, inputs)[at]
            best = model.in_chunks(lambda some: model.logits(some).argmax(-1), hidden)
        is_right = (best == inputs.target[at]).float()
        right += torch.bincount(ahead[at], is_right, minlength=bins).cpu()
        count += torch.bincount(ahead[at], minlength=bins).cpu()
    shares = (right / count)[count > 0]  # examples without masks predict 1 ahead only
    return [round(share, 4) for share in shares.tolist()]


# ----------------------------------------------------------------------------------------- the loop

WARMUP = 0.03  # share of the run
CLIP = 1.0  # largest norm of the gradient


def learning_rate(peak: float, progress: float) -> float:
    """Linear warm-up, then a cosine to zero; progress is the share of the run that is done."""
    if progress < WARMUP:
        return peak * progress / WARMUP
    after_warmup = (progress - WARMUP) / (1 - WARMUP)
    return peak * 0.5 * (1 + math.cos(math.pi * after_warmup))


def share_done(args: argparse.Namespace, step: int, data: Dataset) -> float:
    """Fraction of the run that is done: of --steps if given, else of the rows of all epochs."""
    if args.steps:
        return step / args.steps
    return min(1.0, data.consumed / (args.epochs * len(data.training)))


def train(
    model: Qwen2,
    chat: Chat,
    data: Dataset,
    run: Run,
    args: argparse.Namespace,
    recipe: Recipe,
    add_gradients=add_gradients,
) -> int:
    """Train to the end and return 0, or return the number of the signal that stopped the run.

    add_gradients: what a step learns; another one makes it another method.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    with run:
        step = run.start(model, optimizer, chat, data)
        done = share_done(args, step, data)
        while done < 1:
            began = time.perf_counter()
            before = done
            examples = data.next_batch(args.batch)
            step += 1
            done = share_done(args, step, data)
            # The rate at the middle of the step: neither the first nor the last step has rate 0.
            rate = learning_rate(args.lr, (before + done) / 2)
            sums = add_gradients(model, examples, recipe)
            norm = processes.clip_gradients(model, CLIP)
            if not math.isfinite(norm):
                raise UserError(f"step {step}: the gradient's norm is {norm}; try a smaller --lr")
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()

            noisy, clean = processes.total(sums).tolist()
            num_tokens = sum(len(example.tokens) for example in examples)
            record = {
                "step": step,
                "noisy": round(noisy, 5),  # 0 for --objective sft
                "clean": round(clean, 5),
                "lr": rate,
                "grad_norm": round(norm, 4),
                "tokens_per_s": round(num_tokens / (time.perf_counter() - began)),
                "memory_gib": round(processes.peak_memory(model.device), 2),
            }
            is_due = done >= 1 or step % args.save_every == 0
            if is_due and data.held_out:
                record["look_ahead"] = look_ahead(model, data.held_out, recipe)
            run.log(record, done)

            stop = run.stop_requested()
            if is_due or stop:
                run.save(finished=done >= 1)
            if stop and done < 1:
                return stop
    return 0


# ------------------------------------------------------------------------------------ command line


def make_parser() -> Parser:
    parser = Parser(
        "Train a Qwen2.5 checkpoint to predict several tokens per forward (MARS).",
        usage="%(prog)s --data FILE [option ...]",
    )
    add = parser.add_argument
    # fmt: off
    add("--data", type=Path, required=True, help='JSONL: {"messages"} or {"prompt", "response"}')
    parser.add_model("Qwen/Qwen2.5-0.5B-Instruct", "to start from; without weights: random ones")
    add("--out", type=Path, default=Path("out"), help="the model (bfloat16), log, checkpoints/")
    add("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    add("--objective", choices=("mars", "sft"), default="mars", help="sft is stage 1, mars stage 2")
    add("--block", type=number(int, 1), default=4, help="B, masks in a block")
    add("--blocks", choices=("grid", "every"), default="grid", help="one per B tokens, or at each")
    clean = parser.add_mutually_exclusive_group().add_argument
    clean("--ar-weight", type=number(float, 0, 1e6), default=1.0, help="weight of the clean loss")
    hold_help = "hold the clean stream to what --model predicts, with this weight"
    clean("--hold", type=number(float, 0, 1e6), metavar="WEIGHT", help=hold_help)
    add("--epochs", type=number(int, 1), default=5, help="passes over the data")
    add("--steps", type=number(int, 1, 10**9), help="number of steps, instead of --epochs")
    add("--batch", type=number(int, 1, 10**6), default=128, help="examples per step (paper: 384)")
    add("--batch-tokens", type=number(int, 1), default=4096, help="positions per forward")
    add("--checkpoint-layers", action="store_true", help="less memory: activations computed twice")
    add("--lr", type=number(float, 0, 1e3), default=5e-6, help="peak learning rate")
    add("--max-length", type=number(int, 1), default=512, help="the rest of an example is cut")
    add("--save-every", type=number(int, 1), default=500, help="steps between checkpoints")
    add("--seed", type=number(int, 0, 2**63), default=0, help="for shuffling, new weights")
    # fmt: on
    return parser


def open_model(name: str, device: torch.device, seed: int) -> tuple[Qwen2, Chat]:
    """The model to train, in float32; with random weights if its directory has none."""
    directory = locate(name)
    if any(directory.glob("model*.safetensors*")):
        model, chat = load(name, device)
        return model.requires_grad_(), chat
    model = initialize(read_config(directory, Config), seed)
    chat = Chat(directory)
    add_mask_token(model, chat)
    processes.say(f"{name}: has no weights (model*.safetensors): training begins with random ones")
    return model.to(device), chat


def packed_width(model: Qwen2, longest: int) -> int | None:
    """The width of packed rows. None: no packing, for dense attention costs the width's square."""
    if not can_use_flex(model):
        return None
    return round_up(3 * longest // 2, 32)  # room for the longest example and a short one


def prepare(
    args: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> tuple[Qwen2, Chat, Dataset, Run, Recipe]:
    """What `train` needs; nothing has been written when a UserError stops it."""
    if args.objective == "sft" and args.hold is not None:
        raise UserError("--hold: only for --objective mars; without masks nothing would be learnt")
    rows = JsonlFile(args.data)  # first: a model may take long to download
    run = Run(args.out, what_decides(args, rows), args.resume)
    model, chat = open_model(args.model, device, args.seed)
    config = model.config
    positions = config.max_position_embeddings
    if args.max_length > positions:
        raise UserError(f"--max-length {args.max_length}: the model has {positions} positions")
    ar_weight = args.ar_weight
    start = None
    if args.hold is not None:
        ar_weight = args.hold
        start, _ = load(args.model, device, dtype)
    config.block = args.block if args.objective == "mars" else None  # is saved with the model
    masks_per_token = 0
    if config.block:
        masks_per_token = config.block if args.blocks == "every" else 1
    recipe = Recipe(
        mask_id=config.mask_token_id,
        block=config.block,
        blocks=args.blocks,
        ar_weight=ar_weight,
        start=start,
        batch_tokens=args.batch_tokens,
        row_width=packed_width(model, (1 + masks_per_token) * args.max_length),
        dtype=dtype,
    )
    data = Dataset(rows, chat, config.eos_token_id, args.max_length, args.seed)
    millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    machine = f"{processes.rank_and_size()[1]} x {device}"
    processes.say(f"{args.model}: {millions:.1f} M parameters on {machine}; {len(rows)} rows")
    if not data.held_out:
        processes.say("fewer than ten rows: none is held out to measure look-ahead on")
    return model, chat, data, run, recipe


def main(add_gradients=add_gradients) -> None:
    args = make_parser().parse_args()
    device, dtype = find_device(args.device, args.dtype)
    if dist.is_torchelastic_launched():
        device = processes.join(device)
    with processes.together():
        model, chat, data, run, recipe = prepare(args, device, dtype)

    if args.checkpoint_layers:
        processes.recompute_layers(model)
    if dist.is_initialized():
        processes.shard(model, dtype)
    stop = train(model, chat, data, run, args, recipe, add_gradients)
    processes.wait_for_all()
    if stop:
        sys.exit(128 + stop)


MEMORY_HINT = "use a smaller --batch-tokens, or --checkpoint-layers"

if __name__ == "__main__":
    processes.run_main_and_exit(main, out_of_memory=MEMORY_HINT)
