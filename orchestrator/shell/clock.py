"""The two clocks of the shell; nobody else reads one."""

from __future__ import annotations

import time


def monotonic_s() -> float:
    """Return seconds on a clock that never goes back; only differences mean something."""
    return time.monotonic()


def wall_time() -> float:
    """Return seconds since the Unix epoch, for people and for matching logs of several machines."""
    return time.time()  # noqa: TID251  the one place that reads it


class RunClock:
    """Seconds since the run began, continued over restarts of the controller.

    A restarted controller starts from the last journaled ``at_s``, so that deadlines in the
    state keep their meaning; the time it was down is added from the wall clock.
    """

    def __init__(self, *, last_at_s: float = 0.0, last_wall_time: float | None = None) -> None:
        down_s = 0.0 if last_wall_time is None else max(0.0, wall_time() - last_wall_time)
        self._zero_s = monotonic_s() - last_at_s - down_s

    def at_s(self) -> float:
        """Return the run's age in seconds."""
        return monotonic_s() - self._zero_s
