"""Faster drop-ins for model.attend and for the forward around it; results differ in rounding only.

`python -m bench.speed --shape 0.5B --widths` shows what a forward costs with them.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from .threads import free_cores

NARROW = 96  # positions per row: with more there is nothing left to gain from folding
ONEDNN = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled

# ---------------------------------------------------------------------------------------- decoding


def fold(mask: Tensor, config, num_threads: int, dtype: torch.dtype) -> Tensor:
    """The mask (R, 1, T, S) as `attend_folded` takes it, made once for all layers.

    For few positions it is (R, 1, group * T, S): the query heads that share a key head become more
    positions of one head. The products are the same, but those of one token are 2 (float32) to 6
    times (bfloat16) faster on a CPU. With fewer key heads than threads, though, some would be idle.
    What is visible becomes 0, the rest -inf, which torch would do anew in each layer.
    """
    heads = mask.size(0) * config.num_key_value_heads
    if mask.size(2) <= NARROW and (mask.is_cuda or heads >= num_threads):
        mask = mask.repeat(1, 1, config.num_attention_heads // config.num_key_value_heads, 1)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))


def attend_folded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """model.attend, with a mask from `fold`."""
    R, num_heads, T, head_dim = q.shape
    num_queries = mask.size(2)
    if num_queries > T:
        q = q.reshape(R, k.size(1), num_queries, head_dim)
    elif q.is_cuda and num_heads > k.size(1):  # fast kernels with a mask cannot share key heads
        k = k.repeat_interleave(num_heads // k.size(1), dim=1)
        v = v.repeat_interleave(num_heads // v.size(1), dim=1)
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        # Torch goes block by block through the queries, and adds up in another order where fewer
        # than 4 are left. Padded, a query's result does not depend on how many are beside it.
        q = F.pad(q, (0, 0, 0, -num_queries % 4))
        mask = F.pad(mask, (0, 0, 0, -num_queries % 4))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return y[:, :, :num_queries].reshape(R, num_heads, T, head_dim)


def span_unit(model: nn.Module, compile: bool) -> int:
    """Attention spans a multiple of so many slots of the cache, so that few shapes occur."""
    if compile:
        return 256
    # Torch adds up over blocks of 192 slots, but over halves of a span between 192 and 384.
    is_bfloat16_on_cpu = model.device.type == "cpu" and model.dtype == torch.bfloat16
    return 192 if is_bfloat16_on_cpu else 64


def fast_forwards(model: nn.Module, cache, compile: bool) -> tuple[Callable, Callable]:
    """Two forwards with this cache, of prompts and of steps: (tokens, pos, mask) -> hidden states.

    compile: static shapes for the steps.
    """
    lay_out_by_columns(model)
    advance = model
    if compile:
        advance = compile_forward(model)
        for keys, values in cache.layers:  # or a CUDA graph would copy the cache at each forward
            torch._dynamo.mark_static_address(keys)
            torch._dynamo.mark_static_address(values)
    else:
        pack_matrices(model)
    threads = torch.get_num_threads()

    def run(forward: Callable[..., Tensor], tokens: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
        mask = fold(mask, model.config, threads, model.dtype)
        return forward(tokens, pos, mask, cache, attend_folded)

    return functools.partial(run, model), functools.partial(run, advance)


def compile_forward(model: nn.Module) -> Callable[..., Tensor]:
    """The model's forward for static shapes; on a GPU as CUDA graphs, which need no Python."""
    free_cores.enabled = False  # another number of threads would be compiled anew
    torch._dynamo.config.recompile_limit = 256  # graphs: two widths for each 256 slots of span
    mode = "reduce-overhead" if model.device.type == "cuda" else "default"
    return torch.compile(model.forward, dynamic=False, mode=mode)


def lay_out_by_columns(model: nn.Module) -> None:
    """On a CPU in float32: store matrices with more rows than columns by columns.

    A forward of one position is a product with one vector, for which torch reads tall matrices
    faster in this layout. Shapes and values stay the same. A model in training is left alone: its
    optimizer pairs weights and moments by their layout.
    """
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return
    for weight in model.parameters():
        is_tall = weight.dim() == 2 and weight.size(0) > weight.size(1)
        if is_tall and weight.is_contiguous() and not weight.requires_grad:
            weight.data = weight.data.t().contiguous().t()


def pack_matrices(model: nn.Module) -> None:
    """On a CPU in bfloat16: a copy of every matrix in the layout of oneDNN's kernels.

    Without it oneDNN rearranges a matrix for each product, which takes as long as the product: a
    forward of SmolLM2-135M with 20 positions took 78 ms, and with it 50. A model in training is
    left alone: its matrices change. Afterwards, neither load other weights nor copy the model.
    """
    is_of_use = model.device.type == "cpu" and model.dtype == torch.bfloat16 and ONEDNN
    is_possible = is_of_use and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # by this CPU
    if not is_possible or any(weight.requires_grad for weight in model.parameters()):
        return
    for module in model.modules():
        if isinstance(module, nn.Linear) and not isinstance(module.forward, PackedProduct):
            module.forward = PackedProduct(module.weight, module.bias)
    if not isinstance(model.linear, PackedProduct):
        model.linear = PackedProduct(model.head)


class PackedProduct:
    """F.linear with one weight, from its copy: not for a gradient or torch.compile, which cannot
    use the copy. The result for a position does not depend on how many are beside it."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.weight = weight
        self.bias = bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def __call__(self, x: Tensor, *_) -> Tensor:
        if self.weight.requires_grad or torch.compiler.is_compiling():
            return F.linear(x, self.weight, self.bias)
        if x.numel() == x.size(-1):  # for a single position oneDNN rounds differently
            return self.multiply(torch.cat([x, x]))[:1]
        return self.multiply(x)

    def multiply(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


# ---------------------------------------------------------------------------------------- training


def can_use_flex(device: torch.device, head_dim: int) -> bool:
    return device.type == "cuda" and head_dim >= 16  # FlexAttention takes no smaller heads


def attend_flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """model.attend with a mask of `block_mask`: blocks in which nothing is visible are skipped."""
    return compiled_flex_attention()(q, k, v, block_mask=mask, enable_gqa=True)


@functools.cache
def compiled_flex_attention() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def block_mask(visible: Callable, pos: Tensor, prefix: Tensor, doc: Tensor) -> BlockMask:
    """The mask rule `visible` on all pairs of positions (R, T), for `attend_flex`."""

    def mask_mod(b, head, q, k):
        return visible(pos[b, q], prefix[b, q], doc[b, q], pos[b, k], prefix[b, k], doc[b, k])

    R, T = pos.shape
    return create_block_mask(mask_mod, R, None, T, T, device=pos.device)
