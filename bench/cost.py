"""What MARS training costs beside ordinary fine-tuning (AR SFT), in time and in memory.

    python bench/cost.py                                          # in the toy model's shape
    python bench/cost.py --shape 0.5B --batch 2 --length 512      # in Qwen2.5-0.5B's
    python bench/cost.py --rows 2000000                           # data: start-up time and memory

Three steps on the same examples, with the same loss at the same targets: AR SFT, MARS in the
paper's form (a noisy copy of the whole sequence behind the clean one, "2L"), and MARS as train.py
has it (masks for the response only). Ratios are medians over rounds in which the three run in
turn. Memory is the peak of a process of its own: less weights, gradients and optimizer (counted)
that leaves the activations.
"""

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from bench.pareto import ROOT
from bench.speed import SHAPES, config_of, machine, wait
from model import Chat, UserError, initialize, place, read_config, run
from train import (
    Batch,
    Dataset,
    Example,
    Rows,
    Trainer,
    check_memory,
    collate,
    lay_out,
    memory_needed,
    parse_arguments,
    peak_memory,
    target_weights,
)

FORMS = ("AR SFT", "MARS, 2L", "MARS")
BLOCK = 4


def two_streams(example: Example, mask_id: int, weight: float) -> Batch:
    """The paper's form, [clean ; noisy]: the prompt is in the noisy stream as it is."""
    x, prompt = torch.tensor(example.tokens), example.prompt
    pos = torch.arange(len(x) - 1)
    none, start = 0 * pos, (pos + example.phase) // BLOCK * BLOCK - example.phase
    weights = weight * (pos >= prompt - 1)
    noisy = torch.where(pos < prompt, x[:-1], mask_id)
    clean_stream = Batch(x[:-1], pos, pos + 1, none, x[1:], 0 * weights, weights, none)
    noisy_stream = Batch(noisy, pos, start, none, x[1:], weights, 0 * weights, none + len(pos))
    return Batch(*map(torch.cat, zip(clean_stream, noisy_stream)))


def one_batch(form: str, share: float, args: argparse.Namespace, mask_id: int) -> Batch:
    """A row for each example, and all of one length: nothing is padding."""
    rng, prompt = random.Random(0), round(share * args.length)
    tokens = [[rng.randrange(mask_id) for _ in range(args.length + 1)] for _ in range(args.batch)]
    examples = [Example(each, prompt) for each in tokens]
    layouts = []
    for example, weight in zip(examples, target_weights(examples, "sequence")):
        if form == "MARS, 2L":
            layouts.append(two_streams(example, mask_id, weight))
        else:
            block_size = BLOCK if form == "MARS" else None
            layouts.append(lay_out(example, block_size, mask_id, weight))
    return collate([[layout] for layout in layouts], len(layouts[0].tokens))


def setting(args: argparse.Namespace) -> tuple:
    """(config, train.py's options, device, dtype)"""
    config = config_of(args.shape) if args.shape else read_config(ROOT / "toy/base")
    config.mask_token_id = config.vocab_size - 2
    words = ["--data", "none", "--steps", "1000", "--lr", "1e-5", "--max-length", str(args.length)]
    words += ["--batch-tokens", str(2 * args.batch * args.length)]
    words += ["--checkpoint-layers"] * args.checkpoint_layers
    return config, parse_arguments(words), *place(args.device, args.dtype)


def new_trainer(args: argparse.Namespace) -> Trainer:
    """train.py's own step, on random weights: they cost what real ones do."""
    config, options, device, dtype = setting(args)
    return Trainer(initialize(config, seed=0).to(device), None, None, dtype, options)


def step(trainer: Trainer, form: str, batch: Batch) -> float:
    """Seconds."""
    trainer.model.config.block_size = None if form == "AR SFT" else BLOCK
    wait(trainer.model.device)
    began = time.perf_counter()
    trainer.step([batch], 0)
    wait(trainer.model.device)
    return time.perf_counter() - began


def seconds(args: argparse.Namespace) -> dict[tuple[str, float], list[float]]:
    """Of a step, by form and prompt share, in rounds."""
    trainer = new_trainer(args)
    mask_id = trainer.model.config.mask_token_id
    print(f"{args.shape or 'toy'}, {args.batch} examples of {args.length} tokens per step")
    print(f"medians of {args.rounds} rounds; {machine(trainer.model)}", flush=True)
    taken = {(form, share): [] for share in args.shares for form in FORMS}
    for number in range(-1, args.rounds):  # the first is start-up
        for (form, share), times in taken.items():
            time_of_step = step(trainer, form, one_batch(form, share, args, mask_id))
            times += [time_of_step] if number >= 0 else []
    return taken


def memory(form: str, share: float, args: argparse.Namespace) -> list[float]:
    """GiB: peak of a step in a process of its own, what of it stays between steps, and the peak
    that train.py would have announced."""
    device, dtype = place(args.device, args.dtype)
    before = peak_memory(device)  # what Python and torch themselves take
    trainer = new_trainer(args)
    batch = one_batch(form, share, args, trainer.model.config.mask_token_id)
    step(trainer, form, batch)  # from then on the optimizer has its moments
    for weight in trainer.model.parameters():  # or they would come when activations are half gone
        weight.grad = torch.zeros_like(weight)
    step(trainer, form, batch)
    trainer.args.batch_tokens, trainer.args.max_length = batch.tokens.numel(), 1
    stays, foretold = memory_needed(trainer.model.config, trainer.args, dtype)
    return [peak_memory(device) - before, stays, foretold]


def alone(function: Callable, *args):
    """Its result, from a process that does nothing else and leaves nothing behind."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *args).result()
        except BrokenProcessPool:
            raise UserError("a process was killed, for its memory no doubt: --batch less") from None


def compare(args: argparse.Namespace) -> None:
    config, options, device, dtype = setting(args)
    check_memory(config, options, device, dtype)
    taken = alone(seconds, args)
    print("\n| prompt | form     | s/step | x SFT | activations, GiB | x SFT | peak | foretold |")
    print("|-------:|:---------|-------:|------:|-----------------:|------:|-----:|---------:|")
    for share in args.shares:
        sft = taken["AR SFT", share], None
        for form in FORMS:
            whole, stays, foretold = alone(memory, form, share, args)
            times, activations = taken[form, share], whole - stays
            sft = sft[0], sft[1] or activations
            ratio = statistics.median(map(float.__truediv__, times, sft[0]))
            print(
                f"| {share:6.0%} | {form:8} | {statistics.median(times):6.3f} | {ratio:5.2f} "
                f"| {activations:16.2f} | {activations / sft[1]:5.2f} "
                f"| {whole:4.2f} | {foretold:8.2f} |",
                flush=True,
            )


# -------------------------------------------------------------------------------------- many rows


def write_rows(path: Path, count: int) -> None:
    """Rows of some 500 bytes, all different."""
    words = Path(ROOT / "toy/train.jsonl").read_text(encoding="utf-8").split()
    rng = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for i in range(count):
            at = rng.randrange(len(words) - 80)
            user = {"role": "user", "content": f"{i} " + " ".join(words[at : at + 40])}
            reply = {"role": "assistant", "content": " ".join(words[at + 40 : at + 80])}
            file.write(json.dumps({"messages": [user, reply]}) + "\n")


def index(path: Path) -> tuple[float, float]:
    """(seconds until the first step's examples are there, MiB that this takes)."""
    chat, cpu = Chat(ROOT / "toy/base"), torch.device("cpu")
    before = peak_memory(cpu)
    args = parse_arguments(["--data", str(path)])
    began = time.perf_counter()
    data = Dataset(Rows(path), chat, 2, 4, args)
    next(data.steps(args.batch))
    return time.perf_counter() - began, 1024 * (peak_memory(cpu) - before)


def many_rows(count: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rows.jsonl"
        write_rows(path, count)
        taken, memory = alone(index, path)
        size = path.stat().st_size / 2**30
    print(f"{count} rows, {size:.2f} GiB: all parsed, indexed and shuffled, first step encoded")
    print(f"{taken:.1f} s, at most {memory:.0f} MiB of memory")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="What MARS training costs beside ordinary fine-tuning.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    # fmt: off
    add("--shape", choices=SHAPES, help="of a Qwen2.5; None: of the toy model")
    add("--batch", type=int, default=32, help="examples per step, all in one forward")
    add("--length", type=int, default=160, help="tokens per example")
    add("--shares", type=float, nargs="+", default=[0.3, 0.5, 0.7], help="of an example: prompt")
    add("--rounds", type=int, default=7, help="of which the median is printed")
    add("--checkpoint-layers", action="store_true", help="as in train.py")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", choices=("float32", "bfloat16"), help="None: bfloat16 on cuda, else float32")
    add("--rows", type=int, help="instead: start-up time and memory of so many rows of data")
    # fmt: on
    args = parser.parse_args()
    for name, least in (("batch", 1), ("length", 16), ("rounds", 1), ("rows", 1000)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(f"--{name} {value}: must be at least {least}")
    if not all(0.1 <= share <= 0.9 for share in args.shares):
        raise UserError(f"--shares {args.shares}: must be between 0.1 and 0.9")
    many_rows(args.rows) if args.rows else compare(args)


if __name__ == "__main__":
    run(main)
