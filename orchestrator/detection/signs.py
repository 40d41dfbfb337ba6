"""What a process shows of itself, whatever its collectives say: the kernel's word and its beat.

Whether a process lives and whether its training goes on are two questions. A rank that computes
for long (a recompile, a batch of another shape, an evaluation, a garbage collection) makes no
progress that others see, and is as well as any. So what it shows decides how long it is waited for:

=========  ===========================================================  ========================
sign       what is seen                                                 named after
=========  ===========================================================  ========================
gone       the kernel knows no such process, or only a zombie           ``suspect_s``
stopped    the kernel holds it (state T), and it has not beaten         ``stopped_s``
silent     no beat, asleep (not R, not D), and no processor time used:  ``hang_s``
           a frozen container, or a thread that keeps the interpreter
computing  it runs (state R), or uses processor time                    just before the others'
                                                                        collectives fail
idle       it beats, or waits for a disk or a page (state D), and uses  ``pause_s``, without
           no processor time: a sleep, a child that works, a lock       processor time as well
=========  ===========================================================  ========================

The first three are proof. The last two are asked only about a rank that others wait for and that
waits for none (``waits``). What runs when the machine has no processor to spare is in state R.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from orchestrator.detection.limits import Limits
from workers.protocol import GONE, WorkerReport

#: Less than this share of a processor, with a burst now and then, is what a process of Ray uses
#: that only waits: threads of its own, and the beat.
_WAITING_SHARE: Final = 0.05
_WAITING_BURST_S: Final = 0.05

_STOPPED: Final = "T"
_RUNNING: Final = "R"
_PAGING: Final = "D"


class Sign(StrEnum):
    """What a process shows."""

    GONE = "gone"
    STOPPED = "stopped"
    SILENT = "silent"
    COMPUTING = "computing"
    IDLE = "idle"


def has_computed(processor_s: float, over_s: float) -> bool:
    """Return whether ``processor_s`` within ``over_s`` is more than a waiting process uses."""
    return processor_s > _WAITING_BURST_S + _WAITING_SHARE * over_s


def sign_of(row: WorkerReport, idle_s: float, limits: Limits) -> Sign:
    """Return what a process shows that has used no processor time for ``idle_s``."""
    if row.os_state in GONE:
        return Sign.GONE
    if row.os_state == _STOPPED:
        return Sign.STOPPED
    if row.os_state == _RUNNING or idle_s < limits.hang_s:
        return Sign.COMPUTING
    if row.os_state == _PAGING or row.beat_age_s < limits.hang_s:
        return Sign.IDLE
    return Sign.SILENT


def describe(sign: Sign, row: WorkerReport, idle_s: float) -> str:
    """Return the evidence of ``sign`` for people."""
    if sign is Sign.COMPUTING:
        return f"it computes (state {row.os_state}, processor time until {idle_s:.1f} s ago)"
    return (
        f"it beat {row.beat_age_s:.1f} s ago, is in state {row.os_state}, and has used no "
        f"processor time for {idle_s:.1f} s"
    )
