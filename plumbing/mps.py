"""Apple's GPUs: torch's attention there has been wrong, without an error, for masks like ours."""

import torch
from torch import Tensor, nn

from .errors import UserError

LENGTHS = 8, 40  # at most 8 queries have a kernel of their own


def check_logits(on_mps: nn.Module, on_cpu: nn.Module) -> None:
    """Raise UserError if a model's logits on the two devices differ by more than rounding.

    Both are in float32. In some versions of torch few queries are wrong, or masks that differ from
    row to row (pytorch #182285, #184180): so the first row is causal, and in the second each token
    sees only itself. Such mistakes, made on a CPU, changed the logits of five models by 7 % and
    more, and the order of sums changed them by less than 0.01 %.
    """
    for length in LENGTHS:
        # Tokens from all of the vocabulary: the first ones may be special, and all alike.
        spread = torch.linspace(0, on_cpu.config.vocab_size - 1, 2 * length).long()
        tokens = spread.view(2, length)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask = torch.stack([causal, torch.eye(length, dtype=torch.bool)])[:, None]  # (2, 1, T, T)
        expected = logits_of(on_cpu, tokens, mask)
        error = (logits_of(on_mps, tokens, mask) - expected).norm() / expected.norm()
        if not error < 0.01:  # so that NaN, too, is refused
            raise UserError(
                f"torch {torch.__version__} computes other logits on mps than on the CPU, by "
                f"{error:.1%}: use another version of torch, or --device cpu"
            )


@torch.no_grad()
def logits_of(model: nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
    """Logits (2 * T, V) on the CPU; the mask token's, which is always -inf, is 0."""
    device = model.device
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    hidden = model(tokens.to(device), positions.to(device), mask.to(device))
    logits = model.logits(hidden.flatten(0, 1)).cpu()
    return logits.masked_fill(logits == float("-inf"), 0)
