"""Charts as SVG text: curves, staircases, marks and bands. Pure.

Drawn here rather than by a library, because a report is one small file that works offline; plotly
alone would add 4 MB to each. Colours are CSS classes, so one drawing serves light, dark and paper.
Every number is also there as text: bands carry a ``<title>`` and the report has tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias

#: ``(x, y)`` in the units of the axes.
Point: TypeAlias = tuple[float, float]

#: Viewbox in SVG units; the page scales it.
WIDTH, HEIGHT = 960.0, 320.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 14.0, 48.0, 44.0
#: Baseline of the line above the plot that names the y axis and the curves.
LEGEND_Y = 16.0
#: Baselines of the labels of bands, above the plot; the second takes those that overlap.
LABEL_ROWS_Y = (TOP - 6, TOP - 19)
#: With more bands than this only some are labelled, in one row and well apart.
LABELS_ALL_MAX = 16
#: About the width of a character at 12 px.
CHARACTER = 6.5
#: More than about two points per pixel column cannot be seen.
POINTS_MAX = 1600
NUM_TICKS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve: its name in the legend, its CSS class, its points by rising x."""

    label: str
    css: str
    points: tuple[Point, ...]
    staircase: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A stretch of the x axis with a label above it; a mark if ``end`` equals ``begin``."""

    begin: float
    end: float
    label: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """Maps data to the viewbox."""

    x_min: float
    x_max: float
    y_min: float
    y_max: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_min) / (self.x_max - self.x_min) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_min) / (self.y_max - self.y_min)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    bands: Sequence[Band] = (),
    y_from_zero: bool = False,
) -> str:
    """Return a chart as one ``<svg>`` element, or a sentence if there is nothing to draw."""
    finite = [point for one in series for point in one.points if all(map(math.isfinite, point))]
    if not finite:
        return '<p class="empty">Nothing was recorded yet.</p>'
    scale = _scale(finite, bands, y_from_zero=y_from_zero)
    label = f"{escape(y_label)} over {escape(x_label)}"
    parts = [
        f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" aria-label="{label}">',
        *_bands(bands, scale),
        *_axes(scale, x_label, y_label),
        *(_curve(one, scale) for one in series),
        _legend(series),
        "</svg>",
    ]
    return "\n".join(parts)


def thin(points: Sequence[Point], count_max: int = POINTS_MAX) -> list[Point]:
    """Return at most about ``count_max`` points; each stretch keeps its lowest and its highest.

    A stride would hide a spike of one step, which readers of a loss curve look for.
    """
    if len(points) <= count_max:
        return list(points)
    size = math.ceil(2 * len(points) / count_max)
    kept: list[Point] = []
    for begin in range(0, len(points), size):
        bucket = points[begin : begin + size]
        ends = {min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])}
        kept.extend(sorted(ends))
    return kept


def ticks(low: float, high: float, count: int = NUM_TICKS) -> list[float]:
    """Return about ``count`` round numbers within ``low`` to ``high``, both included if round."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _scale(points: Sequence[Point], bands: Sequence[Band], *, y_from_zero: bool) -> _Scale:
    xs = [x for x, _ in points] + [edge for band in bands for edge in (band.begin, band.end)]
    ys = [y for _, y in points] + ([0.0] if y_from_zero else [])
    x_min, x_max, y_min, y_max = min(xs), max(xs), min(ys), max(ys)
    margin = 0.0 if y_from_zero else 0.05 * (y_max - y_min)
    return _Scale(
        x_min=x_min,
        x_max=x_max if x_max > x_min else x_min + 1.0,
        y_min=y_min - margin,
        y_max=y_max + margin if y_max > y_min else y_min + 1.0,
    )


def _axes(scale: _Scale, x_label: str, y_label: str) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>']
    for value in ticks(scale.y_min, scale.y_max):
        y = scale.y(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 8}" y="{y + 4:.1f}">{value:g}</text>')
    for value in ticks(scale.x_min, scale.x_max, 10):
        x = scale.x(value)
        parts.append(f'<text class="tick mid" x="{x:.1f}" y="{bottom + 17}">{value:g}</text>')
    middle = (LEFT + right) / 2
    parts.append(
        f'<text class="name mid" x="{middle}" y="{HEIGHT - 8}">{escape(x_label)}</text>'
        f'<text class="name" x="8" y="{LEGEND_Y}">{escape(y_label)}</text>'
    )
    return parts


def _bands(bands: Sequence[Band], scale: _Scale) -> list[str]:
    """Return the bands. If a label has no room, the band's title has to do."""
    is_crowded = len(bands) > LABELS_ALL_MAX
    rows_y = LABEL_ROWS_Y[:1] if is_crowded else LABEL_ROWS_Y
    gap = CHARACTER * (3 if is_crowded else 1)
    taken = [-math.inf] * len(rows_y)
    parts = []
    for band in sorted(bands, key=lambda band: band.begin):
        begin, end = scale.x(band.begin), scale.x(band.end)
        width = max(end - begin, 1.5)
        middle, size = begin + width / 2, CHARACTER * len(band.label)
        # Near the right edge a label in the middle would leave the picture.
        anchor, left = ("end", middle - size) if begin > WIDTH - 90 else ("mid", middle - size / 2)
        label = ""
        for row, y in enumerate(rows_y):
            if left >= taken[row]:
                taken[row] = left + size + gap
                text = escape(band.label)
                label = f'<text class="{anchor}" x="{middle:.1f}" y="{y}">{text}</text>'
                break
        parts.append(
            f'<g class="band"><title>{escape(band.title)}</title><rect x="{begin:.1f}" y="{TOP}" '
            f'width="{width:.1f}" height="{HEIGHT - TOP - BOTTOM}"/>{label}</g>'
        )
    return parts


def _curve(series: Series, scale: _Scale) -> str:
    points = thin([p for p in series.points if all(map(math.isfinite, p))])
    if not points:
        return ""
    pieces = [f"M{scale.x(points[0][0]):.1f} {scale.y(points[0][1]):.1f}"]
    for x, y in points[1:]:
        if series.staircase:
            pieces.append(f"H{scale.x(x):.1f}V{scale.y(y):.1f}")
        else:
            pieces.append(f"L{scale.x(x):.1f} {scale.y(y):.1f}")
    return (
        f'<path class="curve {series.css}" d="{"".join(pieces)}">'
        f"<title>{escape(series.label)}</title></path>"
    )


def _legend(series: Sequence[Series]) -> str:
    """Return the names of the curves, right-aligned above the plot."""
    parts, right = [], WIDTH - RIGHT
    for one in reversed(series):
        # Beside the text there is the sample of the line.
        left = right - CHARACTER * len(one.label) - 40
        parts.append(
            f'<path class="curve {one.css}" d="M{left:.0f} {LEGEND_Y - 4}h26"/>'
            f'<text class="legend" x="{left + 33:.0f}" y="{LEGEND_Y}">{escape(one.label)}</text>'
        )
        right = left - 18
    return "".join(parts)
