"""Copies of a model that decode faster: other layouts of the weights, or weights in 8 bits.

`python -m bench.speed --shape 0.5B --widths` shows what a forward costs.
"""

import ctypes
import functools
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import UserError
from .int8 import Int8Product

M_MMAP_THRESHOLD = -3  # glibc's number of an option of malloc
SMALL = 2**18  # numbers in a matrix; with fewer a call of oneDNN costs more than it saves

Product = Callable[[Tensor], Tensor]  # F.linear with one weight and one bias


def fast_copy(model: nn.Module, is_compiled: bool) -> nn.Module:
    """The same weights, with one product where several have the same input.

    On a CPU all matrices are copied into a faster layout, too (but torch.compile has its own). On a
    GPU it pays only for a compiled model, and takes memory: else that is the model itself. So it is
    for a model that is such a copy already: several decoders can share one.
    """
    if is_compiled and is_int8(model):
        raise UserError("--compile: not in 8 bits; use --dtype float32 or bfloat16")
    if model.is_fast_copy or (model.device.type != "cpu" and not is_compiled):
        return model
    return with_products(model, plain_product if is_compiled else fastest_product)


def int8_copy(model: nn.Module) -> nn.Module:
    """A fast copy with products in 8 bits and all else in float32, but the embedding as it is.

    It shares no memory with the model, so that the model's file can be let go of.
    """
    return_freed_memory(2**22)  # with less, page faults take a tenth of the time
    copy = with_products(model, Int8Product)
    embedding = copy.model.embed_tokens.weight.clone()
    copy.model.embed_tokens.forward = lambda tokens: F.embedding(tokens, embedding).float()
    copy.model.embed_tokens.weight = None
    if not model.config.tie_word_embeddings:
        copy.lm_head.weight = None
    return copy.float()  # the norms


def is_int8(model: nn.Module) -> bool:
    return isinstance(model.project, Int8Product)


def with_products(model: nn.Module, make_product: Callable[..., Product]) -> nn.Module:
    """A copy that shares the model's tensors, but multiplies by products of its matrices.

    Each product takes the place of a method of one object: model.py calls them by these names.
    """
    with torch.device("meta"):
        copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict(), assign=True)
    copy.requires_grad_(False)
    for layer in copy.model.layers:
        attention = layer.self_attn
        mlp = layer.mlp
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        attention.qkv = joined(qkv, make_product)
        mlp.gate_up = joined([mlp.gate_proj, mlp.up_proj], make_product)
        for linear in (attention.o_proj, mlp.down_proj):
            linear.forward = make_product(linear.weight, linear.bias)
        for linear in (*qkv, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            linear.weight = None
            linear.bias = None
    copy.project = make_product(copy.head, None)  # the head stays: it may be the embedding
    copy.is_fast_copy = True
    return copy


def joined(layers: list[nn.Linear], make_product: Callable[..., Product]) -> Callable:
    """One product in place of layers with the same input; it returns the outputs of each."""
    weight = torch.cat([layer.weight for layer in layers])
    bias = None
    if layers[0].bias is not None:
        bias = torch.cat([layer.bias for layer in layers])
    product = make_product(weight, bias)
    sizes = [layer.out_features for layer in layers]
    return lambda x: product(x).split(sizes, dim=-1)


def return_freed_memory(least: int = 2**17) -> None:
    """Give freed tensors of at least so many bytes back to the system at once.

    By default glibc keeps holes between tensors that stay: gradients or weights. With 1,024
    positions in a forward training SmolLM2-135M then holds 5.4 GB, not 4.5, as fast; Qwen2.5-0.5B
    in 8 bits 1.9, not 1.1.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):  # glibc, not musl
        libc.mallopt(M_MMAP_THRESHOLD, least)


def plain_product(weight: Tensor, bias: Tensor | None) -> Product:
    """With the weight (outputs, inputs) as it is."""
    return functools.partial(F.linear, weight=weight, bias=bias)


def fastest_product(weight: Tensor, bias: Tensor | None) -> Product:
    """With the layout of the weight that this CPU reads fastest, made once.

    In bfloat16 torch itself makes oneDNN's at each product: made once, 20 positions of SmolLM2-135M
    are 1.6 times as fast. In float32 torch has other kernels: with them 9 positions of Qwen2.5-0.5B
    take 2.3 times as long.
    """
    weight = weight.detach()
    num_outputs, num_inputs = weight.shape
    if weight.dtype == torch.float32 and weight.numel() < SMALL:
        if num_outputs > num_inputs:  # stored by columns, a product with one vector is faster
            weight = weight.t().contiguous().t()
    elif can_pack(weight.dtype):
        layout = torch.ops.mkldnn._reorder_linear_weight(weight)
        multiply = torch.ops.mkldnn._linear_pointwise
        return lambda x: multiply(x, layout, bias, "none", [], "")
    return plain_product(weight, bias)


def can_pack(dtype: torch.dtype) -> bool:
    """Has oneDNN products of this dtype on this CPU?"""
    onednn = torch.backends.mkldnn
    if not (onednn.is_available() and onednn.enabled):
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32
