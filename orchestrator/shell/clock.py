"""The clocks of the shell; no other module reads one."""

import time


def monotonic_s() -> float:
    """Return seconds on a clock that never goes back; only differences have a meaning."""
    return time.monotonic()


def wall_time() -> float:
    """Return seconds since the Unix epoch, for people and to match logs of several machines."""
    return time.time()  # noqa: TID251  the only place that reads it


class RunClock:
    """Seconds since the run began, continued over restarts of the controller.

    A restarted controller continues from the last journaled ``at_s`` plus the time that it was down
    by the wall clock, so deadlines in the state stay valid.
    """

    def __init__(self, *, last_at_s: float = 0.0, last_wall_time: float | None = None) -> None:
        down_s = 0.0 if last_wall_time is None else max(0.0, wall_time() - last_wall_time)
        self._zero_s = monotonic_s() - last_at_s - down_s

    def at_s(self) -> float:
        """Return the run's age in seconds."""
        return monotonic_s() - self._zero_s
