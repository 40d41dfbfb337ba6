"""Decide how many failures end a run, and whether the user's code caused them.

Pure. Infrastructure, preemption and user errors have separate budgets: a spot cluster may lose a
hundred nodes a day and be healthy; a training script that raises twice at one step will raise a
third time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.fault_kinds import FaultClass
from ucp_core.layout import ParallelLayout

#: Errors about stored state (``ucp_core.errors``): every rank meets them at once, and the user's
#: code does not cause them. The next attempt reads storage again.
DATA_ERRORS = frozenset(
    {
        "CheckpointNotFoundError",
        "CheckpointCorruptError",
        "ChecksumMismatchError",
        "UncoveredRegionError",
        "StorageError",
    }
)


NOT_FINITE = "NotFiniteError"
#: Errors that all ranks raise or none (``workers.errors``), or that the next attempt would meet
#: again, such as a checkpoint of another model. One report of such an error is proof.
OF_ALL = frozenset({NOT_FINITE, "DataDiffersError", "MisfitError"})
#: All ranks raise these if a machine is at fault.
DIVERGED, CORRUPT = "DivergedError", "CorruptError"
#: Errors that prove a fault of the program with a single report.
PROVEN = frozenset({"ApartError", *OF_ALL})


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRules:
    """Limits as rates, so that a run survives rare failures for any length of time."""

    window_s: float = 3600.0  #: Length of the window in which faults are counted.
    infrastructure_max: int = 1000  #: Largest number of infrastructure faults in a window.
    preemption_max: int = 10000  #: Largest number of preemptions in a window.
    user_max: int = 3  #: Largest number of user errors of a single rank in a window.
    #: Largest number of hangs in a window in which ranks called different collectives. One may come
    #: from a rank that read other data; two come from the program.
    program_max: int = 1
    undecided_max: int = 4  #: Largest number of unexplained hangs in a row after the same step.
    #: Largest number of failed attempts in a row without a new committed step, unexplained ones
    #: excluded.
    stuck_max: int = 12
    #: Largest number of attempts in a row without a new committed step, in a run that has trained,
    #: that lost a peer although no process died and no rank raised. With the pauses between them
    #: they take an hour. In that time a person can repair a network that resets connections; a
    #: program whose ranks call different collectives fails in the same way for ever.
    unexplained_max: int = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One failed attempt, as charged."""

    at_s: float
    fault_class: FaultClass


@dataclass(frozen=True, slots=True)
class UserError:
    """One rank's exception: what ranks and attempts compare, and what users see."""

    rank: int
    step: int
    error: str
    traceback: str
    layout: ParallelLayout

    @property
    def error_type(self) -> str:
        """Return the name of the type, without its module."""
        return self.error.split(":", 1)[0].rsplit(".", 1)[-1]

    def is_same(self, other: UserError) -> bool:
        """Return whether ``other`` says the same of the same step."""
        return (self.step, self.error) == (other.step, other.error)

    @property
    def message(self) -> str:
        """Return the text after the type."""
        return self.error.partition(": ")[2]

    @property
    def is_of_all(self) -> bool:
        """Return whether the error holds for every rank, even if some failed in another way."""
        return self.error_type in OF_ALL

    @property
    def is_not_finite(self) -> bool:
        """Return whether a number of training was not finite."""
        return self.error_type == NOT_FINITE

    @property
    def is_proven(self) -> bool:
        """Return whether no machine can be at fault."""
        return self.error_type in PROVEN

    @property
    def is_of_copies(self) -> bool:
        """Return whether copies of one state, or of one result, differ."""
        return self.error_type in (DIVERGED, CORRUPT)

    @property
    def is_of_data(self) -> bool:
        """Return whether stored state is at fault rather than the code."""
        return self.error_type in DATA_ERRORS


def charge(faults: tuple[Fault, ...], fault: Fault, rules: BudgetRules) -> tuple[Fault, ...]:
    """Return the faults in the window that ends with ``fault``, that one last."""
    oldest_s = fault.at_s - rules.window_s
    return (*(f for f in faults if f.at_s > oldest_s), fault)


def overspent(
    faults: Sequence[Fault],
    *,
    num_stuck: int,
    num_unexplained: int = 0,
    num_undecided: int,
    rules: BudgetRules,
) -> str:
    """Return which budget is overspent, as one line for people; "" if none is.

    ``num_unexplained`` of ``num_stuck`` attempts lost a peer for an unknown reason.
    """
    limits = {
        FaultClass.INFRASTRUCTURE: rules.infrastructure_max,
        FaultClass.PREEMPTION: rules.preemption_max,
        FaultClass.USER: rules.user_max,
        FaultClass.PROGRAM: rules.program_max,
    }
    for fault_class, limit in limits.items():
        count = sum(fault.fault_class is fault_class for fault in faults)
        if count > limit:
            return (
                f"{count} {fault_class} failures within {rules.window_s:.0f} s "
                f"(the budget is {limit})"
            )
    if num_undecided > rules.undecided_max:
        return (
            f"{num_undecided} hangs in a row after the same step, and it is undecided "
            "which worker causes them"
        )
    if num_stuck - num_unexplained > rules.stuck_max or num_unexplained > rules.unexplained_max:
        return f"{num_stuck} attempts in a row failed without a new committed step"
    return ""


def pause_s(num_stuck: int) -> float:
    """Return how long to wait before the next attempt after ``num_stuck`` without progress.

    The first two attempts start at once, because most faults come alone. After that the cause, such
    as an unstable network, gets time to pass before the budget is spent: 12 attempts take about a
    minute, and 240 an hour.
    """
    num_tries = 2
    if num_stuck <= num_tries:
        return 0.0
    return min(0.25 * 2.0 ** (num_stuck - num_tries - 1), 15.0)


def user_bug(now: Sequence[UserError], before: Sequence[UserError]) -> UserError | None:
    """Return the error that proves a bug in the user's code, or None.

    One rank's exception may come from its machine and is forgiven once, unless it proves a bug. The
    same type on two ranks in one attempt, or again at the same step in a later attempt, comes from
    the code. If the layout has changed, the text must be the same, too: a layout that the script
    does not support raises errors of its own.

    ``now`` are the errors of the attempt that has just ended, in order of arrival; ``before`` are
    those of earlier attempts.
    """
    now = [error for error in now if not error.is_of_data]
    for index, error in enumerate(now):
        if error.is_proven:
            return error
        for other in now[:index]:
            if other.rank != error.rank and other.error_type == error.error_type:
                return now[0]
        for earlier in before:
            is_again = earlier.step == error.step and earlier.error_type == error.error_type
            if is_again and (earlier.layout == error.layout or earlier.is_same(error)):
                return error
    return None
