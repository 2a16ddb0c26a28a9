"""Tables from the records that experiments/paper/run.py keeps; the text is claims.md.

An accuracy is the mean over seeds and problems. Its 95 % interval is a bootstrap over problems of
the mean over seeds: it is for other problems and the same seeds. A difference is taken problem by
problem: all models answer the same problems, so its interval is narrower than the two accuracies
suggest.
"""

import functools
import json
from pathlib import Path

import numpy as np

from bench.common import table

# Ways to decode: a kind and its threshold. Their options are in run.py.
ONE = "tau 1"
PAPER = [f"paper {tau}" for tau in (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)]
OURS = [f"ours {tau}" for tau in (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)]
ENTROPY = [f"entropy {nats}" for nats in (0.05, 0.1, 0.2, 0.4, 0.7, 1)]
MARGIN = [f"margin {margin}" for margin in (0.95, 0.9, 0.8, 0.6, 0.4, 0.2)]

RESAMPLES = 2000  # of the bootstrap
PERCENT = ("accuracy, %", 100, ".1f")  # name, factor and format
NATS = ("nats per token", 1, ".4f")

Case = tuple[str, str]  # an arm, and a way to decode its models
BySeed = dict[int, np.ndarray]  # a value for each problem


class Results:
    """The records, by arm and seed."""

    def __init__(self, paths: list[Path]):
        self.records = {}
        for path in paths:
            name, _, seed = path.stem.rpartition("-")
            record = json.loads(path.read_text(encoding="utf-8"))
            self.records.setdefault(name, {})[int(seed)] = record

    def decoded(self, case: Case) -> dict[int, dict]:
        name, way = case
        return {seed: record["decoded"][way] for seed, record in self.records[name].items()}

    def right(self, case: Case) -> BySeed:
        """1 or 0."""
        decoded = self.decoded(case).items()
        return {seed: np.array(list(one["right"]), dtype=float) for seed, one in decoded}

    def nats(self, case: Case) -> BySeed:
        """Of the reference answer, one token ahead, relative to a mean answer's tokens."""
        found = {}
        for seed, record in self.records[case[0]].items():
            nats = np.array(record["nats"].split(), dtype=float)
            found[seed] = nats * len(nats) / record["tokens"]
        return found

    def speed(self, case: Case) -> float:
        """Tokens per forward."""
        decoded = self.decoded(case).values()
        return sum(one["tokens"] for one in decoded) / sum(one["forwards"] for one in decoded)


def minus(mine: BySeed, base: BySeed) -> BySeed:
    """The difference from the base's mean over its seeds."""
    base_mean = np.mean(list(base.values()), axis=0)
    return {seed: values - base_mean for seed, values in mine.items()}


@functools.cache
def resampled(problems: int) -> np.ndarray:
    """How often each problem is drawn: (RESAMPLES, problems)."""
    rng = np.random.default_rng(0)
    return rng.multinomial(problems, np.full(problems, 1 / problems), size=RESAMPLES)


def estimate(values: BySeed) -> tuple[float, float, float]:
    """The mean, and its 95 % interval."""
    by_problem = np.mean(list(values.values()), axis=0)
    means = resampled(len(by_problem)) @ by_problem / len(by_problem)
    low, high = np.quantile(means, [0.025, 0.975])
    return by_problem.mean(), low, high


def text(values: BySeed, unit=PERCENT, sign="") -> str:
    """mean (low to high) [of each seed]"""
    _, factor, form = unit
    middle, low, high = (f"{factor * figure:{sign}{form}}" for figure in estimate(values))
    shown = f"{middle} ({low} to {high})"
    if len(values) > 1:
        seeds = [f"{factor * one.mean():{sign}{form}}" for one in values.values()]
        shown += f" [{', '.join(seeds)}]"
    return shown


# ------------------------------------------------------------------------- the fields of claims.md


def show(results: Results, cases: dict[str, Case], bases=(), unit=PERCENT) -> str:
    """A table with a row for each case; differences are from the bases, or from the first case."""
    values_of = results.right if unit == PERCENT else results.nats
    bases = bases or list(cases)[:1]
    rows = []
    for label, case in cases.items():
        cells = [label, text(values_of(case), unit)]
        for base in bases:
            differs = ""
            if label != base:
                differs = text(minus(values_of(case), values_of(cases[base])), unit, sign="+")
            cells.append(differs)
        rows.append([*cells, f"{results.speed(case):.2f}"])
    return table(["", unit[0], *(f"from {base}" for base in bases), "tokens/forward"], rows)


TRAINED = {
    "AR SFT": ("sft", ONE),
    "more AR": ("ar", ONE),
    "more AR, half the rate": ("ar-slow", ONE),
    "MARS, B = 4": ("mars-4", ONE),
    "MARS, B = 4, half the rate": ("mars-4-slow", ONE),
    "MARS, B = 4, gradients not clipped": ("mars-4-free", ONE),
    "MARS, B = 4, clean loss x 4": ("mars-4-heavy", ONE),
    "MARS, B = 4, twice the steps": ("mars-4-long", ONE),
    "MARS, B = 8": ("mars-8", ONE),
    "MARS, B = 16": ("mars-16", ONE),
}
DIFFUSION = {"block diffusion, B = 4": ("diffusion", "diffusion")}
CLEAN_LOSS = {
    "B = 4, w = 1": ("mars-4", ONE),
    "B = 4, w = 0": ("no-clean-4", ONE),
    "B = 16, w = 1": ("mars-16", ONE),
    "B = 16, w = 0": ("no-clean-16", ONE),
}
UNTRAINED = {
    "AR SFT": ("sft", ONE),
    "AR SFT, Jacobi decoding": ("sft", "jacobi"),
    "MARS, B = 4, tau 0.95": ("mars-4", PAPER[0]),
}
ADDED = {
    "B + 1 candidates": ("mars-4", OURS[0]),
    "the paper's B candidates": ("mars-4", PAPER[0]),
    "B + 1 candidates, `--block-phase fixed`": ("fixed", OURS[0]),
    "tau 1": ("mars-4", ONE),
    "`--verify`": ("mars-4", "verify"),
    "`--verify`, `--block-phase fixed`": ("fixed", "verify"),
    "`--verify`, B = 8": ("mars-8", "verify"),
    "`--verify`, B = 16": ("mars-16", "verify"),
}


def by_tau(results: Results, size: int, ways: list[str]) -> str:
    cases = {f"B = {size}, {way}": (f"mars-{size}", way) for way in [ONE, *ways]}
    return show(results, cases)


def write_report(records: list[Path], out: Path) -> None:
    """Write OUT/paper.md."""
    results = Results(records)
    loaded = [record for by_seed in results.records.values() for record in by_seed.values()]
    fields = {
        "models": str(len(loaded)),
        "made": "; ".join(sorted({record["made"] for record in loaded})),
        "one_token": show(results, TRAINED | DIFFUSION, ["AR SFT", "MARS, B = 4"]),
        "one_token_nats": show(results, TRAINED, unit=NATS),
        "clean_loss": show(results, CLEAN_LOSS),
        "clean_loss_nats": show(results, CLEAN_LOSS, unit=NATS),
        "tau_4": by_tau(results, 4, PAPER),
        "tau_8": by_tau(results, 8, PAPER),
        "tau_16": by_tau(results, 16, PAPER),
        "confidences": by_tau(results, 4, ENTROPY + MARGIN),
        "untrained": show(results, UNTRAINED),
        "added": show(results, ADDED),
    }
    template = Path(__file__).with_name("claims.md").read_text(encoding="utf-8")
    (out / "paper.md").write_text(template.format(**fields), encoding="utf-8")
