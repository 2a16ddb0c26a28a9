"""A training run apart from its steps: its directory, log and bar, how it stops."""

import argparse
import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from .checkpoints import Checkpoints, whole_weights
from .data import Dataset
from .errors import UserError
from .files import has_model, save
from .jsonl import JsonlFile
from .processes import leads, say

SHOWN = ("step", "noisy", "clean", "drift", "tokens_per_s")

# Options that a resumed run may change: where and how it computes, not what it learns.
MAY_CHANGE = "data out resume save_every device dtype batch_tokens checkpoint_layers".split()


def find_progress(args: argparse.Namespace, rows: JsonlFile) -> dict:
    """Where the run begins: the newest checkpoint, or step 0. UserError if it may not use --out."""
    settings = {"checksum of --data": str(rows.checksum)}
    for name, value in vars(args).items():
        if name not in MAY_CHANGE:
            settings["--" + name.replace("_", "-")] = str(value)
    out = args.out
    found = Checkpoints(out / "checkpoints").newest()
    if found and args.resume:
        for name, value in settings.items():
            before = found["settings"].get(name)
            if value != before:
                raise UserError(f"{name} {value}: the run in {out} has {before}, and keeps it")
        return found
    if found or has_model(out):
        raise UserError(f"--out {out}: has a run or a model; --resume it, or give another --out")
    if args.resume:
        say(f"{out}: no checkpoint to resume from; starting from the beginning")
    return {"step": 0, "settings": settings}


@dataclass
class Run:
    """OUT: the model for its users, log.jsonl and checkpoints/; and the bar, and signals.

    Life cycle: `find_progress`, before the model is loaded; `with Run(...) as run`; `resume`; then
    `log` every step and `save` now and then.
    """

    out: Path
    progress: dict  # of `find_progress`
    data: Dataset
    num_steps: int
    generate: Path  # of `files.save`
    export_weights: Callable[[nn.Module], dict] = whole_weights  # of the model for its users
    second_loss: str = "clean"  # its name in the log

    def __enter__(self) -> "Run":
        self.checkpoints = Checkpoints(self.out / "checkpoints")
        self.step = self.saved_step = self.progress["step"]
        if leads():
            self.open_log()
        hidden = None if leads() else True  # None: hidden unless there is a terminal
        self.bar = tqdm(total=self.num_steps, initial=self.step, disable=hidden)
        self.last_line = time.monotonic()
        self.stop_signal = StopSignal()
        return self

    def open_log(self) -> None:
        """Open the log, without the steps to be made again; remove what a kill left half-done."""
        self.out.mkdir(parents=True, exist_ok=True)
        for path in (*self.out.glob("checkpoints/step-*.tmp"), *self.out.glob("saving-*.tmp")):
            shutil.rmtree(path)
        self.log_file = open(self.out / "log.jsonl", "a+")
        self.log_file.seek(0)
        for _ in range(self.step):
            self.log_file.readline()
        self.log_file.truncate(self.log_file.tell())

    def resume(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Load the checkpoint, if there is one; the number of steps that are done."""
        if self.step:
            self.checkpoints.load(model, optimizer)
            self.data.consumed = self.progress["consumed"]
            say(f"resumed at step {self.step}")
            self.export(model)  # in case the run was killed before it
        return self.step

    def log(self, record: dict) -> None:
        """Add a line to log.jsonl and move the bar; without a terminal, print a line a minute."""
        self.step = record["step"]
        if leads():
            self.log_file.write(json.dumps(record) + "\n")
            self.log_file.flush()
        self.bar.set_postfix({name: record[name] for name in SHOWN if name in record})
        self.bar.update()
        if self.bar.disable and time.monotonic() > self.last_line + 60:
            self.last_line = time.monotonic()
            say(f"{self.step / self.num_steps:4.0%}: {self.bar.postfix}")
        if "look_ahead" in record:
            shares = "  ".join(f"{share:.3f}" for share in record["look_ahead"])
            say(f"step {self.step}: right 1, 2, ... tokens ahead: {shares}")

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write a checkpoint of the step that was logged last, and the model for its users."""
        progress = self.progress | {"step": self.step, "consumed": self.data.consumed}
        self.checkpoints.save(model, optimizer, progress)
        self.export(model)

    def export(self, model: nn.Module) -> None:
        """Write the whole model for its users: see `files.save`."""
        weights = self.export_weights(model)
        if leads():
            config = model.config.to_json()
            save(self.out, config, self.data.chat, weights, generate=self.generate)
        self.saved_step = self.step

    def __exit__(self, *exception: object) -> None:
        """Whatever ended the run, say what was saved."""
        self.stop_signal.restore()
        self.bar.close()
        if leads():
            self.log_file.close()
        if self.saved_step:
            say(f"{self.step} steps; {self.out} holds the model of step {self.saved_step}")


class StopSignal:
    """Ctrl-C, SIGTERM, a hang-up: the first asks to stop after the step, the second stops at once.

    With several processes every signal only asks: torchrun itself sends two.
    """

    def __init__(self):
        self.number = 0
        self.former = {}
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number and signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                self.former[number] = signal.signal(number, self.remember)

    def remember(self, number: int, frame: object) -> None:
        self.number = number
        if "LOCAL_RANK" not in os.environ:
            self.restore()
        with contextlib.suppress(RuntimeError):  # the signal came in the middle of a print
            say("stopping after this step")

    def restore(self) -> None:
        for number, handler in self.former.items():
            signal.signal(number, handler)
