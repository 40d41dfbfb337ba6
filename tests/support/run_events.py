"""Events of a run: those of several nodes, and those of all members of an attempt."""

from collections.abc import Iterable

from orchestrator.core import events as ev


def worker_named(number: int) -> str:
    """Return the name of the worker that the machine starts as its ``number``-th."""
    return f"w{number:04d}"


def granted_on(nodes: Iterable[str], *, at_s: float = 0.0) -> list[ev.Event]:
    """Return the grants of reservations, from the first on, one for each of ``nodes``."""
    return [
        ev.ReservationGranted(at_s=at_s, reservation=number, node=node)
        for number, node in enumerate(nodes, start=1)
    ]


def ready_on(nodes: Iterable[str], *, at_s: float = 1.0) -> list[ev.Event]:
    """Return that the workers of these reservations are ready; each has its number as a pid."""
    return [
        ev.WorkerReady(at_s=at_s, worker=worker_named(number), node=node, pid=number)
        for number, node in enumerate(nodes, start=1)
    ]


def begun_on(
    nodes: Iterable[str], *, granted_s: float = 0.0, ready_s: float = 1.0
) -> list[ev.Event]:
    """Return the begin of a run up to ready workers, one on each of ``nodes``."""
    names = list(nodes)
    started = ev.ControllerStarted(at_s=0.0, incarnation=1)
    return [started, *granted_on(names, at_s=granted_s), *ready_on(names, at_s=ready_s)]


def formed_by(workers: Iterable[str], *, at_s: float, attempt: int = 1) -> list[ev.Event]:
    """Return that members have formed an attempt."""
    return [ev.WorkerFormed(at_s=at_s, attempt=attempt, worker=worker) for worker in workers]


def left_by(
    workers: Iterable[str],
    *,
    at_s: float,
    attempt: int = 1,
    how: ev.Leaving = ev.Leaving.FENCED,
    step: int = 1,
) -> list[ev.Event]:
    """Return that members have left an attempt after a step."""
    return [
        ev.WorkerLeft(at_s=at_s, attempt=attempt, worker=worker, how=how, step=step, detail="")
        for worker in workers
    ]
