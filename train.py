"""Train a Qwen2.5 to predict several tokens per forward: MARS (arXiv 2604.07023, section 3).

    python train.py --objective sft --data dolci.jsonl --out sft    # stage 1: ordinary fine-tuning
    python train.py --model sft --data dolci.jsonl                  # stage 2: the same, with masks

Two streams share one forward. The clean stream is the ordinary sequence. The noisy stream
repeats the response with every token replaced by `<|mask|>`, and sees what a decoder will see: the
clean tokens before its block, and the masks of its block so far. In both streams a position
predicts the token after its own place.

What is unusual here:
  * the noisy stream holds response positions only: [clean ; masks]. The paper's also repeats the
    prompt, unmasked; the loss is the same;
  * a step's loss is a sum over its targets, each with a weight that is fixed beforehand, so it does
    not depend on how a step is packed, cut into forwards and split among processes (torchrun and
    FSDP2);
  * a signal lets the step finish and be saved; a run that was killed continues from its last
    checkpoint. Either way `--resume` ends with the weights of a run that never stopped, bit for bit
    (on a CPU, with as many threads).
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

from decode import generate
from model import GENERATE, Qwen2, add_mask_token, initialize, load, read_config, visible
from plumbing import cpu, processes
from plumbing.arguments import Parser, find_device, number, out_directory
from plumbing.attention import attend_flex, block_mask
from plumbing.chat import Chat
from plumbing.data import Dataset, Example
from plumbing.errors import UserError, run_main
from plumbing.files import locate
from plumbing.jsonl import JsonlFile
from plumbing.packing import own_rows, round_up, shared_rows
from plumbing.terminal import decode_command
from plumbing.training_run import Run, find_progress

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
    # A position predicts the token after its own place. So the last prompt token predicts the first
    # of the response, in both losses; then each response token, or its mask, predicts the next.
    target = torch.tensor(response, device=model.device)
    clean = hidden[P - 1 : L - 1]
    noisy = torch.cat([hidden[P - 1 : P], hidden[L:-1]])
    clean_loss = F.cross_entropy(model.logits(clean), target)
    noisy_loss = F.cross_entropy(model.logits(noisy), target)
    return noisy_loss + ar_weight * clean_loss


# ------------------------------------------------- two streams: the same for many examples at once


@dataclass(frozen=True)
class Recipe:
    """What is learnt from an example, in how many steps, and how a step becomes forwards."""

    mask_id: int
    block: int | None = 4  # B; None: the clean stream alone, which is ordinary fine-tuning
    ar_weight: float = 1.0  # of the clean loss
    lr: float = 5e-6  # the peak of the learning rate
    batch: int = 128  # examples in a step
    steps: int = 1
    save_every: int = 500  # steps
    batch_tokens: int = 4096  # positions in a forward
    row_width: int | None = None  # examples share rows of this width; None: each has its own
    dtype: torch.dtype = torch.float32  # of the arithmetic; the weights stay float32


class Streams(NamedTuple):
    """The two streams of one example; every field is (T,). Or of many, in rows: (R, T).

    PADDING has a number in each field.
    """

    tokens: Tensor
    pos: Tensor
    prefix: Tensor  # the number of clean tokens that a position sees: `visible` in model.py
    doc: Tensor  # the example's number in the step; -1: padding
    target: Tensor  # the next token
    noisy_weight: Tensor  # of this position's cross-entropy in the noisy loss
    clean_weight: Tensor  # and of its term in the clean loss

    @property
    def is_mask(self) -> Tensor:
        return self.prefix <= self.pos  # a clean token has prefix = pos + 1

    def to(self, device: torch.device) -> "Streams":
        return Streams(*(field.to(device) for field in self))


# A position of padding is no mask, and of no example.
PADDING = Streams(tokens=0, pos=0, prefix=1, doc=-1, target=0, noisy_weight=0.0, clean_weight=0.0)


def join(streams: list[Streams], rows: list[list[int]], width: int) -> Streams:
    """Streams one after another in rows of `width`; rows: which of the streams each row has."""
    joined = Streams(*(torch.full((len(rows), width), value) for value in PADDING))
    for row, indices in enumerate(rows):
        end = 0
        for i in indices:
            begin = end
            end += len(streams[i].tokens)
            for field, values in zip(joined, streams[i]):
                field[row, begin:end] = values
    return joined


def lay_out(example: Example, recipe: Recipe, doc: int = 0) -> Streams:
    """One example as [clean ; masks]; its weights are those of a mean over its targets.

    The blocks are those of `naive_loss`. The last position of each stream, which has no next token
    to predict, is left out.
    """
    x = torch.tensor(example.tokens)
    P = example.prompt_length
    L = len(x)
    clean_pos = torch.arange(L - 1)
    if recipe.block is None:  # the clean stream alone
        mask_pos = torch.arange(0)
        block_start = mask_pos
    else:
        mask_pos = torch.arange(P, L - 1)
        block_start = mask_pos - mask_pos % recipe.block
    pos = torch.cat([clean_pos, mask_pos])
    share = 1 / (L - P)
    clean_weight = torch.zeros(len(pos))
    clean_weight[P - 1 : len(clean_pos)] = share
    noisy_weight = torch.zeros(len(pos))
    if recipe.block is not None:
        noisy_weight[len(clean_pos) :] = share  # the masks'
        # No mask predicts the first response token. The last prompt token does, so it counts in the
        # noisy loss, too, as in the paper.
        noisy_weight[P - 1] = share
    return Streams(
        tokens=torch.cat([x[:-1], torch.full_like(mask_pos, recipe.mask_id)]),
        pos=pos,
        prefix=torch.cat([clean_pos + 1, block_start.clamp(min=P)]),
        doc=torch.full_like(pos, doc),
        target=x[pos + 1],
        noisy_weight=noisy_weight,
        clean_weight=clean_weight,
    )


def forward_inputs(examples: list[Example], recipe: Recipe, rank=0, size=1) -> list[Streams]:
    """What each forward of a step is fed, in process `rank` of `size`.

    Each process gets equally many forwards. Each loss of a step is the mean over its examples.
    """
    streams = [lay_out(example, recipe, doc) for doc, example in enumerate(examples)]
    for each in streams:
        each.noisy_weight.div_(len(examples))
        each.clean_weight.div_(len(examples))
    return fill_forwards(streams, recipe, rank, size)


def fill_forwards(streams: list[Streams], recipe: Recipe, rank=0, size=1) -> list[Streams]:
    """The forwards of process `rank`, in which the streams of a step stand side by side.

    All forwards of the step are planned, and dealt to the processes in turn.
    """
    streams = sorted(streams, key=lambda each: -len(each.tokens))
    lengths = [len(each.tokens) for each in streams]
    if recipe.row_width is None:
        plans = own_rows(lengths, recipe.batch_tokens, size)
    else:
        plans = shared_rows(lengths, recipe.row_width, recipe.batch_tokens, size)
    own_plans = plans[rank::size]
    return [join(streams, rows, width) for rows, width in own_plans]


def can_use_flex(model: Qwen2) -> bool:
    # FlexAttention takes no smaller heads.
    return model.device.type == "cuda" and model.config.head_dim >= 16


def hidden_states(model: Qwen2, inputs: Streams) -> Tensor:
    """Hidden states (R, T, D) of both streams, by FlexAttention where it runs."""
    fields = (inputs.pos, inputs.prefix, inputs.doc)
    if can_use_flex(model):
        return model(inputs.tokens, inputs.pos, block_mask(visible, *fields), kernel=attend_flex)
    queries = [field[:, None, :, None] for field in fields]  # (R, 1, T, 1)
    keys = [field[:, None, None, :] for field in fields]  # (R, 1, 1, T)
    return model(inputs.tokens, inputs.pos, visible(*queries, *keys))


def weighted_cross_entropy(model: Qwen2, hidden: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """The sum of weight (R, T) times cross-entropy; logits are made where the weight is not 0."""
    at = weight.nonzero(as_tuple=True)  # row and column of each position that counts
    cross_entropies = model.in_chunks(
        lambda h, y: F.cross_entropy(model.logits(h), y, reduction="none"), hidden[at], target[at]
    )
    return (cross_entropies * weight[at]).sum()


def losses(model: Qwen2, inputs: Streams) -> tuple[Tensor, Tensor]:
    """(noisy, clean): what one forward adds to each loss of its step."""
    hidden = hidden_states(model, inputs)
    noisy = weighted_cross_entropy(model, hidden, inputs.target, inputs.noisy_weight)
    clean = weighted_cross_entropy(model, hidden, inputs.target, inputs.clean_weight)
    return noisy, clean


def add_gradients(model: Qwen2, examples: list[Example], recipe: Recipe) -> Tensor:
    """Add the gradients of a step's loss. Returns this process's part of (noisy, clean): (2,)."""
    rank, size = processes.rank_and_size()
    sums = torch.zeros(2, device=model.device)
    for inputs in forward_inputs(examples, recipe, rank, size):
        with processes.arithmetic_in(recipe.dtype, model.device):
            noisy, clean = losses(model, inputs.to(model.device))
        loss = noisy + recipe.ar_weight * clean
        (size * loss).backward()  # FSDP takes the mean over processes; we want the sum
        sums += torch.stack([noisy, clean]).detach()
    return sums


@torch.no_grad()
def look_ahead(model: Qwen2, forwards: list[Streams], recipe: Recipe) -> list[float]:
    """Accuracy at predicting the token 1, 2, ... B + 1 places after the last real one.

    The clean stream predicts 1 ahead, the masks of a block predict further. If s_k is the accuracy
    k ahead, lossless decoding gives about 1 + s_2 + s_2 s_3 + ... tokens per forward: AR's own, and
    the guesses that hold.
    """
    bins = (recipe.block or 0) + 2
    right = torch.zeros(bins, dtype=torch.float64)
    count = torch.zeros_like(right)
    for inputs in forwards:
        inputs = inputs.to(model.device)
        # The first mask of a block stands at pos = prefix, and predicts two after the last token
        # that it sees.
        ahead = torch.where(inputs.is_mask, inputs.pos - inputs.prefix + 2, 1)
        at = (inputs.noisy_weight + inputs.clean_weight).nonzero(as_tuple=True)
        with processes.arithmetic_in(recipe.dtype, model.device):
            hidden = hidden_states(model, inputs)[at]
            best = model.in_chunks(lambda some: model.logits(some).argmax(-1), hidden)
        is_right = (best == inputs.target[at]).float()
        right += torch.bincount(ahead[at], is_right, minlength=bins).cpu()
        count += torch.bincount(ahead[at], minlength=bins).cpu()
    shares = (right / count)[count > 0]  # 0 ahead is empty, and the farthest may be
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


def train(
    model: Qwen2, held_out: list[Streams], run: Run, recipe: Recipe, backward=add_gradients
) -> int:
    """Train to the end and return 0, or return the number of the signal that stopped the run.

    held_out: forwards to measure `look_ahead` on. backward: apps/low_rank.py has another.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    steps_done = run.resume(model, optimizer)
    second_losses = []
    for step in range(steps_done + 1, recipe.steps + 1):
        began = time.perf_counter()
        examples = run.data.next_batch(recipe.batch)
        own_losses = backward(model, examples, recipe)  # this process's part
        norm = processes.clip_gradients(model, CLIP)
        if not math.isfinite(norm):
            raise UserError(f"step {step}: the gradient's norm is {norm}; try a smaller --lr")
        # The rate at the middle of the step: neither the first nor the last step has rate 0.
        rate = learning_rate(recipe.lr, (step - 0.5) / recipe.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()

        noisy, second = processes.total(own_losses).tolist()
        second_losses.append(second)
        num_tokens = sum(len(example.tokens) for example in examples)
        record = {
            "step": step,
            "noisy": round(noisy, 5),  # 0 for --objective sft
            run.second_loss: round(second, 5),  # "clean"; in apps/low_rank.py "drift"
            "lr": rate,
            "grad_norm": round(norm, 4),
            "tokens_per_s": round(num_tokens / (time.perf_counter() - began)),
            "memory_gib": round(processes.peak_memory(model.device), 2),
        }
        is_last = step == recipe.steps
        is_due = is_last or step % recipe.save_every == 0
        if is_due and held_out:
            record["look_ahead"] = look_ahead(model, held_out, recipe)
        run.log(record)

        stop = processes.largest(run.stop_signal.number)  # 0 if none came to any process
        if is_due or stop:
            run.save(model, optimizer)
        if stop and not is_last:  # after the last step the run is complete
            return stop
    last = second_losses[-math.ceil(recipe.steps / 10) :]
    if last:  # a run that was complete already made no step
        name = run.second_loss
        processes.say(f"{name}, mean of the last {len(last)} steps: {sum(last) / len(last):.3f}")
    return 0


# ------------------------------------------------------------------------------------ command line


def training_parser(description: str) -> Parser:
    """The options of every way to train: here, and in apps/low_rank.py."""
    parser = Parser(description, usage="%(prog)s --data FILE [option ...]")
    add = parser.add_argument
    add("--data", type=Path, required=True, help='JSONL: {"messages"} or {"prompt", "response"}')
    start = "to start from; without weights: random ones"
    parser.add_model("Qwen/Qwen2.5-0.5B-Instruct", start, dtypes=("float32", "bfloat16"))
    add("--out", type=out_directory, default="out", help="the model (bfloat16), log, checkpoints/")
    add("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    add("--block", type=number(int, 1, 999), default=4, help="B, masks in a block")
    add("--epochs", type=number(int, 1), default=5, help="passes over the data")
    add("--steps", type=number(int, 1), help="number of steps, instead of --epochs")
    add("--batch", type=number(int, 1, 10**6), default=128, help="examples per step (paper: 384)")
    help = "positions per forward (default: 1024 on a CPU, 4096 on a GPU)"
    add("--batch-tokens", type=number(int, 1), help=help)
    add("--checkpoint-layers", action="store_true", help="less memory: activations computed twice")
    add("--lr", type=number(float, 0, 1000), default=5e-6, help="peak learning rate")
    add("--max-length", type=number(int, 1), default=512, help="the rest of an example is cut")
    add("--save-every", type=number(int, 1), default=500, help="steps between checkpoints")
    add("--seed", type=number(int, 0, 2**62), default=0, help="for shuffling, new weights")
    return parser


def make_parser() -> Parser:
    parser = training_parser("Train a Qwen2.5 to predict several tokens per forward (MARS).")
    add = parser.add_argument
    add("--objective", choices=("mars", "sft"), default="mars", help="sft is stage 1, mars stage 2")
    return parser


def open_model(args: argparse.Namespace, device: torch.device) -> tuple[Qwen2, Chat]:
    """The model to train, in float32; with random weights if its directory has none."""
    directory = locate(args.model)
    if any(directory.glob("model*.safetensors*")):
        model, chat = load(args.model, device)
        model.requires_grad_()
    else:
        config, _ = read_config(directory)
        model = initialize(config, args.seed)
        chat = Chat(directory)
        add_mask_token(model, chat)
        model.to(device)
        text = "has no weights (model*.safetensors): training begins with random ones"
        processes.say(f"{args.model}: {text}")
    positions = model.config.max_position_embeddings
    if args.max_length > positions:
        raise UserError(f"--max-length {args.max_length}: the model has {positions} positions")
    return model, chat


def packed_width(model: Qwen2, longest: int) -> int | None:
    """The width of packed rows. None: no packing, for dense attention costs the width's square."""
    if not can_use_flex(model):
        return None
    return round_up(3 * longest // 2, 32)  # room for the longest example and a short one


def prepare(args: argparse.Namespace, block: int | None) -> tuple[Qwen2, Recipe, Run]:
    """Everything before the first step; apps/low_rank.py calls it, too.

    The model's config gets the block, B.
    """
    device, dtype = find_device(args.device, args.dtype)
    if device.type == "cpu":
        cpu.return_freed_memory()
    if dist.is_torchelastic_launched():
        device = processes.join(device)
    rows = JsonlFile(args.data)  # first: a model may take long to download
    progress = find_progress(args, rows)
    model, chat = open_model(args, device)
    model.config.block = block
    data = Dataset(rows, chat, model.config.eos_token_id, args.max_length, args.seed)
    num_streams = 1 if block is None else 2
    batch = min(args.batch, data.num_usable)  # more would be the same rows again
    recipe = Recipe(
        mask_id=model.config.mask_token_id,
        block=block,
        lr=args.lr,
        batch=batch,
        steps=args.steps or math.ceil(args.epochs * data.num_usable / batch),
        save_every=args.save_every,
        # On a CPU more positions are no faster; each takes 1.5 MB in SmolLM2-135M.
        batch_tokens=args.batch_tokens or (1024 if device.type == "cpu" else 4096),
        row_width=packed_width(model, num_streams * args.max_length),
        dtype=dtype,
    )
    announce(args, model, recipe, data)
    if args.checkpoint_layers:
        processes.recompute_layers(model)
    return model, recipe, Run(args.out, progress, data, recipe.steps, GENERATE)


def announce(args: argparse.Namespace, model: Qwen2, recipe: Recipe, data: Dataset) -> None:
    """Say what is trained, on what, and for how long."""
    millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    machine = f"{processes.rank_and_size()[1]} x {model.device}"
    processes.say(f"{args.model}: {millions:.1f} M parameters on {machine}")
    tokens = recipe.batch * sum(len(example.tokens) for example in data.first) / len(data.first)
    size = f"{recipe.batch} examples, about {tokens:,.0f} tokens"
    processes.say(f"{data.summary()}; {recipe.steps} steps of {size}")
    if len(data.held_out) < 10:
        processes.say("fewer than ten rows held out: look-ahead is measured roughly, or not at all")
    if recipe.steps < 50 and not args.steps:
        processes.say("fewer than 50 steps: enough if all responses are alike; else raise --epochs")


def say_what_next(args: argparse.Namespace, model: Qwen2, recipe: Recipe, run: Run) -> None:
    """Say how to go on after the last step, and show how the saved model answers a row's prompt."""
    out = args.out
    megabytes = sum(path.stat().st_size for path in out.glob("checkpoints/*/*")) / 1e6
    processes.say(f"{out}/checkpoints ({megabytes:,.0f} MB) is for --resume: it may be deleted")
    if recipe.block is None:
        words = f"--model {out} --data {args.data} --out {out}-mars"
        processes.say(f"the next stage: python train.py {words}")
    processes.say(decode_command(out))
    if dist.is_initialized():  # the others would wait for the process that answers
        return
    example = (run.data.held_out + run.data.first)[0]
    prompt = example.tokens[: example.prompt_length]
    saved, chat = load(str(out), model.device, recipe.dtype)
    tau = 1 if recipe.block is None else None  # without masks AR, else lossless
    [sequence] = generate(saved, [prompt], tau=tau, max_new=args.max_length - len(prompt))
    figures = f"{len(sequence.tokens)} tokens in {sequence.forwards} forwards"
    processes.say(f"{chat.decode(sequence.token_ids)}\n({figures})")


def main() -> None:
    args = make_parser().parse_args()
    block = args.block if args.objective == "mars" else None
    model, recipe, run = prepare(args, block)
    held_out = forward_inputs(run.data.held_out, recipe)  # every process measures all of it
    if dist.is_initialized():
        processes.shard(model, recipe.dtype)
    with run:
        stop = train(model, held_out, run, recipe)
    if not stop:
        say_what_next(args, model, recipe, run)
    if dist.is_initialized():
        dist.barrier()  # the process that hosts the rendezvous must not end first
        dist.destroy_process_group()  # else gloo may abort a process that ends
    if stop:
        sys.exit(128 + stop)


MEMORY_HINT = "use a smaller --batch-tokens, or --checkpoint-layers"

if __name__ == "__main__":
    run_main(main, out_of_memory=MEMORY_HINT)
