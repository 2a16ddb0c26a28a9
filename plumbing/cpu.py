"""What makes a forward faster on a CPU: weights in other layouts, and threads by load.

`python -m bench.speed --shape 0.5B --widths` shows what a forward costs.
"""

import copy
import functools
import os
import time
import weakref
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

# ----------------------------------------------------------------------------------------- weights

ONEDNN = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
_copies = weakref.WeakKeyDictionary()  # of a model: versions of its weights, they, a fast copy
_num_steps = 0  # of all of torch's optimizers in this process


def count_step(*_: object) -> None:
    global _num_steps
    _num_steps += 1


register_optimizer_step_post_hook(count_step)


def fast_copy(model: nn.Module) -> nn.Module:
    """The same model with its matrices in a faster layout; the model itself is left as it is.

    On a GPU that is the model. On a CPU the copy shares everything with the model but its matrices,
    and is made anew when the weights have changed. (A change through `weight.data` or numpy cannot
    be seen: torch counts the others.)
    """
    is_fast_in = {torch.float32: True, torch.bfloat16: can_pack()}
    if model.device.type != "cpu" or not is_fast_in.get(model.dtype):
        _copies.pop(model, None)
        return model
    weights = [weight.detach() for weight in model.parameters()]
    versions = [version(weight) for weight in weights]
    if model not in _copies or _copies[model][0] != versions:
        # The weights are kept, or new ones might get their memory, and so look like them.
        _copies[model] = versions, weights, make_copy(model)
    return _copies[model][-1]


def can_pack() -> bool:
    """Has oneDNN bfloat16 on this CPU?"""
    return ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def version(weight: Tensor) -> tuple:
    """Another one for other values, except for what fast_copy says."""
    number = 0 if weight.is_inference() else weight._version  # a fused optimizer leaves it as it is
    return weight.data_ptr(), number, weight.dtype, _num_steps


def make_copy(model: nn.Module) -> nn.Module:
    shared = {id(weight): weight for weight in model.parameters()}
    shared[id(model.config)] = model.config
    fast = copy.deepcopy(model, shared)  # modules are copied, and what is in `shared` is not
    product = by_columns if model.dtype == torch.float32 else PackedProduct
    for module in fast.modules():
        if isinstance(module, nn.Linear):
            module.forward = product(module.weight.detach(), module.bias)
    fast.project = product(model.head.detach())
    return fast


def by_columns(weight: Tensor, bias: Tensor | None = None):
    """F.linear with one weight, stored column by column if it has more rows than columns.

    A forward of one position is a product with one vector, for which torch reads tall matrices
    faster in this layout.
    """
    if weight.size(0) > weight.size(1):
        weight = weight.t().contiguous().t()
    return functools.partial(F.linear, weight=weight, bias=bias)


class PackedProduct:
    """F.linear with one weight, from a copy in the layout of oneDNN's bfloat16 kernels.

    Without it oneDNN rearranges a matrix for each product, which takes as long as the product: a
    forward of SmolLM2-135M with 20 positions took 78 ms, and with it 50.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.bias = bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.single_differs = single_differs(*weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        if self.single_differs and x.numel() == x.size(-1):
            return self.multiply(torch.cat([x, x]))[:1]
        return self.multiply(x)

    def multiply(self, x: Tensor) -> Tensor:
        return multiply_packed(x, self.packed, self.bias)


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


# ----------------------------------------------------------------------------------------- threads

INTERVAL = 0.25  # seconds between two looks
STAT = Path("/proc/stat")  # of Linux; elsewhere the number of threads stays torch's
CHOSEN_BY_USER = any(name.startswith(("OMP_", "GOMP_", "MKL_")) for name in os.environ)


def use_free_cores(model: nn.Module) -> None:
    """From now on the model's forwards use as many threads as there are free cores.

    torch's threads (libgomp's) meet hundreds of times in a forward, and those that come first spin
    until the last one is there. If another program keeps a core busy, one of two threads is often
    the last by the length of a time slice: two threads are then two to four times slower than one.
    """
    if STAT.exists() and not CHOSEN_BY_USER:
        look = FreeCores().look
        model.register_forward_pre_hook(lambda *_: look())


class FreeCores:
    """Sets the number of torch's threads, until somebody else does."""

    def __init__(self):
        self.most = self.chosen = torch.get_num_threads()
        self.then = self.measure()

    def measure(self) -> tuple[float, float]:
        """The time now, and the seconds of work that other programs have had, all cores taken."""
        return time.monotonic(), seconds_used(STAT.read_text()) - time.process_time()

    def look(self) -> None:
        """Call it before every forward: it looks at the machine now and then."""
        is_other = torch.get_num_threads() != self.chosen  # somebody else sets it
        if is_other or time.monotonic() < self.then[0] + INTERVAL:
            return
        began, others_then = self.then
        self.then = now, others = self.measure()
        busy_cores = (others - others_then) / (now - began)
        # A program that shares its core with one of our threads gets half of it.
        free = os.cpu_count() - int(busy_cores + 0.6)
        self.chosen = max(1, min(self.most, free))
        torch.set_num_threads(self.chosen)


def seconds_used(stat: str) -> float:
    """Seconds of work of all cores since the machine started, of the text of /proc/stat."""
    user, nice, system, _idle, _waiting, interrupts, softirq = map(int, stat.split()[1:8])
    return (user + nice + system + interrupts + softirq) / os.sysconf("SC_CLK_TCK")
