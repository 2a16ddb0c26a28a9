"""What bench/reproduce.py found: tables, verdicts, plots, from its cache. The text: claims.md.

An accuracy is the mean over seeds and problems. Its 95 % interval is for other problems and other
seeds (two-way random effects, Satterthwaite's degrees of freedom); with one seed, for other
problems only. A difference is taken problem by problem and seed by seed: all models answer the same
problems, so most of their luck is shared, and its interval narrower than the accuracies' suggest.
"""

import contextlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

TAUS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
ENTROPIES = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)  # nats; what passes is below
MARGINS = (0.95, 0.9, 0.8, 0.6, 0.4, 0.2)
WAYS = {
    "probability": [f"paper {tau:g}" for tau in TAUS],
    "entropy": [f"entropy {tau:g}" for tau in ENTROPIES],
    "margin": [f"margin {tau:g}" for tau in MARGINS],
    "ours": [f"ours {tau:g}" for tau in TAUS],
}
ONE, PAPER = "tau 1", "paper 0.95"  # the ways to decode that come up most
MARGIN = 0.02  # "as good": the interval of the difference is above minus this; "worse": below it
MORE = 1.3  # tokens per forward that are "several"
FLOOR = 0.05  # an accuracy below which nothing can be compared

# --------------------------------------------------------------------------------------- estimates


class Missing(Exception):
    """A model or a way to decode that is not in the cache."""


class Estimate(NamedTuple):
    """A share, or a difference of shares, with its 95 % interval."""

    mean: float
    low: float
    high: float

    def percent(self) -> str:
        low, high = max(self.low, 0.0), min(self.high, 1.0)
        return f"{100 * self.mean:.1f} ({100 * low:.1f} to {100 * high:.1f})"

    def points(self) -> str:
        return f"{100 * self.mean:+.1f} ({100 * self.low:+.1f} to {100 * self.high:+.1f})"

    def as_good(self) -> str:
        """Of a difference, as are the next: yes, no, or open."""
        return "yes" if self.low > -MARGIN else "no" if self.high < -MARGIN else "open"

    def worse(self, by: float = 0.0) -> str:
        return "yes" if self.high < -by else "no" if self.low >= -by else "open"


def estimate(right: np.ndarray) -> Estimate:
    """Of (seeds, problems), by the mean squares of a two-way table without replication."""
    S, N = right.shape
    mean, of_seed, of_problem = right.mean(), right.mean(1), right.mean(0)
    squares = {"problem": S * of_problem.var(ddof=1)}
    freedom = {"problem": N - 1}
    if S > 1:
        rest = right - of_seed[:, None] - of_problem + mean
        squares |= {"seed": N * of_seed.var(ddof=1), "rest": (rest**2).sum() / ((S - 1) * (N - 1))}
        freedom |= {"seed": S - 1, "rest": (S - 1) * (N - 1)}
    both = squares["problem"] + squares.get("seed", 0.0) - squares.get("rest", 0.0)
    both = max(both, *squares.values())  # no less than any of its parts
    df = both**2 / max(sum(s**2 / freedom[name] for name, s in squares.items()), 1e-30)
    half = student(max(df, 2.0)) * math.sqrt(both / (S * N))
    return Estimate(float(mean), float(mean - half), float(mean + half))


def student(df: float) -> float:
    """Two-sided 95 % quantile of Student's t (a series in 1 / df; 1 % short at df = 2)."""
    z = 1.959964
    terms = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96)
    terms += ((3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,)
    terms += ((79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,)
    return sum(term / df**power for power, term in enumerate(terms))


def verdict(*parts: str) -> str:
    """Of a claim with parts that each hold (yes), do not (no), or cannot be told (open)."""
    if not parts:
        raise Missing("all parts")
    if set(parts) == {"yes"}:
        return "**Holds at this scale.**"
    if "no" in parts:
        return "**Holds partly at this scale.**" if "yes" in parts else "**Does not hold here.**"
    if "yes" in parts:
        return "**Holds, as far as can be told at this scale.**"
    return "**Cannot be told at this scale.**"


class Results:
    """The cache: what a stage's model gave, by name, way to decode, and seed."""

    def __init__(self, cache: Path):
        self.records = {}
        for path in sorted(cache.glob("*-[0-9].json")):
            self.records[path.stem] = json.loads(path.read_text(encoding="utf-8"))

    def of(self, name: str, way: str, only: Iterable[int] = range(10)) -> dict[int, dict]:
        """By seed."""
        found = {}
        for seed in only:
            decoded = self.records.get(f"{name}-{seed}", {}).get("decoded", {})
            found |= {seed: decoded[way]} if way in decoded else {}
        if not found:
            raise Missing(f"{name}, {way}")
        return found

    def has(self, name: str, way: str) -> bool:
        try:
            return bool(self.of(name, way))
        except Missing:
            return False

    def right(self, name: str, way: str, only: Iterable[int] = range(10)) -> np.ndarray:
        """(seeds, problems), of 0 and 1."""
        texts = [decoded["right"] for decoded in self.of(name, way, only).values()]
        return np.array([list(map(int, text)) for text in texts], dtype=float)

    def accuracy(self, name: str, way: str, only: Iterable[int] = range(10)) -> Estimate:
        return estimate(self.right(name, way, only))

    def speed(self, name: str, way: str, only: Iterable[int] = range(10)) -> float:
        """Tokens per forward."""
        found = self.of(name, way, only).values()
        return sum(d["tokens"] for d in found) / sum(d["forwards"] for d in found)

    def difference(self, a: tuple[str, str], b: tuple[str, str], only=range(10)) -> Estimate:
        """Accuracy of a (name, way) less that of b, over the seeds that both have."""
        seeds = sorted(self.of(*a, only).keys() & self.of(*b, only).keys())
        return estimate(self.right(*a, seeds) - self.right(*b, seeds))

    def look_ahead(self, name: str, seed: int = 0) -> np.ndarray:
        """(steps measured, 1 + B + 1): the step, and the share guessed right 1, 2, ... ahead."""
        if "trained" not in self.records.get(f"{name}-{seed}", {}):
            raise Missing(f"{name}, training")
        ahead = self.records[f"{name}-{seed}"]["trained"]["look_ahead"]
        return np.array([[int(step), *shares] for step, shares in ahead.items()])


# ------------------------------------------------------------------------------------------ claims
#
# What goes into the text, by the names of its fields. The paper's figures are those of its
# Qwen2.5-0.5B, averages of six benchmarks.


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, [":--", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def in_short(results: Results) -> dict[str, str]:
    """The models and decoders that matter most."""
    rows = []
    for label, name, way in (
        ("AR SFT", "sft", ONE),
        ("AR SFT, as many steps on top", "ar", ONE),
        ("block diffusion", "diffusion", "diffusion"),
        ("MARS, tau 1", "mars-4", ONE),
        ("MARS, tau 0.95, the paper's decoder", "mars-4", PAPER),
        ("MARS, tau 0.95, ours", "mars-4", "ours 0.95"),
        ("MARS, `--verify --tau 0`", "mars-4", "verify"),
    ):
        if results.has(name, way):
            less = results.difference((name, way), ("sft", ONE)).points()
            less, speed = "" if name == "sft" else less, f"{results.speed(name, way):.2f}"
            rows.append([label, results.accuracy(name, way).percent(), less, speed])
    return {"short_table": table(["B = 4", "accuracy, %", "less AR SFT", "tokens/forward"], rows)}


def one_token(results: Results) -> dict[str, str]:
    """Claim 1: at tau 1 nothing is lost."""
    models = {
        "base": ("before: easy problems only", "17.2"),
        "sft": ("AR SFT", "28.7"),
        "ar": ("AR SFT, as many steps on top", "26.4"),
        "mars-4": ("MARS, B = 4", "30.4"),
        "mars-8": ("MARS, B = 8", "29.7"),
        "mars-16": ("MARS, B = 16", "29.7"),
        "diffusion": ("block diffusion, B = 4", "22.8"),
    }
    rows = []
    for name, (label, paper) in models.items():
        way = "diffusion" if name == "diffusion" else ONE
        if not results.has(name, way):
            continue
        row = [label, str(len(results.of(name, way))), results.accuracy(name, way).percent()]
        for other, without in (("sft", ("base", "sft")), ("ar", ("base", "sft", "ar"))):
            compare = name not in without and results.has(other, ONE)
            row.append(results.difference((name, way), (other, ONE)).points() if compare else "")
        rows.append([*row, paper])
    head = ["tau 1", "seeds", "accuracy, %", "less AR SFT", "less AR of as many", "paper"]
    of_sft = results.difference(("mars-4", ONE), ("sft", ONE))
    of_more = results.difference(("mars-4", ONE), ("ar", ONE))
    control = results.difference(("diffusion", "diffusion"), ("ar", ONE))
    return {
        "one_token_table": table(head, rows),
        "one_token_verdict": verdict(of_sft.as_good(), of_more.as_good()),
        "control_verdict": verdict(control.worse(MARGIN)),
        "mars_less_sft": of_sft.points(),
        "mars_less_more": of_more.points(),
        "diffusion_less_more": control.points(),
    }


WEIGHTS = {"mars": "w = 1", "no-clean": "w = 0", "over-t": "w = 0, 1/t"}


def clean_loss(results: Results) -> dict[str, str]:
    """Claim 2: the clean stream's loss keeps one-token decoding. One seed."""
    papers = {4: ("30.4", "28.4"), 8: ("29.7", "26.4"), 16: ("29.7", "22.2")}
    rows, parts, changes = [], [], []
    for B, (with_it, without) in papers.items():
        base = (f"mars-{B}", ONE)
        for arm, label in WEIGHTS.items():
            name = f"{arm}-{B}"
            if not results.has(name, PAPER):
                continue
            less = results.difference((name, ONE), base, [0])
            paper = {"w = 1": with_it, "w = 0, 1/t": without}.get(label, "")
            rows.append(
                [
                    f"B = {B}, {label}",
                    results.accuracy(name, ONE, [0]).percent(),
                    "" if label == "w = 1" else less.points(),
                    results.accuracy(name, PAPER, [0]).percent(),
                    f"{results.speed(name, PAPER, [0]):.2f}",
                    paper,
                ]
            )
            parts += [less.worse()] if label == "w = 0" else []
            if label == "w = 0, 1/t":
                change = results.difference((name, ONE), (f"no-clean-{B}", ONE), [0])
                changes.append(f"{change.points()} (B = {B})")
    head = ["", "tau 1: %", "less w = 1", "tau .95: %", "tokens/forward", "paper, tau 1"]
    found = {
        "clean_loss_table": table(head, rows),
        "over_t_changes": ", ".join(changes) or "(not in this run)",
    }
    with contextlib.suppress(Missing):
        trend, told = clean_loss_trend(results)
        found["clean_loss_trend"] = told
        parts.append(trend)
    return found | {"clean_loss_verdict": verdict(*parts)}


def clean_loss_trend(results: Results) -> tuple[str, str]:
    """Does w = 0 cost more with B = 16 than with 4? yes, no or open, and the figures."""
    if any(results.accuracy(f"no-clean-{B}", ONE, [0]).low < FLOOR for B in (4, 16)):
        return "open", "With so little left, whether larger blocks lose more cannot be told."
    lost = [
        results.right(f"no-clean-{B}", ONE, [0]) - results.right(f"mars-{B}", ONE, [0])
        for B in (4, 16)
    ]
    trend = estimate(lost[1] - lost[0])
    return trend.worse(), f"From B = 4 to B = 16 the loss changes by {trend.points()} points."


def tau_buys(results: Results) -> dict[str, str]:
    """Claim 3: several tokens per forward for no accuracy, and below that a trade."""
    ways = [ONE, *WAYS["probability"]]
    names = [name for name in ("mars-4", "mars-8", "mars-16") if results.has(name, PAPER)]
    seeds = [len(results.of(name, PAPER)) for name in names]
    head = [f"B = {n[5:]}, seeds: {s}; %, tokens/forward" for n, s in zip(names, seeds)]
    head = ["tau", *head, "paper, B = 4, GSM8K"]
    paper = ("32.8, 1.00", "31.1, 1.51", "28.8, 1.66", "26.9, 1.86", "26.0, 2.04", "21.5, 2.24")
    rows = []
    for way, theirs in zip(ways, (*paper, "18.6, 2.47")):
        cells = [
            f"{results.accuracy(name, way).percent()}, {results.speed(name, way):.2f}"
            for name in names
        ]
        rows.append([way.split()[1], *cells, theirs])
    parts, told = [], []
    for name in names:
        loss = results.difference((name, PAPER), (name, ONE))
        speeds = [results.speed(name, way) for way in ways]
        falls = [results.difference((name, b), (name, a)) for a, b in zip(ways, ways[1:])]
        trades = speeds == sorted(speeds) and all(fall.low <= 0 for fall in falls)
        parts += ["yes" if speeds[1] > MORE else "no", loss.as_good(), "yes" if trades else "no"]
        told.append(f"B = {name[5:]} {speeds[1]:.2f}, {loss.points()} points from tau 1")
    return {
        "tau_table": table(head, rows),
        "tau_verdict": verdict(*parts),
        "tau_95": "; ".join(told),
        "speed_50": f"{results.speed('mars-4', ways[-1]):.2f}",
        "loss_50": results.difference(("mars-4", ways[-1]), ("mars-4", ONE)).points(),
    }


def at_equal_speed(results: Results, ways: dict[str, list[str]], only=range(10)) -> tuple[str, str]:
    """Mean accuracy of mars-4 over the tokens per forward that all reach, linear between points.

    Returns texts: by name, the first's accuracy and how far the others are from it, and the range.
    """
    speeds = {n: [results.speed("mars-4", way, only) for way in of] for n, of in ways.items()}
    low, high = max(map(min, speeds.values())), min(map(max, speeds.values()))
    grid, means = np.linspace(low, high, 50), {}
    for name, found in speeds.items():
        order = np.argsort(found)
        # What interpolation gives each point for a weight, it gives each problem's 0 or 1 there.
        ones = [np.interp(grid, np.array(found)[order], one) for one in np.eye(len(found))]
        right = [results.right("mars-4", ways[name][i], only) for i in order]
        means[name] = sum(one.mean() * r for one, r in zip(ones, right))
    (first, base), *others = means.items()
    told = [f"{first} {estimate(base).percent()} %"]
    told += [f"{name} {estimate(mean - base).points()} points from that" for name, mean in others]
    return ", ".join(told), f"{low:.2f} to {high:.2f}"


def confidences(results: Results) -> dict[str, str]:
    """Probability, entropy or margin. One seed."""
    ways = {metric: WAYS[metric] for metric in ("probability", "entropy", "margin")}
    rows = []
    for metric, points in ways.items():
        for way in points:
            accuracy, speed = (f("mars-4", way, [0]) for f in (results.accuracy, results.speed))
            rows.append([f"{metric} {way.split()[1]}", accuracy.percent(), f"{speed:.2f}"])
    means, over = at_equal_speed(results, ways, [0])
    return {
        "confidence_table": table(["", "accuracy, %", "tokens/forward"], rows),
        "confidence_means": means,
        "confidence_range": over,
    }


def training_free(results: Results) -> dict[str, str]:
    """Jacobi decoding."""
    speed, mars = results.speed("sft", "jacobi"), results.speed("mars-4", PAPER)
    same = results.right("sft", "jacobi") == results.right("sft", ONE)
    return {
        "jacobi_verdict": verdict("yes" if speed < min(MORE, mars) else "no"),
        "jacobi_beside": f"{mars:.2f}",
        "jacobi_speed": f"{speed:.2f}",
        "jacobi_same": f"{same.mean():.1%}",
    }


def ours(results: Results) -> dict[str, str]:
    """What the paper does not have, beside what it has."""
    rows = []
    for way in ("0.95", "0.8", "0.5"):
        for label, name, kind in (
            ("the paper's decoder", "mars-4", "paper"),
            ("B + 1 candidates", "mars-4", "ours"),
            ("B + 1 candidates, `--distill`", "distill", "ours"),
            ("B + 1 candidates, `--block-phase fixed`", "fixed", "ours"),
        ):
            rows.append((f"tau {way}, {label}", name, f"{kind} {way}"))
    rows += [("`--verify --tau 0`", "mars-4", "verify")]
    for label, name in (("--distill", "distill"), ("--block-phase fixed", "fixed")):
        rows.append((f"`--verify --tau 0`, trained with `{label}`", name, "verify"))
    for B in (8, 16):
        rows.append((f"`--verify --tau 0`, B = {B}", f"mars-{B}", "verify"))
    filled = [
        [
            label,
            str(len(results.of(name, way))),
            results.accuracy(name, way).percent(),
            results.difference((name, way), ("mars-4", way), [0]).points()
            if name in ("distill", "fixed")
            else "",
            f"{results.speed(name, way):.2f}",
        ]
        for label, name, way in rows
        if results.has(name, way)
    ]
    head = ["", "seeds", "accuracy, %", "less plain, same seed", "tokens/forward"]
    same = results.right("mars-4", "verify") == results.right("mars-4", ONE)
    ways = {"the paper's decoder": WAYS["probability"], "B + 1 candidates": WAYS["ours"]}
    means, over = at_equal_speed(results, ways)
    return {
        "ours_table": table(head, filled),
        "verify_speed": f"{results.speed('mars-4', 'verify'):.2f}",
        "verify_same": f"{same.mean():.2%}",
        "candidate_means": means,
        "candidate_range": over,
    }


def horizon(results: Results) -> dict[str, str]:
    """The accuracy of each look-ahead at the end of training. One seed."""
    arms = {f"{arm}-{B}": f"B = {B}, {w}" for B in (4, 8, 16) for arm, w in WEIGHTS.items()}
    arms |= {"fixed": "B = 4, w = 1, fixed phase", "distill": "B = 4, w = 1, distilled"}
    rows = []
    for name, label in arms.items():
        with contextlib.suppress(Missing):
            rows.append([label, *(f"{share:.3f}" for share in results.look_ahead(name)[-1, 1:6])])
    head = ["", *(f"{k} ahead" for k in range(1, 6))]
    with_it, without = (results.look_ahead(name)[-1, 1] for name in ("mars-4", "no-clean-4"))
    return {
        "horizon_table": table(head, rows),
        "ahead_with": f"{with_it:.3f}",
        "ahead_without": f"{without:.3f}",
    }


def how(results: Results) -> dict[str, str]:
    """The machine, versions and time."""
    records = list(results.records.values())
    facts = {key: sorted({r[key] for r in records}) for key in ("machine", "versions", "date")}
    seconds = sum(r.get("seconds", 0) for r in records)
    decoded = [d for r in records for d in r.get("decoded", {}).values()]
    return {key: "; ".join(found) for key, found in facts.items()} | {
        "problems": f"{max(len(d['right']) for d in decoded):,}",
        "models": str(sum("trained" in r for r in records)),
        "training_hours": f"{seconds / 3600:.1f}",
        "decoding_hours": f"{sum(d['seconds'] for d in decoded) / 3600:.1f}",
    }


CLAIMS = (in_short, one_token, clean_loss, tau_buys, confidences, training_free, ours, horizon, how)


class Fields(dict):
    def __missing__(self, key: str) -> str:
        return "(not in this run)"


def write_report(results: Results, texts: dict[str, str], out: Path, readings: bool) -> None:
    """OUT/paper.md and the plots. `texts`: more fields, what the other benchmarks printed.

    `readings`: with the quoted paragraphs, which explain what the committed cache holds.
    """
    fields = Fields(texts)
    for claim in CLAIMS:
        try:
            fields |= claim(results)
        except Missing:
            continue
    template = (Path(__file__).parent / "claims.md").read_text(encoding="utf-8")
    parts = [part for part in template.split("\n\n") if readings or not part.startswith("> ")]
    out.mkdir(parents=True, exist_ok=True)
    (out / "paper.md").write_text("\n\n".join(parts).format_map(fields), encoding="utf-8")
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
}


def curve(results: Results, axes, name: str, ways: list[str], only=range(10), **look) -> None:
    """Accuracy over tokens per forward, in a band that is the interval."""
    if not results.has(name, ways[-1]):
        return
    found = [results.accuracy(name, way, only) for way in ways]
    x = [results.speed(name, way, only) for way in ways]
    mean, low, high = (100 * np.array(values) for values in zip(*found))
    axes.plot(x, mean, markersize=5, **look)
    axes.fill_between(x, low, high, color=look["color"], alpha=0.12, linewidth=0)


def point(results: Results, axes, name: str, way: str, **look) -> None:
    if results.has(name, way):
        mean, low, high = (100 * value for value in results.accuracy(name, way))
        error = [[mean - low], [high - mean]]
        axes.errorbar(results.speed(name, way), mean, error, linestyle="", capsize=3, **look)


def plot_pareto(results: Results, axes) -> None:
    sweep = [ONE, *WAYS["probability"]]
    for B, colour, marker in ((4, BLUE, "o"), (8, GREEN, "s"), (16, PINK, "^")):
        look = {"color": colour, "marker": marker, "label": f"B = {B}, the paper's decoder"}
        curve(results, axes, f"mars-{B}", sweep, **look)
    look = {"color": ORANGE, "marker": "D", "linestyle": "--"}
    curve(results, axes, "mars-4", [ONE, *WAYS["ours"]], label="B = 4, B + 1 candidates", **look)
    for B, marker in ((4, "*"), (8, "P"), (16, "X")):
        look = {"color": RED, "marker": marker, "markersize": 10, "label": f"B = {B}, --verify"}
        point(results, axes, f"mars-{B}", "verify", **look)
    point(results, axes, "sft", ONE, color=GREY, marker="o", label="AR SFT")
    point(results, axes, "ar", ONE, color=GREY, marker="s", label="AR SFT, as many steps on top")
    point(results, axes, "sft", "jacobi", color=GREY, marker="x", label="AR SFT, Jacobi")
    point(results, axes, "diffusion", "diffusion", color="black", marker="v", label="diffusion")
    axes.set(
        xlabel="tokens per forward", ylabel="accuracy, %", title="What tau buys, from 1 to 0.5"
    )
    axes.legend(fontsize=9)


def plot_clean_loss(results: Results, axes) -> None:
    arms = {"mars": ("w = 1", BLUE, "o"), "no-clean": ("w = 0", ORANGE, "s")}
    arms["over-t"] = ("w = 0, weights 1/t", RED, "^")
    for shift, (arm, (label, colour, marker)) in enumerate(arms.items(), -1):
        blocks = [B for B in (4, 8, 16) if results.has(f"{arm}-{B}", ONE)]
        if blocks:
            found = [results.accuracy(f"{arm}-{B}", ONE, [0]) for B in blocks]
            mean, low, high = (100 * np.array(values) for values in zip(*found))
            x = [(4, 8, 16).index(B) + 0.08 * shift for B in blocks]
            look = {"color": colour, "marker": marker, "linestyle": ":", "capsize": 3}
            axes.errorbar(x, mean, [mean - low, high - mean], label=label, **look)
    before = 100 * results.accuracy("sft", ONE, [0]).mean
    axes.axhline(before, color=GREY, linewidth=1, label="AR SFT, where all start")
    axes.set_xticks(range(3), ["B = 4", "B = 8", "B = 16"])
    axes.set(ylabel="accuracy at tau 1, %", title="With and without the clean loss")
    axes.legend()


def plot_confidence(results: Results, axes) -> None:
    results.of("mars-4", WAYS["margin"][0], [0])  # or there is no plot
    looks = {"probability": (BLUE, "o"), "entropy": (ORANGE, "s"), "margin": (GREEN, "^")}
    for metric, (colour, marker) in looks.items():
        look = {"color": colour, "marker": marker, "label": metric}
        curve(results, axes, "mars-4", WAYS[metric], [0], **look)
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


PLOTS = {"pareto.png": plot_pareto, "clean-loss.png": plot_clean_loss}
PLOTS |= {"confidence.png": plot_confidence, "horizon.png": plot_horizon}


def draw(results: Results, out: Path) -> None:
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
