"""The data of Grafana boards as Markdown: a row for each series, with a small picture of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["SAMPLES", "board_table"]

#: Values in a picture.
SAMPLES = 24
_BARS = "▁▂▃▄▅▆▇█"
#: The same node, worker and address for every reader.
_LONG_ID = re.compile(r"\b[0-9a-f]{12,}\b")

Matrix = Sequence[Mapping[str, Any]]


def board_table(board: Mapping[str, Any], ask: Callable[[str], Matrix]) -> list[str]:
    """Return the lines of a table of all panels of a board.

    Args:
        board: Grafana's JSON.
        ask: Returns what Prometheus answers to a range query for an expression.
    """
    lines = ["| panel | series | over the run | least | most | last |", "|---|---|---|---|---|---|"]
    for panel in board["panels"]:
        title = panel["title"]
        for target in panel["targets"]:
            for series in ask(target["expr"]):
                # Before the first step some are 0 / 0.
                told = (float(value) for _, value in series["values"])
                values = [value for value in told if math.isfinite(value)]
                if not values:
                    continue
                name = _named(target["legendFormat"], series["metric"])
                numbers = (_short(each) for each in (min(values), max(values), values[-1]))
                cells = (title, name, f"`{picture(values)}`", *numbers)
                lines.append(f"| {' | '.join(cells)} |")
                title = ""
    return lines


def _named(legend: str, labels: Mapping[str, str]) -> str:
    filled = re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), legend)
    return _LONG_ID.sub(lambda match: match[0][:6], filled)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value.is_integer() else f"{value:.3g}"


def picture(values: Sequence[float]) -> str:
    """Return a bar for each of at most ``SAMPLES`` values, from the least to the most of them."""
    least, most = min(values), max(values)
    step = max(1, -(-len(values) // SAMPLES))
    share = [(value - least) / (most - least) if most > least else 0.0 for value in values[::step]]
    return "".join(_BARS[min(int(each * len(_BARS)), len(_BARS) - 1)] for each in share)
