"""Checkpoints by name: a directory, or a repository of the Hugging Face hub."""

import re
from pathlib import Path

from .errors import UserError, describe

FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "chat_template.jinja",
]


def locate(name: str) -> Path:
    """The directory `name`, or a hub repository: downloaded unless it is in the hub's cache.

    Cache, progress bar, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT are huggingface_hub's.
    """
    if name and Path(name).is_dir():
        return Path(name)
    if Path(name).is_file():
        raise UserError(f"{name}: is a file; name the directory of a checkpoint")
    if not re.fullmatch(r"\w[\w.-]{,95}/[\w.-]{1,96}", name):
        raise UserError(f"{name!r}: no such directory, and not a hub id (org/name)")
    from huggingface_hub import constants, errors, snapshot_download  # slow; needed only here

    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except errors.GatedRepoError:
        reason = "asks for its terms to be accepted on its page; then set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = "has no such model, or it is private and HF_TOKEN may not read it"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError):
        reason = "does not answer, and nothing complete was downloaded before"
        if constants.HF_HUB_OFFLINE:
            reason = "is not asked (HF_HUB_OFFLINE), and nothing complete was downloaded before"
    except Exception as error:  # a proxy, a full disk, a file that changed on the way: many types
        reason = f"says: {describe(error)}"
    raise UserError(f"{name}: no such directory in {Path.cwd()}; the hub {reason}")
