"""Draw the losses in a run's log.jsonl, or a JSON table of points, as an SVG next to that file."""

from pathlib import Path

from plumbing.arguments import Parser
from plumbing.errors import failure_as, require, run_main
from plumbing.files import read_json
from plumbing.jsonl import read_rows


def main() -> None:
    parser = Parser('A table has axes, "x" and "y", and "rows", each [label, curve, x, y].')
    parser.add_argument("path", type=Path, help="the directory of a run, or a table in JSON")
    path = parser.parse_args().path
    require("matplotlib", "-r apps/requirements.txt")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "mars"})
    figure, axes = pyplot.subplots(figsize=(8, 4))
    with failure_as(f"{path}: not the directory of a run, nor a table"):
        if path.suffix == ".json":
            table = read_json(path)
        else:
            path = path / "log.jsonl"
            table = {"x": "step", "y": "loss", "rows": []}
            for step in read_rows(path).values():
                for name in ("noisy", "drift" if "drift" in step else "clean"):
                    table["rows"].append(["", name, step["step"], step[name]])
        for i, curve in enumerate(dict.fromkeys(row[1] for row in table["rows"])):
            points = [row for row in table["rows"] if row[1] == curve]
            axes.plot([row[2] for row in points], [row[3] for row in points], ".-", label=curve)
            for label, _, x, y in points:
                axes.text(x, y, f" {label} ", color=f"C{i}", va=("bottom", "top")[i % 2])
        axes.set(xlabel=table["x"], ylabel=table["y"], ylim=(0, None))
        axes.legend()
        figure.savefig(path.with_suffix(".svg"), bbox_inches="tight", metadata={"Date": None})
    print(path.with_suffix(".svg"))


if __name__ == "__main__":
    run_main(main)
