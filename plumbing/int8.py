"""Products in 8 bits on a CPU: half the bytes of bfloat16, so half the reading (docs/speed.md).

Weights are rounded to integers once, each output's with a scale of its own; inputs in each product,
each position's with a scale of its own. oneDNN's sums of the integer products are exact. Other sums
are made in float64 and rounded (here; attention's in runner.py): so what a position gets does not
depend on how many others are computed with it, to the last bit. In float32 the order of a sum may
change its last bit, and with that an integer; a layer later all numbers differ.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import UserError

IN_8_BITS = 127  # integers are from -127 to 127
IN_7_BITS = 63
ZERO = 128  # oneDNN is fast for unsigned inputs only: so this is added to them
LEAST_POSITIONS = 4  # fewer take longer
# Inputs of a matrix that stay in float. In a few the numbers are a hundred times those of others,
# which would be rounded to nothing next to them (LLM.int8(), arXiv 2208.07339).
NUM_IN_FLOAT = 16
TINY = 1e-30  # in place of the scale of zeros


class Int8Product:
    """F.linear with a weight (outputs, inputs) in 8 bits, and a few of its columns in float."""

    def __init__(self, weight: Tensor, bias: Tensor | None, largest_inputs: Tensor):
        """largest_inputs (inputs,): how large each input may be; those of the largest are float."""
        weight = weight.detach().float()
        num_in_float = min(NUM_IN_FLOAT, weight.size(1))
        self.in_float = largest_inputs.topk(num_in_float).indices
        self.float_weight = weight[:, self.in_float].double()
        self.bias = None if bias is None else bias.detach().double()
        others = weight.index_fill(1, self.in_float, 0)
        self.weight, self.weight_scale = pack(others, largest_weight())
        self.no_zero_points = torch.zeros(len(weight), dtype=torch.int)
        self.half = torch.tensor([ZERO + 0.5])  # to unsigned integers torch rounds down

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., inputs) times the weight, plus bias: (..., outputs)."""
        rows = x.reshape(-1, x.size(-1))
        floats = rows[:, self.in_float].double()
        others = rows.index_fill(1, self.in_float, 0)
        scale = torch.linalg.vector_norm(others, torch.inf, 1, keepdim=True, dtype=torch.float32)
        scale = scale.mul_(1 / IN_8_BITS).clamp_(min=TINY)
        rounded = torch.addcdiv(self.half, others, scale).to(torch.uint8)
        sums = integer_product(rounded, self.weight, self.weight_scale, self.no_zero_points)
        y = F.linear(floats, self.float_weight, self.bias).float()
        y.addcmul_(sums, scale)
        return y.to(x.dtype).view(*x.shape[:-1], -1)


def pack(weight: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Integers in oneDNN's layout and a scale for each output (outputs,): of a float weight.

    The integers are from -largest to largest.
    """
    scale = (weight.abs().amax(1, keepdim=True) / largest).clamp(min=TINY)
    integers = (weight / scale).round().to(torch.int8)
    return torch.ops.onednn.qlinear_prepack(integers, None), scale[:, 0]


def integer_product(x: Tensor, weight: Tensor, weight_scale: Tensor, zeros: Tensor) -> Tensor:
    """(x - ZERO) times a weight of `pack`, times the scale of each output: (N, outputs)."""
    padding = max(0, LEAST_POSITIONS - len(x))
    padded = F.pad(x, (0, 0, 0, padding))
    multiply = torch.ops.onednn.qlinear_pointwise
    in_float = (None, 1.0, 0, torch.float32)  # no bias; the output is not rounded
    y = multiply(padded, 1.0, ZERO, weight, weight_scale, zeros, *in_float, "none", [], "")
    return y[: len(x)]


@functools.cache
def largest_weight() -> int:
    """Weights are rounded to integers from -n to n; 0: this CPU has no products of integers.

    Without VNNI (AMD before Zen 4, Intel before 2019) two products are added in 16 bits: too few
    for 2 * 255 * 127, enough for 2 * 255 * 63.
    """
    for largest in (IN_8_BITS, IN_7_BITS):
        if is_exact(largest):
            return largest
    return 0


def is_exact(largest: int) -> bool:
    """Are the largest sums of products right on this CPU?"""
    onednn = torch.backends.mkldnn
    if not (onednn.is_available() and onednn.enabled):
        return False
    num_inputs = 256
    weight = torch.full((64, num_inputs), float(largest))  # its scale is 1
    x = torch.full((LEAST_POSITIONS, num_inputs), 255, dtype=torch.uint8)
    try:
        packed, scale = pack(weight, largest)
        y = integer_product(x, packed, scale, torch.zeros(64, dtype=torch.int))
    except RuntimeError:  # a torch without these operators, or for another kind of CPU
        return False
    return bool((y == (255 - ZERO) * largest * num_inputs).all())


def check_int8(device: torch.device) -> None:
    """Raise UserError where there are no products in 8 bits."""
    if device.type != "cpu":
        raise UserError(f"dtype int8: only on a CPU, not on {device}; use bfloat16 or float32")
    if not largest_weight():
        raise UserError("dtype int8: not on this CPU; use bfloat16 or float32")


def largest_inputs(model: nn.Module, tokens: list[int]) -> dict[Tensor, Tensor]:
    """The largest absolute value of each input of each matrix in a forward: {weight: (inputs,)}."""
    found = {}

    def note_largest(layer: nn.Linear, inputs: tuple[Tensor]) -> None:
        found[layer.weight] = inputs[0].flatten(0, -2).abs().amax(0)

    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(note_largest) for layer in linears]
    ids = torch.tensor([tokens])
    hidden = model(ids, torch.arange(len(tokens))[None], None)
    for hook in hooks:
        hook.remove()
    found[model.head] = hidden[0].abs().amax(0)
    return found
