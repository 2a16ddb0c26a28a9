"""Train a Qwen2.5 to predict several tokens per forward: MARS (arXiv 2604.07023, section 3).

    python train.py --data dolci.jsonl                              # stage 2, on Qwen2.5-0.5B-Instruct
    python train.py --objective sft --data dolci.jsonl --out sft    # stage 1

Two streams share one causal forward. The clean stream is the ordinary sequence; the noisy stream repeats
the response with every token replaced by `<|mask|>`, and sees only what a decoder will see: the clean
tokens before its block, and the masks of its block so far. Logits stay right-shifted in both.

What is unusual here:
  * the noisy stream holds response positions only, [clean ; masks], which gives the paper's loss for less
    work: its prompt positions would be copies of the clean ones;
  * the block grid gets a random phase per example and epoch, so that every token is learnt at every
    look-ahead (`--block-phase fixed` is the paper's grid);
  * every target carries its weight in the global step, so that how a step is cut into micro-batches
    changes nothing;
  * shuffle and phases are functions of (seed, epoch, row): there is no random state to save.
"""

import argparse
import json
import math
import random
import resource
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from model import (
    Chat,
    Qwen2,
    UserError,
    add_mask_token,
    initialize,
    load,
    locate,
    pick_device,
    pick_dtype,
    read_config,
    run,
    save,
    visible,
)

# ----------------------------------------------------------------------------------------------- data


class Rows:
    """A JSONL file by byte offset: flat memory, whatever its size. A line that is not JSON is an error."""

    def __init__(self, path: Path):
        self.path, self.offsets, offset = path, array("Q"), 0
        try:
            self.file = open(path, "rb")
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        for number, line in enumerate(self.file, 1):
            if line.strip():
                self._parse(line, number)
                self.offsets.append(offset)
            offset += len(line)
        if not self.offsets:
            raise UserError(f"{path}: empty; expected one JSON object per line")

    def _parse(self, line: bytes, number: int) -> dict:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{self.path}:{number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise UserError(f"{self.path}:{number}: expected a JSON object, found {str(row)[:40]!r}")
        return row

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> dict:
        self.file.seek(self.offsets[index])
        return json.loads(self.file.readline())


class Unusable(Exception):
    """Why a row cannot be trained on; such rows are skipped and counted."""


@dataclass
class Example:
    tokens: list[int]  # prompt, response and, unless it was cut, the end-of-turn token
    prompt: int  # length of the prompt
    phase: int = 0  # of the block grid

    @property
    def targets(self) -> int:
        return len(self.tokens) - self.prompt


def encode(row: dict, chat: Chat, eos: int, max_length: int) -> Example:
    """The last assistant turn of a row as the response, all before it as the prompt (the paper's way)."""
    messages = row.get("messages")
    if messages is None and isinstance(row.get("prompt"), str):
        pairs = {"user": row["prompt"], "assistant": row.get("response")}
        messages = [{"role": role, "content": text} for role, text in pairs.items()]
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise Unusable("neither messages nor prompt and response")
    while messages and messages[-1].get("role") != "assistant":
        messages = messages[:-1]
    if not messages:
        raise Unusable("no assistant turn")
    if not all(isinstance(m.get("content"), str) for m in messages):
        raise Unusable("content that is not text")
    if not {m.get("role") for m in messages} <= chat.roles:
        raise Unusable("a role that the chat template drops")
    try:
        prompt = chat.encode(chat.prompt(messages[:-1]))
    except UserError:
        raise Unusable("refused by the chat template") from None
    if len(prompt) >= max_length:
        raise Unusable("prompt longer than --max-length")
    # A response that is cut loses its end-of-turn target with its tail.
    return Example((prompt + chat.encode(messages[-1]["content"]) + [eos])[:max_length], len(prompt))


def shuffled(count: int, *key: object) -> list[int]:
    order = list(range(count))
    random.Random(str(key)).shuffle(order)
    return order


class Dataset:
    """Examples of a JSONL file: a held-out slice, and an endless shuffled stream of all the others."""

    def __init__(self, rows: Rows, chat: Chat, eos: int, phases: int, args: argparse.Namespace):
        self.rows, self.chat, self.eos, self.phases = rows, chat, eos, phases
        self.max_length, self.seed = args.max_length, args.seed
        order = shuffled(len(rows), self.seed)
        held_out = min(args.held_out, len(rows) // 10)
        self.held_out, self.training = order[:held_out], order[held_out:]
        self.consumed = 0  # rows taken from the stream, the skipped ones too
        self.skipped = Counter()

    def example(self, index: int, epoch: int) -> Example | None:
        try:
            example = encode(self.rows[index], self.chat, self.eos, self.max_length)
        except Unusable as reason:
            self.skipped[str(reason)] += 1
            return None
        example.phase = random.Random(f"{self.seed} {epoch} {index}").randrange(self.phases)
        return example

    def stream(self) -> Iterator[Example]:
        while True:
            epoch, at = divmod(self.consumed, len(self.training))
            if at == 0:
                order = shuffled(len(self.training), self.seed, epoch)
            self.consumed += 1
            example = self.example(self.training[order[at]], epoch)
            if example:
                yield example
            elif sum(self.skipped.values()) == self.consumed >= len(self.training):
                raise UserError(f"{self.rows.path}: no usable row: {dict(self.skipped)}")


# ----------------------------------------------------------------------------------------------- loss


class Batch(NamedTuple):
    """A micro-batch, every field (B, T), or one example before padding, every field (T)."""

    tokens: Tensor
    pos: Tensor
    start: Tensor  # see `visible` in model.py
    doc: Tensor
    target: Tensor  # the token that follows
    noisy: Tensor  # weight of this position's cross-entropy in the noisy loss
    clean: Tensor  # and in the clean loss


PADDING = Batch(tokens=0, pos=0, start=1, doc=1, target=0, noisy=0.0, clean=0.0)  # a document of its own


def lay_out(example: Example, block_size: int | None, mask_id: int, weight: float) -> Batch:
    """One example as [clean ; masks]; without a block size, as the clean stream alone.

    Clean position p predicts token p + 1, and so does the mask at p; the last token predicts nothing and
    is in neither stream. The first response token is predicted by the last prompt token, which is never
    masked: its cross-entropy counts in both sums, as in the paper's code.
    """
    x, prompt = torch.tensor(example.tokens), example.prompt
    pos = torch.arange(len(x) - 1)
    clean = weight * (pos >= prompt - 1)
    stream = Batch(x[:-1], pos, pos + 1, 0 * pos, x[1:], weight * (pos == prompt - 1), clean)
    if not block_size:
        return stream._replace(noisy=0 * clean)
    pos = pos[prompt:]
    grid = (pos + example.phase) // block_size * block_size - example.phase
    start = grid.clamp(min=prompt)  # "blocks strictly before" would blind the block that the prompt ends in
    masks = Batch(
        torch.full_like(pos, mask_id), pos, start, 0 * pos, x[prompt + 1 :], weight + 0.0 * pos, 0.0 * pos
    )
    return Batch(*map(torch.cat, zip(stream, masks)))


def collate(layouts: list[Batch], device) -> Batch:
    """Pad to a multiple of 32: few distinct shapes, without which bf16 on a CPU is several times slower."""
    length = -(-max(len(layout.tokens) for layout in layouts) // 32) * 32

    def pad(fields: tuple[Tensor, ...], value: float) -> Tensor:
        return torch.stack([F.pad(f, (0, length - len(f)), value=value) for f in fields]).to(device)

    return Batch(*map(pad, zip(*layouts), PADDING))


def target_weights(examples: list[Example], normalization: str) -> list[float]:
    """Weight of each target of each example, over the WHOLE step, however it is cut into micro-batches.

    sequence: the mean over an example's targets, then over the examples (the paper); token: the mean over
    all targets.
    """
    if normalization == "token":
        return [1 / sum(e.targets for e in examples)] * len(examples)
    return [1 / (e.targets * len(examples)) for e in examples]


def hidden_states(model: Qwen2, batch: Batch) -> Tensor:
    """(B, T, D), under the mask rule on all pairs of positions."""
    queries = (field[:, None, :, None] for field in (batch.pos, batch.start, batch.doc))
    keys = (field[:, None, None, :] for field in (batch.pos, batch.start, batch.doc))
    return model(batch.tokens, batch.pos, visible(*queries, *keys))


def losses(model: Qwen2, batch: Batch) -> tuple[Tensor, Tensor]:
    """(noisy, clean): the two weighted sums of cross-entropies of section 3.3. Their sum is the loss."""
    at = (batch.noisy + batch.clean).nonzero(as_tuple=True)
    logits = model.logits(hidden_states(model, batch)[at]).float()
    cross_entropy = F.cross_entropy(logits, batch.target[at], reduction="none")
    return (cross_entropy * batch.noisy[at]).sum(), (cross_entropy * batch.clean[at]).sum()


@torch.no_grad()
def look_ahead(model: Qwen2, examples: list[Example], block_size: int, device) -> list[float]:
    """Share of tokens guessed right 1, 2, ... B + 1 tokens ahead of the last real one.

    Look-ahead 1 is the clean stream, 2 .. B + 1 are the masks of a window. With g_k these numbers, a
    forward yields up to about 1 + g_2 + g_2 g_3 + ... tokens.
    """
    right, count = torch.zeros(2, block_size + 2).double()
    for example in examples:
        batch = collate([lay_out(example, block_size, model.config.mask_token_id, 1.0)], device)
        ahead = torch.where(batch.start > batch.pos, 1, batch.pos - batch.start + 2)
        at = (batch.noisy + batch.clean).nonzero(as_tuple=True)
        hit = model.logits(hidden_states(model, batch)[at]).argmax(-1) == batch.target[at]
        right += torch.bincount(ahead[at], hit, minlength=block_size + 2).cpu()
        count += torch.bincount(ahead[at], minlength=block_size + 2).cpu()
    return [round(r / max(c, 1), 4) for r, c in zip(right.tolist()[1:], count.tolist()[1:])]


# --------------------------------------------------------------------------------------------- training


def learning_rate(peak: float, progress: float, warmup: float) -> float:
    """Linear warm-up, then a cosine to zero; progress and warmup are shares of the whole run."""
    if progress < warmup:
        return peak * progress / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


def peak_memory(device: torch.device) -> float:
    """GiB: of the GPU where there is one, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def train(model: Qwen2, chat: Chat, data: Dataset, args: argparse.Namespace) -> None:
    device, block_size = model.device, model.config.block_size if args.objective == "mars" else None
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=pick_dtype(args.dtype, device) == torch.bfloat16)
    total = args.epochs * len(data.training)
    if args.steps:
        total = min(total, args.steps * args.batch)
    held_out = [data.example(i, -1) for i in data.held_out]
    held_out = [example for example in held_out if example]
    data.skipped.clear()
    stream = data.stream()
    args.out.mkdir(parents=True, exist_ok=True)
    log = open(args.out / "log.jsonl", "a", encoding="utf-8")
    bar = tqdm(total=total, unit="ex", desc=args.objective)

    def checkpoint(record: dict) -> None:
        save(model, chat, args.out)
        if held_out:
            with autocast:
                record["look_ahead"] = look_ahead(model, held_out, model.config.block_size or 1, device)
            tqdm.write(f"step {step}: right by look-ahead: {record['look_ahead']}  -> {args.out}")

    step = 0
    while data.consumed < total:
        began = time.perf_counter()
        rate = learning_rate(args.lr, (data.consumed + args.batch) / total, args.warmup)
        examples = sorted((next(stream) for _ in range(args.batch)), key=lambda e: len(e.tokens))
        weights = target_weights(examples, args.normalization)
        layouts = [
            lay_out(e, block_size, model.config.mask_token_id, w) for e, w in zip(examples, weights)
        ]
        sums = torch.zeros(2, device=device)
        for i in range(0, len(layouts), args.micro_batch):
            batch = collate(layouts[i : i + args.micro_batch], device)
            with autocast:
                noisy, clean = losses(model, batch)
            loss = noisy + args.ar_weight * clean if block_size else clean
            loss.backward()
            sums += torch.stack([noisy, clean]).detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1

        noisy, clean = sums.tolist()  # waits for the device, so the clock below is honest
        seconds = time.perf_counter() - began
        record = {
            "step": step,
            "noisy": round(noisy, 5) if block_size else None,
            "clean": round(clean, 5),
            "lr": rate,
            "tokens_per_s": round(sum(len(e.tokens) for e in examples) / seconds),
            "grad_norm": round(norm.item(), 4),
            "memory_gib": round(peak_memory(device), 2),
        }
        if step % args.save_every == 0 or data.consumed >= total:
            checkpoint(record)
        log.write(json.dumps(record) + "\n")
        log.flush()
        bar.set_postfix(noisy=record["noisy"], clean=record["clean"], tok_s=record["tokens_per_s"])
        bar.update(min(data.consumed, total) - bar.n)
    bar.close()
    if data.skipped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in data.skipped.most_common())
        print(f"skipped {sum(data.skipped.values())} rows: {reasons}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a Qwen2.5 checkpoint to predict several tokens per forward (MARS).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help='JSONL: {"messages": [...]} or {"prompt", "response"}')
    add("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="directory or hub id to start from")
    add("--from-scratch", action="store_true", help="random weights: of --model only config and tokenizer")
    add("--out", type=Path, default=Path("out"), help="directory of the checkpoint and log.jsonl")
    add("--objective", choices=("mars", "sft"), default="mars", help="sft is stage 1, mars stage 2")
    add("--block", type=int, default=4, help="B, the number of masks per window")
    add("--block-phase", choices=("random", "fixed"), default="random", help="fixed: the paper's grid")
    add("--ar-weight", type=float, default=1.0, help="weight of the clean loss")
    add("--normalization", choices=("sequence", "token"), default="sequence", help="see target_weights")
    add("--epochs", type=int, default=5, help="passes over the data")
    add("--steps", type=int, help="stop (and end the cosine) after so many steps, if that is sooner")
    add("--batch", type=int, default=384, help="examples per step")
    add("--micro-batch", type=int, default=16, help="examples per forward; memory, not the result")
    add("--lr", type=float, default=5e-6, help="peak learning rate")
    add("--warmup", type=float, default=0.03, help="share of the run in which the rate rises")
    add("--clip", type=float, default=1.0, help="largest gradient norm")
    add("--max-length", type=int, default=512, help="tokens per example; responses are cut there")
    add("--held-out", type=int, default=64, help="rows kept for the look-ahead accuracy (10 %% at most)")
    add("--save-every", type=int, default=500, help="steps between checkpoints")
    add("--seed", type=int, default=0, help="of shuffling, block phases and fresh weights")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", choices=("float32", "bfloat16"), help="of the arithmetic; None is bfloat16 on cuda")
    args = parser.parse_args()
    for name in ("block", "epochs", "batch", "micro_batch", "max_length", "save_every"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    return args


def main() -> None:
    args = parse_arguments()
    device = pick_device(args.device)
    rows = Rows(args.data)
    if args.from_scratch:
        directory = locate(args.model)
        model, chat = initialize(read_config(directory), args.seed), Chat(directory)
        add_mask_token(model, chat)
        model.to(device)
    else:
        model, chat = load(args.model, device, torch.float32)
    if args.objective == "mars":
        model.config.block_size = args.block
    count = sum(p.numel() for p in model.parameters())
    print(f"{args.model}: {count / 1e6:.1f} M parameters on {device}; {args.data}: {len(rows)} rows")
    phases = args.block if args.block_phase == "random" else 1
    data = Dataset(rows, chat, model.config.eos_token_id[0], phases, args)
    train(model, chat, data, args)


if __name__ == "__main__":
    run(main)
