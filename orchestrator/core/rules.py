"""The rules of a run: sizes, bounds of waits, limits of policies. Fixed at its start."""

from dataclasses import dataclass, field, fields, replace
from typing import Final

from orchestrator.policies import (
    BudgetRules,
    CadenceRules,
    CapacityRules,
    GrowthRules,
    LayoutRules,
    Refused,
    SharingRules,
    SlowRules,
    choose,
    one_node,
)
from orchestrator.traffic import Topology
from ucp_core.layout import ParallelLayout
from workers.settings import SnapshotSettings

#: A process that is not ready after ten times the bound hangs, as does an attempt that has not
#: formed after 16 times its bound.
_START_FACTOR_MAX: Final = 10
_FORM_DOUBLINGS_MAX: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bound of every wait, in seconds, and what happens when it is reached."""

    #: The first attempt waits this long for all ``max_workers``, then starts with fewer. It does
    #: not wait for replacements of a lost node or process.
    grace_s: float = 30.0
    #: The run fails if it has fewer than ``min_workers`` for this long, or if storage does not
    #: answer for this long while it is needed to resume.
    capacity_s: float = 86400.0
    #: A worker process that is not ready by then is killed. One that computes gets the same time
    #: again, up to ten times as long in all. The bound grows by the same amount after each process
    #: that was late, so that a slow cluster does not restart processes for ever.
    start_s: float = 60.0
    #: If a member has not formed by then, the attempt is fenced and no worker is blamed. The bound
    #: doubles after each attempt without progress. Detection finds hangs much sooner.
    form_s: float = 600.0
    #: A fenced member that has not left by then is killed. A member that computes gets one more
    #: usual step: it leaves when its micro-batch ends.
    fence_s: float = 2.0
    kill_s: float = 3.0  #: The run stops waiting for a killed process after this.
    read_s: float = 10.0  #: A read without an answer from storage is repeated after this.
    #: If keepers have not reported by then which nodes they reach, the run continues without that.
    probe_s: float = 3.0
    #: If members have not left by then, plus four steps, the attempt is fenced.
    yield_s: float = 60.0
    survey_s: float = 10.0  #: A survey without an answer is requested again after this.
    drain_lead_s: float = 10.0  #: A draining node is left this long before its deadline.
    #: A keeper that is silent for this long is restarted. Ray regards a keeper that a signal
    #: stopped as alive, but it would copy and store nothing for its trainers. Among 28 busy
    #: processes on two cores a keeper answered in 2 s.
    keeper_silent_s: float = 15.0
    #: If a keeper that died is not back by then, its node counts as lost. Restarting a single
    #: keeper took 0.7 to 1.1 s, and 12 s with twenty processes per core.
    keeper_return_s: float = 30.0
    #: First pause after a worker process failed to start; it doubles each time.
    backoff_s: float = 1.0

    def as_seconds(self) -> dict[str, float]:
        """Return every bound by its name without ``_s``."""
        return {field.name.removesuffix("_s"): getattr(self, field.name) for field in fields(self)}

    @property
    def start_s_max(self) -> float:
        """Return when a process that is not ready counts as hung, even if it computes."""
        return self.start_s * _START_FACTOR_MAX

    def start_bound_s(self, num_failed: int) -> float:
        """Return the start bound after ``num_failed`` processes in a row failed to start."""
        return self.start_s * min(1 + num_failed, _START_FACTOR_MAX)

    def form_bound_s(self, num_stuck: int) -> float:
        """Return the forming bound after ``num_stuck`` attempts in a row without progress."""
        return self.form_s * 2.0 ** min(num_stuck, _FORM_DOUBLINGS_MAX)

    def __post_init__(self) -> None:
        assert self.fence_s <= self.form_s, f"fence_s={self.fence_s} exceeds form_s={self.form_s}"
        assert self.grace_s <= self.capacity_s, f"grace_s={self.grace_s} exceeds capacity_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class AvoidRules:
    """When to give a node no new workers for a while because workers keep failing on it."""

    #: A node is avoided if, within the window, it has this many more proven failures (crash, proven
    #: hang, failed start) than the best other node.
    strikes_max: int = 3
    window_s: float = 600.0  #: How long a strike counts.
    #: How long the node is avoided; shorter if the run needs it to reach its minimum. For the same
    #: time afterwards it is on trial: another failure doubles the time it is avoided.
    avoid_s: float = 600.0
    #: The longest time a node is avoided. In a large cluster half of the broken servers stay broken
    #: for 20 hours (``node_faults`` in ``tests/fixtures``), and a repaired node should not wait
    #: much longer than it was broken.
    avoid_s_max: float = 6 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRules:
    """Everything ``machine.step`` needs besides state and event."""

    run: str  #: Name of the run.
    min_workers: int  #: Fewest workers that may train.
    #: Most workers. The run requests this many reservations, unless other runs need them.
    max_workers: int
    total_steps: int  #: The run is complete when this step is committed.
    standby_per_node: int = 0  #: Warm processes per node beyond its reservations.
    #: Steps are committed at multiples of this, at the last step and at a yield. Knowing this saves
    #: a read.
    checkpoint_every: int = 1
    #: If this many worker processes in a row die at start before any is ready, the run fails.
    starts_failed_max: int = 20
    layout: LayoutRules = field(default_factory=LayoutRules)
    growth: GrowthRules = field(default_factory=GrowthRules)
    slow: SlowRules = field(default_factory=SlowRules)
    budgets: BudgetRules = field(default_factory=BudgetRules)
    snapshot: SnapshotSettings = field(default_factory=lambda: SnapshotSettings(tolerance=0))
    avoid: AvoidRules = field(default_factory=AvoidRules)
    cadence: CadenceRules = field(default_factory=CadenceRules)
    capacity: CapacityRules = field(default_factory=CapacityRules)
    sharing: SharingRules = field(default_factory=SharingRules)
    bounds: Bounds = field(default_factory=Bounds)
    #: Speeds of links; None if unknown. Its racks are replaced by those of the nodes.
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
        """Return the layout of ``num_max`` workers (default all) on one node; None without one."""
        num = self.max_workers if num_max is None else num_max
        return choose(one_node(num), num, replace(self.layout, refused=refused), self.min_workers)

    def wanted(self, num_max: int, refused: tuple[Refused, ...] = ()) -> int:
        """Return how many of ``num_max`` workers would train if one node had room for all."""
        layout = self.full_layout(refused, num_max)
        return 0 if layout is None else layout.world_size
