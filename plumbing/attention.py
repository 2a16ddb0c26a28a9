"""A faster drop-in for model.attend in training on a GPU; results differ in rounding only."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


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
