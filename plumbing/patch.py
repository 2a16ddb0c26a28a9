"""What training changed in a model, as a small file: the difference of the weights, at low rank.

Training moves every matrix W (n, m) mostly along a few directions: the difference is nearly a
product of two thin matrices, kept as whole numbers and a scale for each direction. (Many coarse
directions keep more than a few exact ones. But the right matrix says which inputs a change answers
to: rounded coarsely, it would answer to others, too.) Vectors and the embedding of `<|mask|>` are
kept whole.

The file is a safetensors file, compressed as gzip does, which also notices any damage.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from .errors import failure_as
from .files import atomic_write

FACTS = "facts"  # the tensor that holds the bytes of a JSON object
LEFT, RIGHT, SCALE, VECTOR, ROW = ".left", ".right", ".scale", ".difference", ".mask_row"
LEFT_STEP, RIGHT_STEP = 0.7, 0.12  # of rounding; a number takes about 3 bits, and 5


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
            patch[name + LEFT], left_scale = whole_numbers(u[:, :rank], s[:rank], LEFT_STEP)
            patch[name + RIGHT], right_scale = whole_numbers(v[:, :rank], s[:rank], RIGHT_STEP)
            patch[name + SCALE] = s[:rank] * left_scale * right_scale
    return patch


def whole_numbers(columns: Tensor, weights: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """int8 numbers (rank, n) of columns (n, rank), finer where one weighs more; scales (rank,).

    step: by which they are rounded, in units of their root mean square.
    """
    step = step * (columns * weights).square().mean().sqrt()
    numbers = (columns * weights / step.clamp(min=1e-30)).round().clamp(-127, 127)
    scale = (numbers * columns).sum(dim=0) / numbers.square().sum(dim=0).clamp(min=1)
    return numbers.T.to(torch.int8).contiguous(), scale


def apply_patch(weights: dict[str, Tensor], patch: Mapping[str, Tensor], mask_id: int) -> None:
    """Add the patch to a base's state_dict, in place."""
    for name, weight in weights.items():
        if is_embedding(name):
            weight[mask_id] += patch[name + ROW]
        if weight.dim() == 1:
            weight += patch[name + VECTOR]
        else:
            left = patch[name + LEFT].T.float() * patch[name + SCALE]
            weight += left @ patch[name + RIGHT].float()


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """A checksum of every tenth tensor; embeddings, whose mask row may be new, are left out."""
    checksum = hashlib.sha256()
    for name in sorted(name for name in weights if not is_embedding(name))[::10]:
        checksum.update(name.encode())
        checksum.update(weights[name].float().cpu().numpy().tobytes())
    return checksum.hexdigest()


def write_patch(path: Path, patch: dict[str, Tensor], facts: dict) -> None:
    """facts: whatever can be JSON."""
    text = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
    # gzip's format, but looking for no repetitions: there are none, and the file gets smaller.
    compressor = zlib.compressobj(wbits=31, memLevel=7, strategy=zlib.Z_HUFFMAN_ONLY)
    content = compressor.compress(save(patch | {FACTS: text})) + compressor.flush()
    atomic_write(path, lambda file: file.write_bytes(content))


def read_patch(path: Path) -> tuple[dict[str, Tensor], dict]:
    """The tensors and the facts of a patch."""
    with failure_as(f"{path}: missing, damaged, or not a patch (apps.patch makes them)"):
        patch = load(gzip.decompress(path.read_bytes()))
        return patch, json.loads(bytes(patch.pop(FACTS).tolist()))
