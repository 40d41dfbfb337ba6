"""The state of one attempt; the next attempt starts with a new ``Attempt``."""

from dataclasses import dataclass, field
from math import inf

from orchestrator.core.state.frozen import Frozen, StatePart
from orchestrator.core.state.table import Table
from orchestrator.diagnosis import Suspicion
from orchestrator.policies import RedundancyPlan, Refused, UserError
from ucp_core.layout import ParallelLayout
from workers.protocol import Source


@dataclass(eq=False)
class Attempt(StatePart):
    """The current attempt, or the last one."""

    number: int = 0  #: The fencing token; 0 before the first attempt.
    layout: ParallelLayout | None = None
    #: Layouts that were not chosen, each with the reason, for people.
    other_layouts: tuple[tuple[str, str], ...] = ()
    members: tuple[int, ...] = ()  #: Its workers in rank order, also dead ones.
    #: ``(node, its members)`` in rank order: members of one node are neighbours.
    placed: tuple[tuple[int, tuple[int, ...]], ...] = ()
    #: How its snapshots are protected.
    plan: RedundancyPlan = field(default_factory=RedundancyPlan)
    #: Members that have neither left nor died, by number, each with whether it has formed.
    inside: Table[bool] = field(default_factory=Table)
    num_inside: int = 0  #: The size of ``inside``.
    num_unformed: int = 0  #: Members that have not formed.
    started_s: float = 0.0
    step: int = 0  #: Last step that every rank completed.
    stepped: bool = False  #: Whether a step was completed.
    #: The run's ``committed`` when the attempt started.
    committed_at_start: tuple[int, int] = (0, 0)
    num_bad_at_start: int = 0  #: Number of bad sources when it started.
    left_step: int = -1  #: Least step that a member reported when it left; -1 if none did.
    yield_asked: bool = False  #: Whether the members were asked to leave.
    #: Step at which all members so far yielded; -1 if none has, -2 if they differ.
    yielded_step: int = -1
    completed: bool = False  #: Whether a member reported the last step as committed.
    ended: str = ""  #: Why the script stopped before the last step; "" if it did not.
    fenced_s: float = 0.0  #: When the last member had left; 0.0 before.
    leave_by_s: float = inf  #: Time by which fenced members must have left unless they compute.
    #: Members that were fenced and have not left because they compute.
    at_work: tuple[int, ...] = ()
    #: (rank, worker, node) of each member that did not leave when fenced and was killed.
    killed: tuple[tuple[int, str, str], ...] = ()
    judged: bool = False  #: Whether its end was recorded and charged.
    raised: tuple[UserError, ...] = ()  #: Errors of its training code.
    refused: Refused | None = None  #: Why its layout cannot train; None unless it was refused.
    is_program: bool = False  #: Whether its ranks are proven to have called different collectives.
    #: Ranks and links that seem to delay the others; nothing is proven.
    suspects: tuple[Suspicion, ...] = ()
    usual_step_s: float = 0.0  #: Median step time before the suspicions; 0.0 if none was seen.
    #: When the run last convicted a slow worker and so decided to leave its node.
    slow_since_s: float = 0.0
    num_noted: int = 0  #: How many numbers that are not finite were recorded.
    unread: tuple[Source, ...] = ()  #: Sources that members could not read but did not prove bad.
    from_storage: bool = False  #: Whether a member loaded from storage.
    #: When a worker beyond the members first became usable; infinity if none did.
    newcomer_since_s: float = inf
    trained_since_s: float = 0.0  #: When it completed its first step.

    @property
    def nodes(self) -> tuple[int, ...]:
        """Return the node of each member, by rank."""
        return tuple(node for node, members in self.placed for _ in members)

    @property
    def num_nodes(self) -> int:
        """Return how many nodes have members."""
        return len(self.placed)


class FrozenAttempt(Frozen, Attempt):
    """An attempt as a value."""
