"""What a run can be resumed from: weights, optimizer and progress, complete at any instant."""

import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from .errors import failure_as
from .files import atomic_write, read_json, write_json
from .processes import leads, together

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is fine

KEPT = 2  # checkpoints: the newest, and a spare in case it is damaged
DAMAGED = "damaged; delete it to resume from the one before"


class Checkpoints:
    """OUT/checkpoints/step-N, in torch's distributed format: the same for any number of processes.

    A directory gets its name when it is complete and loses it before it is deleted: whenever the
    run is killed, the newest is complete. (torch reads pickles, which can run code: a checkpoint is
    one's own. To share a model, share its safetensors.)
    """

    def __init__(self, directory: Path):
        self.directory = directory

    def paths(self) -> list[Path]:
        return sorted(self.directory.glob("step-" + 8 * "[0-9]"))

    def newest(self) -> dict | None:
        """The newest checkpoint's progress.json, if there is a checkpoint."""
        paths = self.paths()
        return read_json(paths[-1] / "progress.json") if paths else None

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict) -> None:
        path = self.directory / step_name(progress["step"])
        temporary = path.with_suffix(".tmp")
        with together(f"{path}: not saved; those before it are intact"):
            try:
                dcp.save(tensors_of(model, optimizer), checkpoint_id=temporary)
                if leads():
                    atomic_write(
                        temporary / "progress.json", lambda file: write_json(file, progress)
                    )
                    temporary.rename(path)
                    self.remove(self.paths()[:-KEPT])
            except BaseException as error:
                is_full = shutil.disk_usage(self.directory.parent).free < 2**20
                shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs the room
                if is_full and not isinstance(error, KeyboardInterrupt):  # torch does not say so
                    raise OSError("no space left on device") from None
                raise

    def remove(self, paths: list[Path]) -> None:
        for path in paths:
            renamed = path.rename(path.with_suffix(".removed.tmp"))  # not where `save` writes
            shutil.rmtree(renamed)

    def remove_leftovers(self) -> None:
        """What a kill left half-written or half-deleted."""
        for path in self.directory.glob("step-*.tmp"):
            shutil.rmtree(path)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load the newest checkpoint, in place."""
        path = self.paths()[-1]
        with together(f"{path}: {DAMAGED}"):
            with failure_as(f"{path}: {DAMAGED}"):  # dcp.load would print a traceback, and go on
                dcp.FileSystemReader(path).read_metadata()
            state = tensors_of(model, optimizer)
            dcp.load(state, checkpoint_id=path)
            optimizer_state = {
                "state": state["optimizer"],
                "param_groups": get_state_dict(model, optimizer)[1]["param_groups"],
            }
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=optimizer_state,
            )


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Tensors only, by name; the optimizer's settings follow from the run's options."""
    weights, optimizer_state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": optimizer_state["state"]}


def whole_weights(model: nn.Module) -> dict:
    """The state_dict of a model that may be sharded, whole and on the CPU."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)
