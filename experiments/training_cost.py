"""What a MARS training step costs next to ordinary fine-tuning (AR SFT), in time and in memory.

    python -m experiments.training_cost                                      # the toy model
    python -m experiments.training_cost --shape 0.5B --batch 2 --length 512  # Qwen2.5-0.5B's shape
    python -m experiments.training_cost --rows 2000000                       # reading so many rows

Three steps on the same examples, with the loss at the same targets: AR SFT; MARS in the paper's
form ("2L": a noisy copy of the whole sequence follows the clean one); MARS as in train.py (masks
for the response only). Memory is the peak of a process of its own. Weights, gradients and AdamW's
moments are the same for all three: the rest of the peak is the activations.
"""

import functools
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

from bench import common
from model import Config, initialize
from plumbing.arguments import Parser, find_device, number
from plumbing.chat import Chat
from plumbing.config import read_config
from plumbing.data import Dataset, Example
from plumbing.errors import UserError, run_main
from plumbing.hub import locate
from plumbing.jsonl import JsonlFile
from plumbing.packing import collate, concatenate
from plumbing.processes import peak_memory
from plumbing.signals import exit_on_sigterm
from train import PADDING, Batch, lay_out, losses, target_weights

FORMS = ("AR SFT", "MARS, 2L", "MARS")
BLOCK = 4


def two_streams(example: Example, mask_id: int, weight: float) -> Batch:
    """The paper's form, [clean; noisy]: the noisy stream repeats the prompt as it is."""
    clean = lay_out(example, None, mask_id, weight)
    pos = clean.pos
    noisy = clean._replace(
        tokens=torch.where(pos < example.prompt, clean.tokens, mask_id),
        prefix=(pos + example.phase) // BLOCK * BLOCK - example.phase,
        noisy_weight=clean.clean_weight,
        clean_weight=torch.zeros_like(clean.clean_weight),
    )
    return concatenate([clean, noisy])


def make_batch(form: str, share: float, args, mask_id: int) -> Batch:
    """Random examples, a row for each; `share` of every example is prompt."""
    rng = random.Random(0)
    examples = []
    for _ in range(args.batch):
        tokens = [rng.randrange(mask_id) for _ in range(args.length + 1)]
        examples.append(Example(tokens, prompt=round(share * args.length)))
    streams = []
    for example, weight in zip(examples, target_weights(examples, "sequence")):
        if form == "AR SFT":
            streams.append(lay_out(example, None, mask_id, weight))
        elif form == "MARS, 2L":
            streams.append(two_streams(example, mask_id, weight))
        else:
            streams.append(lay_out(example, BLOCK, mask_id, weight))
    width = len(streams[0].tokens)  # all have the same length
    return collate([[stream] for stream in streams], width, PADDING)


class Training:
    """Steps as in train.py, on random weights: they cost what trained ones do."""

    def __init__(self, args):
        self.device, self.dtype = find_device(args.device, args.dtype)
        if args.shape:
            config = common.config_of(args.shape)
        else:
            config = read_config(locate(args.model), Config)
            config.mask_token_id = config.vocab_size - 2
        self.model = initialize(config, seed=0).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def batch(self, form: str, share: float, args) -> Batch:
        return make_batch(form, share, args, self.model.config.mask_token_id).to(self.device)

    def step(self, batch: Batch) -> None:
        autocast = self.dtype == torch.bfloat16
        with torch.autocast(self.device.type, torch.bfloat16, enabled=autocast):
            noisy, clean = losses(self.model, batch)
        (noisy + clean).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def seconds(args) -> dict[tuple[str, float], list[float]]:
    """Of a step, in every round, by form and prompt share."""
    training = Training(args)
    steps = {}
    for share in args.shares:
        for form in FORMS:
            step = functools.partial(training.step, training.batch(form, share, args))
            step()  # start-up, not timed
            steps[form, share] = step
    print(f"{args.shape or args.model}, {args.batch} examples of {args.length} tokens per step")
    print(f"medians of {args.rounds} rounds; {common.machine(training.model)}\n", flush=True)
    _, taken = common.in_turn(steps, args.rounds, training.device)
    return taken


def memory(form: str, share: float, args) -> tuple[float, float]:
    """GiB: the peak of a step, and the activations' part of it."""
    device, _ = find_device(args.device, args.dtype)
    before = peak_memory(device)  # what Python and torch themselves take
    training = Training(args)
    batch = training.batch(form, share, args)
    training.step(batch)  # from now on the optimizer has its moments
    for weight in training.model.parameters():
        weight.grad = torch.zeros_like(weight)  # or it would come when activations are half gone
    training.step(batch)
    peak = peak_memory(device) - before
    num_parameters = sum(weight.numel() for weight in training.model.parameters())
    lasting = 4 * 4 * num_parameters / 2**30  # weights, gradients, two moments; all in float32
    return peak, peak - lasting


def alone(function: Callable, *args):
    """What a function returns, called in a process that does nothing else."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *args).result()
        except BrokenProcessPool:
            raise UserError("killed, probably for its memory: lower --batch") from None
        except (KeyboardInterrupt, SystemExit):  # a signal: do not wait for the worker
            for process in multiprocessing.active_children():
                process.kill()
            raise


def compare(args) -> None:
    taken = alone(seconds, args)
    rows = []
    for share in args.shares:
        memories = {form: alone(memory, form, share, args) for form in FORMS}
        _, sft_activations = memories["AR SFT"]
        for form in FORMS:
            peak, activations = memories[form]
            ratios = common.ratios(taken[form, share], taken["AR SFT", share])
            rows.append(
                [
                    form,
                    f"{share:.0%}",
                    f"{statistics.median(taken[form, share]):.3f}",
                    f"{statistics.median(ratios):.2f}",
                    f"{activations:.2f}",
                    f"{activations / sft_activations:.2f}",
                    f"{peak:.2f}",
                ]
            )
    head = ["form", "prompt", "s/step", "x SFT", "activations, GiB", "x SFT", "peak, GiB"]
    print(common.table(head, rows))


def read_rows(file: Path) -> tuple[float, float]:
    """Seconds until the first step's examples are there, and the MiB that this takes."""
    cpu = torch.device("cpu")
    chat = Chat(common.TOY / "base")
    before = peak_memory(cpu)
    began = time.perf_counter()
    data = Dataset(JsonlFile(file), chat, eos=2, phases=4, max_length=512, seed=0, held_out=64)
    next(data.steps(128))
    return time.perf_counter() - began, 1024 * (peak_memory(cpu) - before)


def many_rows(count: int) -> None:
    """Print what reading so many rows costs: those of toy/train.jsonl, again and again."""
    rows = (common.TOY / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "rows.jsonl")
        with open(file, "w", encoding="utf-8") as out:
            for i in range(count):
                out.write(rows[i % len(rows)])
        taken, mib = alone(read_rows, file)
        size = file.stat().st_size / 2**30
    print(f"{count} rows, {size:.2f} GiB: all parsed, indexed and shuffled, first step encoded")
    print(f"{taken:.1f} s, at most {mib:.0f} MiB of memory")


def parse_arguments():
    parser = Parser("What a MARS training step costs next to ordinary fine-tuning.")
    parser.add_model(str(common.TOY / "base"), "directory or hub id: its shape, random weights")
    add = parser.add_argument
    share = number(float, 0.1, 0.91)
    add("--shape", choices=common.SHAPES, help="the shape of that Qwen2.5 instead")
    add("--batch", type=number(int, 1), default=32, help="examples per step, in one forward")
    add("--length", type=number(int, 16), default=160, help="tokens per example")
    add("--shares", type=share, nargs="+", default=[0.3, 0.5, 0.7], help="the prompt's share")
    add("--rows", type=number(int, 1000), help="instead: time and memory of reading so many rows")
    common.add_rounds(parser, default=7)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    exit_on_sigterm()
    if args.rows:
        many_rows(args.rows)
    else:
        compare(args)


if __name__ == "__main__":
    run_main(main, out_of_memory="lower --batch or --length")
