"""Turn lines of metrics into the points of one curve. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Any, Final

from orchestrator.report import json_object
from workers.protocol import METRICS, VALIDATION, VALUES

#: Keys of a step's line, and their names for people.
_OF_STEP: Final = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "tokens": "train/tokens",
    "step_s": "train/step_s",
    "device_bytes": "everstep/device_bytes",
    "num_workers": "everstep/num_workers",
    "attempt": "everstep/attempt",
}


@dataclass(frozen=True, slots=True)
class Point:
    """The values of one step."""

    step: int  #: Optimizer step, from 1; 0 for values from before the first.
    wall_time: float  #: When it was completed, in seconds since 1970.
    values: Mapping[str, float]  #: By name; nan if a value was not a number.


@dataclass(slots=True)
class Curve:
    """A curve with one point per step, of the last time it was trained before the next step.

    ``take`` returns each step once. If a returned step is redone later, it has the same samples, so
    the first values stay.
    """

    #: The attempt of the newest line. Older attempts are fenced: their lines of steps from its
    #: first one on do not count.
    attempt: int = 0
    given: int = -1  #: The last step that was returned; -1 before any.
    pending: dict[int, Point] = field(default_factory=dict)  #: The points of later steps.
    newest: int = -1  #: The newest step; -1 before any.
    begun: dict[int, int] = field(default_factory=dict)  #: The first step of each attempt.

    def add(self, path: str, lines: Iterable[str]) -> None:
        """Add whole lines of a file of metrics; ``FILES`` has the order of the files."""
        for line in lines:
            document = json_object(line)
            if document is None or not {"step", "attempt"} <= document.keys():
                continue
            attempt, step = int(document["attempt"]), int(document["step"])
            # Files are read one after another, so older attempts' lines of another file may come
            # later.
            if any(first <= step for later, first in self.begun.items() if later > attempt) or (
                path == METRICS and attempt < self.attempt
            ):
                continue
            first = step if path == METRICS else step + 1
            self.begun[attempt] = min(self.begun.get(attempt, first), first)
            if attempt > self.attempt:
                # The attempt starts from a committed step, so later steps are lost.
                self.attempt = attempt
                self.newest = min(self.newest, step)
                self.pending = {at: one for at, one in self.pending.items() if at < first}
            if path == METRICS:
                self.newest = max(self.newest, step)
            if step > self.given:
                known = self.pending.get(step, Point(step, 0.0, {}))
                wall_time = float(document.get("wall_time") or known.wall_time)
                values = {**known.values, **FILES[path](document)}
                self.pending[step] = Point(step, wall_time, values)

    def take(self, *, is_final: bool = False) -> list[Point]:
        """Return the points of steps that are complete, in order.

        The newest step is complete only when the next one, or the end of the run, has come.
        """
        steps = sorted(step for step in self.pending if is_final or step < self.newest)
        if steps:
            self.given = steps[-1]
        return [self.pending.pop(step) for step in steps]


def _number(value: Any) -> float:
    return nan if value is None else float(value)


#: The files of metrics, and how to read a line of each. They are read in this order. All lines of a
#: step are written before the next step's line of ``METRICS``.
FILES: Final[dict[str, Callable[[Mapping[str, Any]], dict[str, float]]]] = {
    METRICS: lambda line: {
        to: _number(line[name]) for name, to in _OF_STEP.items() if name in line
    },
    VALIDATION: lambda line: {"validation/loss": _number(line.get("loss"))},
    VALUES: lambda line: {name: _number(value) for name, value in line.get("values", {}).items()},
}
