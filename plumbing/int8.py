"""Products in 8 bits on a CPU: half the bytes of bfloat16, so half the reading (docs/speed.md).

Weights are rounded to integers of 8 bits once, each output's with a scale of its own; inputs to
16 bits in each product, each position's with a scale of its own. A CPU multiplies bytes: so the two
bytes of each input are two rows of one product, which reads the weights once.

    input     3.00   0.61  -1.21    scale 3.00 / 32639
    integer  32639   6637 -13164    256 * high + low
    low        127    -19   -108    one row of the product
    high       127     26    -51    another

Sums of integers are exact: so a position gets the same, to the bit, however many are computed.
"""

import functools

import torch
from torch import Tensor

from .errors import UserError

IN_8_BITS = 127  # weights are integers from -127 to 127
IN_16_BITS = 256 * 127 + 127  # inputs: so both bytes are at most 127
ZERO = 128  # oneDNN is fast for unsigned bytes only: so this is added to both
TINY = 1e-30  # in place of the scale of zeros
ROWS = 256  # of a weight, rounded at a time: they stay in the CPU's cache


class Int8Product:
    """F.linear with a weight (outputs, inputs) in 8 bits; it returns float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.packed = pack(weight.detach(), largest_weight())
        self.bias = None if bias is None else bias.detach().float()
        self.half = torch.tensor([256 * ZERO + ZERO + 0.5])  # to integers torch rounds down

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., inputs) in float32 times the weight, plus bias: (..., outputs)."""
        rows = x.reshape(-1, x.size(-1))  # (T, inputs)
        scale = rows.abs().amax(1, keepdim=True).mul_(1 / IN_16_BITS).clamp_(min=TINY)
        integers = torch.addcdiv(self.half, rows, scale).to(torch.int32)
        four_bytes = integers.view(torch.uint8).unflatten(1, (-1, 4))  # the lowest comes first
        low_and_high = four_bytes[:, :, :2].permute(2, 0, 1).flatten(0, 1)  # (2 T, inputs)
        low, high = integer_product(low_and_high, self.packed).chunk(2)
        y = torch.add(low, high, alpha=256).mul_(scale)
        if self.bias is not None:
            y += self.bias
        return y.view(*x.shape[:-1], -1)


def pack(weight: Tensor, largest: int) -> tuple[Tensor, Tensor, Tensor]:
    """For `integer_product`: a float weight's integers, at most +-largest; scales, zero points."""
    scale = weight.abs().amax(1, keepdim=True).float().div_(largest).clamp_(min=TINY)
    integers = torch.empty(weight.shape, dtype=torch.int8)
    for i in range(0, len(weight), ROWS):
        integers[i : i + ROWS] = (weight[i : i + ROWS] / scale[i : i + ROWS]).round_()
    no_zero_points = torch.zeros(len(weight), dtype=torch.int)
    return torch.ops.onednn.qlinear_prepack(integers, None), scale[:, 0], no_zero_points


def integer_product(x: Tensor, packed: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """(x - ZERO) times the integers of `pack`, times the scale of each output: (N, outputs)."""
    multiply = torch.ops.onednn.qlinear_pointwise
    return multiply(x, 1.0, ZERO, *packed, None, 1.0, 0, torch.float32, "none", [], "")


@functools.cache
def largest_weight() -> int:
    """Weights are rounded to integers from -n to n; 0: this CPU has no products of integers.

    Without VNNI (AMD before Zen 4, Intel before 2019) two products are added in 16 bits: too few
    for 2 * 255 * 127, enough for 2 * 255 * 63.
    """
    for largest in (IN_8_BITS, 63):
        if is_exact(largest):
            return largest
    return 0


def is_exact(largest: int) -> bool:
    """Are the largest sums of products right on this CPU?"""
    x = torch.full((2, 256), 255, dtype=torch.uint8)
    weight = torch.full((64, 256), float(largest))  # its scale is 1
    try:
        y = integer_product(x, pack(weight, largest))
    except (RuntimeError, AttributeError):  # a torch without these operators, another kind of CPU
        return False
    return bool((y == (255 - ZERO) * largest * 256).all())


def float_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """In which the weights are read: for int8 bfloat16; UserError where it has no products."""
    if dtype != torch.int8:
        return dtype
    if device.type != "cpu":
        raise UserError(f"dtype int8: only on a CPU, not on {device}; use bfloat16 or float32")
    if not largest_weight():
        raise UserError("dtype int8: not on this CPU; use bfloat16 or float32")
    return torch.bfloat16
