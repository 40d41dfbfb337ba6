"""What a run may do: sizes, bounds of waits, limits of policies. Fixed when the run starts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Final

from orchestrator.policies import (
    BudgetRules,
    CadenceRules,
    CapacityRules,
    GrowthRules,
    LayoutRules,
    RedundancyRules,
    Refused,
    SharingRules,
    SlowRules,
    choose,
    one_node,
)
from orchestrator.traffic import Topology
from ucp_core.layout import ParallelLayout

#: A process that is not ready in ten minutes, or an attempt that has not formed in hours, hangs.
_START_FACTOR_MAX: Final = 10
_FORM_DOUBLINGS_MAX: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bound of every wait, in seconds, and what happens at it."""

    #: First attempt: wait this long for all ``max_workers``, then start with fewer.
    #: Replacements for a lost node or process join later.
    grace_s: float = 30.0
    #: Fewer than ``min_workers`` for this long, or storage that says nothing while it is needed
    #: to resume: the run fails.
    capacity_s: float = 86400.0
    #: A worker process must be ready by then, or it is killed. One that computes gets as long
    #: again from then on, up to ten times as long in all. The bound grows by as much after each
    #: one that was not ready: a slow cluster must not restart them for ever.
    start_s: float = 60.0
    #: All members must have formed, or the attempt is fenced without blame. The bound
    #: doubles after each attempt without progress. Hangs are found much sooner.
    form_s: float = 600.0
    #: A fenced member must have left, or it is killed. A member that computes gets one more usual
    #: step: it leaves when its micro-batch ends.
    fence_s: float = 2.0
    kill_s: float = 3.0  #: A killed process must be gone, or the wait for it ends.
    read_s: float = 10.0  #: Storage must have answered, or the read is repeated.
    #: Keepers must have answered whom they reach, or the run goes on without knowing.
    probe_s: float = 3.0
    #: Members must have left as asked, or the attempt is fenced; four steps come on top.
    yield_s: float = 60.0
    survey_s: float = 10.0  #: The survey must have come, or it is asked for again.
    drain_lead_s: float = 10.0  #: A draining node is left this long before its deadline.
    #: A keeper must have answered, or it is restarted. Ray calls a keeper that a signal has
    #: stopped alive, and nothing of its trainers would be copied or stored. Among 28 busy
    #: processes on two cores a keeper answered in 2 s.
    keeper_silent_s: float = 15.0
    #: A keeper that died must be back, or its node is taken for lost. To restart one alone took
    #: 0.7 to 1.1 s, and 12 s with twenty processes to a core.
    keeper_return_s: float = 30.0
    #: First pause after a worker process failed to start; doubles each time.
    backoff_s: float = 1.0

    def as_seconds(self) -> dict[str, float]:
        """Return every bound by name."""
        return {field.name.removesuffix("_s"): getattr(self, field.name) for field in fields(self)}

    @property
    def start_s_max(self) -> float:
        """Return after how long a process that is not ready hangs, whatever it computes."""
        return self.start_s * _START_FACTOR_MAX

    def start_bound_s(self, num_failed: int) -> float:
        """Return ``start_s`` after so many processes in a row did not get ready."""
        return self.start_s * min(1 + num_failed, _START_FACTOR_MAX)

    def form_bound_s(self, num_stuck: int) -> float:
        """Return ``form_s`` after so many attempts in a row without progress."""
        return self.form_s * 2.0 ** min(num_stuck, _FORM_DOUBLINGS_MAX)

    def __post_init__(self) -> None:
        assert self.fence_s <= self.form_s, f"fence_s={self.fence_s} exceeds form_s={self.form_s}"
        assert self.grace_s <= self.capacity_s, f"grace_s={self.grace_s} exceeds capacity_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class AvoidRules:
    """When a node on which workers keep failing gets no new ones for a while."""

    #: Proven failures (crash, proven hang, failed start) within the window, by which it exceeds
    #: the best of the other nodes.
    strikes_max: int = 3
    window_s: float = 600.0  #: How long a strike counts.
    #: How long the node is avoided; shorter if the run needs it to reach its minimum. Then it is
    #: on trial for as long again: a failure has it avoided for twice as long.
    avoid_s: float = 600.0
    #: But for no longer than this. Half of the servers of a large cluster that break stay broken
    #: for 20 hours (``node_faults`` in ``tests/fixtures``), and what is repaired should not wait
    #: for much longer than it was broken.
    avoid_s_max: float = 6 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRules:
    """Everything ``machine.step`` needs besides state and event."""

    run: str  #: Name of the run.
    min_workers: int  #: Fewest workers that may train.
    #: Most workers; as many reservations are asked for, unless other runs need them.
    max_workers: int
    total_steps: int  #: The run is complete when this step is committed.
    standby_per_node: int = 0  #: Warm processes per node beyond its reservations.
    #: Commits are at multiples of this, except for the last step and for a yield. A hint that
    #: saves a read.
    checkpoint_every: int = 1
    #: Worker processes that may die at start in a row before any got ready.
    starts_failed_max: int = 20
    layout: LayoutRules = field(default_factory=LayoutRules)
    growth: GrowthRules = field(default_factory=GrowthRules)
    slow: SlowRules = field(default_factory=SlowRules)
    budgets: BudgetRules = field(default_factory=BudgetRules)
    redundancy: RedundancyRules = field(default_factory=RedundancyRules)
    avoid: AvoidRules = field(default_factory=AvoidRules)
    cadence: CadenceRules = field(default_factory=CadenceRules)
    capacity: CapacityRules = field(default_factory=CapacityRules)
    sharing: SharingRules = field(default_factory=SharingRules)
    bounds: Bounds = field(default_factory=Bounds)
    #: Speeds of links; its racks are those of the nodes. None if nobody knows.
    topology: Topology | None = None

    def __post_init__(self) -> None:
        assert 1 <= self.min_workers <= self.max_workers, (
            f"min_workers={self.min_workers} and max_workers={self.max_workers} are not ordered"
        )
        assert self.wanted(self.max_workers), (
            f"{self.layout} leaves no layout with at least "
            f"min_workers={self.min_workers} of max_workers={self.max_workers}"
        )
        assert self.checkpoint_every >= 1, f"checkpoint_every={self.checkpoint_every}"
        assert self.total_steps >= 1, f"total_steps={self.total_steps}"

    def full_layout(
        self, refused: tuple[Refused, ...] = (), num_max: int | None = None
    ) -> ParallelLayout | None:
        """Return the layout of ``num_max`` workers, by default all, that are on one node."""
        num = self.max_workers if num_max is None else num_max
        return choose(one_node(num), num, replace(self.layout, refused=refused), self.min_workers)

    def wanted(self, num_max: int, refused: tuple[Refused, ...] = ()) -> int:
        """Return how many of ``num_max`` workers would train if all could be had on one node."""
        layout = self.full_layout(refused, num_max)
        return 0 if layout is None else layout.world_size
