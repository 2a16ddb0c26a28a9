"""What a run can be resumed from: weights, optimizer and progress, complete at any instant."""

import pickle
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from .errors import UserError
from .files import atomic_write, read_json, refuse_pipe, write_json
from .processes import leads, together

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is fine

KEPT = 2  # checkpoints: the newest, and a spare in case it is damaged
PROGRESS = {"step": int, "consumed": int, "skipped": dict, "finished": bool, "run": dict}
DAMAGED = "damaged; delete it to resume from the one before"


class Checkpoints:
    """OUT/checkpoints/step-N, in torch's distributed format: the same for any number of processes.

    A directory gets its name when it is complete and loses it before it is deleted: whenever the
    run is killed, the newest is complete.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.replaced: list[Path] = []  # the previous run's, deleted once this run has one

    def paths(self) -> list[Path]:
        return sorted(self.directory.glob("step-" + 8 * "[0-9]"))

    def newest(self) -> dict | None:
        """The newest checkpoint's progress.json, if there is a checkpoint."""
        paths = self.paths()
        if not paths:
            return None
        progress = read_json(paths[-1] / "progress.json")
        if not is_sound(progress) or paths[-1].name != step_name(progress["step"]):
            raise UserError(f"{paths[-1]}: {DAMAGED}")
        return progress

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
                    self.remove([old for old in self.replaced if old == path])
                    temporary.rename(path)
                    self.remove([old for old in self.replaced if old != path])
                    self.replaced = []
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
            refuse_programs(path)
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


def is_sound(progress: dict) -> bool:
    """Is this the content of a progress.json as `Run.save` makes it?"""
    if any(type(progress.get(name)) is not kind for name, kind in PROGRESS.items()):
        return False
    counts = [progress["consumed"], *progress["skipped"].values()]
    return all(type(count) is int and count >= 0 for count in counts)


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Tensors only, by name; the optimizer's settings follow from the run's options."""
    weights, optimizer_state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": optimizer_state["state"]}


def whole_weights(model: nn.Module) -> dict:
    """The state_dict of a model that may be sharded, whole and on the CPU."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


class DataOnly(pickle.Unpickler):
    """Loads the kinds of data that torch's .metadata consists of; anything else is an error."""

    def find_class(self, module: str, name: str) -> object:
        known = {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        }
        if module.startswith("pathlib"):
            known.add((module, "PosixPath"))
            known.add((module, "WindowsPath"))
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_metadata = module == "torch.distributed.checkpoint.metadata" and name.isidentifier()
        found = super().find_class(module, name) if is_metadata else None
        is_metadata = getattr(found, "__module__", None) == module
        if is_dtype or is_metadata or (module, name) in known:
            return super().find_class(module, name)
        raise UserError(f"its metadata would run {module}.{name}")


def refuse_programs(checkpoint: Path) -> None:
    """Raise UserError unless a checkpoint holds data only.

    torch reads .metadata, and entries that are not tensors, as pickles, and these can run code.
    """
    if not (checkpoint / ".metadata").exists():
        raise UserError(f"{checkpoint}: {DAMAGED}")
    for path in checkpoint.iterdir():
        refuse_pipe(path)
    for path in checkpoint.glob("*.metadata"):
        try:
            with open(path, "rb") as file:
                metadata = DataOnly(file).load()
            entries = metadata.state_dict_metadata.values()
            is_data = all(isinstance(entry, TensorStorageMetadata) for entry in entries)
        except UserError as error:
            raise UserError(f"{checkpoint}: refused: {error}") from None
        except Exception:  # a damaged pickle may raise anything
            raise UserError(f"{checkpoint}: {DAMAGED}") from None
        if not is_data:
            raise UserError(f"{checkpoint}: refused: it holds more than tensors")
