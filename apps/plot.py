"""A picture of a training run over its steps: `python -m apps.plot out` writes out/log.svg."""

from pathlib import Path

from plumbing.arguments import Parser
from plumbing.errors import UserError, run_main
from plumbing.jsonl import JsonlFile

WIDTH, HEIGHT, MARGIN = 640, 240, 40  # of one of the two diagrams
COLOURS = ("#1a63c4", "#c4501a", "#2a8a4a", "#8a2a8a", "#777777")


def diagram(curves: dict[str, list[tuple[int, float]]], top: int) -> str:
    """The SVG of each curve of (step, value), with its name; values from 0 up."""
    last_step = max(step for points in curves.values() for step, _ in points)
    most = max(value for points in curves.values() for _, value in points) or 1
    box = f'x="{MARGIN}" y="{top}" width="{WIDTH}" height="{HEIGHT}"'
    svg = f'<rect {box} fill="none" stroke="#999"/><text x="0" y="{top + 12}">{most:.3g}</text>\n'
    for i, (name, points) in enumerate(curves.items()):
        colour = COLOURS[i % len(COLOURS)]
        corners = []
        for step, value in points:
            x = MARGIN + WIDTH * step / last_step
            corners.append(f"{x:.1f},{top + HEIGHT * (1 - value / most):.1f}")
        corners.append(corners[-1])  # a single point, too, is then a line, with round ends
        line = f'points="{" ".join(corners)}" fill="none" stroke-width="3" stroke-linecap="round"'
        svg += f'<polyline {line} stroke="{colour}"/>\n'
        x, y = MARGIN + WIDTH + 6, top + 14 + 18 * i
        svg += f'<text x="{x}" y="{y}" fill="{colour}">{name}</text>\n'
    return svg


def main() -> None:
    parser = Parser("A picture of a training run.")
    parser.add_argument("out", metavar="OUT", type=Path, help="the directory of the run")
    out = parser.parse_args().out
    rows = list(JsonlFile(out / "log.jsonl"))
    if not all({"step", "noisy", "clean"} <= row.keys() for row in rows):
        raise UserError(f"{out}/log.jsonl: not the log of a training")
    losses = {name: [(row["step"], row[name]) for row in rows] for name in ("noisy", "clean")}
    ahead = {}
    for row in rows:
        for i, share in enumerate(row.get("look_ahead", []), start=1):
            ahead.setdefault(f"right {i} ahead", []).append((row["step"], share))
    svg = diagram(losses, top=20) + (diagram(ahead, top=HEIGHT + 60) if ahead else "")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 170} {2 * HEIGHT + 80}">'
    (out / "log.svg").write_text(f"{head}\n{svg}</svg>\n", encoding="utf-8")
    for name, points in losses.items():
        most = max(value for _, value in points) or 1
        picked = [points[i * len(points) // 60][1] for i in range(60)]
        bars = "".join(" ▁▂▃▄▅▆▇█"[round(8 * value / most)] for value in picked)
        print(f"{name} {points[0][1]:.3f} {bars} {points[-1][1]:.3f}")
    print(f"{out}/log.svg")


if __name__ == "__main__":
    run_main(main)
