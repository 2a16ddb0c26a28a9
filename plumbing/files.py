"""Files: JSON, checkpoints by name, their weights, and all-or-nothing writes."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import UserError, failure_as

HUB_FILES = ["*.json", "model*.safetensors", "*.jinja"]  # what is downloaded


def read_json(path: Path) -> dict:
    """The JSON object in a file; anything else is a UserError."""
    with failure_as(f"{path}: cannot be read; is {path.parent} a checkpoint?"):
        content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, found {str(content)[:40]}")
    return content


def has_model(directory: Path) -> bool:
    """Is there a model, or a part of one, that a new one would replace?"""
    return any((directory / name).exists() for name in ("config.json", "model.safetensors"))


def locate(name: str) -> Path:
    """The directory `name`, or a hub repository: downloaded unless it is in the hub's cache.

    Cache, progress bar, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT are huggingface_hub's.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download  # slow; needed only here

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns="*/*"))
    except Exception as error:  # no such model, no access, no network: it says what to do
        raise UserError(f"{name}: no such directory in {Path.cwd()}; the hub: {error}") from None


def read_tensors(directory: Path, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of model.safetensors, or of its shards, straight to `device`."""
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"dtype: torch.bfloat16, say, not {dtype!r}")
    paths = [directory / "model.safetensors"]
    if not paths[0].exists():
        paths = sorted(directory.glob("model-*.safetensors")) or paths
    tensors = {}
    for path in paths:
        with (
            failure_as(f"{path}: missing, damaged, or too large for this machine"),
            safe_open(path, framework="pt", device=str(device)) as shard,
        ):
            for name in shard.keys():
                tensor = shard.get_tensor(name)
                if tensor.itemsize < 2 or not tensor.is_floating_point():
                    raise UserError(f"{path}: {name} is {tensor.dtype}; get the model unquantized")
                tensors[name] = tensor.to(dtype)
                # a sum is quicker than to look at each number; in float16 it may overflow
                if not tensors[name].sum(dtype=torch.float32).isfinite():
                    raise UserError(f"{path}: damaged (tensor {name} holds NaN or infinity)")
    return tensors


def check_shapes(directory: Path, expected: Mapping, found: Mapping) -> None:
    """Raise UserError if tensors `found` are not those `expected`, by name and shape."""
    for name in sorted(expected.keys() | found.keys()):
        want = tuple(expected[name].shape) if name in expected else "no such tensor"
        got = tuple(found[name].shape) if name in found else "none"
        if want != got:
            raise UserError(f"{directory}: tensor {name}: expected {want}, found {got}")


@contextlib.contextmanager
def all_or_nothing(directory: Path) -> Iterator[Path]:
    """A new folder to write files into; when all are written, they move to `directory` together.

    Whatever fails before, a full disk or a kill, leaves the old files as they were.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=directory, prefix="saving-", suffix=".tmp") as folder:
            yield Path(folder)
            paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
            for path in paths:  # before any name is given: a crash may lose what is not on the disk
                with open(path, "r+b") as file:
                    os.fsync(file.fileno())
            for path in paths:
                target = directory / path.relative_to(folder)
                target.parent.mkdir(exist_ok=True)  # custom_generate
                os.replace(path, target)
    except (OSError, SafetensorError) as error:
        message = f"{directory}: not saved ({error}); what was there before is intact"
        raise UserError(message) from None


def atomic_write(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path; when it returns, that file takes the place of `path`."""
    with all_or_nothing(path.parent) as folder:
        write(folder / path.name)


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def save(
    directory: Path,
    config: dict,
    chat,
    weights: Mapping,
    dtype: torch.dtype = torch.bfloat16,
    generate: Path | None = None,
) -> None:
    """Write a directory that `load`, transformers and any server of such models can read.

    config: the content of config.json; chat: a `Chat`; weights: a whole state_dict. generate: the
    file by which transformers decodes with masks. If masks were trained it is copied, and so is the
    README.md of its model, which suits any, unless `directory` has its own.
    """
    config = config | {"torch_dtype": str(dtype).removeprefix("torch.")}
    with all_or_nothing(directory) as folder:
        write_json(folder / "config.json", config)
        write_json(folder / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
        chat.save(folder)
        tensors = {k: v.detach().to("cpu", dtype).contiguous() for k, v in weights.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        # safetensors makes files that only their owner may read
        shutil.copymode(folder / "config.json", folder / "model.safetensors")
        if generate and config.get("block"):
            (folder / "custom_generate").mkdir()
            shutil.copy(generate, folder / "custom_generate")
            if not (directory / "README.md").exists():
                shutil.copy(generate.parent.parent / "README.md", folder)
