"""Tables, verdicts and plots from the records that experiments/paper/run.py keeps; text: claims.md.

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
from plumbing.files import atomic_write

# Ways to decode: a kind and its threshold. Their options are in run.py.
ONE = "tau 1"
PAPER = [f"paper {tau}" for tau in (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)]
OURS = [f"ours {tau}" for tau in (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)]
ENTROPY = [f"entropy {nats}" for nats in (0.05, 0.1, 0.2, 0.4, 0.7, 1)]
MARGIN = [f"margin {margin}" for margin in (0.95, 0.9, 0.8, 0.6, 0.4, 0.2)]

# The rules of the verdicts.
AS_GOOD = -0.02  # the difference in accuracy is above this
AS_GOOD_NATS = -0.002  # and in nats per token: how many fewer
CONVERGED = 0.01  # as many steps of AR as the other arms have gain less
SEVERAL = 1.3  # tokens per forward

TABLE6 = Path(__file__).parents[1] / "results/cache/table6.txt"  # printed by tables.py
RESAMPLES = 2000  # of the bootstrap

PERCENT = (100, ".1f")  # factor and format
NATS = (1, ".4f")

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

    def nats(self, name: str) -> BySeed:
        """Of the reference answer, one token ahead, relative to a mean answer's tokens."""
        found = {}
        for seed, record in self.records[name].items():
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


def mean(values: BySeed) -> float:
    """Over seeds and problems."""
    return float(np.mean(list(values.values())))


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
    factor, form = unit
    middle, low, high = (f"{factor * figure:{sign}{form}}" for figure in estimate(values))
    shown = f"{middle} ({low} to {high})"
    if len(values) > 1:
        seeds = [f"{factor * one.mean():{sign}{form}}" for one in values.values()]
        shown += f" [{', '.join(seeds)}]"
    return shown


def verdict(values: BySeed, bound: float) -> str:
    """Is the mean above the bound?"""
    _, low, high = estimate(values)
    if low <= bound <= high:
        return "cannot be told"
    return "holds" if low > bound else "does not hold"


def judge(parts: dict[str, tuple], unit=PERCENT) -> str:
    """A table with a row for each part of a claim: (difference, bound), or (holds,)."""
    rows = []
    for part, found in parts.items():
        if len(found) == 1:
            rows.append([part, "", "", "holds" if found[0] else "does not hold"])
            continue
        difference, bound = found
        shown = [text(difference, unit, "+"), f"{unit[0] * bound:g}", verdict(difference, bound)]
        rows.append([part, *shown])
    return table(["", "difference", "is above", "verdict"], rows)


def show(results: Results, cases: dict[str, Case]) -> str:
    """A table with a row for each case; differences are from the first."""
    first, base = next(iter(cases.items()))
    rows = []
    for label, case in cases.items():
        right = results.right(case)
        differs = ""
        if case != base:
            differs = text(minus(right, results.right(base)), sign="+")
        rows.append([label, text(right), differs, f"{results.speed(case):.2f}"])
    return table(["", "accuracy, %", f"from {first}", "tokens/forward"], rows)


# ------------------------------------------------------------------------- the fields of claims.md


def one_token(results: Results) -> str:
    arms = {
        "AR SFT": "sft",
        "more AR": "ar",
        "more AR, half the rate": "ar-slow",
        "MARS, B = 4": "mars-4",
        "MARS, B = 4, half the rate": "mars-4-slow",
        "MARS, B = 4, gradients not clipped": "mars-4-free",
        "MARS, B = 4, clean loss x 4": "mars-4-heavy",
        "MARS, B = 4, twice the steps": "mars-4-long",
        "MARS, B = 8": "mars-8",
        "MARS, B = 16": "mars-16",
    }
    cases = {label: (name, ONE) for label, name in arms.items()}
    cases["block diffusion, B = 4"] = ("diffusion", "diffusion")
    start = results.nats("sft")
    rows = [["AR SFT", f"{mean(start):.4f}", "", ""]]
    for label, name in list(arms.items())[1:]:
        nats = results.nats(name)
        clipped = [record["trained"]["clipped"] for record in results.records[name].values()]
        difference = text(minus(nats, start), NATS, sign="+")
        rows.append([label, f"{mean(nats):.4f}", difference, f"{np.mean(clipped):.0%}"])
    nats_table = table(["", "nats per token", "from AR SFT", "norm above 1"], rows)
    return f"{show(results, cases)}\n\n{nats_table}"


def one_token_verdicts(results: Results) -> str:
    right = {name: results.right((name, ONE)) for name in results.records if name != "diffusion"}
    parts = {}
    nats = {}
    for rate, mars, more in (("", "mars-4", "ar"), (", half the rate", "mars-4-slow", "ar-slow")):
        gain = mean(minus(right[more], right["sft"]))
        parts[f"AR SFT has converged{rate}"] = (gain < CONVERGED,)
        for label, base in ((f"AR SFT{rate}", "sft"), (f"more AR{rate}", more)):
            parts[f"MARS answers as well as {label}"] = (minus(right[mars], right[base]), AS_GOOD)
            fewer = minus(results.nats(base), results.nats(mars))
            nats[f"MARS's nats as few as those of {label}"] = (fewer, AS_GOOD_NATS)
    diffusion = results.right(("diffusion", "diffusion"))
    parts["MARS answers better than block diffusion"] = (minus(right["mars-4"], diffusion), 0)
    for label, name in (
        ("at half the learning rate", "mars-4-slow"),
        ("if gradients are not clipped", "mars-4-free"),
        ("with the clean loss x 4", "mars-4-heavy"),
        ("with twice the steps", "mars-4-long"),
    ):
        parts[f"MARS answers better {label}"] = (minus(right[name], right["mars-4"]), 0)
    return f"{judge(parts)}\n\n{judge(nats, NATS)}"


def clean_loss(results: Results) -> str:
    rows = []
    parts = {}
    more_nats = {}
    for size in (4, 16):
        with_it, without = f"mars-{size}", f"no-clean-{size}"
        arms = {"w = 1": with_it, "w = 0": without}
        if size == 4:
            arms["w = 0, 1/t"] = "over-t-4"
        for label, name in arms.items():
            right = text(results.right((name, ONE)))
            rows.append([f"B = {size}, {label}", right, f"{mean(results.nats(name)):.4f}"])
        lost = minus(results.right((with_it, ONE)), results.right((without, ONE)))
        parts[f"more right answers with it, B = {size}"] = (lost, 0)
        more_nats[size] = minus(results.nats(without), results.nats(with_it))
    nats = {"more nats are lost with the larger B": (minus(more_nats[16], more_nats[4]), 0)}
    shown = table(["", "accuracy, %", "nats per token"], rows)
    return f"{shown}\n\n{judge(parts)}\n\n{judge(nats, NATS)}"


def tau_buys(results: Results) -> str:
    tables = []
    parts = {}
    for size in (4, 8, 16):
        sweep = {way: (f"mars-{size}", way) for way in [ONE, *PAPER]}
        tables.append(show(results, {f"B = {size}, {way}": case for way, case in sweep.items()}))
        speeds = [results.speed(case) for case in sweep.values()]
        one = results.right(sweep[ONE])
        gains = [minus(results.right(sweep[way]), one) for way in PAPER]
        never_better = not any(verdict(gain, 0) == "holds" for gain in gains)
        parts[f"B = {size}: several tokens at tau 0.95"] = (speeds[1] > SEVERAL,)
        parts[f"B = {size}: answers as good there"] = (gains[0], AS_GOOD)
        parts[f"B = {size}: more tokens at every lower tau"] = (speeds == sorted(set(speeds)),)
        parts[f"B = {size}: never better answers"] = (never_better,)
    return "\n\n".join([*tables, judge(parts)])


def training_free(results: Results) -> str:
    jacobi = results.speed(("sft", "jacobi"))
    mars = results.speed(("mars-4", PAPER[0]))
    parts = {
        f"Jacobi: {jacobi:.2f} tokens per forward, fewer than {SEVERAL}": (jacobi < SEVERAL,),
        f"and fewer than MARS at tau 0.95: {mars:.2f}": (jacobi < mars,),
    }
    return judge(parts)


def ours(results: Results) -> str:
    cases = {
        "B + 1 candidates": ("mars-4", OURS[0]),
        "the paper's B candidates": ("mars-4", PAPER[0]),
        "B + 1 candidates, `--block-phase fixed`": ("fixed", OURS[0]),
        "`--verify`": ("mars-4", "verify"),
        "`--verify`, `--block-phase fixed`": ("fixed", "verify"),
        "`--verify`, B = 8": ("mars-8", "verify"),
        "`--verify`, B = 16": ("mars-16", "verify"),
    }
    verified = results.right(("mars-4", "verify"))
    one = results.right(("mars-4", ONE))
    same = all(np.array_equal(verified[seed], one[seed]) for seed in one)
    return f"{show(results, cases)}\n\n{judge({'`--verify` is right where tau 1 is': (same,)})}"


SECTIONS = (one_token, one_token_verdicts, clean_loss, tau_buys, training_free, ours)


def write_report(records: list[Path], out: Path) -> None:
    """Write OUT/paper.md and the plots."""
    results = Results(records)
    loaded = [record for by_seed in results.records.values() for record in by_seed.values()]
    fields = {section.__name__: section(results) for section in SECTIONS}
    fields["models"] = str(len(loaded))
    fields["made"] = "; ".join(sorted({record["made"] for record in loaded}))
    fields["table6"] = TABLE6.read_text(encoding="utf-8").strip()
    for name, (title, curves) in PLOTS.items():
        draw(results, out / name, title, curves)
    template = Path(__file__).with_name("claims.md").read_text(encoding="utf-8")
    (out / "paper.md").write_text(template.format(**fields), encoding="utf-8")


# ------------------------------------------------------------------------------------------- plots

# Okabe and Ito's colours, which do not depend on telling red from green.
BLUE, ORANGE, GREEN, RED, PINK, GREY = "#0072b2 #e69f00 #009e73 #d55e00 #cc79a7 #777777".split()
PLOTS = {  # the title, and of each curve: its label, an arm, ways, marker, colour
    "pareto.png": (
        "What tau buys (small numbers: tau)",
        [
            ("B = 4", "mars-4", [ONE, *PAPER], "o-", BLUE),
            ("B = 8", "mars-8", [ONE, *PAPER], "s-", GREEN),
            ("B = 16", "mars-16", [ONE, *PAPER], "^-", PINK),
            ("B = 4, B + 1 candidates", "mars-4", OURS, "D--", ORANGE),
            ("--verify, B = 4", "mars-4", ["verify"], "*", RED),
            ("--verify, B = 8", "mars-8", ["verify"], "P", RED),
            ("Jacobi", "sft", ["jacobi"], "x", GREY),
            ("block diffusion", "diffusion", ["diffusion"], "v", GREY),
        ],
    ),
    "confidence.png": (
        "Three confidences, B = 4 (small numbers: the threshold)",
        [
            ("probability", "mars-4", PAPER, "o-", BLUE),
            ("entropy", "mars-4", ENTROPY, "s-", ORANGE),
            ("margin", "mars-4", MARGIN, "^-", GREEN),
        ],
    ),
}


def draw(results: Results, file: Path, title: str, curves: list[tuple]) -> None:
    """Accuracy over tokens per forward."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel="tokens per forward", ylabel="accuracy, % (bars: 95 % interval)")
    axes.spines[["top", "right"]].set_visible(False)
    label_at = functools.partial(axes.annotate, xytext=(6, 4), textcoords="offset points")
    for label, name, ways, marker, colour in curves:
        x = [results.speed((name, way)) for way in ways]
        y, low, high = 100 * np.array([estimate(results.right((name, way))) for way in ways]).T
        axes.errorbar(x, y, [y - low, high - y], fmt=marker, color=colour, capsize=3, label=label)
        for way, *point in zip(ways, x, y):
            if len(ways) > 1:
                label_at(way.split()[-1], point, fontsize=8, color=colour)
    axes.legend(frameon=False, loc="lower left")
    atomic_write(file, lambda part: figure.savefig(part, dpi=120))
