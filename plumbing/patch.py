"""What training changed in a model, as a small file: the difference of the weights, at low rank.

Training moves every matrix W (n, m) a little, and mostly along a few directions. So most of the
difference is a product of two thin matrices, left (n, rank) and right (m, rank). These are kept in
4 bits, with a scale for each of the rank directions: at the same size, many coarse directions keep
more than a few exact ones. Vectors (norms and biases) are kept whole, and so is the embedding of
`<|mask|>`.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from .errors import UserError, describe
from .files import atomic_write

LEFT, RIGHT, SCALE, VECTOR, ROW = ".left", ".right", ".scale", ".difference", ".mask_row"


def is_embedding(name: str) -> bool:
    return name in ("model.embed_tokens.weight", "lm_head.weight")


def make_patch(base: Mapping, tuned: Mapping, mask_id: int, rank: int) -> dict[str, Tensor]:
    """The patch between two state_dicts of the same names and shapes."""
    torch.manual_seed(0)  # svd_lowrank begins with random directions
    patch = {}
    for name, weight in tuned.items():
        difference = weight.float() - base[name].float()
        if is_embedding(name):
            patch[name + ROW] = difference[mask_id].bfloat16()
            difference[mask_id] = 0
        if weight.dim() == 1:
            patch[name + VECTOR] = difference.bfloat16()
        else:
            u, s, v = torch.svd_lowrank(difference, q=min(rank + 16, *weight.shape), niter=4)
            patch[name + LEFT], left_scale = to_4_bits(u[:, :rank])
            patch[name + RIGHT], right_scale = to_4_bits(v[:, :rank])
            patch[name + SCALE] = s[:rank] * left_scale * right_scale
    return patch


def to_4_bits(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes, each of two numbers from -7 to 7, and by what to multiply each column (rank,)."""
    scale = columns.abs().amax(dim=0) / 7
    numbers = (columns / scale).round().to(torch.int8).flatten() + 8
    numbers = F.pad(numbers, (0, len(numbers) % 2)).to(torch.uint8)
    return numbers[::2] + 16 * numbers[1::2], scale


def from_4_bits(packed: Tensor, n: int, rank: int) -> Tensor:
    """The numbers (n, rank)."""
    numbers = torch.stack([packed % 16, packed // 16], dim=1).flatten()[: n * rank]
    return numbers.view(n, rank).float() - 8


def apply_patch(weights: dict[str, Tensor], patch: Mapping, mask_id: int) -> None:
    """Add the patch to a base's state_dict, in place."""
    for name, weight in weights.items():
        if is_embedding(name):
            weight[mask_id] += patch[name + ROW]
        if weight.dim() == 1:
            weight += patch[name + VECTOR]
        else:
            n, m = weight.shape
            scale = patch[name + SCALE]
            left = from_4_bits(patch[name + LEFT], n, len(scale)) * scale
            weight += left @ from_4_bits(patch[name + RIGHT], m, len(scale)).T


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """A checksum of every tenth tensor; embeddings, whose mask row may be new, are left out."""
    checksum = hashlib.sha256()
    for name in sorted(name for name in weights if not is_embedding(name))[::10]:
        checksum.update(name.encode())
        checksum.update(weights[name].float().cpu().numpy().tobytes())
    return checksum.hexdigest()


def write_patch(path: Path, patch: dict[str, Tensor], facts: dict) -> None:
    """facts: whatever can be JSON; it stands in the file's metadata."""
    metadata = {"format": "pt", "mars_patch": json.dumps(facts)}
    content = save(patch, metadata=metadata)  # save_file would let nobody else read it
    atomic_write(path, lambda file: file.write_bytes(content))


def read_patch(path: Path) -> tuple[dict[str, Tensor], dict]:
    """The tensors and the facts of a patch."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["mars_patch"])
            facts["base"], facts["config"]["eos_token_id"], facts["fingerprint"]  # or a KeyError
            return {name: file.get_tensor(name) for name in file.keys()}, facts
    except (KeyError, TypeError):
        raise UserError(f"{path}: not a patch (apps.patch makes them)") from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{path}: damaged ({describe(error)})") from None
