"""Which members leave a fenced attempt late because they compute, and which are stuck in it.

A fence ends every wait of an attempt in milliseconds. A rank that computes notices it at its next
collective or when its micro-batch ends. So a rank that still waits after the fence is stuck. A rank
that does not wait is healthy as long as its process shows signs of life (``signs``). The bounds for
these signs do not depend on the step time.
"""

from collections.abc import Collection
from typing import Final

from orchestrator.detection.detector import WATCH_GAP_S, Detector, Watched
from orchestrator.detection.limits import PATIENCE, limits_from
from orchestrator.detection.signs import Sign, sign_of
from orchestrator.diagnosis import waits
from workers.protocol import WorkerPhase

#: Bounds for the signs of a process: those for the shortest steps.
_LIMITS: Final = limits_from(1.0 / PATIENCE)
_LIVING: Final = frozenset({Sign.COMPUTING, Sign.IDLE, Sign.HELD, Sign.TRACED})


def at_work(state: Detector, *, attempt: int, members: Collection[str]) -> tuple[str, ...]:
    """Return the members that are still in a fenced attempt and compute, sorted."""
    known = ((name, state.worker(name)) for name in sorted(members))
    return tuple(name for name, one in known if one is not None and _works(state, one, attempt))


def _works(state: Detector, one: Watched, attempt: int) -> bool:
    row = one.report
    is_inside = row.attempt == attempt and row.phase is not WorkerPhase.FORMING
    is_seen = state.silent_s(one.node) <= WATCH_GAP_S
    lives = sign_of(row, state.quiet(one), _LIMITS) in _LIVING
    return is_inside and is_seen and lives and not any(waits(row))
