"""What training changed in a model, as a small file: the difference of the weights, at low rank.

Training moves every matrix W (n, m) mostly along a few directions: the difference is nearly a
product of two thin matrices, kept as whole numbers and a scale for each direction. (Many coarse
directions keep more than a few exact ones.) Vectors and the embedding of `<|mask|>` are kept whole.

A patch may come from a stranger: what `make_patch` never makes is refused before the first file of
a model is written.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from .errors import UserError, describe
from .files import atomic_write, refuse_pipe

DAMAGED = "damaged; make or download it again"
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
            patch[name + LEFT], left_scale = to_code(u[:, :rank], s[:rank])
            patch[name + RIGHT], right_scale = to_code(v[:, :rank], s[:rank])
            patch[name + SCALE] = s[:rank] * left_scale * right_scale
    return patch


def to_code(columns: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers, finer where a column weighs more, in Huffman's code; and scales (rank,)."""
    step = 0.62 * (columns * weights).square().mean().sqrt()  # then a number takes under 3 bits
    numbers = (columns * weights / step.clamp(min=1e-30)).round().clamp(-127, 127)
    scale = (numbers * columns).sum(dim=0) / numbers.square().sum(dim=0).clamp(min=1)
    coder = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    code = coder.compress(numbers.T.to(torch.int8).numpy().tobytes()) + coder.flush()
    return torch.frombuffer(bytearray(code), dtype=torch.uint8), scale


def from_code(code: Tensor, n: int, rank: int) -> Tensor:
    """The numbers (n, rank); ValueError if the code has others."""
    decoder = zlib.decompressobj()
    try:
        numbers = bytearray(decoder.decompress(code.numpy(), n * rank + 1))  # never gigabytes
    except zlib.error as error:
        raise ValueError(f"{DAMAGED} ({error})") from None
    if len(numbers) != n * rank or not decoder.eof:
        raise ValueError(f"{DAMAGED} (a matrix does not have {n} x {rank} numbers)")
    return torch.frombuffer(numbers, dtype=torch.int8).view(rank, n).T.float()


def check_tensors(weights: Mapping, patch: Mapping, rank: int) -> None:
    """Raise ValueError unless a patch has the tensors that fit these weights, and no others."""
    expected = {}
    for name, weight in weights.items():
        if is_embedding(name):
            expected[name + ROW] = f"({weight.shape[1]},) bfloat16"
        if weight.dim() == 1:
            expected[name + VECTOR] = f"({len(weight)},) bfloat16"
        else:
            expected[name + SCALE] = f"({min(rank, *weight.shape)},) float32"
            expected[name + LEFT] = expected[name + RIGHT] = "a code"
    for name in sorted(expected.keys() | patch.keys()):
        want = expected.get(name, "no such tensor")
        got = kind(patch[name]) if name in patch else "none"
        if want != got:
            raise ValueError(f"tensor {name}: expected {want}, found {got}")


def kind(tensor: Tensor) -> str:
    """Shape and dtype; codes may have any length."""
    if tensor.dim() == 1 and tensor.dtype == torch.uint8:
        return "a code"
    return f"{tuple(tensor.shape)} {tensor.dtype}".replace("torch.", "")


def apply_patch(weights: dict[str, Tensor], patch: Mapping[str, Tensor], mask_id: int) -> None:
    """Add the patch to a base's state_dict, in place; ValueError if its numbers are damaged."""
    for name, weight in weights.items():
        if is_embedding(name):
            weight[mask_id] += patch[name + ROW]
        if weight.dim() == 1:
            weight += patch[name + VECTOR]
        else:
            n, m = weight.shape
            scale = patch[name + SCALE]
            left = from_code(patch[name + LEFT], n, len(scale)) * scale
            weight += left @ from_code(patch[name + RIGHT], m, len(scale)).T
        if not weight.sum().isfinite():
            raise ValueError(f"{DAMAGED} (with it, {name} is not finite)")


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """A checksum of every tenth tensor; embeddings, whose mask row may be new, are left out."""
    checksum = hashlib.sha256()
    for name in sorted(name for name in weights if not is_embedding(name))[::10]:
        checksum.update(name.encode())
        checksum.update(weights[name].float().cpu().numpy().tobytes())
    return checksum.hexdigest()


def checksum(patch: Mapping[str, Tensor], facts: dict) -> str:
    """Of every tensor, and of every fact but itself."""
    others = {name: fact for name, fact in facts.items() if name != "checksum"}
    digest = hashlib.sha256(json.dumps(others, sort_keys=True).encode())
    for name in sorted(patch):
        tensor = patch[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def write_patch(path: Path, patch: dict[str, Tensor], facts: dict) -> None:
    """facts: whatever can be JSON. (safetensors' save_file would let nobody else read the file.)"""
    facts = facts | {"checksum": checksum(patch, facts)}
    content = save(patch, metadata={"format": "pt", "mars_patch": json.dumps(facts)})
    atomic_write(path, lambda file: file.write_bytes(content))


def read_patch(path: Path) -> tuple[dict[str, Tensor], dict]:
    """The tensors and the facts of a patch. Whether they fit a model, `check_tensors` says."""
    refuse_pipe(path)
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["mars_patch"])
            patch = {name: file.get_tensor(name) for name in file.keys()}
        check_facts(facts)
    except (KeyError, TypeError):
        raise UserError(f"{path}: not a patch (apps.patch makes them)") from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise UserError(f"{path}: damaged ({describe(error)})") from None
    if "checksum" in facts and facts["checksum"] != checksum(patch, facts):  # old ones have none
        raise UserError(f"{path}: {DAMAGED} (its checksum is another)")
    return patch, facts


def check_facts(facts: dict) -> None:
    """Raise KeyError or TypeError if a fact is missing, or is not what `apps.patch make` writes."""
    for name, kind in (("base", str), ("fingerprint", str), ("rank", int), ("config", dict)):
        if not isinstance(facts[name], kind):
            raise TypeError(name)
    if facts["rank"] < 1:
        raise TypeError("rank")
