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

from .chat import Chat
from .errors import UserError
from .int8 import Int8Product, check_int8, largest_inputs

M_MMAP_THRESHOLD = -3  # glibc's number of an option of malloc
SMALL = 2**18  # numbers in a matrix; with fewer a call of oneDNN costs more than it saves

Product = Callable[[Tensor], Tensor]  # F.linear with one weight and one bias
ANY_TEXT = "Name three fruits: apples, 2 pears and (x + 1) plums."  # of `int8_copy`


def fast_copy(model: nn.Module, is_compiled: bool) -> nn.Module:
    """The same weights, with one product where several have the same input.

    On a CPU all matrices are copied into a faster layout, too (but torch.compile has its own). On a
    GPU it pays only for a compiled model, and takes memory: else that is the model itself. So it is
    for a model that is such a copy already: several decoders can share one.
    """
    if is_copy(model):
        if is_compiled and is_int8(model):
            raise UserError("--compile: not with --dtype int8")
        return model
    if model.device.type != "cpu" and not is_compiled:
        return model
    make_product = plain_product if is_compiled else fastest_product
    fast = shared(model)
    use_products(fast, lambda *layers: make_product(*joined(layers)))
    return fast


def int8_copy(model: nn.Module, chat: Chat) -> nn.Module:
    """A `fast_copy` whose products are in 8 bits. It holds each matrix in 8 bits only.

    The largest inputs of each matrix stay in float. They are found in one forward of a fixed text,
    so they do not depend on what is decoded later.
    """
    tokens = chat.encode_prompt([{"role": "user", "content": ANY_TEXT}])
    copy = shared(model)
    with torch.inference_mode():
        largest = largest_inputs(copy, tokens)
        use_products(copy, lambda *layers: Int8Product(*joined(layers), largest[layers[0].weight]))
    # What stays in float may be a view of the model's file, and would keep all of it in memory.
    own = {name: weight.clone() for name, weight in copy.state_dict().items()}
    copy.load_state_dict(own, assign=True)
    copy.requires_grad_(False)
    return copy


def is_copy(model: nn.Module) -> bool:
    return "project" in vars(model)


def is_int8(model: nn.Module) -> bool:
    return isinstance(model.project, Int8Product)


def shared(model: nn.Module) -> nn.Module:
    """Another model with the same tensors."""
    with torch.device("meta"):
        copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict(), assign=True)
    return copy.requires_grad_(False)


def joined(layers: tuple[nn.Linear, ...]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of one layer with the outputs of all."""
    if len(layers) == 1:
        return layers[0].weight, layers[0].bias
    weight = torch.cat([layer.weight for layer in layers])
    bias = None
    if layers[0].bias is not None:
        bias = torch.cat([layer.bias for layer in layers])
    return weight, bias


def use_products(copy: nn.Module, product_of: Callable[..., Product]) -> None:
    """Multiply by product_of(layers) in place of layers with one input; let go of their weights.

    Each product takes the place of a method of one object: model.py calls them by these names.
    """
    for layer in copy.model.layers:
        attention = layer.self_attn
        mlp = layer.mlp
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        attention.qkv = split(product_of(*qkv), qkv)
        attention.o_proj.forward = product_of(attention.o_proj)
        gate_up = [mlp.gate_proj, mlp.up_proj]
        mlp.gate_up = split(product_of(*gate_up), gate_up)
        mlp.down_proj.forward = product_of(mlp.down_proj)
        for linear in (*qkv, attention.o_proj, *gate_up, mlp.down_proj):
            linear.weight = None
            linear.bias = None
    with torch.device("meta"):
        head = nn.Linear(copy.config.hidden_size, copy.config.vocab_size, bias=False)
    head.weight = copy.head  # which stays: it may be the embedding
    copy.project = product_of(head)


def split(product: Product, layers: list[nn.Linear]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """The outputs of each layer, from the product of all."""
    sizes = [layer.out_features for layer in layers]
    return lambda x: product(x).split(sizes, dim=-1)


def prepare_int8(device: torch.device) -> torch.dtype:
    """Before a model is loaded for `int8_copy`: the dtype of all that stays in float.

    UserError where there are no products in 8 bits.
    """
    check_int8(device)
    return_freed_memory()  # else the float weights, once freed, still fill the process
    return torch.bfloat16 if can_pack(torch.bfloat16) else torch.float32


def return_freed_memory() -> None:
    """For training: give every freed tensor back to the system at once.

    Gradients that stay lie among activations that are freed, and by default glibc keeps the holes.
    With 1,024 positions in a forward SmolLM2-135M then holds 5.4 GB, not 4.5; a step is as fast.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):  # glibc, not musl
        # With 2**20 many tensors stayed in the heap: 24 layers of 256 held 2.35 GB, now 1.88.
        libc.mallopt(M_MMAP_THRESHOLD, 2**17)


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
