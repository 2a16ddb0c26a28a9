"""Faster drop-ins for model.attend, in training on a GPU and in decoding; they round otherwise."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

NARROW = 96  # positions per row: with more there is nothing left to gain from folding

# ----------------------------------------------------------------------------------------- training


def attend_flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """model.attend with a mask of `block_mask`: blocks in which nothing is visible are skipped."""
    return compiled_flex_attention()(q, k, v, block_mask=mask, enable_gqa=True)


@functools.cache
def compiled_flex_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


def block_mask(rule: Callable[..., Tensor], pos: Tensor, prefix: Tensor, doc: Tensor) -> BlockMask:
    """A mask rule (model.visible) on all pairs of positions (R, T), for `attend_flex`."""

    def mask_mod(b, head, q, k):
        return rule(pos[b, q], prefix[b, q], doc[b, q], pos[b, k], prefix[b, k], doc[b, k])

    R, T = pos.shape
    return create_block_mask(mask_mod, R, None, T, T, device=pos.device)


# ----------------------------------------------------------------------------------------- decoding


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
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return y.reshape(R, num_heads, T, head_dim)
