"""Where the time of a run goes: measured parts that add up to the whole.

Pure. The time since the previous report of a step belongs to the steps of the next report. Each
second is counted once, so the parts cannot exceed the whole.
"""

from dataclasses import dataclass, field
from typing import Final

#: - steps: steps that count, and the step under way;
#: - saving: time that saves take from training on rank 0, and the save that ends an attempt;
#: - start: from a start by a person to the first training;
#: - recovery: from the last step before a fault or a change until training continues;
#: - lost: steps that had to be redone;
#: - idle: from the end of the run, or its last sign of life, to the resume by a person.
PARTS: Final = ("steps", "saving", "start", "recovery", "lost", "idle")
#: How many stretches of steps to keep in case steps are redone. They cover at least three hours; no
#: resume goes back further.
_STRETCHES_KEPT: Final = 10_000


@dataclass(slots=True, kw_only=True)
class TimeParts:
    """The parts so far. The ``now_s`` of later calls never decreases."""

    #: Share of the time between two reports that saves recently took.
    saving_share: float = 0.0
    _parts_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    _since_s: float = 0.0
    #: ``(first, last, took_s)``, oldest first.
    _stretches: list[tuple[int, int, float]] = field(default_factory=list)
    #: The part that got the time after the last reported step, and how many seconds.
    _rest: tuple[str, float] = ("recovery", 0.0)

    def begin(self, now_s: float) -> None:
        """Count from ``now_s`` on."""
        self._since_s = now_s

    def parts_s(self, open_part: str, now_s: float) -> dict[str, float]:
        """Return the parts; ``open_part`` gets the time since the last change."""
        open_s = self._parts_s[open_part] + now_s - self._since_s
        return {**self._parts_s, open_part: open_s}

    def spend(self, part: str, now_s: float) -> float:
        """Count the time up to ``now_s`` for ``part``, and return it."""
        took_s = now_s - self._since_s
        self._parts_s[part] += took_s
        self._since_s = now_s
        return took_s

    def leave_training(self, part: str, now_s: float) -> None:
        """Count the time since the last step for ``part`` until more steps are reported."""
        self._rest = part, self.spend(part, now_s)

    def count(self, first: int, last: int, now_s: float, *, is_training: bool) -> None:
        """Count the time since the last step for these steps; after training, from ``_rest``."""
        if is_training:
            took_s = self.spend("steps", now_s)
        else:
            part, took_s = self._rest
            self._rest = part, 0.0
            self._move(took_s, part, "steps")
        saving_s = took_s * self.saving_share
        self._move(saving_s, "steps", "saving")
        self._stretches.append((first, last, took_s - saving_s))
        del self._stretches[:-_STRETCHES_KEPT]

    def lose(self, step: int) -> None:
        """Count all steps after this one as lost."""
        while self._stretches and self._stretches[-1][1] > step:
            first, last, took_s = self._stretches.pop()
            kept_s = took_s * max(step - first + 1, 0) / (last - first + 1)
            self._move(took_s - kept_s, "steps", "lost")
            if first <= step:
                self._stretches.append((first, step, kept_s))

    def _move(self, took_s: float, part: str, other: str) -> None:
        self._parts_s[part] -= took_s
        self._parts_s[other] += took_s
