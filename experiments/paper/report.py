"""Tables, verdicts and plots from the records that experiments/paper/run.py keeps; text: claims.md.

An accuracy is the mean over seeds and problems. Its 95 % interval is a bootstrap over problems of
the mean over seeds: it is for other problems and the same seeds. A difference is taken problem by
problem: all models answer the same problems, so its interval is narrower than the two accuracies
suggest.
"""

import json
from pathlib import Path

import numpy as np

from bench.common import table
from bench.likelihood import interval
from plumbing.files import atomic_write

# Ways to decode: a kind and its threshold. Their options are in run.py.
ONE = "tau 1"
PAPER = [f"paper {tau}" for tau in (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)]
OURS = [f"ours {tau}" for tau in (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)]
ENTROPY = [f"entropy {nats}" for nats in (0.05, 0.1, 0.2, 0.4, 0.7, 1)]
MARGIN = [f"margin {margin}" for margin in (0.95, 0.9, 0.8, 0.6, 0.4, 0.2)]

# The rules of the verdicts.
AS_GOOD = 0.02  # the interval of the difference in accuracy is above -0.02
AS_GOOD_NATS = 0.002  # the interval of the difference in nats per token is below 0.002
CONVERGED = 0.01  # as many steps of AR as the other arms have gain less
SEVERAL = 1.3  # tokens per forward

TABLE6 = Path(__file__).parents[1] / "results/cache/table6.txt"  # printed by tables.py

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


def estimate(values: BySeed) -> tuple[float, float, float]:
    """The mean, and its 95 % interval."""
    by_problem = np.mean(list(values.values()), axis=0)
    return interval(by_problem, np.ones(len(by_problem)))


def text(values: BySeed, unit=PERCENT, sign="") -> str:
    """mean (low to high) [of each seed]"""
    factor, form = unit
    middle, low, high = (f"{factor * figure:{sign}{form}}" for figure in estimate(values))
    shown = f"{middle} ({low} to {high})"
    if len(values) > 1:
        seeds = [f"{factor * one.mean():{sign}{form}}" for one in values.values()]
        shown += f" [{', '.join(seeds)}]"
    return shown


def above(values: BySeed, bound: float) -> bool | None:
    """None where the interval includes the bound."""
    _, low, high = estimate(values)
    return None if low <= bound <= high else bool(low > bound)


def verdict(parts: dict[str, bool | None]) -> str:
    """Which parts of a claim hold, which do not, and which cannot be told (None)."""
    shown = []
    for head, meant in (("Holds", True), ("Does not hold", False), ("Cannot be told", None)):
        named = [part for part, holds in parts.items() if holds is meant]
        if named:
            shown.append(f"**{head}**: {'; '.join(named)}.")
    return " ".join(shown)


def show(results: Results, base: Case, cases: dict[str, Case]) -> str:
    """A table with a row for each case; differences are from the base, which is the first."""
    rows = []
    for label, case in cases.items():
        right = results.right(case)
        differs = ""
        if case != base:
            differs = text(minus(right, results.right(base)), sign="+")
        rows.append([label, text(right), differs, f"{results.speed(case):.2f}"])
    return table(["", "accuracy, %", f"from {rows[0][0]}", "tokens/forward"], rows)


# ------------------------------------------------------------------------- the fields of claims.md


def one_token(results: Results) -> dict[str, str]:
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
    nats = []
    for label, name in arms.items():
        mine = results.nats(name)
        row = [label, f"{mean(mine):.4f}", "", ""]
        if name != "sft":
            row[2] = text(minus(mine, start), NATS, sign="+")
            trained = [record["trained"]["clipped"] for record in results.records[name].values()]
            row[3] = f"{np.mean(trained):.0%}"
        nats.append(row)
    return {
        "accuracy_table": show(results, ("sft", ONE), cases),
        "nats_table": table(["", "nats per token", "from AR SFT", "norm above 1"], nats),
        "verdict": one_token_verdict(results, "mars-4", "ar"),
        "slow_verdict": one_token_verdict(results, "mars-4-slow", "ar-slow"),
    }


def one_token_verdict(results: Results, mars: str, more: str) -> str:
    parts = {}
    for label, base in (("AR SFT", "sft"), ("more AR", more)):
        right = minus(results.right((mars, ONE)), results.right((base, ONE)))
        parts[f"answers as good as {label}'s"] = above(right, -AS_GOOD)
        fewer = minus(results.nats(base), results.nats(mars))
        parts[f"nats as good as {label}'s"] = above(fewer, -AS_GOOD_NATS)
    gain = minus(results.right((more, ONE)), results.right(("sft", ONE)))
    had = "had" if mean(gain) < CONVERGED else "had NOT"
    return f"{verdict(parts)} AR SFT {had} converged: more AR is {text(gain, sign='+')} points."


def causes(results: Results) -> dict[str, str]:
    """Which factor, changed alone, makes MARS more accurate."""
    mars = results.right(("mars-4", ONE))
    parts = {}
    for label, name in (
        ("half the learning rate", "mars-4-slow"),
        ("gradients not clipped", "mars-4-free"),
        ("clean loss x 4", "mars-4-heavy"),
        ("twice the steps", "mars-4-long"),
    ):
        parts[label] = above(minus(results.right((name, ONE)), mars), 0)
    return {"causes_verdict": verdict(parts)}


def block_diffusion(results: Results) -> dict[str, str]:
    better = minus(results.right(("mars-4", ONE)), results.right(("diffusion", "diffusion")))
    return {"diffusion_verdict": verdict({"MARS is better": above(better, 0)})}


def clean_loss(results: Results) -> dict[str, str]:
    rows = []
    parts = {}
    more_nats = {}
    for size in (4, 16):
        arms = {"w = 1": f"mars-{size}", "w = 0": f"no-clean-{size}"}
        if size == 4:
            arms["w = 0, 1/t"] = "over-t-4"
        for label, name in arms.items():
            right = text(results.right((name, ONE)))
            rows.append([f"B = {size}, {label}", right, f"{mean(results.nats(name)):.4f}"])
        with_it, without = arms["w = 1"], arms["w = 0"]
        lost = minus(results.right((with_it, ONE)), results.right((without, ONE)))
        parts[f"fewer right answers without it, B = {size}"] = above(lost, 0)
        more_nats[size] = minus(results.nats(without), results.nats(with_it))
    more_so = minus(more_nats[16], more_nats[4])
    parts["more nats are lost with the larger B"] = above(more_so, 0)
    shown = table(["", "accuracy, %", "nats per token"], rows)
    return {"clean_loss_table": shown, "clean_loss_verdict": verdict(parts)}


def tau_buys(results: Results) -> dict[str, str]:
    tables = []
    verdicts = []
    for size in (4, 8, 16):
        sweep = {f"B = {size}, {way}": (f"mars-{size}", way) for way in [ONE, *PAPER]}
        verdicts.append(f"B = {size}: {verdict(is_a_trade(results, list(sweep.values())))}")
        shown = sweep if size == 4 else dict(list(sweep.items())[:2])
        tables.append(show(results, (f"mars-{size}", ONE), shown))
    return {"tau_tables": "\n\n".join(tables), "tau_verdicts": "\n\n".join(verdicts)}


def is_a_trade(results: Results, sweep: list[Case]) -> dict[str, bool | None]:
    one = results.right(sweep[0])
    gains = [minus(results.right(case), one) for case in sweep[1:]]
    speeds = [results.speed(case) for case in sweep]
    return {
        "several tokens at tau 0.95": speeds[1] > SEVERAL,
        "answers as good there": above(gains[0], -AS_GOOD),
        "more tokens at every lower tau": speeds == sorted(set(speeds)),
        "never better answers": not any(above(gain, 0) for gain in gains),
    }


def training_free(results: Results) -> dict[str, str]:
    jacobi = results.speed(("sft", "jacobi"))
    mars = results.speed(("mars-4", PAPER[0]))
    parts = {f"fewer than {SEVERAL}": jacobi < SEVERAL, "fewer than MARS": jacobi < mars}
    return {
        "jacobi_verdict": verdict(parts),
        "jacobi": f"{jacobi:.2f}",
        "jacobi_mars": f"{mars:.2f}",
    }


def ours(results: Results) -> dict[str, str]:
    base = ("mars-4", OURS[0])
    cases = {
        "B + 1 candidates": base,
        "the paper's B candidates": ("mars-4", PAPER[0]),
        "B + 1 candidates, `--block-phase fixed`": ("fixed", OURS[0]),
        "`--verify`": ("mars-4", "verify"),
        "`--verify`, `--block-phase fixed`": ("fixed", "verify"),
        "`--verify`, B = 8": ("mars-8", "verify"),
        "`--verify`, B = 16": ("mars-16", "verify"),
    }
    verified = results.right(("mars-4", "verify"))
    one = results.right(("mars-4", ONE))
    share = np.mean([verified[seed] == one[seed] for seed in verified])
    return {"ours_table": show(results, base, cases), "verify_same": f"{share:.2%}"}


FIELDS = (one_token, causes, block_diffusion, clean_loss, tau_buys, training_free, ours)


def write_report(records: list[Path], out: Path) -> None:
    """Write OUT/paper.md and the plots."""
    results = Results(records)
    loaded = [record for by_seed in results.records.values() for record in by_seed.values()]
    fields = {"models": str(len(loaded))}
    fields["made"] = "; ".join(sorted({record["made"] for record in loaded}))
    fields["table6"] = TABLE6.read_text(encoding="utf-8").strip()
    for function in FIELDS:
        fields |= function(results)
    for name, (title, curves) in PLOTS.items():
        draw(results, out / name, title, curves)
    draw_training(results, out / "convergence.png")
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
            ("--verify, B = 8", "mars-8", ["verify"], "*", RED),
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
ACCURACY = "accuracy, % (bars: 95 % interval)"
BESIDE = {"xytext": (6, 4), "textcoords": "offset points"}


def new_plot(title: str, xlabel: str) -> tuple:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=xlabel, ylabel=ACCURACY)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_curve(axes, x: list[float], right: list[BySeed], marker: str, colour: str) -> list[float]:
    """Accuracy with its interval; returns the means, in percent."""
    y, low, high = 100 * np.array([estimate(one) for one in right]).T
    axes.errorbar(x, y, [y - low, high - y], fmt=marker, color=colour, capsize=3)
    return y


def draw(results: Results, file: Path, title: str, curves: list[tuple]) -> None:
    """Accuracy over tokens per forward."""
    figure, axes = new_plot(title, "tokens per forward")
    for label, name, ways, marker, colour in curves:
        x = [results.speed((name, way)) for way in ways]
        y = draw_curve(axes, x, [results.right((name, way)) for way in ways], marker, colour)
        below = {"xytext": (0, -24), "textcoords": "offset points", "ha": "center"}
        place = BESIDE if len(ways) == 1 else below
        axes.annotate(label, (x[-1], y[-1]), color=colour, **place)
        for way, *point in list(zip(ways, x, y))[:-1]:
            axes.annotate(way.split()[-1], point, fontsize=8, color=colour, **BESIDE)
    atomic_write(file, lambda part: figure.savefig(part, dpi=120))


STAGE_1 = {2400: 91.4, 3600: 93.4, 4800: 95.2}  # steps, accuracy in percent: toy/README.md
STAGE_1_STEPS = 5600


def draw_training(results: Results, file: Path) -> None:
    """Accuracy over training steps: of AR SFT, and of the arms that went on from it."""
    figure, axes = new_plot("AR SFT, and what went on from it", "training steps")
    sft = results.right(("sft", ONE))
    start = 100 * mean(sft)
    axes.plot([*STAGE_1, STAGE_1_STEPS], [*STAGE_1.values(), start], "o-", color=GREY)
    draw_curve(axes, [STAGE_1_STEPS], [sft], "o", GREY)
    axes.annotate("AR SFT", (STAGE_1_STEPS, start), color=GREY, **(BESIDE | {"xytext": (-48, 4)}))
    for label, name, steps, colour in (
        ("more AR", "ar", 800, BLUE),
        ("MARS", "mars-4", 800, RED),
        ("MARS, half the rate", "mars-4-slow", 800, PINK),
        ("MARS, twice the steps", "mars-4-long", 1600, ORANGE),
    ):
        x = STAGE_1_STEPS + steps
        [end] = draw_curve(axes, [x], [results.right((name, ONE))], "o", colour)
        axes.plot([STAGE_1_STEPS, x], [start, end], color=colour)
        axes.annotate(label, (x, end), color=colour, **BESIDE)
    atomic_write(file, lambda part: figure.savefig(part, dpi=120))
