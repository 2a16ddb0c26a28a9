"""A copy of a model that decodes faster: the same weights, in layouts that are read faster.

`python -m bench.speed --shape 0.5B --widths` shows what a forward costs.
"""

import ctypes
import functools
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# glibc's names and numbers for options of malloc
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
SMALL = 2**18  # numbers in a matrix; with fewer a call of oneDNN costs more than it saves

Product = Callable[[Tensor], Tensor]  # F.linear with one weight and one bias


def fast_copy(model: nn.Module, is_compiled: bool) -> nn.Module:
    """The same weights, with one product where several have the same input.

    On a CPU all matrices are copied into a faster layout, too (but torch.compile has its own). On a
    GPU it pays only for a compiled model, and takes memory: else that is the model itself. So it is
    for a model that is such a copy already: several decoders can share one.
    """
    if "project" in vars(model):
        return model
    if model.device.type != "cpu" and not is_compiled:
        return model
    if model.device.type == "cpu":
        keep_freed_memory()
    make_product = plain_product if is_compiled else fastest_product
    with torch.device("meta"):
        fast = type(model)(model.config)
    fast.load_state_dict(model.state_dict(), assign=True)  # shares all tensors with `model`
    for layer in fast.model.layers:
        attention = layer.self_attn
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        attention.qkv = one_product(qkv, make_product)
        attention.o_proj.forward = make_product(attention.o_proj.weight)
        mlp = layer.mlp
        mlp.gate_up = one_product([mlp.gate_proj, mlp.up_proj], make_product)
        mlp.down_proj.forward = make_product(mlp.down_proj.weight)
    fast.project = make_product(fast.head)
    return fast


def keep_freed_memory() -> None:
    """For decoding: let this process keep up to 1 GiB of what it has freed.

    A forward of 8 rows makes tens of megabytes of logits. By default glibc gives them back to the
    system, or not, by how they happen to lie. Where it does, the next forward gets them page by
    page: a step of Qwen2.5-0.5B in bfloat16 takes a tenth longer.
    """
    set_malloc(M_TRIM_THRESHOLD, 2**30)
    set_malloc(M_MMAP_THRESHOLD, 2**30)


def return_freed_memory() -> None:
    """For training: give every freed tensor back to the system at once.

    Gradients that stay lie among activations that are freed, and by default glibc keeps the holes.
    With 1,024 positions in a forward SmolLM2-135M then holds 5.4 GB, not 4.5; a step is as fast.
    """
    set_malloc(M_MMAP_THRESHOLD, 2**20)


def set_malloc(option: int, value: int) -> None:
    """Set an option of glibc's malloc, where there is one, for the whole process."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):  # not in musl
        libc.mallopt(option, value)


def one_product(
    layers: list[nn.Linear], make_product: Callable[..., Product]
) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """The outputs of layers that have the same input, from one product with all their weights."""
    weight = torch.cat([layer.weight for layer in layers])
    bias = None
    if layers[0].bias is not None:
        bias = torch.cat([layer.bias for layer in layers])
    product = make_product(weight, bias)
    sizes = [layer.out_features for layer in layers]
    return lambda x: product(x).split(sizes, dim=-1)


def plain_product(weight: Tensor, bias: Tensor | None = None) -> Product:
    """With the weight (outputs, inputs) as it is."""
    return functools.partial(F.linear, weight=weight, bias=bias)


def fastest_product(weight: Tensor, bias: Tensor | None = None) -> Product:
    """With the layout of the weight that this CPU reads fastest."""
    weight = weight.detach()
    if weight.dtype == torch.float32 and weight.numel() < SMALL:
        num_outputs, num_inputs = weight.shape
        if num_outputs > num_inputs:  # stored by columns, a product with one vector is faster
            weight = weight.t().contiguous().t()
        return plain_product(weight, bias)
    if can_pack(weight.dtype):
        return onednn_product(weight, bias)
    return plain_product(weight, bias)


def onednn_product(weight: Tensor, bias: Tensor | None) -> Product:
    """With oneDNN's layout of the weight, made once.

    In bfloat16 torch itself makes it anew at each product: made once, 20 positions of SmolLM2-135M
    are 1.6 times as fast. In float32 torch has other kernels: 9 positions of Qwen2.5-0.5B take 2.3
    times as long with them.
    """
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
