"""Tables from the records in experiments/results/cache, for experiments/results/paper.md.

A figure is the mean over seeds and problems. Its 95 % interval is a bootstrap over problems: it is
for other problems and the same seeds. All models answer the same problems, and a difference is
taken problem by problem: its interval is narrower than those of the two figures suggest.
"""

import json
from pathlib import Path

import numpy as np

from bench.common import mean_and_interval, table
from plumbing.errors import UserError

# Ways to decode: a kind and its threshold. Their options are in __main__.py.
ONE = "tau 1"
PAPER = [f"paper {tau}" for tau in (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)]
OURS = "ours 0.95"
ENTROPY = [f"entropy {nats}" for nats in (0.05, 0.2, 0.7)]
MARGIN = [f"margin {margin}" for margin in (0.95, 0.8, 0.4)]

Case = tuple[str, str]  # an arm, and a way to decode its models
Records = dict[str, list[dict]]  # of each arm, one for each seed


def accuracy(records: Records, case: Case) -> np.ndarray:
    """Of each problem, how many percent of the seeds answered it right."""
    arm, way = case
    by_seed = [list(record["decoded"][way]["right"]) for record in records[arm]]
    return 100 * np.array(by_seed, dtype=float).mean(axis=0)


def nats(records: Records, case: Case) -> np.ndarray:
    """Of each reference answer, one token ahead, relative to a mean answer's tokens."""
    by_seed = []
    for record in records[case[0]]:
        values = np.array(record["nats"].split(), dtype=float)
        by_seed.append(values * len(values) / record["tokens"])
    return np.mean(by_seed, axis=0)


def tokens_per_forward(records: Records, case: Case) -> float:
    arm, way = case
    decoded = [record["decoded"][way] for record in records[arm]]
    return sum(one["tokens"] for one in decoded) / sum(one["forwards"] for one in decoded)


def with_interval(by_problem: np.ndarray, digits: int, sign: str = "") -> str:
    """mean (low to high)"""
    figures = [round(figure, digits) + 0.0 for figure in mean_and_interval(by_problem)]  # no -0.0
    mean, low, high = (format(figure, f"{sign}.{digits}f") for figure in figures)
    return f"{mean} ({low} to {high})"


# ------------------------------------------------------------------------- the tables of paper.md


UNITS = {accuracy: ("accuracy, %", 1), nats: ("nats per token", 4)}  # with digits


def show(records: Records, cases: dict[str, Case], bases=(), measure=accuracy) -> str:
    """A table with a row for each case; differences are from the bases, or from the first case."""
    unit, digits = UNITS[measure]
    bases = bases or list(cases)[:1]
    values = {label: measure(records, case) for label, case in cases.items()}
    rows = []
    for label, case in cases.items():
        row = [label, with_interval(values[label], digits)]
        for base in bases:
            difference = with_interval(values[label] - values[base], digits, "+")
            row.append("" if label == base else difference)
        row.append(f"{tokens_per_forward(records, case):.2f}")
        rows.append(row)
    return table(["", unit, *(f"from {base}" for base in bases), "tokens/forward"], rows)


TRAINED = {
    "AR SFT": ("sft", ONE),
    "more AR": ("ar", ONE),
    "more AR, half the rate": ("ar-slow", ONE),
    "MARS, B = 4": ("mars-4", ONE),
    "MARS, B = 4, half the rate": ("mars-4-slow", ONE),
    "MARS, B = 4, twice the steps": ("mars-4-long", ONE),
    "MARS, B = 8": ("mars-8", ONE),
    "MARS, B = 16": ("mars-16", ONE),
}
UNTRAINED = {
    "AR SFT": ("sft", ONE),
    "AR SFT, Jacobi decoding": ("sft", "jacobi"),
    "MARS, B = 4, tau 0.95": ("mars-4", PAPER[0]),
}
ADDED = {
    "B + 1 candidates": ("mars-4", OURS),
    "the paper's B candidates": ("mars-4", PAPER[0]),
    "tau 1": ("mars-4", ONE),
    "lossless": ("mars-4", "lossless"),
    "lossless, B = 8": ("mars-8", "lossless"),
    "lossless, B = 16": ("mars-16", "lossless"),
}


def by_tau(size: int, ways: list[str]) -> dict[str, Case]:
    return {f"B = {size}, {way}": (f"mars-{size}", way) for way in [ONE, *ways]}


def read_records(folder: Path, *commits: str) -> Records:
    """The records in FOLDER/cache; UserError if they are of several commits, or of others."""
    records: Records = {}
    found = set(commits)
    for path in sorted(folder.glob("cache/*.json")):
        arm = path.stem.rpartition("-")[0]  # before the seed
        record = json.loads(path.read_text(encoding="utf-8"))
        records.setdefault(arm, []).append(record)
        found.add(record["commit"])
    if len(found) > 1:
        commits = " and ".join(sorted(found))
        raise UserError(f"records of {commits}: delete {folder}/cache, or check out their commit")
    return records


def write_report(folder: Path) -> None:
    """Fill in the tables of FOLDER/paper.md from the records; each stands after its name."""
    records = read_records(folder)
    first = records["sft"][0]
    num_models = sum(map(len, records.values()))
    fields = {
        "made": f"{num_models} models of commit {first['commit']}; {first['made']}",
        "one_token": show(records, TRAINED, ["AR SFT", "MARS, B = 4"]),
        "one_token_nats": show(records, TRAINED, measure=nats),
        "tau_4": show(records, by_tau(4, PAPER)),
        "tau_8": show(records, by_tau(8, PAPER[::2])),
        "tau_16": show(records, by_tau(16, PAPER[::2])),
        "confidences": show(records, by_tau(4, ENTROPY + MARGIN)),
        "untrained": show(records, UNTRAINED),
        "added": show(records, ADDED),
    }
    page = (folder / "paper.md").read_text(encoding="utf-8")
    for name, text in fields.items():
        before, mark, after = page.partition(f"<!-- {name} -->\n\n")
        _, _, after = after.partition("\n\n")  # without the old table
        page = f"{before}{mark}{text}\n\n{after}"
    (folder / "paper.md").write_text(page, encoding="utf-8")
