"""How many failures end a run, and whether the user's code caused them.

Pure. Infrastructure, preemption and user errors have separate budgets: a spot cluster may lose a
hundred nodes a day and be healthy; a training script that raises twice at one step will raise a
third time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.fault_kinds import FaultClass
from ucp_core.layout import ParallelLayout

#: Errors about stored state (``ucp_core.errors``): every rank meets them at once, and they do not
#: point to the user's code. The next attempt reads storage again.
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
#: again: a checkpoint of another model, or other data.
#: One report of such an error is proof.
OF_ALL = frozenset({NOT_FINITE, "DataDiffersError", "MisfitError"})
#: All ranks raise these when a machine is at fault.
DIVERGED, CORRUPT = "DivergedError", "CorruptError"
#: Errors that say what a rank knows of all others.
PROVEN = frozenset({"ApartError", *OF_ALL})


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRules:
    """Limits as rates, so that a run survives rare failures for ever."""

    window_s: float = 3600.0  #: Length of the window in which faults are counted.
    infrastructure_max: int = 1000  #: Most infrastructure faults in a window.
    preemption_max: int = 10000  #: Most preemptions in a window.
    user_max: int = 3  #: Most single-rank user errors in a window.
    #: Most hangs in a window in which ranks called different collectives. A single one may come
    #: from a rank that read other data; two come from the program.
    program_max: int = 1
    undecided_max: int = 4  #: Most unexplained hangs in a row after the same step.
    #: Most failed attempts in a row without a new committed step, not counting unexplained ones.
    stuck_max: int = 12
    #: Most attempts in a row without a new committed step, in a run that has trained, that lost
    #: a peer although no process died and no rank raised. With the pauses between them they take
    #: an hour. A person can repair a network that resets connections in that time; a program
    #: whose ranks call different collectives fails likewise for ever.
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
        """Return the part before the message, without its module, as in ``ValueError``."""
        return self.error.split(":", 1)[0].rsplit(".", 1)[-1]

    def is_same(self, other: UserError) -> bool:
        """Return whether ``other`` says the same of the same step."""
        return (self.step, self.error) == (other.step, other.error)

    @property
    def message(self) -> str:
        """Return the part after the type."""
        return self.error.partition(": ")[2]

    @property
    def is_of_all(self) -> bool:
        """Return whether the error holds for every rank, even if some failed in another way."""
        return self.error_type in OF_ALL

    @property
    def is_not_finite(self) -> bool:
        """Return whether updates were not finite."""
        return self.error_type == NOT_FINITE

    @property
    def is_proven(self) -> bool:
        """Return whether no machine can be at fault."""
        return self.error_type in PROVEN

    @property
    def is_of_copies(self) -> bool:
        """Return whether copies of one state, or of one result, were found to differ."""
        return self.error_type in (DIVERGED, CORRUPT)

    @property
    def is_of_data(self) -> bool:
        """Return whether stored state is at fault, and not the code."""
        return self.error_type in DATA_ERRORS


def charge(faults: tuple[Fault, ...], fault: Fault, rules: BudgetRules) -> tuple[Fault, ...]:
    """Return the faults of the window that ends with ``fault``, which is the last of them."""
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

    Two are tried at once, because most faults come alone. After that the cause, such as an unstable
    network, gets time to pass before the budget is spent: 12 attempts take about a minute, and 240
    an hour.
    """
    num_tries = 2
    if num_stuck <= num_tries:
        return 0.0
    return min(0.25 * 2.0 ** (num_stuck - num_tries - 1), 15.0)


def user_bug(now: Sequence[UserError], before: Sequence[UserError]) -> UserError | None:
    """Return the error that proves a bug in the user's code, or None.

    One rank's exception may come from its machine and is forgiven once. Errors that prove a bug are
    not. The same type on two ranks in one attempt, or again at the same step in a later attempt,
    comes from the code.

    Args:
        now: Errors of the attempt that has just ended, in order of arrival.
        before: Errors of earlier attempts.
    """
    now = [error for error in now if not error.is_of_data]
    for index, error in enumerate(now):
        if error.is_proven:
            return error
        for other in now[:index]:
            if other.rank != error.rank and other.error_type == error.error_type:
                return now[0]
        for earlier in before:
            if earlier.step == error.step and earlier.error_type == error.error_type:
                return error
    return None
