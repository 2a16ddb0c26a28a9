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
  * on a GPU examples are packed into rows, several to a row, and kept apart by the mask rule;
  * every target carries its weight in the whole step: how that is packed, cut into forwards and
    split among processes changes nothing;
  * shuffle and phases are functions of (seed, epoch, row): there is no random state to save, and
    a run that was killed goes on bit for bit (`--resume`).

Under torchrun the same loop shards the model and splits the rows of each step (FSDP2).
"""

import argparse
import contextlib
import functools
import json
import math
import os
import random
import shutil
import signal
import sys
import time
import warnings
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils.checkpoint import checkpoint as recompute  # in the backward pass
from tqdm import tqdm

from model import (
    LOGITS_AT_A_TIME,
    Chat,
    Config,
    Qwen2,
    UserError,
    add_mask_token,
    initialize,
    load,
    locate,
    place,
    read_config,
    read_json,
    replace,
    run,
    save,
    visible,
)

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is fine

# --------------------------------------------------------------------------------------------- data


OTHER_FORMATS = {b"\x1f\x8b": "gzip", b"PK\3\4": "zip", b"PAR1": "parquet", b"\x28\xb5\x2f": "zstd"}


class Rows:
    """A JSONL file by byte offset: flat memory, whatever its size. Non-JSON raises UserError."""

    def __init__(self, path: Path):
        self.path, self.offsets, offset = path, array("Q"), 0
        try:
            self.file = open(path, "rb")
            self.file.seek(0)  # rows are read in any order, which a pipe cannot give
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
        for magic, name in OTHER_FORMATS.items():
            if self.file.peek(4).startswith(magic):
                raise UserError(f"{path}: is {name}, not JSONL; unpack or convert it first")
        for number, line in enumerate(
            tqdm(self.file, desc=str(path), leave=False, delay=2, disable=not leads()), 1
        ):
            if line.strip():
                self._parse(line, number)
                self.offsets.append(offset)
            offset += len(line)
        self.size = offset
        if not self.offsets:
            raise UserError(f"{path}: empty; expected one JSON object per line")

    def _parse(self, line: bytes, number: int | str) -> dict:
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
        return self._parse(self.file.readline(), f"byte {self.offsets[index]}, changed meanwhile")


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
    if any(m.get("function_calls") or m.get("tool_calls") for m in messages):
        raise Unusable("a tool call")  # which is not in the content: the text would lack it
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
    if {chat.mask_id, eos} & set(response):  # which can never, or not yet, be predicted
        raise Unusable("a mask or end-of-turn token in the response")
    if not 0 < len(prompt) < max_length:
        raise Unusable("prompt longer than --max-length")
    tokens = prompt + response + [eos]
    return Example(tokens[:max_length], len(prompt))  # a cut response loses its end-of-turn target


def shuffled(count: int, *key: object) -> array:
    order = array("Q", range(count))
    random.Random(str(key)).shuffle(order)
    return order


class Step(NamedTuple):
    """What one step trains on, and how far the data is consumed then."""

    examples: list[Example]
    consumed: int  # rows, the skipped ones too
    skipped: dict[str, int]


class Dataset:
    """Examples of a JSONL file: a held-out slice, and an endless shuffled stream of the others."""

    def __init__(self, rows: Rows, chat: Chat, eos: int, phases: int, args: argparse.Namespace):
        self.rows, self.chat, self.eos, self.phases = rows, chat, eos, phases
        self.max_length, self.seed = args.max_length, args.seed
        order = shuffled(len(rows), self.seed)
        held_out = min(args.held_out, len(rows) // 10)
        self.training, self.skipped = order[held_out:], Counter()
        self.held_out = [e for i in order[:held_out] if (e := self.example(i, -1))]

    def example(self, index: int, epoch: int) -> Example | None:
        try:
            example = encode(self.rows[index], self.chat, self.eos, self.max_length)
        except Unusable as reason:
            self.skipped[str(reason)] += epoch <= 0  # once per row, however many epochs
            return None
        example.phase = random.Random(f"{self.seed} {epoch} {index}").randrange(self.phases)
        return example

    def steps(self, batch: int, consumed: int = 0) -> Iterator[Step]:
        """Steps of `batch` examples for ever, from the row on where a step left off."""
        examples, fruitless, order_of = [], 0, None
        while True:
            epoch, at = divmod(consumed, len(self.training))
            if epoch != order_of:
                order, order_of = shuffled(len(self.training), self.seed, epoch), epoch
            example = self.example(self.training[order[at]], epoch)
            consumed, fruitless = consumed + 1, 0 if example else fruitless + 1
            if fruitless == len(self.training):
                raise UserError(f"{self.rows.path}: no usable row: {reasons(self.skipped)}")
            examples += [example] if example else []
            if len(examples) == batch:
                yield Step(examples, consumed, dict(self.skipped))
                examples = []


def reasons(skipped: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in Counter(skipped).most_common())


# --------------------------------------------------------------------------------------------- loss


class Batch(NamedTuple):
    """The positions of one forward, every field (B, T); or of one example, every field (T)."""

    tokens: Tensor
    pos: Tensor
    start: Tensor  # see `visible` in model.py
    doc: Tensor
    target: Tensor  # the token that follows
    noisy: Tensor  # weight of this position's cross-entropy in the noisy loss
    clean: Tensor  # and in the clean loss
    back: Tensor  # of a mask: so many columns before it stands the clean token of its position


PADDING = Batch(tokens=0, pos=0, start=1, doc=-1, target=0, noisy=0.0, clean=0.0, back=0)


def stream_length(example: Example, block_size: int | None) -> int:
    """Positions of both streams. The last token, which predicts nothing, is in neither."""
    return len(example.tokens) - 1 + (example.targets - 1 if block_size else 0)


def lay_out(example: Example, block_size: int | None, mask_id: int, weight: float, doc=0) -> Batch:
    """One example as [clean ; masks]; without a block size, as the clean stream alone.

    Clean position p predicts token p + 1, and so does the mask at p. The last of the prompt, which
    is never masked, predicts the first of the response: that cross-entropy counts in both sums, as
    in the paper's code.
    """
    x, prompt = torch.tensor(example.tokens), example.prompt
    pos = torch.arange(len(x) - 1)
    doc, clean, first = 0 * pos + doc, weight * (pos >= prompt - 1), weight * (pos == prompt - 1)
    stream = Batch(x[:-1], pos, pos + 1, doc, x[1:], first, clean, 0 * pos)
    if not block_size:
        return stream._replace(noisy=0 * clean)
    pos, doc, target = pos[prompt:], doc[prompt:], x[prompt + 1 :]
    block_start = (pos + example.phase) // block_size * block_size - example.phase
    start = block_start.clamp(min=prompt)  # or the block where the prompt ends would not see it
    noisy, back = torch.full(pos.shape, weight), torch.full_like(pos, len(pos))
    masks = Batch(0 * pos + mask_id, pos, start, doc, target, noisy, 0 * noisy, back)
    return Batch(*map(torch.cat, zip(stream, masks)))


def pack(lengths: list[int], width: int) -> list[list[int]]:
    """Which examples share a row of `width` positions: the longest first, each where it fits best.

    (Best-fit decreasing, a classic of bin packing: at most 11/9 of the fewest rows there could be.)
    """
    rows, free = [], []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = [row for row in range(len(rows)) if free[row] >= lengths[i]]
        row = min(fits, key=free.__getitem__, default=len(rows))
        if row == len(rows):
            rows.append([])
            free.append(width)
        rows[row].append(i)
        free[row] -= lengths[i]
    return rows


def collate(rows: list[list[Batch]], width: int) -> Batch:
    """Each row's examples, one behind the other, and padding, which is a document of its own."""
    filled = []
    for row in rows:
        rest = width - sum(len(layout.tokens) for layout in row)
        padding = Batch(*(torch.full((rest,), value) for value in PADDING))
        filled.append(Batch(*map(torch.cat, zip(*row, padding))))
    return Batch(*map(torch.stack, zip(*filled)))


def target_weights(examples: list[Example], normalization: str) -> list[float]:
    """Weight of each example's targets in the WHOLE step, however it is packed and split.

    sequence: the mean over an example's targets, then over examples (the paper's); token: the mean
    over all targets.
    """
    if normalization == "token":
        return [1 / sum(e.targets for e in examples)] * len(examples)
    return [1 / (e.targets * len(examples)) for e in examples]


def row_width(longest: int) -> int:
    """Room for the longest example and a short one beside it, in a multiple of 32: few shapes."""
    return -(-3 * longest // 64) * 32


def alike(lengths: list[int], positions: int) -> list[tuple[list[int], int]]:
    """Examples of like length, the longest first, and the width that each of a group gets.

    A group has room in so many positions, and none of it is much shorter than its longest.
    """
    groups = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        group, width = groups[-1] if groups else ([], 0)
        if (len(group) + 1) * width > positions or lengths[i] < 7 / 8 * width - 32 or not group:
            groups.append(([], -(-lengths[i] // 32) * 32))
        groups[-1][0].append(i)
    return groups


def batches(
    examples: list[Example], config: Config, args: argparse.Namespace, rank=0, size=1, longest=0
) -> list[Batch]:
    """The forwards of process `rank` of `size`, as many in every process.

    Given `longest`, examples are packed into rows, and all forwards of all steps whose examples are
    no longer have one shape. Else each has a row of its own, beside others of like length.
    """
    block_size, weights = config.block_size, target_weights(examples, args.normalization)
    lengths = [stream_length(example, block_size) for example in examples]
    if longest:
        width = row_width(longest)
        rows, height = pack(lengths, width), max(1, args.batch_tokens // width)
        rows += [[]] * (-len(rows) % (size * height))
        rows = rows[rank::size]
        forwards = [(rows[at : at + height], width) for at in range(0, len(rows), height)]
    else:
        groups = alike(lengths, min(args.batch_tokens, sum(lengths) // size))
        groups += [([], 32)] * (-len(groups) % size)
        forwards = [([[i] for i in some] or [[]], width) for some, width in groups[rank::size]]

    def row(of: list[int]) -> list[Batch]:
        mask_id = config.mask_token_id
        return [lay_out(examples[i], block_size, mask_id, weights[i], n) for n, i in enumerate(of)]

    return [collate([row(of) for of in rows], width) for rows, width in forwards]


def dense_mask(batch: Batch) -> Tensor:
    """`visible` on all pairs of positions: (B, 1, T, T)."""
    fields = (batch.pos, batch.start, batch.doc)
    queries = (field[:, None, :, None] for field in fields)
    return visible(*queries, *(field[:, None, None, :] for field in fields))


def block_mask(batch: Batch) -> BlockMask:
    """The same for FlexAttention, which skips the pairs of blocks where nothing is visible."""
    pos, start, doc = batch.pos, batch.start, batch.doc

    def mask_mod(b, head, q, k):
        return visible(pos[b, q], start[b, q], doc[b, q], pos[b, k], start[b, k], doc[b, k])

    B, T = pos.shape
    return create_block_mask(mask_mod, B, None, T, T, device=pos.device)


def hidden_states(model: Qwen2, batch: Batch) -> Tensor:
    """(B, T, D); the mask is made once for all layers."""
    flex = batch.tokens.is_cuda and model.config.head_dim >= 16  # it knows no smaller ones
    return model(batch.tokens, batch.pos, block_mask(batch) if flex else dense_mask(batch))


def wide_logits(model: Qwen2, hidden: Tensor) -> Tensor:
    logits = model.logits(hidden)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))  # no loss in bfloat16


def losses(model: Qwen2, batch: Batch, distill: bool = False) -> tuple[Tensor, Tensor]:
    """(noisy, clean): the weighted sums of cross-entropies that make the paper's loss.

    distill: a mask learns the distribution that the clean stream has for its token (detached)
    instead of the one token that was drawn from it: what the model itself would say is what
    decoding asks of a guess.
    """

    def cross_entropy(hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(wide_logits(model, hidden), target, reduction="none")

    def distilled(hidden: Tensor, target: Tensor, is_mask: Tensor, teacher: Tensor) -> Tensor:
        logits = wide_logits(model, hidden)
        hard = F.cross_entropy(logits, target, reduction="none")
        with torch.no_grad():
            probs = wide_logits(model, teacher[is_mask]).softmax(-1)
        log_probs = logits[is_mask].log_softmax(-1).clamp(min=-1e4)  # 0 x -inf would be NaN
        return hard.masked_scatter(is_mask, -(probs * log_probs).sum(-1))

    at = (batch.noisy + batch.clean).nonzero(as_tuple=True)
    hidden, target, back = hidden_states(model, batch), batch.target[at], batch.back[at]
    if distill:
        teacher = hidden.detach()[at[0], at[1] - back]
        each = model.in_chunks(distilled, hidden[at], target, back > 0, teacher)
    else:
        each = model.in_chunks(cross_entropy, hidden[at], target)
    return (each * batch.noisy[at]).sum(), (each * batch.clean[at]).sum()


@torch.no_grad()
def look_ahead(model: Qwen2, held_out: Iterable[Batch]) -> list[float]:
    """Share of tokens guessed right 1, 2, ... B + 1 tokens ahead of the last real one.

    Look-ahead 1 is the clean stream, the others are the masks of a window. With g_k these shares, a
    forward would yield some 1 + g_2 + g_2 g_3 + ... tokens if every right guess were accepted.
    """
    bins = (model.config.block_size or 0) + 2
    right, count = torch.zeros(2, bins).double()
    for batch in held_out:
        ahead = torch.where(batch.start > batch.pos, 1, batch.pos - batch.start + 2)
        at = (batch.noisy + batch.clean).nonzero(as_tuple=True)
        best = model.in_chunks(
            lambda h: model.logits(h).argmax(-1), hidden_states(model, batch)[at]
        )
        hit = (best == batch.target[at]).float()
        right += torch.bincount(ahead[at], hit, minlength=bins).cpu()
        count += torch.bincount(ahead[at], minlength=bins).cpu()
    return (right / count.clamp(min=1))[1:].tolist()


# ------------------------------------------------------------------------------- several processes


def rank_and_size() -> tuple[int, int]:
    """Of the processes that torchrun started: (0, 1) if it did not."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def leads() -> bool:
    return rank_and_size()[0] == 0


def say(text: str) -> None:
    if leads():
        tqdm.write(text)  # above the bar, if there is one


@contextlib.contextmanager
def together(failure: str = "") -> Iterator[None]:
    """What fails in one process fails in all: the others would wait for it in vain."""
    error = None
    try:
        yield
    except UserError as caught:
        error = str(caught)
    except (OSError, RuntimeError, CheckpointException) as caught:
        if not failure:
            raise
        error = f"{failure} ({str(caught).strip().splitlines()[-1]})"
    if dist.is_initialized():
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        error = next(filter(None, errors), None)
    if error and not leads():
        sys.exit(2)  # the first process says why
    if error:
        raise UserError(error)


def join(device: torch.device) -> torch.device:
    """Meet the other processes; each has a GPU of its own, or all share the CPU."""
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if device.index >= torch.cuda.device_count():
            raise UserError(f"{torch.cuda.device_count()} GPUs: too few for so many processes")
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return device


def shard(model: Qwen2, dtype: torch.dtype) -> None:
    """FSDP2: every process keeps a part of each weight, and gathers a layer when it is needed."""
    options = {
        "mesh": init_device_mesh(model.device.type, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
    }
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    register_fsdp_forward_method(model, "in_chunks")


STATE = ("model_state_dict", "optim_state_dict")
PROGRESS = {"step", "consumed", "skipped", "finished", "run"}
DAMAGED = "damaged; without it, the one before is taken"


class Checkpoints:
    """OUT/checkpoints/step-N: weights, optimizer and progress, of one format at any world size.

    A directory gets its name when it is complete and loses it before it is deleted: killed at any
    instant, the newest is complete.
    """

    def __init__(self, out: Path, keep: int):
        self.directory, self.keep = out / "checkpoints", keep

    def paths(self) -> list[Path]:
        return sorted(self.directory.glob("step-" + 8 * "[0-9]"))

    def newest(self) -> dict | None:
        """Its progress, if there is one."""
        paths = self.paths()
        found = read_json(paths[-1] / "progress.json") if paths else None
        if found is not None and not PROGRESS <= set(found):
            raise UserError(f"{paths[-1]}: {DAMAGED}")
        return found

    def save(self, model: Qwen2, optimizer: torch.optim.Optimizer, progress: dict) -> None:
        path = self.directory / f"step-{progress['step']:08d}"
        temporary = path.with_suffix(".tmp")
        with together(f"{path}: not saved; those before it are intact"):
            try:
                state = dict(zip(STATE, get_state_dict(model, optimizer)))
                dcp.save(state, checkpoint_id=temporary)
                if leads():
                    text = json.dumps(progress, indent=2)
                    replace({temporary / "progress.json": lambda file: file.write_text(text)})
                    temporary.rename(path)
                    self.remove(self.paths()[: -self.keep])
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)  # what is full may need the room
                raise

    def remove(self, paths: list[Path]) -> None:
        for path in paths:
            path.rename(path.with_suffix(".tmp"))
        for path in self.directory.glob("*.tmp"):  # these, and what a kill has left behind
            shutil.rmtree(path)

    def load(self, model: Qwen2, optimizer: torch.optim.Optimizer) -> None:
        path = self.paths()[-1]
        with together(f"{path}: {DAMAGED}"):
            state = dict(zip(STATE, get_state_dict(model, optimizer)))
            dcp.load(state, checkpoint_id=path)
            set_state_dict(model, optimizer, **state)


# ----------------------------------------------------------------------------------------- training


def learning_rate(peak: float, progress: float, warmup: float) -> float:
    """Linear warm-up, then a cosine to zero; progress and warmup are shares of the whole run."""
    if progress < warmup:
        return peak * progress / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


def proc(file: str, field: str) -> float:
    """GiB that Linux has there; 0 where it is not known."""
    try:
        return int(Path("/proc", file).read_text().split(field)[1].split()[0]) / 2**20
    except (OSError, IndexError):
        return 0.0


def peak_memory(device: torch.device) -> float:
    """GiB: of torch on a GPU, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return proc("self/status", "VmHWM:")


def free_memory(device: torch.device) -> float:
    """GiB: of the GPU, or each process's share of this machine's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 2**30
    return proc("meminfo", "MemAvailable:") / rank_and_size()[1]


def longest_stream(args: argparse.Namespace) -> int:
    return args.max_length * (2 if args.objective == "mars" else 1)


def memory_needed(config: Config, args: argparse.Namespace, dtype, processes=1) -> list[float]:
    """GiB per process: what stays between steps, and a step at its peak, by counting.

    What stays: weights, gradients and AdamW's two moments, all in float32. In the forward pass a
    layer keeps for the backward pass some ten vectors of hidden_size and four of intermediate_size
    per position; with --checkpoint-layers only its input.
    """
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Qwen2(config).parameters())
    D, layers, vocabulary = config.hidden_size, config.num_hidden_layers, config.vocab_size
    stays = 4 * 4 * parameters / processes
    if processes > 1:  # what is not in a layer is gathered for the whole step, gradients too
        copies = 2 * dtype.itemsize * vocabulary * D * (1 if config.tie_word_embeddings else 2)
    else:  # autocast keeps what it has cast
        copies = dtype.itemsize * parameters if dtype != torch.float32 else 0
    positions = max(args.batch_tokens, row_width(longest_stream(args)))  # a row is never split
    layer = positions * (40 * D + 4 * dtype.itemsize * config.intermediate_size)
    kept = 4 * positions * D * layers + layer if args.checkpoint_layers else layer * layers
    # A chunk of logits, its softmax and its gradient (distilled: and the teacher's); and what chunk
    # and embedding are about to add to their weights' gradients.
    chunk = 4 * min(LOGITS_AT_A_TIME, positions * vocabulary) * (5 if args.distill else 3)
    step = stays + copies + kept + layer + chunk + 2 * 4 * vocabulary * D
    return [stays / 2**30, max(step, 4 * parameters) / 2**30]  # each loads all, then shards it


def check_memory(config: Config, args: argparse.Namespace, device, dtype) -> None:
    """Say what a step needs; raise UserError if not even what stays between steps has room."""
    stays, step = memory_needed(config, args, dtype, rank_and_size()[1])
    free = free_memory(device) or math.inf
    need = f"a step needs about {step:.1f} GiB per process"
    need += f"; {free:.1f} GiB are free" * (free < math.inf)
    if stays > free:
        raise UserError(f"{need}: use more GPUs (torchrun) or a smaller model")
    say(need + "; to need less: --checkpoint-layers, a smaller --batch-tokens" * (step > free))


BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
POSTFIX = ("step", "noisy", "clean", "tokens_per_s")
# Options that a resumed run may have otherwise: they say where and how, not what is computed.
MAY_CHANGE = {"data", "out", "resume", "save_every", "keep", "device", "dtype"}
MAY_CHANGE |= {"batch_tokens", "checkpoint_layers"}


def identity(args: argparse.Namespace, rows: Rows) -> dict[str, str]:
    """What makes a run the run it is."""
    options = {k: v for k, v in vars(args).items() if k not in MAY_CHANGE}
    facts = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    facts |= {"rows of --data": len(rows), "bytes of --data": rows.size}
    return {name: str(value) for name, value in facts.items()}


class Trainer:
    """One run: the model, its data, the optimizer, and log.jsonl with a line per step."""

    def __init__(self, model: Qwen2, chat: Chat, data: Dataset, dtype, args: argparse.Namespace):
        self.model, self.chat, self.data, self.args = model, chat, data, args
        self.rank, self.size = rank_and_size()
        self.sharded = dist.is_initialized()
        if args.checkpoint_layers:  # inside of the module's call, where FSDP's hooks are
            for layer in model.model.layers:
                layer.forward = functools.partial(recompute, layer.forward, use_reentrant=False)
        if self.sharded:
            shard(model, dtype)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        # Of the arithmetic only: the weights stay float32. (FSDP does it by itself, and casts what
        # autocast leaves as it is: norms, and the sums that run from layer to layer.)
        autocast = dtype == torch.bfloat16 and not self.sharded
        self.autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=autocast)
        self.checkpoints = Checkpoints(args.out, args.keep)
        self.steps, self.consumed, self.skipped = 0, 0, {}
        self.saved, self.signal = "no model yet", 0

    def progress(self) -> float:
        """Share of the run that is done: of --steps, or else of the rows of all epochs."""
        if self.args.steps:
            return self.steps / self.args.steps
        return self.consumed / (self.args.epochs * len(self.data.training))

    def finished(self) -> bool:
        return self.steps > 0 and self.progress() >= 1

    def batches(self, examples: list[Example], rank=0, size=1) -> list[Batch]:
        """On a GPU packed, of one shape throughout: FlexAttention is compiled for it, and skips
        what is empty. Elsewhere attention is dense, and pays for every width."""
        longest = longest_stream(self.args) if self.model.device.type == "cuda" else 0
        return batches(examples, self.model.config, self.args, rank, size, longest)

    def to_device(self, batch: Batch) -> Batch:
        return Batch(*(field.to(self.model.device) for field in batch))

    def step(self, parts: list[Batch], consumed: int) -> dict[str, float]:
        """One update from this process's part of a step; returns what all processes measured."""
        args, model, mars = self.args, self.model, self.model.config.block_size is not None
        sums = torch.zeros(2, device=model.device)
        for part in map(self.to_device, parts):
            with self.autocast:
                noisy, clean = losses(model, part, args.distill)
            loss = noisy + args.ar_weight * clean if mars else clean
            (self.size * loss).backward()  # FSDP takes the processes' mean, where we want the sum
            sums += torch.stack([noisy, clean]).detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        if self.sharded:
            norm = norm.full_tensor()
            dist.all_reduce(sums)
        if not norm.isfinite():
            raise UserError(f"step {self.steps + 1}: the loss is not finite; try a smaller --lr")
        before = self.progress()
        self.steps, self.consumed = self.steps + 1, consumed
        rate = learning_rate(args.lr, (before + self.progress()) / 2, args.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        noisy, clean = sums.tolist()
        record = {"noisy": round(noisy, 5)} if mars else {}
        return {**record, "clean": round(clean, 5), "lr": rate, "grad_norm": round(norm.item(), 4)}

    def timed_step(self, step: Step, parts: list[Batch]) -> dict:
        began = time.perf_counter()
        record = self.step(parts, step.consumed)
        seconds = time.perf_counter() - began
        record["tokens_per_s"] = round(sum(len(e.tokens) for e in step.examples) / seconds)
        record["memory_gib"] = round(peak_memory(self.model.device), 2)
        self.skipped = step.skipped
        return {"step": self.steps, **record}

    def measure(self) -> dict[str, list[float]]:
        """The look-aheads of the held-out examples."""
        if not self.data.held_out:
            return {}
        with self.autocast:
            held_out = map(self.to_device, self.batches(self.data.held_out))
            right = look_ahead(self.model, held_out)
        shares = "  ".join(f"{share:.3f}" for share in right)
        say(f"step {self.steps}: right 1, 2, ... tokens ahead: {shares}")
        return {"look_ahead": [round(share, 4) for share in right]}

    def save(self) -> None:
        at = {"step": self.steps, "consumed": self.consumed, "skipped": self.skipped}
        at |= {"finished": self.finished(), "run": identity(self.args, self.data.rows)}
        self.checkpoints.save(self.model, self.optimizer, at)
        self.export()

    def export(self) -> None:
        """The model for its users, whole."""
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self.model, options=whole)
        with together():
            if leads():
                save(self.model, self.chat, self.args.out, weights=weights)
        self.saved = f"the model of step {self.steps}"

    def resume(self, found: dict) -> None:
        self.checkpoints.load(self.model, self.optimizer)
        self.steps, self.consumed, self.skipped = map(found.get, ("step", "consumed", "skipped"))
        self.data.skipped = Counter(self.skipped)
        say(f"resumed at step {self.steps}")
        self.export()  # a kill may have come between the checkpoint and this

    def open_log(self) -> TextIO:
        """Make place for this run. Steps that no checkpoint holds are made, and logged, again."""
        if not leads():
            return open(os.devnull, "w")
        out, lines = self.args.out, []
        path = out / "log.jsonl"
        try:
            out.mkdir(parents=True, exist_ok=True)
            self.checkpoints.remove([] if self.steps else self.checkpoints.paths())
            if self.steps and path.exists():
                lines = [line for line in path.read_text().splitlines(True) if line.endswith("\n")]
                lines = [line for line in lines if json.loads(line)["step"] <= self.steps]
            replace({path: functools.partial(Path.write_text, data="".join(lines))})
            return open(path, "a")
        except OSError as error:
            raise UserError(f"--out {out}: cannot be written to ({error.strerror})") from None
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}: has a line that is not a step's; move it away") from None

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM wait until a step is done; a second one does not."""

        def remember(signum: int, frame: object) -> None:
            if self.signal and not self.sharded:  # torchrun itself sends a second one
                raise KeyboardInterrupt
            self.signal = signum
            say("stopping after this step")

        former = {s: signal.signal(s, remember) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for signum, handler in former.items():
                signal.signal(signum, handler)

    @contextlib.contextmanager
    def bar(self) -> Iterator[tqdm]:
        """The progress bar; when it closes, in whatever way, a line says what there is."""
        name = self.args.objective
        with tqdm(total=100, desc=name, bar_format=BAR, disable=not leads()) as bar:
            try:
                yield bar
            finally:
                bar.close()
                if self.skipped:
                    say(f"skipped rows: {reasons(self.skipped)}")
                say(f"{self.steps} steps; {self.args.out} holds {self.saved}")

    def told_to_stop(self) -> int:
        """The signal that came to any of the processes, or 0."""
        signum = torch.tensor(self.signal, device=self.model.device)
        if self.sharded:
            dist.all_reduce(signum, dist.ReduceOp.MAX)
        return int(signum)

    def work(self) -> Iterator[tuple[Step, list[Batch]]]:
        for step in self.data.steps(self.args.batch, self.consumed):
            yield step, self.batches(step.examples, self.rank, self.size)

    def run(self) -> None:
        """To the end, or to a signal: then the exit status is 128 + its number."""
        work, stop = self.work(), 0
        with ThreadPoolExecutor(1) as reader, self.signals():
            with together():
                following = reader.submit(next, work)
                following.result()  # no usable row: stop before any file is written
                log = self.open_log()
            with log, self.bar() as bar:
                while not stop and not self.finished():
                    now, following = following.result(), reader.submit(next, work)
                    record = self.timed_step(*now)
                    stop = self.told_to_stop()
                    due = self.finished() or self.steps % self.args.save_every == 0
                    record |= self.measure() if due else {}
                    log.write(json.dumps(record) + "\n")
                    log.flush()
                    if due or stop:
                        self.save()
                    bar.set_postfix({k: v for k, v in record.items() if k in POSTFIX})
                    bar.update(100 * min(1.0, self.progress()) - bar.n)
        if self.sharded:
            dist.barrier()  # the first process to end takes the meeting place with it
        if stop and not self.finished():
            sys.exit(128 + stop)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
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
    add("--out", type=Path, default="out", help="the model (bfloat16), log.jsonl, checkpoints/")
    add("--objective", choices=("mars", "sft"), default="mars", help="sft is stage 1, mars stage 2")
    add("--block", type=int, default=4, help="B, the number of masks in a window")
    add("--block-phase", choices=("random", "fixed"), default="random", help="fixed: the paper's")
    add("--ar-weight", type=float, default=1.0, help="weight of the clean loss")
    add("--distill", action="store_true", help="masks learn what the clean stream would say")
    add("--normalization", choices=("sequence", "token"), default="sequence", help="of the loss")
    add("--epochs", type=int, default=5, help="passes over the data")
    add("--steps", type=int, help="train for so many steps instead")
    add("--batch", type=int, default=128, help="examples per step (the paper: 384)")
    add("--batch-tokens", type=int, default=4096, help="positions per forward; changes the memory")
    add("--checkpoint-layers", action="store_true", help="save memory: compute activations twice")
    add("--lr", type=float, default=5e-6, help="peak learning rate")
    add("--warmup", type=float, default=0.03, help="share of the run in which the rate rises")
    add("--clip", type=float, default=1.0, help="largest gradient norm")
    add("--max-length", type=int, default=512, help="tokens per example; responses are cut there")
    add("--held-out", type=int, default=64, help="rows to measure on (at most a tenth of all)")
    add("--save-every", type=int, default=500, help="steps between checkpoints")
    add("--keep", type=int, default=2, help="so many checkpoints, the newest")
    add("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    add("--seed", type=int, default=0, help="of shuffling, block phases and fresh weights")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", choices=("float32", "bfloat16"), help="None: bfloat16 on cuda, else float32")
    # fmt: on
    args = parser.parse_args(words)
    least = dict.fromkeys(("block", "epochs", "steps", "batch", "batch_tokens", "max_length"), 1)
    least |= {"keep": 1, "save_every": 1, "held_out": 0, "seed": 0}
    least |= {"lr": 0, "warmup": 0, "clip": 1e-6, "ar_weight": 0}
    below = {"warmup": 1, "lr": 1e3, "seed": 2**63}
    for name, low in least.items():
        value, high = getattr(args, name), below.get(name, math.inf)
        if value is not None and not low <= value < high:
            option = "--" + name.replace("_", "-")
            upper = f" and below {high:g}" if high < math.inf else ""
            raise UserError(f"{option} {value}: must be at least {low}{upper}")
    return args


def resumable(args: argparse.Namespace, rows: Rows) -> dict | None:
    """The checkpoint to go on from; UserError if it is another run's, or would be destroyed."""
    found, out = Checkpoints(args.out, args.keep).newest(), args.out
    if found and not args.resume and not found["finished"]:
        raise UserError(f"--out {out}: has an unfinished run; --resume it, or take another")
    if found and not args.resume:
        say(f"{out}: the finished run there is replaced")
    if not found and args.resume:
        say(f"{out}: no checkpoint to go on from, so from the beginning")
    if not found or not args.resume:
        return None
    for name, value in identity(args, rows).items():
        was = found["run"].get(name)
        if value != was:
            raise UserError(f"{name} {value}: the run in {out} has {was}; so it cannot go on")
    return found


def prepare(args: argparse.Namespace, device, dtype) -> tuple[Qwen2, Chat, Dataset, dict | None]:
    processes, directory = rank_and_size()[1], locate(args.model)
    if args.batch < processes:
        raise UserError(f"--batch {args.batch}: fewer examples than processes ({processes})")
    config = read_config(directory)
    if args.max_length > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise UserError(f"--max-length {args.max_length}: the model has {limit} positions")
    if args.objective == "mars" and args.block > args.max_length:
        raise UserError(f"--block {args.block}: more than --max-length {args.max_length}")
    rows = Rows(args.data)
    found = resumable(args, rows)
    check_memory(config, args, device, dtype)
    if args.from_scratch:
        model, chat = initialize(config, args.seed), Chat(directory)
        add_mask_token(model, chat)
        model.to(device)
    else:
        model, chat = load(args.model, device, torch.float32)
        model.requires_grad_()
    model.config.block_size = args.block if args.objective == "mars" else None
    phases = args.block if args.block_phase == "random" else 1
    data = Dataset(rows, chat, model.config.eos_token_id[0], phases, args)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    where = str(device) if processes == 1 else f"{processes} x {device.type}"
    say(f"{args.model}: {size:.1f} M parameters on {where}; {args.data}: {len(rows)} rows")
    return model, chat, data, found


def main() -> None:
    args = parse_arguments()
    device, dtype = place(args.device, args.dtype)
    if dist.is_torchelastic_launched():
        device = join(device)
    with together():
        model, chat, data, found = prepare(args, device, dtype)
    trainer = Trainer(model, chat, data, dtype, args)
    if found:
        trainer.resume(found)
    trainer.run()


def start() -> None:
    """Run main. Under torchrun, end without taking the interpreter down: gloo's threads, still
    there, may abort it."""
    status = 0
    try:
        run(main)
    except SystemExit as stop:
        status = stop.code
    if dist.is_torchelastic_launched():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    start()
