"""Draw right.svg, README.md's picture: right answers over tokens per forward.

    python qwen2.5/right.py    # writes right.svg next to this file

The figures are those of README.md and, for the first patch, of experiments/results: HumanEval's
are in cpu.md, GSM8K's in gpu.md.
"""

from pathlib import Path

GREY, BLUE, ORANGE = "#7d828b", "#2f6fde", "#d2690a"
LEGEND = {
    GREY: "the first patch (320 answers)",
    BLUE: "the patch (933 answers)",
    ORANGE: "the patch, with --guard",
}
# Where the label of a point is: x and y from the point, and which end of the label is there.
SIDES = {"up": (5, -5, "start"), "right": (8, 4, "start"), "down": (-5, 13, "end")}

# Of each point: tokens per forward, right answers in %, the side of its label.
HUMANEVAL = {
    "tau 1": {GREY: (1.00, 52.4, "down"), BLUE: (1.00, 53.7, "up")},
    ".99": {GREY: (1.18, 42.7, "down"), BLUE: (1.24, 52.4, "up"), ORANGE: (1.23, 52.4, "down")},
    ".95": {GREY: (1.36, 24.4, "down"), BLUE: (1.43, 36.6, "up"), ORANGE: (1.41, 47.6, "down")},
    ".9": {GREY: (1.48, 18.3, "down"), BLUE: (1.57, 31.7, "up"), ORANGE: (1.52, 40.2, "up")},
    ".8": {GREY: (1.62, 4.9, "down"), BLUE: (1.72, 19.5, "up"), ORANGE: (1.68, 31.7, "up")},
    "lossless": {GREY: (1.69, 52.4, "down"), BLUE: (1.96, 54.9, "down")},
}
GSM8K = {
    "tau 1": {GREY: (1.00, 21.2, "up"), BLUE: (1.00, 20.0, "down")},
    ".99": {GREY: (1.14, 21.0, "up"), BLUE: (1.11, 18.0, "down")},
    ".95": {GREY: (1.27, 18.0, "right"), BLUE: (1.25, 16.2, "down")},
    ".9": {GREY: (1.37, 13.8, "down"), BLUE: (1.35, 17.0, "right")},
    ".8": {GREY: (1.50, 10.8, "up"), BLUE: (1.49, 10.0, "down")},
    "lossless": {GREY: (1.97, 21.8, "up"), BLUE: (1.81, 19.5, "up")},
}
WIDTH, HEIGHT, BOTTOM = 270, 250, 284  # of a panel, and where its axis is


def text(x: float, y: float, words: str, anchor: str = "start", colour: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>\n'


def panel(left: int, title: str, figures: dict, original: float, step: int, most: int) -> str:
    """The SVG of one benchmark. original: right answers of the original, in %, a dashed line."""

    def place(tokens: float, right: float) -> tuple[float, float]:
        return left + WIDTH * (tokens - 0.85) / 1.25, BOTTOM - HEIGHT * right / most

    svg = text(left, 18, f'<tspan font-size="13">{title}</tspan>')
    for right in range(0, most + 1, step):
        _, y = place(1, right)
        svg += f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#e3e5e8"/>\n'
        svg += text(left - 6, y + 4, str(right), "end", "#555")
    for tokens in (1.0, 1.2, 1.4, 1.6, 1.8, 2.0):
        svg += text(place(tokens, 0)[0], BOTTOM + 16, str(tokens), "middle", "#555")
    svg += text(left + WIDTH / 2, BOTTOM + 32, "tokens per forward", "middle")
    x, y = place(1.6, original)
    svg += f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#222" stroke-dasharray="4 4"/>\n'
    svg += text(x, y + 12, "the original", "middle")
    for colour in LEGEND:
        line = ""
        for label, points in figures.items():
            if colour not in points:
                continue
            tokens, right, side = points[colour]
            x, y = place(tokens, right)
            if label == "lossless":
                svg += f'<path d="M{x - 4:.1f} {y - 4:.1f}h8v8h-8z" fill="{colour}"/>\n'
            else:
                svg += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>\n'
                line += f"{x:.1f},{y:.1f} "
            right_by, down_by, anchor = SIDES[side]
            svg += text(x + right_by, y + down_by, label, anchor, colour)
        svg += f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>\n'
    return svg


def main() -> None:
    svg = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 340" '
    svg += 'font-family="sans-serif" font-size="11">\n'
    svg += '<rect width="680" height="340" fill="#fff"/>\n'
    svg += panel(44, "HumanEval: right answers, %", HUMANEVAL, original=57.3, step=10, most=60)
    title = "GSM8K: right answers, % (grey: on a GPU)"
    svg += panel(374, title, GSM8K, original=18.5, step=5, most=25)
    for x, (colour, words) in zip((50, 250, 420), LEGEND.items()):
        svg += f'<circle cx="{x}" cy="330" r="4" fill="{colour}"/>\n' + text(x + 8, 334, words)
    Path(__file__).with_name("right.svg").write_text(svg + "</svg>\n", encoding="utf-8")


if __name__ == "__main__":
    main()
