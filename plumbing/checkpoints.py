"""What a run can be resumed from: weights, optimizer and progress, complete at any instant."""

import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict

from .errors import failure_as
from .files import read_json, write_json
from .processes import leads

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is fine

KEPT = 2  # checkpoints: the newest, and a spare in case it is damaged


@dataclass
class Checkpoints:
    """OUT/checkpoints/step-N, in torch's distributed format: the same for any number of processes.

    A directory gets its name when it is complete and loses it before it is deleted: whenever the
    run is killed, the newest is complete. (torch reads pickles, which can run code: a checkpoint is
    one's own. To share a model, share its safetensors.)
    """

    directory: Path

    def paths(self) -> list[Path]:
        return sorted(self.directory.glob("step-" + 8 * "[0-9]"))

    def newest(self) -> dict | None:
        """The newest checkpoint's progress.json, if there is a checkpoint."""
        paths = self.paths()
        return read_json(paths[-1] / "progress.json") if paths else None

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict) -> None:
        path = self.directory / f"step-{progress['step']:08d}"
        temporary = path.with_suffix(".tmp")
        with failure_as(f"{path}: not saved (is the disk full?); others are intact"):
            try:
                dcp.save(tensors_of(model, optimizer), checkpoint_id=temporary)
                if leads():
                    write_json(temporary / "progress.json", progress)
                    temporary.rename(path)
                    for old in self.paths()[:-KEPT]:
                        shutil.rmtree(old.rename(old.with_suffix(".removed.tmp")))
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs the room
                raise

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load the newest checkpoint, in place."""
        path = self.paths()[-1]
        with failure_as(f"{path}: damaged; delete it to resume from the one before"):
            dcp.FileSystemReader(path).read_metadata()  # where `load` prints a traceback
            found = tensors_of(model, optimizer)
            dcp.load(found, checkpoint_id=path)
            _, states = state_dict.get_state_dict(model, optimizer)
            states["state"] = found["optimizer"]
            state_dict.set_state_dict(
                model, optimizer, model_state_dict=found["model"], optim_state_dict=states
            )


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Tensors only, by name; the optimizer's settings follow from the run's options."""
    weights, optimizer_state = state_dict.get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": optimizer_state["state"]}


def whole_weights(model: nn.Module) -> dict:
    """The state_dict of a model that may be sharded, whole and on the CPU."""
    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    return state_dict.get_model_state_dict(model, options=options)
