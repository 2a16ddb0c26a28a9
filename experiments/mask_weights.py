"""Weights of guesses for which train.py has no option: smoothed more, or fading.

    python -m experiments.mask_weights fading --data toy/train.jsonl --model toy/sft --out fading

The first argument is one of `WEIGHTS`, the others are train.py's. All are variants of
`--mask-weight expected`, which they set.
"""

import functools
import sys

import train
from plumbing.errors import UserError, run_main


def smooth(amount: float) -> None:
    """Set train.SMOOTHING: 0 is the plain derivative, a large one makes all weights alike."""
    train.SMOOTHING = amount


def fade() -> None:
    """From `expected` at the start of a run to the paper's weight at its end."""
    learning_rate = train.learning_rate
    expected_weights = train.expected_weights
    now = 0.0  # the share of the run that is done

    def note_progress(peak: float, progress: float, warmup: float) -> float:
        nonlocal now
        now = progress
        return learning_rate(peak, progress, warmup)

    def mixed_weights(*args):
        return now + (1 - now) * expected_weights(*args)

    train.learning_rate = note_progress  # train.py asks for it at every step
    train.expected_weights = mixed_weights


WEIGHTS = {
    "smoothing-1": functools.partial(smooth, 1.0),
    "fading": fade,
}


def main() -> None:
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in WEIGHTS:
        raise UserError(f"the first argument must be one of: {', '.join(WEIGHTS)}")
    sys.argv += ["--mask-weight", "expected"]
    WEIGHTS[name]()
    identity = train.identity
    train.identity = lambda *args: identity(*args) | {"weights": name}  # --resume compares it
    train.main()


if __name__ == "__main__":
    run_main(main, out_of_memory="use a smaller --batch-tokens, or --checkpoint-layers")
