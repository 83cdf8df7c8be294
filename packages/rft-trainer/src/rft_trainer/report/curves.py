"""Curves of metrics as SVG: one small picture each, readable without a program."""

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 78, 16, 40, 36


def curve_svg(title: str, steps: Sequence[int], values: Sequence[float]) -> str:
    """A line through (step, value); values that are not finite leave a gap."""
    points = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="26" font-family="sans-serif" font-size="20" fill="#1c2430">{escape(title)}</text>',
    ]
    if points:
        parts += _axes(points) + _lines(points, steps, values)
    else:
        parts.append(_label(WIDTH / 2, HEIGHT / 2, "no finite value", "middle"))
    return "".join([*parts, "</svg>"])


def _span(numbers: Sequence[float]) -> tuple[float, float]:
    low, high = min(numbers), max(numbers)
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def _axes(points: Sequence[tuple[int, float]]) -> list[str]:
    (first, last), (low, high) = _span([s for s, _ in points]), _span([v for _, v in points])
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e3e6eb"/>')
        parts.append(_label(LEFT - 6, y + 6, f"{low + share * (high - low):.3g}", "end"))
    if points[0][0] == points[-1][0]:
        return [*parts, _label(LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 12, f"step {points[0][0]}", "middle")]
    for step, x, anchor in ((first, LEFT, "start"), (last, WIDTH - RIGHT, "end")):
        parts.append(_label(x, HEIGHT - 12, f"step {step:g}", anchor))
    return parts


def _lines(points: Sequence[tuple[int, float]], steps: Sequence[int], values: Sequence[float]) -> list[str]:
    (first, last), (low, high) = _span([s for s, _ in points]), _span([v for _, v in points])

    def place(step: int, value: float) -> str:
        x = LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return f"{x:.1f} {y:.1f}"

    path, drawing = "", False
    for step, value in zip(steps, values, strict=True):
        if not math.isfinite(value):
            drawing = False
            continue
        path += ("L" if drawing else "M") + place(step, value)
        drawing = True
    dots = "".join(
        f'<circle cx="{at.split()[0]}" cy="{at.split()[1]}" r="2.5"/>' for at in (place(*point) for point in points)
    )
    return [
        f'<path d="{path}" fill="none" stroke="#1f5fbf" stroke-width="2"/>',
        f'<g fill="#1f5fbf">{dots if len(points) <= 100 else ""}</g>',
    ]


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-family="sans-serif" font-size="17" '
        f'fill="#5d6878">{escape(text)}</text>'
    )
