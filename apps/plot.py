"""Draw a training run over its steps, or a table of points, as SVG.

    python -m apps.plot out                   # of out/log.jsonl: out/log.svg
    python -m apps.plot patches/qwen2.5/right.json    # patches/qwen2.5/right.svg

A table names its axes, "x" and "y", and has "rows" [label, group, x, y]; a line joins a group.
"""

from pathlib import Path

from plumbing.arguments import Parser
from plumbing.errors import failure_as, require, run_main
from plumbing.files import read_json
from plumbing.jsonl import JsonlFile


def tables_of(log: Path) -> list[dict]:
    """What a run's log.jsonl has: losses, and how often the model was right ahead."""
    losses = []
    ahead = []
    for row in JsonlFile(log):
        losses += [["", name, row["step"], row[name]] for name in ("noisy", "clean")]
        for i, share in enumerate(row.get("look_ahead", []), start=1):
            ahead.append(["", f"right {i} ahead", row["step"], share])
    return [{"x": "step", "y": "loss", "rows": losses}, {"x": "step", "y": "share", "rows": ahead}]


def draw(table: dict, axes) -> None:
    """axes: matplotlib's."""
    groups = {}
    for label, group, x, y in table["rows"]:
        groups.setdefault(group, []).append((label, x, y))
    for i, (group, points) in enumerate(groups.items()):
        xs = [x for _, x, _ in points]
        ys = [y for _, _, y in points]
        [line] = axes.plot(xs, ys, label=group, marker=".")
        offset = (4, 4) if i % 2 == 0 else (-22, -12)  # labels of lines that are near
        for label, x, y in points:
            style = {"textcoords": "offset points", "color": line.get_color()}
            axes.annotate(label, (x, y), xytext=offset, **style)
    axes.set(xlabel=table["x"], ylabel=table["y"], ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()


def main() -> None:
    parser = Parser("Draw a training run, or a table of points.")
    parser.add_argument("source", type=Path, help="the directory of a run, or a JSON file")
    path = parser.parse_args().source
    require("matplotlib", "-r apps/requirements.txt")
    from matplotlib import pyplot

    is_run = path.suffix != ".json"
    if is_run:
        path = path / "log.jsonl"
    picture = path.with_suffix(".svg")
    with failure_as(f"{path}: not the log of a training, nor a table"):
        tables = tables_of(path) if is_run else [read_json(path)]
        tables = [table for table in tables if table["rows"]]
        pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "mars"})
        figure, axes = pyplot.subplots(len(tables), figsize=(8, 4 * len(tables)), squeeze=False)
        for table, each in zip(tables, axes[:, 0]):
            draw(table, each)
        figure.savefig(picture, bbox_inches="tight", metadata={"Date": None})
    print(picture)


if __name__ == "__main__":
    run_main(main)
