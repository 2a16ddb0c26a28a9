"""A copy of a model that decodes faster, and no more threads than there are free cores.

`python -m bench.speed --shape 0.5B --widths` shows what a forward costs.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMALL = 2**18  # numbers in a matrix; with fewer a call of oneDNN costs more than it saves
LOAD = Path("/proc/loadavg")  # of Linux: "1.02 0.97 0.95 2/310 4711"; elsewhere there is no look


def use_free_cores() -> None:
    """Leave the cores to other programs that have been busy for a minute and still are.

    torch's threads meet hundreds of times in a forward, and wait for the last one. Where another
    program keeps a core busy, two threads on two cores are two to four times slower than one.
    """
    is_set = any(name.startswith(("OMP_", "GOMP_", "MKL_")) for name in os.environ)
    if is_set or not LOAD.exists():
        return
    last_minute, _, _, tasks, _ = LOAD.read_text().split()
    others_now = int(tasks.split("/")[0]) - 1  # so that our own last command does not count
    busy = max(0, min(round(float(last_minute)), others_now))
    torch.set_num_threads(max(1, min(torch.get_num_threads(), os.cpu_count() - busy)))


def fast_copy(model: nn.Module, is_compiled: bool) -> nn.Module:
    """The same weights, with one product where several have the same input.

    On a CPU all matrices are copied into a faster layout, too (but torch.compile has its own). On a
    GPU it pays only for a compiled model, and takes memory: else that is the model itself.
    """
    if model.device.type != "cpu" and not is_compiled:
        return model
    product = plain if is_compiled else packed
    with torch.device("meta"):
        fast = type(model)(model.config)
    fast.load_state_dict(model.state_dict(), assign=True)  # shares all tensors with `model`
    for layer in fast.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        attention.qkv = at_once([attention.q_proj, attention.k_proj, attention.v_proj], product)
        attention.o_proj.forward = product(attention.o_proj.weight)
        mlp.gate_up = at_once([mlp.gate_proj, mlp.up_proj], product)
        mlp.down_proj.forward = product(mlp.down_proj.weight)
    fast.project = product(fast.head)
    return fast


def at_once(layers: list[nn.Linear], product: Callable) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """The outputs of layers that have the same input, from one product with all their weights."""
    weight = torch.cat([layer.weight for layer in layers])
    bias = None
    if layers[0].bias is not None:
        bias = torch.cat([layer.bias for layer in layers])
    sizes = [layer.out_features for layer in layers]
    all_outputs = product(weight, bias)
    return lambda x: all_outputs(x).split(sizes, dim=-1)


def plain(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """F.linear with one weight (outputs, inputs)."""
    return functools.partial(F.linear, weight=weight, bias=bias)


def packed(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """The same from a copy that this CPU reads faster, if there is one.

    In bfloat16 torch rearranges a matrix for oneDNN's kernels at each product: with a layout made
    once, 20 positions of SmolLM2-135M are 1.6 times as fast. In float32 torch has other kernels: 9
    positions of Qwen2.5-0.5B take 2.3 times as long with them.
    """
    weight = weight.detach()
    if weight.dtype == torch.float32 and weight.numel() < SMALL:
        if weight.size(0) > weight.size(
            1
        ):  # stored by columns, a product with one vector is faster
            weight = weight.t().contiguous().t()
        return plain(weight, bias)
    if not can_pack(weight.dtype):
        return plain(weight, bias)
    layout = torch.ops.mkldnn._reorder_linear_weight(weight)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, layout, bias, "none", [], "")


def can_pack(dtype: torch.dtype) -> bool:
    """Has oneDNN products of this dtype on this CPU?"""
    onednn = torch.backends.mkldnn
    if not (onednn.is_available() and onednn.enabled):
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32
