"""What is known of one attempt; the next attempt starts with a new ``Attempt``."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from orchestrator.core.state.frozen import Frozen, Part
from orchestrator.core.state.table import Table
from orchestrator.diagnosis import Suspicion
from orchestrator.policies import RedundancyPlan, Refused, UserError
from ucp_core.layout import ParallelLayout
from workers.protocol import Source


@dataclass(eq=False)
class Attempt(Part):
    """The current attempt, or the last one."""

    number: int = 0  #: The fencing token; 0 before the first attempt.
    layout: ParallelLayout | None = None
    #: Those that were not taken, and why, for people.
    other_layouts: tuple[tuple[str, str], ...] = ()
    members: tuple[int, ...] = ()  #: Its workers in rank order, dead ones too.
    nodes: tuple[int, ...] = ()  #: Their nodes, by rank.
    #: How its snapshots are protected.
    plan: RedundancyPlan = field(default_factory=RedundancyPlan)
    #: Members that have neither left nor died, by number, and whether each has formed.
    inside: Table[bool] = field(default_factory=Table)
    num_inside: int = 0  #: How many these are.
    num_unformed: int = 0  #: Members that have not formed.
    started_s: float = 0.0
    step: int = 0  #: Last step that every rank completed.
    stepped: bool = False
    #: What the run's ``committed`` was when it started.
    committed_at_start: tuple[int, int] = (0, 0)
    num_bad_at_start: int = 0  #: How many sources were bad when it started.
    left_step: int = -1  #: Least step that members reported when they left, -1 if none did.
    yield_asked: bool = False  #: Whether the members were asked to leave.
    #: Step at which all members so far yielded; -1 none yet, -2 they differ.
    yielded_step: int = -1
    completed: bool = False  #: Whether a member reported the last step as committed.
    ended: str = ""  #: Why the script stopped before the last step; "" if it did not.
    fenced_s: float = 0.0  #: When the last member was out.
    leave_by_s: float = inf  #: By when fenced members must have left that are not at work.
    #: Members that were fenced and have not left because they compute.
    at_work: tuple[int, ...] = ()
    #: (rank, worker, node) of each member that did not leave when fenced, and was killed.
    killed: tuple[tuple[int, str, str], ...] = ()
    judged: bool = False  #: Whether its end was put on record and charged.
    raised: tuple[UserError, ...] = ()  #: Errors of its training code.
    refused: Refused | None = None  #: Why its layout cannot train; None unless it was refused.
    is_program: bool = False  #: Whether its ranks are proven to have called different collectives.
    #: Ranks and links that seem to hold the others up; nothing is proven.
    suspects: tuple[Suspicion, ...] = ()
    usual_step_s: float = 0.0  #: Median duration of a step before they were; 0.0 if none was seen.
    slow_since_s: float = 0.0  #: When it was last decided to leave a node for a slow worker.
    num_noted: int = 0  #: Numbers that were not finite and are on record.
    unread: tuple[Source, ...] = ()  #: Sources that members could not read, and did not prove bad.
    from_storage: bool = False  #: Whether a member loaded from storage.
    #: When a worker that it lacks first became usable; infinity: none.
    newcomer_since_s: float = inf
    trained_since_s: float = 0.0  #: When it completed its first step.


class FrozenAttempt(Frozen, Attempt):
    """An attempt as a value."""
