"""Every bound on waiting, derived from the observed step time by one setting.

A fixed timeout is right for one kind of machine only: torch's 10 and 30 minutes leave a cluster
idle, and a few seconds would evict healthy workers of a slow one. So all bounds are multiples of
the hang bound, which is a multiple of the p99 step time.
"""

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Final

from workers.protocol import BEAT_S

#: Longest period of a keeper's reports on workers that stand still (``workers.keeper``).
REPORT_S: Final = 0.25

#: Default patience: a step may take 3x the p99 before it counts as hung. On a shared 2-core machine
#: single steps of 2x the median are common; 3x the p99 was never seen.
PATIENCE: Final = 3.0

#: With less patience, the bounds would not stay in order with the period of reports.
PATIENCE_MIN: Final = 1.5

# A process that the kernel holds is not a slow step, so p99 does not apply to it. The run waits for
# as long as continuing without the process would cost: one usual step to repeat, but at least the
# re-forming (0.5 s). In seconds, with the default patience.
_STOPPED_S: Final = 0.55

#: Assumed step time before any step was observed.
_UNKNOWN_STEP_S: Final = 1.0

# A call in C that holds the interpreter may be healthy, and its duration is unknown. A new process
# with its imports would replace it in about this many seconds.
_HELD_S: Final = 10.0

# Multiples of the hang bound. Work whose duration is not observed (saving, forming) gets more time.
# The bound that ends a wait without naming a rank comes after those that name one.
_SUSPECT: Final = 0.6
# A node's workers are then asked, which takes up to 0.15 s: with that, two hang bounds at most.
_NODE_SILENT: Final = 1.85
_UNDECIDED: Final = 3.0
_SAVING: Final = 10.0
_PAUSE: Final = 30.0
_FORMING: Final = 40.0

# Lower bounds of these, in seconds, with the default patience. They do not depend on the step time:
# compiling a small model or reading its data takes as long as for a large one. Workers that load or
# save report the bytes they moved, so this bounds one read or write, not all of it. Any step may
# pause like a first one, because a batch of another shape is compiled again.
_SAVING_S: Final = 30.0
_PAUSE_S: Final = 120.0
_FORMING_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on waiting in seconds, in ascending order.

    A collective fails after ``parallel.collective_timeout_s``, which is not listed here.
    """

    beat_s: float  #: Period of a process's beat.
    report_s: float  #: Period of a keeper's reports.
    #: A process that the kernel holds and that has not beaten for this long is named when no member
    #: has progressed for this long.
    stopped_s: float
    #: A beat older than this counts as silent. A process that is gone is named when no member has
    #: progressed for this long.
    suspect_s: float
    hang_s: float  #: If no member has progressed for this long, a silent one is named.
    #: A node without reports for this long, while others report and do not progress, is lost even
    #: if its machine answers (``workers.keeper.reach``), unless one of its workers answers.
    node_silent_s: float
    #: If no member has progressed for this long, and none can be named, the hang is undecided.
    undecided_s: float
    #: If no member has progressed for this long, a worker that saves or leaves while others wait
    #: for it is named. Waits in a first step get the same time.
    saving_s: float
    #: The same for a worker in its own code that does not compute: the longest pause of a script.
    #: It is shorter if the others' collectives fail earlier.
    pause_s: float
    forming_s: float  #: The same for a worker that forms, loads or is absent.
    #: A process whose interpreter is held and that does not compute is named after this. Unlike the
    #: others, this bound is not in order.
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
        step_s_p99: The p99 step time; 0.0 if none was observed.
        step_s_p50: The median step time, at most ``step_s_p99``, which is its default.
        patience: A step may take this many times ``step_s_p99``, at least 1.5. With the default of
            3 the hang bound is at least 1 s, because scheduling alone can look like a shorter hang;
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
    """Return the bounds by name without ``_s``."""
    return {field.name.removesuffix("_s"): getattr(limits, field.name) for field in fields(limits)}
