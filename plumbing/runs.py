"""The directory of a training run: what may be written there, its log and bar, and how it stops."""

import argparse
import json
import time
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from .checkpoints import Checkpoints, remove_leftovers, whole_weights
from .config import config_json
from .errors import UserError, failure_as
from .files import atomic_write, has_model, save
from .jsonl import JsonlFile
from .processes import largest, leads, say, together
from .signals import StopSignal

BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
SHOWN = ("step", "noisy", "clean", "tokens_per_s")
# Options that a resumed run may change: they say where and how, not what is computed.
MAY_CHANGE = {"data", "out", "resume", "save_every", "device", "dtype"}
MAY_CHANGE |= {"batch_tokens", "checkpoint_layers"}


def what_decides(args: argparse.Namespace, rows: JsonlFile) -> dict[str, str]:
    """The options and the data that decide what a run computes."""
    facts = {"rows of --data": str(len(rows)), "checksum of --data": str(rows.checksum)}
    for name, value in vars(args).items():
        if name not in MAY_CHANGE:
            facts["--" + name.replace("_", "-")] = str(value)
    return facts


class Run:
    """OUT: the exported model, log.jsonl and checkpoints/.

    Life cycle: create it (conflicts are refused before anything is written), enter it, `start`,
    then `log` every step and `save` now and then.
    """

    def __init__(self, out: Path, settings: dict[str, str], resume: bool):
        """settings: of `what_decides`; a resumed run must have the same."""
        self.out = out
        self.settings = settings
        self.checkpoints = Checkpoints(out / "checkpoints")
        self.whole_weights = whole_weights  # of the model for its users; may be replaced
        self.step = self.saved_step = 0
        self.data = None
        self.found = self.checkpoints.newest()  # progress to resume from
        if self.found and resume:
            self.step = self.saved_step = self.found["step"]
            for name, value in settings.items():
                before = self.found["run"].get(name)
                if value != before:
                    raise UserError(
                        f"{name} {value}: the run in {out} has {before}, and keeps it; "
                        f"to train on from its model, give --model {out} and another --out"
                    )
        elif self.found and not self.found["finished"]:
            what = "has an unfinished run; --resume it, delete it or choose another --out"
            raise UserError(f"--out {out}: {what}")
        elif self.found or has_model(out):
            raise UserError(f"--out {out}: has a model; delete it or choose another --out")
        elif resume:
            say(f"{out}: no checkpoint to resume from; starting from the beginning")

    def __enter__(self) -> "Run":
        """Open log and progress bar, remove what a kill left, and catch signals."""
        with together(), failure_as(f"--out {self.out}: cannot be written to"):
            if leads():
                self.out.mkdir(parents=True, exist_ok=True)
                remove_leftovers(self.out)
                self.open_log()
        self.bar = tqdm(total=100, bar_format=BAR, disable=None if leads() else True)
        self.last_line = time.monotonic()
        self.stop_signal = StopSignal()
        return self

    def open_log(self) -> None:
        """Open log.jsonl, without the steps that no checkpoint holds: they are logged again."""
        log = self.out / "log.jsonl"
        log.touch()
        lines = log.read_text().splitlines(keepends=True)[: self.step]  # one for each step
        atomic_write(log, lambda file: file.write_text("".join(lines)))
        self.log_file = open(log, "a")

    def start(self, model, optimizer, chat, data) -> int:
        """The number of the step to go on from; its checkpoint is loaded into what is given."""
        self.model = model
        self.optimizer = optimizer
        self.chat = chat
        self.data = data
        if self.found:
            self.checkpoints.load(model, optimizer)
            data.consumed = self.found["consumed"]
            data.skipped = Counter(self.found["skipped"])
            say(f"resumed at step {self.step}")
            self.export()  # in case the run was killed before it
        return self.step

    def log(self, record: dict, share_done: float) -> None:
        """Add a line to log.jsonl and move the bar; without a terminal, print a line a minute."""
        self.step = record["step"]
        if leads():
            self.log_file.write(json.dumps(record) + "\n")
            self.log_file.flush()
        self.bar.set_postfix({name: record[name] for name in SHOWN if name in record})
        self.bar.update(100 * share_done - self.bar.n)
        if self.bar.disable and time.monotonic() > self.last_line + 60:
            self.last_line = time.monotonic()
            say(f"{share_done:4.0%}: {self.bar.postfix}")
        if "look_ahead" in record:
            shares = "  ".join(f"{share:.3f}" for share in record["look_ahead"])
            say(f"step {self.step}: right 1, 2, ... tokens ahead: {shares}")

    def save(self, finished: bool) -> None:
        """Write a checkpoint of the step that was logged last, and the model for its users."""
        progress = {"step": self.step, "consumed": self.data.consumed, "skipped": self.data.skipped}
        progress |= {"finished": finished, "run": self.settings}
        self.checkpoints.save(self.model, self.optimizer, progress)
        self.export()

    def export(self) -> None:
        """Write the whole model for its users: see `files.save`."""
        weights = self.whole_weights(self.model)
        with together():
            if leads():
                save(self.out, config_json(self.model.config), self.chat, weights)
        self.saved_step = self.step

    def stop_requested(self) -> int:
        """The number of the signal that came to any of the processes, or 0."""
        return largest(self.stop_signal.number, self.model.device)

    def __exit__(self, *exception: object) -> None:
        """Whatever ended the run, say what was saved."""
        self.stop_signal.restore()
        self.bar.close()
        if leads():
            self.log_file.close()
        if self.data and self.data.skipped:
            say(f"skipped rows: {self.data.reasons()}")
        what = f"the model of step {self.saved_step}" if self.saved_step else "no model of this run"
        say(f"{self.step} steps; {self.out} holds {what}")
