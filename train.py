"""Train a Qwen2.5 to predict several tokens per forward: MARS (arXiv 2604.07023).

    python train.py --objective sft --data dolci.jsonl --out sft    # stage 1: ordinary fine-tuning
    python train.py --model sft --data dolci.jsonl                  # stage 2: the same, with masks

Two streams share one causal forward. The clean stream is the ordinary sequence. The noisy stream
repeats the response with every token replaced by `<|mask|>`, and sees what a decoder will see: the
clean tokens before its block, and the masks of its block so far. Logits stay right-shifted in both.

What is unusual here:
  * the noisy stream holds response positions only, [clean ; masks]: the paper's loss for less work,
    since its prompt positions would be copies of the clean ones;
  * the block grid has a random phase per example and epoch, so that every token is learnt at every
    look-ahead (`--block-phase fixed` is the paper's grid);
  * every target carries its weight in the whole step: cutting it into parts changes nothing;
  * shuffle and phases are functions of (seed, epoch, row): there is no random state to save.
"""

import argparse
import itertools
import json
import math
import random
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
    place,
    read_config,
    run,
    save,
    visible,
)

try:
    import resource
except ImportError:  # on Windows
    resource = None

# --------------------------------------------------------------------------------------------- data


class Rows:
    """A JSONL file by byte offset: flat memory, whatever its size. Non-JSON raises UserError."""

    def __init__(self, path: Path):
        self.path, self.offsets, offset = path, array("Q"), 0
        try:
            self.file = open(path, "rb")
            self.file.seek(0)  # rows are read in any order, which a pipe cannot give
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
        for number, line in enumerate(tqdm(self.file, desc=str(path), leave=False, delay=2), 1):
            if line.strip():
                self._parse(line, number)
                self.offsets.append(offset)
            offset += len(line)
        if not self.offsets:
            raise UserError(f"{path}: empty; expected one JSON object per line")

    def _parse(self, line: bytes, number: int) -> dict:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.path}:{number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise UserError(f"{self.path}:{number}: not a JSON object but {str(row)[:40]}")
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
    """The last assistant turn is the response, all before it the prompt (as in the paper)."""
    messages = row.get("messages")
    if messages is None and {"prompt", "response"} <= row.keys():
        pairs = {"user": row["prompt"], "assistant": row["response"]}
        messages = [{"role": role, "content": text} for role, text in pairs.items()]
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise Unusable("neither messages nor prompt and response")
    while messages and messages[-1].get("role") != "assistant":
        messages = messages[:-1]
    if not messages:
        raise Unusable("no assistant turn")
    if not all(isinstance(m.get("content"), str) for m in messages):
        raise Unusable("content that is not text")
    try:
        text = chat.prompt(messages[:-1])
        prompt, response = chat.encode(text), chat.encode(messages[-1]["content"])
    except UserError:
        raise Unusable("refused by the chat template or the tokenizer") from None
    if not all(m["content"].strip() in text for m in messages[:-1]):
        raise Unusable("a turn that the chat template drops")  # Qwen2.5's does so with some roles
    if not response:
        raise Unusable("an empty response")
    if chat.mask_id in response:
        raise Unusable("a mask token in the response")  # it can never be predicted
    if not 0 < len(prompt) < max_length:
        raise Unusable("prompt longer than --max-length")
    tokens = prompt + response + [eos]
    return Example(tokens[:max_length], len(prompt))  # a cut response loses its end-of-turn target


def shuffled(count: int, *key: object) -> array:
    order = array("Q", range(count))
    random.Random(str(key)).shuffle(order)
    return order


class Dataset:
    """Examples of a JSONL file: a held-out slice, and an endless shuffled stream of the others."""

    def __init__(self, rows: Rows, chat: Chat, eos: int, phases: int, args: argparse.Namespace):
        self.rows, self.chat, self.eos, self.phases = rows, chat, eos, phases
        self.max_length, self.seed = args.max_length, args.seed
        order = shuffled(len(rows), self.seed)
        held_out = min(args.held_out, len(rows) // 10)
        self.training, self.consumed = order[held_out:], 0  # the skipped rows are consumed too
        self.skipped = Counter()
        self.held_out = [e for i in order[:held_out] if (e := self.example(i, -1))]

    def example(self, index: int, epoch: int) -> Example | None:
        try:
            example = encode(self.rows[index], self.chat, self.eos, self.max_length)
        except Unusable as reason:
            self.skipped[str(reason)] += epoch <= 0  # once per row, however many epochs
            return None
        example.phase = random.Random(f"{self.seed} {epoch} {index}").randrange(self.phases)
        return example

    def reasons(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in self.skipped.most_common())

    def stream(self) -> Iterator[Example]:
        usable = False
        while True:
            epoch, at = divmod(self.consumed, len(self.training))
            if at == 0:
                order = shuffled(len(self.training), self.seed, epoch)
            self.consumed += 1
            example = self.example(self.training[order[at]], epoch)
            if example:
                usable = True
                yield example
            elif not usable and self.consumed >= len(self.training):
                raise UserError(f"{self.rows.path}: no usable row: {self.reasons()}")


# --------------------------------------------------------------------------------------------- loss


class Batch(NamedTuple):
    """A micro-batch, every field (B, T), or one example before padding, every field (T)."""

    tokens: Tensor
    pos: Tensor
    start: Tensor  # see `visible` in model.py
    doc: Tensor
    target: Tensor  # the token that follows
    noisy: Tensor  # weight of this position's cross-entropy in the noisy loss
    clean: Tensor  # and in the clean loss


PADDING = Batch(tokens=0, pos=0, start=1, doc=1, target=0, noisy=0.0, clean=0.0)  # its own document


def lay_out(example: Example, block_size: int | None, mask_id: int, weight: float) -> Batch:
    """One example as [clean ; masks]; without a block size, as the clean stream alone.

    Clean position p predicts token p + 1, and so does the mask at p. The last token predicts
    nothing and is in neither stream. The last of the prompt, which is never masked, predicts the
    first of the response: that cross-entropy counts in both sums, as in the paper's code.
    """
    x, prompt = torch.tensor(example.tokens), example.prompt
    pos = torch.arange(len(x) - 1)
    clean = weight * (pos >= prompt - 1)
    stream = Batch(x[:-1], pos, pos + 1, 0 * pos, x[1:], weight * (pos == prompt - 1), clean)
    if not block_size:
        return stream._replace(noisy=0 * clean)
    pos = pos[prompt:]
    block_start = (pos + example.phase) // block_size * block_size - example.phase
    start = block_start.clamp(min=prompt)  # or the block where the prompt ends would not see it
    doc, noisy = torch.zeros_like(pos), torch.full(pos.shape, weight)
    masks = Batch(doc + mask_id, pos, start, doc, x[prompt + 1 :], noisy, 0 * noisy)
    return Batch(*map(torch.cat, zip(stream, masks)))


def collate(layouts: list[Batch], device) -> Batch:
    """Pad to a multiple of 32: with ever-new shapes bf16 on a CPU is several times slower."""
    length = -(-max(len(layout.tokens) for layout in layouts) // 32) * 32

    def pad(fields: tuple[Tensor, ...], value: float) -> Tensor:
        return torch.stack([F.pad(f, (0, length - len(f)), value=value) for f in fields]).to(device)

    return Batch(*map(pad, zip(*layouts), PADDING))


def target_weights(examples: list[Example], normalization: str) -> list[float]:
    """Weight of each example's targets in the WHOLE step, however it is cut into micro-batches.

    sequence: the mean over an example's targets, then over examples (the paper's); token: the mean
    over all targets.
    """
    if normalization == "token":
        return [1 / sum(e.targets for e in examples)] * len(examples)
    return [1 / (e.targets * len(examples)) for e in examples]


def hidden_states(model: Qwen2, batch: Batch) -> Tensor:
    """(B, T, D), under the mask rule on all pairs of positions."""
    queries = (field[:, None, :, None] for field in (batch.pos, batch.start, batch.doc))
    keys = (field[:, None, None, :] for field in (batch.pos, batch.start, batch.doc))
    return model(batch.tokens, batch.pos, visible(*queries, *keys))


def losses(model: Qwen2, batch: Batch, distill: bool = False) -> tuple[Tensor, Tensor]:
    """(noisy, clean): the weighted sums of cross-entropies that make the paper's loss.

    distill: a mask learns the distribution that the clean stream has for its token (and that is
    already computed) instead of the one token that was drawn from it: what the model itself would
    say is what decoding asks of a guess.
    """
    at = (batch.noisy + batch.clean).nonzero(as_tuple=True)
    logits = model.logits(hidden_states(model, batch)[at])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # not in bfloat16
    cross_entropy = F.cross_entropy(logits, batch.target[at], reduction="none")
    if distill:
        row = torch.empty_like(batch.tokens)  # of `logits`, by position in the batch
        row[at] = torch.arange(len(logits), device=logits.device)
        twin = row[at[0], batch.pos[at]]  # the clean stream comes first: its columns are positions
        teacher = logits.detach()[twin].softmax(-1)
        log_probs = logits.log_softmax(-1).clamp(min=-1e4)  # 0 x -inf would be NaN
        is_mask = (batch.start <= batch.pos)[at]
        cross_entropy = torch.where(is_mask, -(teacher * log_probs).sum(-1), cross_entropy)
    return (cross_entropy * batch.noisy[at]).sum(), (cross_entropy * batch.clean[at]).sum()


@torch.no_grad()
def look_ahead(model: Qwen2, examples: list[Example], block_size: int | None) -> list[float]:
    """Share of tokens guessed right 1, 2, ... B + 1 tokens ahead of the last real one.

    Look-ahead 1 is the clean stream, the others are the masks of a window. With g_k these shares, a
    forward would yield some 1 + g_2 + g_2 g_3 + ... tokens if every right guess were accepted.
    """
    bins = (block_size or 0) + 2
    right, count = torch.zeros(2, bins).double()
    mask_id = model.config.mask_token_id
    for example in examples:
        batch = collate([lay_out(example, block_size, mask_id, 1.0)], model.device)
        ahead = torch.where(batch.start > batch.pos, 1, batch.pos - batch.start + 2)
        at = (batch.noisy + batch.clean).nonzero(as_tuple=True)
        hit = model.logits(hidden_states(model, batch)[at]).argmax(-1) == batch.target[at]
        right += torch.bincount(ahead[at], hit.float(), minlength=bins).cpu()
        count += torch.bincount(ahead[at], minlength=bins).cpu()
    return (right / count.clamp(min=1))[1:].tolist()


# ----------------------------------------------------------------------------------------- training


def learning_rate(peak: float, progress: float, warmup: float) -> float:
    """Linear warm-up, then a cosine to zero; progress and warmup are shares of the whole run."""
    if progress < warmup:
        return peak * progress / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


def peak_memory(device: torch.device) -> float:
    """GiB: of the GPU where there is one, else of this process (0 where that is not known)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if resource is None:
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
POSTFIX = ("step", "noisy", "clean", "tokens_per_s")


class Trainer:
    """One run: the model, its data, the optimizer, and log.jsonl with a line per step."""

    def __init__(self, model: Qwen2, chat: Chat, data: Dataset, dtype, args: argparse.Namespace):
        self.model, self.chat, self.data, self.args = model, chat, data, args
        self.block_size = model.config.block_size  # None: the clean stream alone
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        autocast = dtype == torch.bfloat16  # of the arithmetic; the weights stay float32
        self.autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=autocast)
        self.steps, self.progress_before, self.saved = 0, 0.0, "no model yet"

    def progress(self) -> float:
        """Share of the run that is done: of --steps, or else of the rows of all epochs."""
        if self.args.steps:
            return self.steps / self.args.steps
        return self.data.consumed / (self.args.epochs * len(self.data.training))

    def step(self, examples: list[Example]) -> dict[str, float]:
        """One update from the examples of a global step; returns what it measured."""
        args, model = self.args, self.model
        examples = sorted(examples, key=lambda e: len(e.tokens))  # alike lengths, little padding
        weights = target_weights(examples, args.normalization)
        mask_id, sums = model.config.mask_token_id, torch.zeros(2, device=model.device)
        for i in range(0, len(examples), args.micro_batch):
            part = zip(examples[i : i + args.micro_batch], weights[i:])
            layouts = [lay_out(example, self.block_size, mask_id, w) for example, w in part]
            batch = collate(layouts, model.device)
            with self.autocast:
                noisy, clean = losses(model, batch, args.distill)
            (noisy + args.ar_weight * clean if self.block_size else clean).backward()
            sums += torch.stack([noisy, clean]).detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        before, self.steps = self.progress_before, self.steps + 1
        self.progress_before = self.progress()
        rate = learning_rate(args.lr, (before + self.progress_before) / 2, args.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        noisy, clean = sums.tolist()
        record = {"noisy": round(noisy, 5)} if self.block_size else {}
        return {**record, "clean": round(clean, 5), "lr": rate, "grad_norm": round(norm.item(), 4)}

    def checkpoint(self) -> dict[str, list[float]]:
        """Save, and measure the held-out examples."""
        save(self.model, self.chat, self.args.out)
        self.saved = f"the model of step {self.steps}"
        if not self.data.held_out:
            return {}
        with self.autocast:
            right = look_ahead(self.model, self.data.held_out, self.block_size)
        shares = "  ".join(f"{share:.3f}" for share in right)
        tqdm.write(f"step {self.steps}: right 1, 2, ... tokens ahead: {shares}")
        return {"look_ahead": [round(share, 4) for share in right]}

    def run(self) -> None:
        args, stream = self.args, self.data.stream()
        stream = itertools.chain([next(stream)], stream)  # no usable row: stop before any file
        try:
            args.out.mkdir(parents=True, exist_ok=True)
            log = open(args.out / "log.jsonl", "w", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--out {args.out}: cannot be written to ({error.strerror})") from None
        with log, tqdm(total=100, unit="%", desc=args.objective, bar_format=BAR) as bar:
            try:
                while self.steps == 0 or self.progress() < 1:
                    record = self.timed_step([next(stream) for _ in range(args.batch)])
                    if self.steps % args.save_every == 0 or self.progress() >= 1:
                        record |= self.checkpoint()
                    log.write(json.dumps(record) + "\n")
                    log.flush()
                    bar.set_postfix({k: v for k, v in record.items() if k in POSTFIX})
                    bar.update(100 * min(1.0, self.progress()) - bar.n)
            finally:  # after Ctrl-C too
                bar.close()
                if self.data.skipped:
                    print(f"skipped rows: {self.data.reasons()}")
                print(f"{self.steps} steps; {args.out} holds {self.saved}")

    def timed_step(self, examples: list[Example]) -> dict:
        began = time.perf_counter()
        record = self.step(examples)
        seconds = time.perf_counter() - began
        record["tokens_per_s"] = round(sum(len(e.tokens) for e in examples) / seconds)
        record["memory_gib"] = round(peak_memory(self.model.device), 2)
        return {"step": self.steps, **record}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a Qwen2.5 checkpoint to predict several tokens per forward (MARS).",
        usage="%(prog)s --data FILE [option ...]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    # fmt: off
    add("--data", type=Path, required=True, help='JSONL: {"messages"} or {"prompt", "response"}')
    add("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="directory or hub id to start from")
    add("--from-scratch", action="store_true", help="use only its config and tokenizer")
    add("--out", type=Path, default="out", help="checkpoint (bfloat16) and log.jsonl, overwritten")
    add("--objective", choices=("mars", "sft"), default="mars", help="sft is stage 1, mars stage 2")
    add("--block", type=int, default=4, help="B, the number of masks in a window")
    add("--block-phase", choices=("random", "fixed"), default="random", help="fixed: the paper's")
    add("--ar-weight", type=float, default=1.0, help="weight of the clean loss")
    add("--distill", action="store_true", help="masks learn what the clean stream would say")
    add("--normalization", choices=("sequence", "token"), default="sequence", help="of the loss")
    add("--epochs", type=int, default=5, help="passes over the data")
    add("--steps", type=int, help="train for so many steps instead")
    add("--batch", type=int, default=128, help="examples per step (the paper: 384)")
    add("--micro-batch", type=int, default=16, help="examples per forward; changes only the memory")
    add("--lr", type=float, default=5e-6, help="peak learning rate")
    add("--warmup", type=float, default=0.03, help="share of the run in which the rate rises")
    add("--clip", type=float, default=1.0, help="largest gradient norm")
    add("--max-length", type=int, default=512, help="tokens per example; responses are cut there")
    add("--held-out", type=int, default=64, help="rows to measure on (at most a tenth of all)")
    add("--save-every", type=int, default=500, help="steps between checkpoints")
    add("--seed", type=int, default=0, help="of shuffling, block phases and fresh weights")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", choices=("float32", "bfloat16"), help="None: bfloat16 on cuda, else float32")
    # fmt: on
    args = parser.parse_args()
    least = dict.fromkeys(("block", "epochs", "steps", "batch", "micro_batch", "max_length"), 1)
    least |= {"save_every": 1, "held_out": 0, "lr": 0, "warmup": 0, "clip": 1e-6, "ar_weight": 0}
    below = {"warmup": 1, "lr": 1e3}
    for name, low in least.items():
        value, high = getattr(args, name), below.get(name, math.inf)
        if value is not None and not low <= value < high:
            option = "--" + name.replace("_", "-")
            upper = f" and below {high:g}" if high < math.inf else ""
            raise UserError(f"{option} {value}: must be at least {low}{upper}")
    return args


def main() -> None:
    args = parse_arguments()
    device, dtype = place(args.device, args.dtype)
    rows = Rows(args.data)
    if args.from_scratch:
        directory = locate(args.model)
        model, chat = initialize(read_config(directory), args.seed), Chat(directory)
        add_mask_token(model, chat)
        model.to(device)
    else:
        model, chat = load(args.model, device, torch.float32)
    model.config.block_size = args.block if args.objective == "mars" else None
    phases = args.block if args.block_phase == "random" else 1
    data = Dataset(rows, chat, model.config.eos_token_id[0], phases, args)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{args.model}: {size:.1f} M parameters on {device}; {args.data}: {len(rows)} rows")
    Trainer(model, chat, data, dtype, args).run()


if __name__ == "__main__":
    run(main)
