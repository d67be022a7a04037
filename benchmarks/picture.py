"""A chart with two logarithmic axes as SVG text, readable on light and on dark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 780, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 210, 44, 52
COLOURS = 7
"""Colours of series, 0 to 6; the one after them is for bounds."""
STYLE = """
  :root { --ground: #ffffff; --text: #24292f; --faint: #57606a; --grid: #d8dee4;
          --c0: #0969da; --c1: #bc4c00; --c2: #1a7f37; --c3: #8250df; --c4: #bf3989; --c5: #0e8a9c; --c6: #8a6d00;
          --c7: #6e7781; }
  @media (prefers-color-scheme: dark) {
    :root { --ground: #0d1117; --text: #e6edf3; --faint: #9198a1; --grid: #30363d;
            --c0: #4493f8; --c1: #f0883e; --c2: #3fb950; --c3: #ab7df8; --c4: #db61a2; --c5: #39c5cf; --c6: #d29922;
            --c7: #9198a1; } }
  text { font: 12px system-ui, sans-serif; fill: var(--text); } .title { font-size: 14px; font-weight: 600; }
  .tick { fill: var(--faint); } .grid { stroke: var(--grid); } .line { fill: none; stroke-width: 2; }
"""


@dataclass(frozen=True)
class Series:
    """Points that belong together. colour: 0 to ``COLOURS``. dashed: a bound. joined: a line through the points."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    dashed: bool = False
    joined: bool = True


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis over ``low`` to ``high``, from pixel ``start`` to ``end``; ``unit`` scales the labels."""

    title: str
    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> Iterator[float]:
        """Powers of ten, of a thousand where there are many."""
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        step = 1 if last - first < 9 else 3
        return (10.0**power for power in range(first, last + 1, step))


def axis(title: str, values: Sequence[float], start: float, end: float) -> Axis:
    """From the power of ten below the least value to the one above the greatest."""
    low, high = (
        10.0 ** round_(math.log10(value)) for round_, value in ((math.floor, min(values)), (math.ceil, max(values)))
    )
    return Axis(title, low, high if high > low else low * 10, start, end)


def short(value: float) -> str:
    """1000 as 1 k, and so on."""
    for size, letter in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def chart(title: str, x_title: str, y_title: str, series: Sequence[Series]) -> str:
    """The picture; ``ValueError`` without points."""
    points = [point for one in series for point in one.points]
    if not points:
        raise ValueError("series: got no points, need at least one")
    x = axis(x_title, [point[0] for point in points], LEFT, WIDTH - RIGHT)
    y = axis(y_title, [point[1] for point in points], HEIGHT - BOTTOM, TOP)
    parts = [*_frame(title, x, y), *(part for one in series for part in _drawn(one, x, y)), *_legend(series)]
    body = "\n".join(f"  {part}" for part in parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">\n  <style>{STYLE}  </style>\n'
        f'  <rect width="{WIDTH}" height="{HEIGHT}" fill="var(--ground)"/>\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "", rest: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}"{rest}>{escape(text)}</text>'


def _frame(title: str, x: Axis, y: Axis) -> Iterator[str]:
    yield _text(LEFT, 24, title, kind="title")
    for value in x.ticks():
        at = x.at(value)
        yield f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" class="grid"/>'
        yield _text(at, HEIGHT - BOTTOM + 18, short(value), "middle", "tick")
    for value in y.ticks():
        at = y.at(value)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>'
        yield _text(LEFT - 8, at + 4, short(value), "end", "tick")
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x.title, "middle")
    middle = (TOP + HEIGHT - BOTTOM) / 2
    yield _text(18, middle, y.title, "middle", rest=f' transform="rotate(-90 18 {middle:.0f})"')


def _drawn(one: Series, x: Axis, y: Axis) -> Iterator[str]:
    places = [(x.at(a), y.at(b), a, b) for a, b in sorted(one.points)]
    colour = f"var(--c{one.colour})"
    if one.joined:
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in places)
        dash = ' stroke-dasharray="5 4"' if one.dashed else ""
        yield f'<polyline points="{path}" class="line" style="stroke: {colour}"{dash}/>'
    if not one.dashed:
        for px, py, a, b in places:
            said = escape(f"{one.name}: {short(a)}, {short(float(f'{b:.3g}'))}")
            yield f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" style="fill: {colour}"><title>{said}</title></circle>'


def _legend(series: Sequence[Series]) -> Iterator[str]:
    left = WIDTH - RIGHT + 16
    for index, one in enumerate(series):
        height = TOP + 10 + 20 * index
        dash = ' stroke-dasharray="5 4"' if one.dashed else ""
        style = f'style="stroke: var(--c{one.colour})"'
        yield f'<line x1="{left}" x2="{left + 22}" y1="{height}" y2="{height}" class="line" {style}{dash}/>'
        yield _text(left + 28, height + 4, one.name)
