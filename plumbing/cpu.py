"""What makes a forward faster on a CPU: weights in other layouts, and no more threads than cores.

`python -m bench.speed --shape 0.5B --widths` shows what a forward costs.
"""

import copy
import functools
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Products with one input, by the method of model.py that returns them.
AT_ONCE = {"qkv": ["q_proj", "k_proj", "v_proj"], "gate_up": ["gate_proj", "up_proj"]}
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


def fast_copy(model: nn.Module) -> nn.Module:
    """The same model with its matrices in a faster layout; it shares all else with `model`.

    On a GPU, and where no faster layout is known, that is the model itself.
    """
    if model.device.type != "cpu":
        return model
    if model.dtype != torch.float32 and not can_pack(model.dtype):
        return model
    shared = {id(weight): weight for weight in model.parameters()}
    shared[id(model.config)] = model.config
    fast = copy.deepcopy(model, shared)  # modules are copied, and what is in `shared` is not
    modules = dict(fast.named_modules())
    for name, module in list(modules.items()):
        for method, parts in AT_ONCE.items():
            if hasattr(module, method):
                linears = [modules.pop(f"{name}.{part}") for part in parts]
                setattr(module, method, at_once(linears))
    for module in modules.values():
        if isinstance(module, nn.Linear):
            module.forward = in_fast_layout(module.weight.detach(), module.bias)
    fast.project = in_fast_layout(model.head.detach())
    return fast


def at_once(linears: list[nn.Linear]):
    """The outputs of layers that have the same input, from one product with all their weights."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    bias = None
    if linears[0].bias is not None:
        bias = torch.cat([linear.bias.detach() for linear in linears])
    sizes = [linear.out_features for linear in linears]
    all_outputs = in_fast_layout(weight, bias)
    return lambda x: all_outputs(x).split(sizes, dim=-1)


def can_pack(dtype: torch.dtype) -> bool:
    """Has oneDNN products of this dtype on this CPU?"""
    onednn = torch.backends.mkldnn
    if not (onednn.is_available() and onednn.enabled):
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


def in_fast_layout(weight: Tensor, bias: Tensor | None = None):
    """F.linear with one weight, from a copy that this CPU reads faster."""
    is_small = weight.dtype == torch.float32 and weight.numel() < SMALL
    if is_small or not can_pack(weight.dtype):
        return by_columns(weight, bias)
    return packed(weight, bias)


def by_columns(weight: Tensor, bias: Tensor | None = None):
    """F.linear with one weight, stored column by column if it has more rows than columns.

    A forward of one position is a product with one vector, for which torch reads tall matrices
    faster in this layout.
    """
    if weight.size(0) > weight.size(1):
        weight = weight.t().contiguous().t()
    return functools.partial(F.linear, weight=weight, bias=bias)


def packed(weight: Tensor, bias: Tensor | None = None):
    """F.linear with one weight, from a copy in the layout of oneDNN's kernels.

    Without it a forward takes longer. In bfloat16 oneDNN rearranges a matrix for each product: 20
    positions of SmolLM2-135M took 1.6 times as long. In float32 torch has other kernels: 9
    positions of Qwen2.5-0.5B took 2.3 times as long.
    """
    layout = torch.ops.mkldnn._reorder_linear_weight(weight)
    needs_copies = weight.dtype == torch.bfloat16 and single_differs(*weight.shape)

    def product(x: Tensor) -> Tensor:
        if needs_copies and x.numel() == x.size(-1):
            # Two would do, but four are faster: of Qwen2.5-0.5B's products 31 and 22 ms.
            return multiply_packed(torch.cat([x] * 4), layout, bias)[:1]
        return multiply_packed(x, layout, bias)

    return product


def multiply_packed(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@functools.cache
def single_differs(num_outputs: int, num_inputs: int) -> bool:
    """Does this CPU round a product of this shape differently if there is a single position?

    Large numbers of which each has its negative show it: their sum is what rounding made of it.
    """
    generator = torch.Generator().manual_seed(0)
    half = torch.arange(num_inputs // 2)
    large = torch.randn(len(half), generator=generator) * 2.0 ** (half % 20)
    places = torch.randperm(2 * len(half), generator=generator)
    row = torch.zeros(1, num_inputs)
    row[0, places] = torch.cat([large, -large])
    row = row.bfloat16()
    ones = torch.ops.mkldnn._reorder_linear_weight(torch.ones(num_outputs, num_inputs).bfloat16())
    pair = multiply_packed(torch.cat([row, row]), ones, None)
    return not torch.equal(multiply_packed(row, ones, None), pair[:1])
