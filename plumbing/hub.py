"""Checkpoints by name: a directory, or a repository of the Hugging Face hub."""

from pathlib import Path

from .errors import UserError

FILES = ["*.json", "model*.safetensors", "*.jinja"]


def locate(name: str) -> Path:
    """The directory `name`, or a hub repository: downloaded unless it is in the hub's cache.

    Cache, progress bar, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT are huggingface_hub's.
    """
    path = Path(name)
    if path.suffix == ".gguf":
        raise UserError(
            f"{name}: a GGUF file; unpack it: python -m apps.from_gguf {name} DIRECTORY"
        )
    if name and path.is_dir():
        if (path / "README.md").exists() and not (path / "config.json").exists():
            raise UserError(f"{name}: no model; {path / 'README.md'} says which there are")
        return path
    guide = path.parent / "README.md"
    if "/" in name and guide.exists():  # qwen2.5/model, before it is made
        raise UserError(f"{name!r}: no such directory; {guide} says how to make it")
    if name.count("/") != 1 or path.exists():
        raise UserError(f"{name!r}: no such directory, and not a hub id (org/name)")
    from huggingface_hub import snapshot_download  # slow; needed only here

    try:
        return Path(snapshot_download(name, allow_patterns=FILES, ignore_patterns="*/*"))
    except Exception as error:  # no such model, no access, no network: it says what to do
        raise UserError(f"{name}: no such directory in {Path.cwd()}; the hub: {error}") from None
