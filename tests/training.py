"""What the tests of training share: examples, the paper's loss, and ways to call train.py."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from commands import Done, command
from common import ROOT, random_prompt, rows_of
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from model import Qwen2
from plumbing import processes
from plumbing.data import Example
from plumbing.jsonl import JsonlFile
from train import Recipe, add_gradients

# ------------------------------------------------------------------------------ examples and data


def random_example(rng: random.Random, block: int) -> Example:
    """Prompts and responses at multiples of the block, next to them, and anywhere."""
    lengths = []
    for _ in range(2):
        near = rng.choice([block, 2 * block, 4 * block])
        lengths.append(max(1, near + rng.choice([-1, 0, 1, rng.randint(0, 9)])))
    return Example(random_prompt(rng, sum(lengths)), prompt_length=lengths[0])


def write(path: Path, rows: list[dict]) -> JsonlFile:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), "utf-8")
    return JsonlFile(path)


# ---------------------------------------------------------------------------- the paper's loss


def two_stream_loss(model: Qwen2, example: Example, block: int) -> torch.Tensor:
    """The noisy stream's cross-entropy and the clean one's: means over the response, (2,).

    The paper's form, plainly: [clean L ; noisy L], a mask from loops over its three rules.
    """
    x = example.tokens
    length = len(x)
    mask_id = model.config.mask_token_id
    noisy = x[: example.prompt_length] + [mask_id] * len(example.response)
    see = torch.zeros(2 * length, 2 * length, dtype=torch.bool)
    for p in range(length):
        for k in range(length):
            same_block = p // block == k // block
            see[p, k] = k <= p
            see[length + p, length + k] = same_block and k <= p
            see[length + p, k] = not same_block and k < p
    positions = torch.arange(length).repeat(2)[None]
    hidden = model(torch.tensor([x + noisy]), positions, see[None, None])[0]
    at = torch.arange(example.prompt_length - 1, length - 1)
    targets = torch.tensor(x[example.prompt_length :])
    both = [model.logits(hidden[at + offset]) for offset in (length, 0)]
    return torch.stack([F.cross_entropy(logits, targets) for logits in both])


def mask_predictions(model: Qwen2, example: Example, block: int) -> list[tuple]:
    """Of each mask: how many tokens ahead it predicts, its logits (V,), its target.

    Block by block, each in a plain causal forward of the true tokens before it and its masks.
    """
    x = example.tokens
    last = len(x) - 1
    found = []
    for start in range(example.prompt_length, last):
        if start > example.prompt_length and start % block > 0:
            continue  # no block begins there
        end = min(start - start % block + block, last)
        feed = x[:start] + [model.config.mask_token_id] * (end - start)
        hidden = model(torch.tensor([feed]), torch.arange(end)[None], None)[0, start:]
        for offset, logits in enumerate(model.logits(hidden)):
            found.append((2 + offset, logits, x[start + offset + 1]))
    return found


def clean_logits(model: Qwen2, example: Example) -> torch.Tensor:
    """Logits of each response token, in a plain causal forward."""
    text = torch.tensor([example.tokens[:-1]])
    hidden = model(text, torch.arange(text.size(1))[None], None)[0]
    return model.logits(hidden[example.prompt_length - 1 :])


def gradient(loss: torch.Tensor, model: Qwen2) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def whole_step(model: Qwen2, examples: list[Example], recipe: Recipe, worlds=1) -> torch.Tensor:
    """Both losses, summed over all processes, and the gradient, of which FSDP takes the mean."""
    model.zero_grad()
    sums = 0
    for rank in range(worlds):
        with mock.patch.object(processes, "rank_and_size", return_value=(rank, worlds)):
            sums += add_gradients(model, examples, recipe)
    gradients = [weight.grad.flatten() / worlds for weight in model.parameters()]
    return torch.cat([sums, *gradients]).cpu()


# ------------------------------------------------------------------------------------ the command

DRAFT = ("--model", ROOT / "toy/draft", "--max-length", 64, "--batch", 2)


def run_train(*words: object) -> Done:
    """`python train.py ...` in this process."""
    return command("train", *words)


def start(*words: object, launcher=(sys.executable,), script=("train.py",), **options):
    """`python train.py ...` as a process of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [*launcher, *script, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        **(pipes | options),
    )


def finish(process: subprocess.Popen) -> str:
    """Its standard output; it must end well."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "Traceback" not in err and "terminate called" not in err
    return out


def wait_for(condition: Callable[[], object], process: subprocess.Popen) -> None:
    began = time.monotonic()
    while process.poll() is None and not condition():
        assert time.monotonic() - began < 120
        time.sleep(0.001)


def log(out: Path) -> list[dict]:
    return rows_of(out / "log.jsonl")


def num_logged(out: Path) -> int:
    path = out / "log.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def checkpoints(out: Path) -> list[str]:
    """What is in checkpoints/, complete or not."""
    return [path.name for path in sorted((out / "checkpoints").glob("*"))]


def checkpoint_tensors(checkpoint: Path, place: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by name, read by torch's own converter."""
    dcp_to_torch_save(checkpoint, place / "whole.pt")
    found = torch.load(place / "whole.pt")
    tensors = found["model"]
    for name, state in found["optimizer"].items():
        tensors |= {f"{name} {key}": value for key, value in state.items()}
    return tensors


def contents(directory: Path) -> dict[str, bytes]:
    """Every file in a directory and all below."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}
