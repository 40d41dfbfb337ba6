"""What is known of one attempt; the next attempt starts with a new ``Attempt``."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from orchestrator.core.state.frozen import Frozen, Part
from orchestrator.diagnosis import Suspicion
from orchestrator.policies import RedundancyPlan, Refused, UserError
from ucp_core.layout import ParallelLayout
from workers.protocol import Source


@dataclass(eq=False)
class Attempt(Part):
    """The current attempt, or the last one.

    Attributes:
        number: The fencing token; 0 before the first attempt.
        other_layouts: Those that were not taken, and why, for people.
        members: Its workers in rank order, dead ones too.
        nodes: Their nodes, by rank.
        plan: How its snapshots are protected.
        num_inside: Members that have neither left nor died.
        num_unformed: Members that have not formed.
        step: Last step that every rank completed.
        committed_at_start: What the run's ``committed`` was when it started.
        num_bad_at_start: How many sources were bad when it started.
        left_step: Least step that members reported when they left, -1 if none did.
        yield_asked: Whether the members were asked to leave.
        yielded_step: Step at which all members so far yielded; -1 none yet, -2 they differ.
        completed: Whether a member reported the last step as committed.
        ended: Why the script stopped before the last step; "" if it did not.
        fenced_s: When the last member was out.
        leave_by_s: By when fenced members must have left that are not at work.
        at_work: Members that were fenced and have not left because they compute.
        killed: (rank, worker, node) of each member that did not leave when fenced, and was killed.
        judged: Whether its end was put on record and charged.
        raised: Errors of its training code.
        refused: Why its layout cannot train; None unless it was refused.
        is_program: Whether its ranks are proven to have called different collectives.
        suspects: Ranks and links that seem to hold the others up; nothing is proven.
        usual_step_s: Median duration of a step before they were; 0.0 if none was seen.
        slow_since_s: When it was last decided to leave a node for a slow worker.
        num_noted: Numbers that were not finite and are on record.
        unread: Sources that members could not read, and did not prove bad.
        from_storage: Whether a member loaded from storage.
        newcomer_since_s: When a worker that it lacks first became usable; infinity: none.
        trained_since_s: When it completed its first step.
    """

    number: int = 0
    layout: ParallelLayout | None = None
    other_layouts: tuple[tuple[str, str], ...] = ()
    members: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    plan: RedundancyPlan = field(default_factory=RedundancyPlan)
    num_inside: int = 0
    num_unformed: int = 0
    started_s: float = 0.0
    step: int = 0
    stepped: bool = False
    committed_at_start: tuple[int, int] = (0, 0)
    num_bad_at_start: int = 0
    left_step: int = -1
    yield_asked: bool = False
    yielded_step: int = -1
    completed: bool = False
    ended: str = ""
    fenced_s: float = 0.0
    leave_by_s: float = inf
    at_work: tuple[int, ...] = ()
    killed: tuple[tuple[int, str, str], ...] = ()
    judged: bool = False
    raised: tuple[UserError, ...] = ()
    refused: Refused | None = None
    is_program: bool = False
    suspects: tuple[Suspicion, ...] = ()
    usual_step_s: float = 0.0
    slow_since_s: float = 0.0
    num_noted: int = 0
    unread: tuple[Source, ...] = ()
    from_storage: bool = False
    newcomer_since_s: float = inf
    trained_since_s: float = 0.0


class FrozenAttempt(Frozen, Attempt):
    """An attempt as a value."""
