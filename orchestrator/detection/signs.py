"""Signs of life of a process, apart from its collectives: the kernel's state and its beat.

Whether a process is alive and whether its training progresses are two questions. A rank that
computes for long (a recompile, a batch of another shape, an evaluation, a garbage collection) makes
no visible progress although it is healthy. So its signs decide how long the run waits for it:

=========  ===========================================================  ========================
sign       what is seen                                                 named after
=========  ===========================================================  ========================
gone       the kernel knows no such process, or only a zombie           ``suspect_s``
stopped    the kernel holds it (state T), and it has not beaten         ``stopped_s``
frozen     no beat, asleep (not R, not D), no processor time used, and  ``hang_s``
           its beating thread does not run: a frozen container
held       as frozen, but its beating thread runs and gets no further:  ``held_s``
           a call in C that sleeps with the interpreter's lock
traced     a debugger holds it (state t)                                never
computing  it runs (state R), or the thread that trains or a child      just before the others'
           process uses processor time                                  collectives fail
idle       it beats, or waits for a disk or a page (state D), and       ``pause_s``, without
           neither trains nor has a child that works: a sleep, a lock,  processor time as well
           also while a helper thread spins
=========  ===========================================================  ========================

The first three are proof. A held process may be healthy, for example while it reads a slow disk in
C, so it is named only once the wait has cost more than continuing without it. The last two matter
only for a rank that others wait for and that does not wait itself (``waits``). A process that waits
for a free processor is in state R.
"""

from enum import StrEnum
from typing import Final, NamedTuple

from orchestrator.detection.limits import Limits
from workers.protocol import GONE, WorkerReport

#: A Ray process that only waits uses less than this share of a processor, with bursts, for its own
#: threads and the beat.
_WAITING_SHARE: Final = 0.05
_WAITING_BURST_S: Final = 0.05

_STOPPED: Final = "T"
_TRACED: Final = "t"
_RUNNING: Final = "R"
_PAGING: Final = "D"


class Sign(StrEnum):
    """A sign of life, or of its absence."""

    GONE = "gone"
    STOPPED = "stopped"
    FROZEN = "frozen"
    HELD = "held"
    TRACED = "traced"
    COMPUTING = "computing"
    IDLE = "idle"


def has_computed(processor_s: float, over_s: float) -> bool:
    """Return whether ``processor_s`` within ``over_s`` is more than a waiting process uses."""
    return processor_s > _WAITING_BURST_S + _WAITING_SHARE * over_s


_HOLDS: Final = {_STOPPED: Sign.STOPPED, _TRACED: Sign.TRACED}


class Quiet(NamedTuple):
    """How long a process has shown no sign of each kind."""

    idle_s: float  #: How long it has neither progressed nor computed (``work_s``).
    asleep_s: float  #: How long none of its threads has used processor time.
    frozen_s: float  #: How long its beating thread has not run; 0.0 if unknown.


def work_s(row: WorkerReport) -> float:
    """Return the processor time of the thread that trains and of its children.

    If that thread is not known, return the time of the whole process. Its other threads, such as
    those that fetch data or write logs, also compute while training is stuck.
    """
    return row.trainer_s + row.children_s if row.trainer_s else row.processor_s


def sign_of(row: WorkerReport, quiet: Quiet, limits: Limits) -> Sign:
    """Return the sign of a process that was ``quiet`` for this long."""
    if row.os_state in GONE:
        return Sign.GONE
    if row.os_state in _HOLDS:
        return _HOLDS[row.os_state]
    if row.os_state == _RUNNING or quiet.idle_s < limits.hang_s:
        return Sign.COMPUTING
    is_alive = row.beat_age_s < limits.hang_s or quiet.asleep_s < limits.hang_s
    if row.os_state == _PAGING or is_alive:
        return Sign.IDLE
    return Sign.FROZEN if quiet.frozen_s >= limits.hang_s else Sign.HELD


def describe(sign: Sign, row: WorkerReport, idle_s: float) -> str:
    """Return the evidence of ``sign`` for people: what follows the worker's name."""
    if sign is Sign.GONE:
        return "has no living process"
    if sign is Sign.STOPPED:
        return "is stopped by a signal (state T)"
    if sign is Sign.COMPUTING:
        return f"computes (state {row.os_state}, processor time until {idle_s:.1f} s ago)"
    who = "its training thread has" if row.trainer_s else "has"
    return (
        f"beat {row.beat_age_s:.1f} s ago, is in state {row.os_state}, and {who} used no "
        f"processor time for {idle_s:.1f} s"
    )
