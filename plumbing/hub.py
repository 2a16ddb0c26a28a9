"""Checkpoints by name: a directory, or a repository of the Hugging Face hub."""

from pathlib import Path

from .errors import UserError

FILES = ["*.json", "model*.safetensors", "*.jinja"]


def locate(name: str) -> Path:
    """The directory `name`, or a hub repository: downloaded unless it is in the hub's cache.

    Cache, progress bar, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT are huggingface_hub's.
    """
    if Path(name).is_dir():
        return Path(name)
    guide = Path(name).parent / "README.md"
    if "/" in name and guide.exists():  # qwen2.5/model, before it is made
        raise UserError(f"{name}: no such directory; {guide} says how to make it")
    from huggingface_hub import snapshot_download  # slow; needed only here

    try:
        return Path(snapshot_download(name, allow_patterns=FILES, ignore_patterns="*/*"))
    except Exception as error:  # no such model, no access, no network: it says what to do
        raise UserError(f"{name}: no such directory in {Path.cwd()}; the hub: {error}") from None
