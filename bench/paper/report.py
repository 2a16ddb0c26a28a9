"""Tables, verdicts and plots from the records that bench/paper/run.py keeps.

claims.md is the text of the report; each function under "claims" fills in some of its fields.

An accuracy is the mean over seeds and problems. Its 95 % interval is a bootstrap over problems of
the mean over seeds: it is for other problems and the same seeds. Where there are several seeds, the
figure of each is shown next to the mean. A difference is taken problem by problem and seed by seed:
all models answer the same problems, so its interval is narrower than the two accuracies suggest.
"""

import contextlib
import functools
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.common import table

ONE = "tau 1"  # a way to decode; its options are in run.py
PAPER = "paper 0.95"
SWEEPS = {
    "probability": [f"paper {tau}" for tau in (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)],
    "entropy": [f"entropy {nats}" for nats in (0.05, 0.1, 0.2, 0.4, 0.7, 1)],
    "margin": [f"margin {margin}" for margin in (0.95, 0.9, 0.8, 0.6, 0.4, 0.2)],
    "ours": [f"ours {tau}" for tau in (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)],
}
AS_GOOD = 0.02  # the interval of the difference is above -0.02; "worse" is below it
SEVERAL = 1.3  # tokens per forward
FLOOR = 0.05  # an accuracy below which nothing is left to lose
RESAMPLES = 2000  # of the bootstrap

# --------------------------------------------------------------------------------------- estimates


class Missing(Exception):
    """A model, or a way to decode it, that has no record."""


@dataclass
class Estimate:
    """A share of right answers, or a difference of two shares, with its 95 % interval."""

    mean: float
    low: float
    high: float
    by_seed: list[float]

    def text(self, sign: str = "") -> str:
        """In percent: mean (low to high) [of each seed]; of a difference with sign="+"."""

        def show(share: float) -> str:
            return f"{100 * share:{sign}.1f}"

        text = f"{show(self.mean)} ({show(self.low)} to {show(self.high)})"
        if len(self.by_seed) > 1:
            text += f" [{', '.join(show(share) for share in self.by_seed)}]"
        return text

    def above(self, bound: float) -> bool | None:
        """None where the interval includes the bound."""
        if self.low <= bound <= self.high:
            return None
        return bool(self.low > bound)


@functools.cache
def resamples(num_problems: int) -> np.ndarray:
    """(RESAMPLES, problems): the share that each problem has in each bootstrap sample."""
    rng = np.random.default_rng(0)
    even = np.full(num_problems, 1 / num_problems)
    return rng.multinomial(num_problems, even, size=RESAMPLES) / num_problems


def estimate(right: np.ndarray) -> Estimate:
    """Of (seeds, problems)."""
    by_problem = right.mean(axis=0)
    low, high = np.quantile(resamples(len(by_problem)) @ by_problem, [0.025, 0.975])
    return Estimate(by_problem.mean(), low, high, right.mean(axis=1).tolist())


def verdict(*parts: bool | None) -> str:
    """Of a claim whose parts each hold, do not hold, or cannot be decided (None)."""
    if set(parts) == {True}:
        return "**Holds at this scale.**"
    if True in parts and False in parts:
        return "**Holds partly at this scale.**"
    if False in parts:
        return "**Does not hold here.**"
    if True in parts:
        return "**Holds, as far as can be told at this scale.**"
    return "**Cannot be told at this scale.**"


Case = tuple[str, str]  # a stage, and a way to decode its models


class Results:
    """The records, by stage and seed."""

    def __init__(self, records: dict[tuple[str, int], dict]):
        self.records = records

    def of_seeds(self, seeds: Iterable[int]) -> "Results":
        return Results({key: record for key, record in self.records.items() if key[1] in seeds})

    def of(self, case: Case) -> dict[int, dict]:
        """By seed: which problems were right, tokens, forwards."""
        name, way = case
        found = {}
        for (stage, seed), record in self.records.items():
            if stage == name and way in record.get("decoded", {}):
                found[seed] = record["decoded"][way]
        return found

    def right(self, case: Case) -> np.ndarray:
        """(seeds, problems), of 0 and 1."""
        decoded = self.of(case).values()
        if not decoded:
            raise Missing(case)
        return np.array([list(one["right"]) for one in decoded], dtype=float)

    def accuracy(self, case: Case) -> Estimate:
        return estimate(self.right(case))

    def speed(self, case: Case) -> float:
        """Tokens per forward."""
        decoded = self.of(case).values()
        if not decoded:
            raise Missing(case)
        return sum(one["tokens"] for one in decoded) / sum(one["forwards"] for one in decoded)

    def differences(self, case: Case, base: Case) -> np.ndarray:
        """(seeds, problems), over the seeds that both have."""
        both = self.of_seeds(self.of(case).keys() & self.of(base).keys())
        return both.right(case) - both.right(base)

    def difference(self, case: Case, base: Case) -> Estimate:
        return estimate(self.differences(case, base))

    def same(self, case: Case, base: Case) -> float:
        """The share of answers that are right in both or wrong in both."""
        return (self.differences(case, base) == 0).mean()

    def look_ahead(self, name: str) -> np.ndarray:
        """(measurements, 1 + B + 1): the step, and the share guessed right 1, 2, ... ahead."""
        record = self.records.get((name, 0), {})
        if "trained" not in record:
            raise Missing(name)
        by_step = record["trained"]["look_ahead"]
        return np.array([[int(step), *shares] for step, shares in by_step.items()])


def read_results(cache: Path) -> Results:
    records = {}
    for path in sorted(cache.glob("*-[0-9].json")):
        name, _, seed = path.stem.rpartition("-")
        records[name, int(seed)] = json.loads(path.read_text(encoding="utf-8"))
    return Results(records)


# ------------------------------------------------------------------------------------------ claims
#
# Each function returns fields of claims.md by name. The paper's figures are those of its
# Qwen2.5-0.5B, averages of six benchmarks.

SFT = ("sft", ONE)
MORE_SFT = ("ar", ONE)  # as many steps on top
MARS = ("mars-4", ONE)
DIFFUSION = ("diffusion", "diffusion")


def add_row(
    rows: list, results: Results, label: str, case: Case, bases: Iterable[Case] = (), *more: str
) -> None:
    """Label, accuracy, its difference from each base (empty from itself), tokens per forward, more.

    Nothing is added for a case without a record.
    """
    if not results.of(case):
        return
    row = [label, results.accuracy(case).text()]
    for base in bases:
        if base == case or not results.of(base):
            row.append("")
        else:
            row.append(results.difference(case, base).text("+"))
    rows.append([*row, f"{results.speed(case):.2f}", *more])


def in_short(results: Results) -> dict[str, str]:
    """The most important models and decoders."""
    rows = []
    for label, case in (
        ("AR SFT", SFT),
        ("AR SFT, as many steps on top", MORE_SFT),
        ("block diffusion", DIFFUSION),
        ("MARS, tau 1", MARS),
        ("MARS, tau 0.95, the paper's decoder", ("mars-4", PAPER)),
        ("MARS, tau 0.95, ours", ("mars-4", "ours 0.95")),
        ("MARS, `--verify --tau 0`", ("mars-4", "verify")),
    ):
        add_row(rows, results, label, case, [SFT])
    head = ["B = 4", "accuracy, %", "difference from AR SFT", "tokens/forward"]
    return {"short_table": table(head, rows)}


def one_token(results: Results) -> dict[str, str]:
    """Claim 1: at tau 1 nothing is lost."""
    rows = []
    for label, case, paper in (
        ("before: easy problems only", ("base", ONE), "17.2"),
        ("AR SFT", SFT, "28.7"),
        ("AR SFT, as many steps on top", MORE_SFT, "26.4"),
        ("MARS, B = 4", MARS, "30.4"),
        ("MARS, B = 8", ("mars-8", ONE), "29.7"),
        ("MARS, B = 16", ("mars-16", ONE), "29.7"),
        ("block diffusion, B = 4", DIFFUSION, "22.8"),
    ):
        add_row(rows, results, label, case, [SFT, MORE_SFT], paper)
    head = ["tau 1", "accuracy, %", "difference from AR SFT", "from AR SFT, as many steps on top"]
    from_sft = results.difference(MARS, SFT).above(-AS_GOOD)
    from_more = results.difference(MARS, MORE_SFT).above(-AS_GOOD)
    return {
        "one_token_table": table([*head, "tokens/forward", "paper"], rows),
        "one_token_verdict": verdict(from_sft, from_more),
        "control_verdict": verdict(results.difference(MORE_SFT, DIFFUSION).above(AS_GOOD)),
    }


WEIGHTS = {"mars": "w = 1", "no-clean": "w = 0", "over-t": "w = 0, 1/t"}


def clean_loss(results: Results) -> dict[str, str]:
    """Claim 2: the clean stream's loss keeps one-token decoding. One seed."""
    results = results.of_seeds([0])
    paper = {"mars-4": "30.4", "mars-8": "29.7", "mars-16": "29.7"}
    paper |= {"over-t-4": "28.4", "over-t-8": "26.4", "over-t-16": "22.2"}
    rows = []
    parts = []
    for size in (4, 8, 16):
        mars = (f"mars-{size}", ONE)
        for arm, weight in WEIGHTS.items():
            name = f"{arm}-{size}"
            label = f"B = {size}, {weight}, tau"
            add_row(rows, results, f"{label} 1", (name, ONE), [mars], paper.get(name, ""))
            add_row(rows, results, f"{label} 0.95", (name, PAPER), [mars], "")
        if results.of((f"no-clean-{size}", ONE)):
            parts.append(results.difference(mars, (f"no-clean-{size}", ONE)).above(0))
    head = ["", "accuracy, %", "difference from w = 1, tau 1", "tokens/forward", "paper"]
    fields = {"clean_loss_table": table(head, rows)}
    if results.of(("no-clean-16", ONE)):
        trend, fields["clean_loss_trend"] = clean_loss_trend(results)
        parts.append(trend)
    return fields | {"clean_loss_verdict": verdict(*parts)}


def clean_loss_trend(results: Results) -> tuple[bool | None, str]:
    """Does w = 0 cost more with B = 16 than with 4? The answer, and a sentence for the text."""
    if min(results.accuracy((f"no-clean-{size}", ONE)).low for size in (4, 16)) < FLOOR:
        return None, "With so little left, whether larger blocks lose more cannot be told."
    cost_4 = results.differences(MARS, ("no-clean-4", ONE))
    cost_16 = results.differences(("mars-16", ONE), ("no-clean-16", ONE))
    more = estimate(cost_16 - cost_4)
    return more.above(0), f"With B = 16 it falls by {more.text()} points more than with B = 4."


def tau_buys(results: Results) -> dict[str, str]:
    """Claim 3: several tokens per forward for no accuracy, and below that a trade."""
    ways = [ONE, *SWEEPS["probability"]]
    paper = ["32.8, 1.00", "31.1, 1.51", "28.8, 1.66", "26.9, 1.86", "26.0, 2.04"]
    paper += ["21.5, 2.24", "18.6, 2.47"]
    rows = []
    parts = []
    for size in (4, 8, 16):
        sweep = [(f"mars-{size}", way) for way in ways]
        if not results.of(sweep[-1]):
            continue
        tau_1, tau_95 = sweep[:2]
        for case, figures in zip(sweep, paper):
            label = f"B = {size}, tau {case[1].split()[1]}"
            add_row(rows, results, label, case, [tau_1], figures if size == 4 else "")
        parts.append(results.speed(tau_95) > SEVERAL)
        parts.append(results.difference(tau_95, tau_1).above(-AS_GOOD))
        parts.append(is_a_trade(results, sweep))
    head = ["", "accuracy, %", "difference from tau 1", "tokens/forward", "paper: GSM8K"]
    return {"tau_table": table(head, rows), "tau_verdict": verdict(*parts)}


def is_a_trade(results: Results, sweep: list[Case]) -> bool:
    """Does each lower tau give more tokens per forward, and never clearly better answers?"""
    for higher, lower in zip(sweep, sweep[1:]):
        if results.speed(lower) < results.speed(higher):
            return False
        if results.difference(lower, higher).low > 0:
            return False
    return True


def confidences(results: Results) -> dict[str, str]:
    """Probability, entropy or margin. One seed."""
    rows = []
    for metric in ("probability", "entropy", "margin"):
        for way in SWEEPS[metric]:
            label = f"{metric} {way.split()[1]}"
            add_row(rows, results.of_seeds([0]), label, ("mars-4", way))
    return {"confidence_table": table(["", "accuracy, %", "tokens/forward"], rows)}


def training_free(results: Results) -> dict[str, str]:
    """Jacobi decoding."""
    jacobi = results.speed(("sft", "jacobi"))
    mars = results.speed(("mars-4", PAPER))
    return {
        "jacobi_verdict": verdict(jacobi < min(SEVERAL, mars)),
        "jacobi_speed": f"{jacobi:.2f}",
        "jacobi_mars": f"{mars:.2f}",
        "jacobi_same": f"{results.same(('sft', 'jacobi'), SFT):.1%}",
    }


def ours(results: Results) -> dict[str, str]:
    """What the paper does not have, next to what it has."""
    rows = []
    for tau in ("0.95", "0.8", "0.5"):
        way = f"ours {tau}"
        label = f"tau {tau}, B + 1 candidates"
        plain = ("mars-4", way)
        add_row(
            rows, results, f"tau {tau}, the paper's decoder", ("mars-4", f"paper {tau}"), [plain]
        )
        add_row(rows, results, label, plain, [plain])
        add_row(rows, results, f"{label}, `--distill`", ("distill", way), [plain])
        add_row(rows, results, f"{label}, `--block-phase fixed`", ("fixed", way), [plain])
    plain = ("mars-4", "verify")
    label = "`--verify --tau 0`"
    add_row(rows, results, label, plain, [plain])
    add_row(rows, results, f"{label}, `--distill`", ("distill", "verify"), [plain])
    add_row(rows, results, f"{label}, `--block-phase fixed`", ("fixed", "verify"), [plain])
    add_row(rows, results, f"{label}, B = 8", ("mars-8", "verify"), [plain])
    add_row(rows, results, f"{label}, B = 16", ("mars-16", "verify"), [plain])
    head = ["", "accuracy, %", "difference from plain B + 1, same seeds", "tokens/forward"]
    return {
        "ours_table": table(head, rows),
        "verify_speed": f"{results.speed(plain):.2f}",
        "verify_same": f"{results.same(plain, MARS):.2%}",
    }


def horizon(results: Results) -> dict[str, str]:
    """The accuracy of each look-ahead at the end of training. One seed."""
    labels = {}
    for size in (4, 8, 16):
        for arm, weight in WEIGHTS.items():
            labels[f"{arm}-{size}"] = f"B = {size}, {weight}"
    labels["fixed"] = "B = 4, w = 1, fixed phase"
    labels["distill"] = "B = 4, w = 1, distilled"
    rows = []
    for name, label in labels.items():
        with contextlib.suppress(Missing):
            last = results.look_ahead(name)[-1]
            rows.append([label, *[f"{share:.3f}" for share in last[1:6]]])
    return {"horizon_table": table(["", *[f"{k} ahead" for k in range(1, 6)]], rows)}


def how(results: Results) -> dict[str, str]:
    """The machine, versions and time."""
    records = list(results.records.values())
    decoded = [one for record in records for one in record.get("decoded", {}).values()]
    fields = {
        "problems": f"{max(len(one['right']) for one in decoded):,}",
        "models": str(sum("trained" in record for record in records)),
        "training_hours": f"{sum(record.get('seconds', 0) for record in records) / 3600:.1f}",
        "decoding_hours": f"{sum(one['seconds'] for one in decoded) / 3600:.1f}",
    }
    for key in ("machine", "versions", "date"):
        fields[key] = "; ".join(sorted({record[key] for record in records}))
    return fields


CLAIMS = (in_short, one_token, clean_loss, tau_buys, confidences, training_free, ours, horizon, how)


def write_report(cache: Path, out: Path, texts: dict[str, str], readings: bool) -> None:
    """Write OUT/paper.md and the plots. `texts`: more fields of claims.md.

    readings: with the quoted paragraphs, which explain the figures of the committed cache.
    """
    results = read_results(cache)
    fields = defaultdict(lambda: "(not in this run)", texts)
    for claim in CLAIMS:
        with contextlib.suppress(Missing):
            fields |= claim(results)
    paragraphs = (Path(__file__).parent / "claims.md").read_text(encoding="utf-8").split("\n\n")
    if not readings:
        paragraphs = [paragraph for paragraph in paragraphs if not paragraph.startswith("> ")]
    out.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(paragraphs).format_map(fields)
    (out / "paper.md").write_text(text, encoding="utf-8")
    draw(results, out)


# ------------------------------------------------------------------------------------------- plots

# Okabe and Ito's colours, which do not depend on telling red from green.
BLUE, ORANGE, GREEN, RED, PINK, GREY = "#0072b2 #e69f00 #009e73 #d55e00 #cc79a7 #777777".split()
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "figure.figsize": (8, 4.8),
    "savefig.dpi": 120,
    "errorbar.capsize": 3,
    "lines.markersize": 7,
}


def curve(results: Results, axes, name: str, ways: list[str], **look) -> None:
    """Accuracy, with its interval, over tokens per forward."""
    cases = [(name, way) for way in ways if results.of((name, way))]
    if cases:
        found = [results.accuracy(case) for case in cases]
        mean = [100 * one.mean for one in found]
        below = [100 * (one.mean - one.low) for one in found]
        above = [100 * (one.high - one.mean) for one in found]
        axes.errorbar([results.speed(case) for case in cases], mean, [below, above], **look)


def plot_pareto(results: Results, axes) -> None:
    paper = [ONE, *SWEEPS["probability"]]
    best = [ONE, *SWEEPS["ours"]]
    for label, name, ways, colour, marker in (
        ("B = 4, the paper's decoder", "mars-4", paper, BLUE, "o-"),
        ("B = 8, the paper's decoder", "mars-8", paper, GREEN, "s-"),
        ("B = 16, the paper's decoder", "mars-16", paper, PINK, "^-"),
        ("B = 4, B + 1 candidates", "mars-4", best, ORANGE, "D--"),
        ("B = 4, --verify", "mars-4", ["verify"], RED, "*"),
        ("B = 8, --verify", "mars-8", ["verify"], RED, "P"),
        ("B = 16, --verify", "mars-16", ["verify"], RED, "X"),
        ("AR SFT", "sft", [ONE], GREY, "o"),
        ("AR SFT, as many steps on top", "ar", [ONE], GREY, "s"),
        ("AR SFT, Jacobi", "sft", ["jacobi"], GREY, "x"),
        ("diffusion", "diffusion", ["diffusion"], "black", "v"),
    ):
        curve(results, axes, name, ways, fmt=marker, color=colour, label=label)
    axes.set(
        xlabel="tokens per forward", ylabel="accuracy, %", title="What tau buys, from 1 to 0.5"
    )
    axes.legend(fontsize=9)


def plot_confidence(results: Results, axes) -> None:
    results.speed(("mars-4", SWEEPS["margin"][0]))  # or there is no plot
    looks = {"probability": (BLUE, "o-"), "entropy": (ORANGE, "s-"), "margin": (GREEN, "^-")}
    for metric, (colour, marker) in looks.items():
        look = {"fmt": marker, "color": colour, "label": metric}
        curve(results.of_seeds([0]), axes, "mars-4", SWEEPS[metric], **look)
    axes.set(xlabel="tokens per forward", ylabel="accuracy, %", title="Three confidences, B = 4")
    axes.legend()


def plot_horizon(results: Results, axes) -> None:
    for name, line in (("mars-4", "-"), ("no-clean-4", "--")):
        ahead = results.look_ahead(name)
        for k, colour in enumerate((GREY, BLUE, GREEN, ORANGE, RED), 1):
            label = f"{k} ahead" if name == "mars-4" else None
            axes.plot(ahead[:, 0], 100 * ahead[:, k], line, color=colour, label=label)
    axes.plot([], [], "--", color="black", label="without the clean loss")
    axes.set(xlabel="step", ylabel="guessed right, %", title="Each look-ahead over training, B = 4")
    axes.legend(ncols=2)


PLOTS = {
    "pareto.png": plot_pareto,
    "confidence.png": plot_confidence,
    "horizon.png": plot_horizon,
}


def draw(results: Results, out: Path) -> None:
    """The plots; one that needs a missing record is left out."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(STYLE):
        for name, plot in PLOTS.items():
            figure, axes = pyplot.subplots()
            with contextlib.suppress(Missing):
                plot(results, axes)
                figure.savefig(out / name)
            pyplot.close(figure)
