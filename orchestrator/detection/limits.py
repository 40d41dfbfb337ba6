"""Every bound on waiting, derived from the observed step time by one knob.

A fixed timeout is wrong on every machine but one: torch's 10 and 30 minutes cost an idle
cluster, and a few seconds would evict healthy workers of a slow one. So all bounds are
multiples of one, the hang bound, which is a multiple of the slowest usual step.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Final

from workers.protocol import BEAT_S

#: Longest period of a keeper's reports on workers that stand still (``workers.keeper``).
REPORT_S: Final = 0.25

#: Default of the one knob: a step may take 3x its p99 before it counts as hung. On a shared
#: 2-core machine single steps of 2x the median are common, 3x the p99 was not seen.
PATIENCE: Final = 3.0

#: Below, the bounds would not keep their order beside the period of the reports.
PATIENCE_MIN: Final = 1.5

# A process that the kernel holds is no slow step, so how long the slowest took says nothing about
# it. It is waited for as long as doing without it costs: a usual step anew, and at least, in
# seconds with the default patience, the re-forming (0.5 s).
_STOPPED_S: Final = 0.55

#: A step is taken to last so long before any was observed.
_UNKNOWN_STEP_S: Final = 1.0

# A call in C that holds the interpreter may be well, and nothing tells how long it takes. Another
# process takes its place in about so many seconds, with its imports.
_HELD_S: Final = 10.0

# Multiples of the hang bound. What has no observed duration of its own (saving, forming) gets
# room; a bound that ends a wait without naming anybody comes after those that name somebody.
_SUSPECT: Final = 0.6
_NODE_SILENT: Final = 2.0
_UNDECIDED: Final = 3.0
_SAVING: Final = 10.0
_PAUSE: Final = 30.0
_FORMING: Final = 40.0

# And what these take at least, in seconds, with the default patience. A step tells nothing of
# them: small models are compiled, and read their data, as long as large ones. Workers that load
# or save say how much they moved, so this bounds one read or write, not all of it. Any step may
# pause for what a first step does: a batch of another shape is compiled anew.
_SAVING_S: Final = 30.0
_PAUSE_S: Final = 120.0
_FORMING_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on waiting in seconds, in their order.

    A collective fails by itself after ``parallel.collective_timeout_s``, which is not among them.
    """

    beat_s: float  #: Period of a process's beat.
    report_s: float  #: Period of a keeper's reports.
    #: A process that the kernel holds, and that has not beaten for so long, is named when nobody
    #: progressed for so long.
    stopped_s: float
    #: A beat older than this is silent; a process that is gone is named when nobody progressed
    #: for so long.
    suspect_s: float
    hang_s: float  #: No member progressed for this long: who does not even beat is named.
    #: A node without reports for this long, while others report, is lost, although its machine
    #: answers (``workers.keeper.reach``); all its processes stand still.
    node_silent_s: float
    undecided_s: float  #: No member progressed for this long, and nobody can be named.
    #: No member progressed for this long: a worker that is saving or leaving, and is waited for,
    #: is named. All that wait in their first step are waited for as long.
    saving_s: float
    #: As ``saving_s``, for one that is in its own code and does not compute: the longest pause
    #: that a script takes; but no longer than the others' collectives wait for it.
    pause_s: float
    forming_s: float  #: As ``saving_s``, for a worker that is forming, loading, or did not come.
    #: A process whose interpreter is held, and that does not compute, is named after this; it
    #: may be among the others at any place.
    held_s: float

    def __post_init__(self) -> None:
        ordered = (field.name for field in fields(self) if field.name != "held_s")
        bounds = [(name, getattr(self, name)) for name in ordered]
        for (shorter, a_s), (longer, b_s) in pairwise(bounds):
            assert a_s < b_s, f"{shorter}={a_s} must be shorter than {longer}={b_s}"


def limits_from(
    step_s_p99: float, *, step_s_p50: float | None = None, patience: float = PATIENCE
) -> Limits:
    """Return the bounds for an observed step time.

    Args:
        step_s_p99: The slowest usual step; 0.0 while none was observed.
        step_s_p50: The usual step, at most ``step_s_p99``; that if not given.
        patience: A step may take this many times ``step_s_p99``, at least 1.5. With the default
            of 3 the hang bound is never below 1 s: below, scheduling alone looks like a hang;
            before any step it is 3 s.
    """
    assert patience >= PATIENCE_MIN, f"patience={patience} must be at least {PATIENCE_MIN}"
    hang_s = patience * max(step_s_p99 or _UNKNOWN_STEP_S, 1.0 / PATIENCE)
    scale = patience / PATIENCE
    usual_s = step_s_p99 if step_s_p50 is None else step_s_p50
    return Limits(
        beat_s=BEAT_S,
        report_s=REPORT_S,
        stopped_s=scale * max(usual_s, _STOPPED_S),
        suspect_s=_SUSPECT * hang_s,
        hang_s=hang_s,
        node_silent_s=_NODE_SILENT * hang_s,
        undecided_s=_UNDECIDED * hang_s,
        saving_s=max(_SAVING * hang_s, _SAVING_S * scale),
        pause_s=max(_PAUSE * hang_s, _PAUSE_S * scale),
        forming_s=max(_FORMING * hang_s, _FORMING_S * scale),
        held_s=max(hang_s, _HELD_S * scale),
    )


def as_seconds(limits: Limits) -> dict[str, float]:
    """Return the bounds by name."""
    return {field.name.removesuffix("_s"): getattr(limits, field.name) for field in fields(limits)}
