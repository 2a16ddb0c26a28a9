"""Faster drop-ins for model.attend and for the forward around it; results differ in rounding only.

`python -m bench.speed --shape 0.5B --widths` shows what a forward costs with them.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from .cpu import fast_copy

NARROW = 96  # positions per row: with more there is nothing left to gain from folding

# ---------------------------------------------------------------------------------------- decoding


def additive_mask(mask: Tensor, config, num_threads: int, dtype: torch.dtype) -> Tensor:
    """The mask (R, 1, T, S) as `attend_folded` takes it: 0 where visible, else -inf; maybe folded.

    Made once for all layers; torch would turn a mask of booleans into this one in each of them.
    For few positions it is (R, 1, group * T, S): the query heads that share a key head become more
    positions of one head. The products are the same, but those of one token are 2 (float32) to 6
    times (bfloat16) faster on a CPU. With fewer key heads than threads, though, some would be idle.
    """
    heads = mask.size(0) * config.num_key_value_heads
    if mask.size(2) <= NARROW and (mask.is_cuda or heads >= num_threads):
        mask = mask.repeat(1, 1, config.num_attention_heads // config.num_key_value_heads, 1)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))


def attend_folded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """model.attend, with a mask from `additive_mask`."""
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


class FastModel:
    """The forward of a model with one cache: the same results as model(...), sooner."""

    def __init__(self, model: nn.Module, cache, compile: bool):
        """compile: static shapes for all forwards but prefills."""
        self.config = model.config
        self.cache = cache
        self.fast = fast_copy(model)
        self.logits_at = self.fast.logits_at
        self.compiled = compile_forward(model, cache) if compile else None
        self.num_threads = torch.get_num_threads()  # a later change must not change how it rounds

    def __call__(self, tokens: Tensor, pos: Tensor, mask: Tensor, is_prefill: bool) -> Tensor:
        """Hidden states (R, T, D) of tokens (R, T), with a mask from the cache."""
        forward = self.fast
        if self.compiled and not is_prefill:
            forward = self.compiled
        mask = additive_mask(mask, self.config, self.num_threads, self.fast.dtype)
        return forward(tokens, pos, mask, self.cache, attend_folded)


def compile_forward(model: nn.Module, cache) -> Callable[..., Tensor]:
    """The model's forward for static shapes; on a GPU as CUDA graphs, which need no Python."""
    for keys, values in cache.layers:  # or a CUDA graph would copy the cache at each forward
        torch._dynamo.mark_static_address(keys)
        torch._dynamo.mark_static_address(values)
    torch._dynamo.config.recompile_limit = 256  # graphs: two widths for each 256 slots of span
    mode = "reduce-overhead" if model.device.type == "cuda" else "default"
    return torch.compile(model.forward, dynamic=False, mode=mode)


# ---------------------------------------------------------------------------------------- training


def can_use_flex(device: torch.device, head_dim: int) -> bool:
    return device.type == "cuda" and head_dim >= 16  # FlexAttention takes no smaller heads


def attend_flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """model.attend with a mask of `block_mask`: blocks in which nothing is visible are skipped."""
    return compiled_flex_attention()(q, k, v, block_mask=mask, enable_gqa=True)


@functools.cache
def compiled_flex_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


def block_mask(visible: Callable, pos: Tensor, prefix: Tensor, doc: Tensor) -> BlockMask:
    """The mask rule `visible` on all pairs of positions (R, T), for `attend_flex`."""

    def mask_mod(b, head, q, k):
        return visible(pos[b, q], prefix[b, q], doc[b, q], pos[b, k], prefix[b, k], doc[b, k])

    R, T = pos.shape
    return create_block_mask(mask_mod, R, None, T, T, device=pos.device)
