"""One process or several: torchrun, which ends all if one fails, and sharding with FSDP2."""

import functools
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm


def rank_and_size() -> tuple[int, int]:
    """This process's number and how many torchrun started: (0, 1) without torchrun."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def leads() -> bool:
    """Is this the process that prints and writes files?"""
    return rank_and_size()[0] == 0


def say(text: str) -> None:
    """Print once, above the progress bar if there is one; a reader that went away stops nothing."""
    if not leads():
        return
    try:
        tqdm.write(text)
        sys.stdout.flush()
    except OSError:
        sys.stdout = open(os.devnull, "w")


def join(device: torch.device) -> torch.device:
    """Meet the other processes. Each has a GPU of its own, or all share the CPU."""
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")
    return device


def shard(model: nn.Module, dtype: torch.dtype) -> None:
    """FSDP2: every process keeps a part of each weight, and gathers a layer when it is needed.

    `in_chunks` is registered as one call that gathers the head. A call for each chunk would gather
    more often in one process than in another, which would then wait forever.
    """
    mesh = init_device_mesh(model.device.type, (dist.get_world_size(),))
    policy = fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in [*model.model.layers, model]:
        fsdp.fully_shard(module, mesh=mesh, mp_policy=policy)
    fsdp.register_fsdp_forward_method(model, "in_chunks")


def recompute_layers(model: nn.Module) -> None:
    """Keep no activations of the layers: the backward pass computes them again."""
    for layer in model.model.layers:  # inside the layer's call, where FSDP's hooks are
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def arithmetic_in(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """Compute in bfloat16 with weights in float32; under FSDP, `shard` has done it already."""
    enabled = dtype == torch.bfloat16 and not dist.is_initialized()
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


def total(tensor: Tensor) -> Tensor:
    """The sum over all processes."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def largest(number: int) -> int:
    """The largest of all processes' numbers."""
    tensor = torch.tensor(number)  # on the CPU: gloo is there with GPUs, too
    if dist.is_initialized():
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return int(tensor)


def clip_gradients(model: nn.Module, most: float) -> float:
    """Scale the gradients of all processes to a norm of at most `most`; the norm before that."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), most)
    if dist.is_initialized():
        norm = norm.full_tensor()
    return norm.item()


def peak_memory(device: torch.device) -> float:
    """Peak GiB allocated by torch on a GPU, or used by this process on Linux; else 0."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    status = Path("/proc/self/status")
    if not status.exists():
        return 0.0
    return int(status.read_text().split("VmHWM:")[1].split()[0]) / 2**20
