"""Charts as SVG: curves, staircases, marks and bands. Pure.

This module places what ``templates/chart.svg.j2`` draws. A report is one small file that works
offline; plotly alone would add 4 MB to each. Colours are CSS classes, so one drawing serves light,
dark and paper. Every number is also there as text: bands have a title and the report has tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jinja2
from markupsafe import Markup

#: ``(x, y)`` in the units of the axes.
Point: TypeAlias = tuple[float, float]

TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("orchestrator.report", "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)

#: Viewbox in SVG units; the page scales it.
WIDTH, HEIGHT = 960, 320
#: Edges of the plot in it.
LEFT, RIGHT, TOP, BOTTOM = 62, WIDTH - 14, 48, HEIGHT - 44
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
    points: Sequence[Point]
    staircase: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A stretch of the x axis with a label above it; a mark if ``end`` equals ``begin``."""

    begin: float
    end: float
    label: str
    title: str


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps data to the viewbox."""

    x_min: float
    x_max: float
    y_min: float
    y_max: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_min) / (self.x_max - self.x_min) * (RIGHT - LEFT)

    def y(self, value: float) -> float:
        return BOTTOM - (value - self.y_min) / (self.y_max - self.y_min) * (BOTTOM - TOP)


def chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    bands: Sequence[Band] = (),
    y_from_zero: bool = False,
) -> Markup:
    """Return a chart as one ``<svg>`` element, or a sentence if there is nothing to draw."""
    known = [(one, [p for p in one.points if all(map(math.isfinite, p))]) for one in series]
    points = [point for _, finite in known for point in finite]
    if not points:
        return Markup('<p class="empty">Nothing was recorded yet.</p>')
    scale = _scale(points, bands, y_from_zero=y_from_zero)
    drawn = TEMPLATES.get_template("chart.svg.j2").render(
        scale=scale,
        size=(WIDTH, HEIGHT),
        plot=(LEFT, TOP, RIGHT, BOTTOM),
        labels=(x_label, y_label),
        ticks=(ticks(scale.x_min, scale.x_max, 10), ticks(scale.y_min, scale.y_max)),
        bands=list(_placed(bands, scale)),
        curves=[(one, thin(finite)) for one, finite in known if finite],
        legend=list(_legend(series)),
    )
    return Markup(drawn)  # noqa: S704 - the template escapes


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
        x_min,
        x_max if x_max > x_min else x_min + 1.0,
        y_min - margin,
        y_max + margin if y_max > y_min else y_min + 1.0,
    )


def _placed(bands: Sequence[Band], scale: _Scale) -> Iterator[dict[str, Any]]:
    """Yield the bands in SVG units. If a label has no room, the band's title has to do."""
    is_crowded = len(bands) > LABELS_ALL_MAX
    rows_y = LABEL_ROWS_Y[:1] if is_crowded else LABEL_ROWS_Y
    gap = CHARACTER * (3 if is_crowded else 1)
    taken = dict.fromkeys(rows_y, -math.inf)
    for band in sorted(bands, key=lambda band: band.begin):
        begin = scale.x(band.begin)
        width = max(scale.x(band.end) - begin, 1.5)
        middle, size = begin + width / 2, CHARACTER * len(band.label)
        # Near the right edge a label in the middle would leave the picture.
        anchor, left = ("end", middle - size) if begin > WIDTH - 90 else ("mid", middle - size / 2)
        row_y = next((y for y in rows_y if left >= taken[y]), None)
        if row_y is not None:
            taken[row_y] = left + size + gap
        yield {"band": band, "x": begin, "width": width, "anchor": anchor, "label_y": row_y}


def _legend(series: Sequence[Series]) -> Iterator[tuple[Series, float]]:
    """Yield the curves, each with the left edge of its name, right-aligned above the plot."""
    right: float = RIGHT
    for one in reversed(series):
        # Beside the text there is the sample of the line.
        left = right - CHARACTER * len(one.label) - 40
        yield one, left
        right = left - 18
