"""Hours of the spot market, replayed by the planner and by an oracle that knows what comes. Pure.

Both pay for each change: the pause that was measured, and the time to load by the network what a
worker has in the new layout at most. The times of steps and the layouts that fit are the forecast
for GPUs; the planner does not know it, but sees the steps of what it trained, and what was refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from orchestrator.policies import (
    Forecast,
    Gpu,
    GrowthRules,
    Job,
    LayoutRules,
    Refused,
    choose,
    forecast,
    growth,
    memory_bytes,
    rooms_of,
    step_ratio,
)
from orchestrator.policies.layout import candidates
from orchestrator.policies.saving import FaultsSeen
from tests.support.spot_traces import Change, Costs
from ucp_core.layout import ParallelLayout

#: The second step of an attempt is the first that says how long they take.
_SEEN_STEPS = 2
_STEPS_LEFT = 1_000_000


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some seconds with the same nodes; ``is_loss`` if some that were there before are not."""

    begin_s: float
    end_s: float
    num_nodes: int
    is_loss: bool


@dataclass(frozen=True)
class Cluster:
    """Nodes with a GPU each, and what trains on them.

    Attributes:
        wish: The layout that the user asks for.
        costs: In seconds.
    """

    job: Job
    gpu: Gpu
    wish: ParallelLayout
    costs: Costs

    @property
    def rules(self) -> LayoutRules:
        """Return what the controller knows before the first step."""
        wish, num = self.wish, self.job.num_micro_batches
        return LayoutRules(
            dp_replicate=wish.dp_replicate, tp=wish.tp, pp=wish.pp, num_micro_batches=num
        )

    @lru_cache  # noqa: B019 - there are few clusters, and tests end
    def forecast(self, layout: ParallelLayout) -> Forecast:
        """Return what a layout really does.

        One that would have to sum gradients after each pass is as good as one that does not fit:
        over the network of these machines a pass would take several times as long.
        """
        found = forecast(layout, self.job, self.gpu, node_size=1)
        needed = memory_bytes(layout, self.job)
        return replace(found, memory_bytes=needed) if found.reduces else found

    def pause_s(self, layout: ParallelLayout, *, is_loss: bool) -> float:
        """Return how long all stand still to change to a layout."""
        load_s = self.forecast(layout).state_bytes / (self.gpu.network_gbit_s / 8 * 1e9)
        return (self.costs.loss if is_loss else self.costs.growth) + load_s

    @lru_cache  # noqa: B019 - as above
    def layouts(self, num_nodes: int, *, any_stages: bool) -> tuple[ParallelLayout, ...]:
        """Return the layouts that so many nodes can train in, of the wish's degrees or any."""
        degrees = candidates(self.rules)
        if any_stages:
            layers = self.job.shape.num_layers
            degrees = tuple(ParallelLayout(pp=pp) for pp in range(1, layers + 1))
        found = (
            replace(one, dp_shard=dp_shard)
            for one in degrees
            for dp_shard in range(1, num_nodes // one.world_size + 1)
        )
        return tuple(
            one for one in found if self.job.num_passes(one) >= one.pp and self.forecast(one).fits
        )


def stretches(changes: Sequence[Change], end_s: float, join_s: float) -> list[Stretch]:
    """Cut a trace in seconds, from 0.0 on, where nodes leave, or came ``join_s`` ago."""
    moved: dict[float, int] = {}
    for before, after in pairwise(changes):
        num = after.num_nodes - before.num_nodes
        at_s = after.at + (join_s if num > 0 else 0.0)
        moved[at_s] = moved.get(at_s, 0) + num
    found = [Stretch(0.0, end_s, changes[0].num_nodes, is_loss=False)]
    for at_s, num in sorted(moved.items()):
        if at_s < end_s:
            num_nodes = found[-1].num_nodes + num
            found[-1] = replace(found[-1], end_s=at_s)
            found.append(Stretch(at_s, end_s, num_nodes, is_loss=num < 0))
    return found


#: Returns the layout that it would take, given the nodes and the rules with what was seen.
Choice = Callable[[int, LayoutRules], ParallelLayout | None]


def by_planner(num_nodes: int, rules: LayoutRules) -> ParallelLayout | None:
    """Choose as a run does."""
    return choose(rooms_of([1] * num_nodes), num_nodes, rules)


def by_degrees(num_nodes: int, rules: LayoutRules) -> ParallelLayout | None:
    """Choose as a run does that keeps its degrees."""
    return by_planner(num_nodes, replace(rules, fixed=("pp", "dp_replicate", "tp")))


def unlearned(num_nodes: int, rules: LayoutRules) -> ParallelLayout | None:
    """Choose as a run does that does not look at its steps."""
    return by_planner(num_nodes, replace(rules, steps=()))


class Replay:
    """One run on a trace."""

    def __init__(self, cluster: Cluster, choice: Choice) -> None:
        self._cluster, self._choice = cluster, choice
        self._rules, self._growth = cluster.rules, GrowthRules()
        self._layout: ParallelLayout | None = None
        self._faults = FaultsSeen()
        self._now_s = self._trained_s = self._pause_s = 0.0
        self._steps = 0.0

    def run(self, trace: Sequence[Stretch]) -> float:
        """Return how many steps the run makes."""
        for stretch in trace:
            if stretch.is_loss:
                self._faults = self._faults._replace(num_node=self._faults.num_node + 1)
            if stretch.is_loss or self._layout is None:
                self._form(stretch.num_nodes, is_loss=stretch.is_loss)
            while self._now_s < stretch.end_s:
                self._train_until(self._next_look_s(stretch))
        return self._steps

    def _form(self, num_nodes: int, *, is_loss: bool) -> None:
        """Begin the next attempt; one whose workers lack memory is refused in its first step."""
        self._trained_s = self._now_s
        while layout := self._choice(num_nodes, self._rules):
            self._pause_s = self._cluster.pause_s(layout, is_loss=is_loss)
            self._trained_s += self._pause_s
            if self._cluster.forecast(layout).fits:
                break
            refused = (*self._rules.refused, Refused(layout, "", "memory"))
            self._rules = replace(self._rules, refused=refused)
        self._layout = layout

    def _next_look_s(self, stretch: Stretch) -> float:
        """Change the layout if that pays now; return when to look again."""
        if self._layout is None:
            return stretch.end_s
        step_s = self._cluster.forecast(self._layout).step_s
        seen_s = self._trained_s + _SEEN_STEPS * step_s
        if self._now_s < seen_s:
            return min(seen_s, stretch.end_s)
        steps = {**dict(self._rules.steps), self._layout: step_s}
        self._rules = replace(self._rules, steps=tuple(steps.items()))
        then = self._choice(stretch.num_nodes, self._rules)
        if then is None or then == self._layout:
            return stretch.end_s
        num_members = self._layout.world_size
        facts = growth.GrowthFacts(
            now_s=self._now_s,
            num_members=num_members,
            num_after=then.world_size,
            step_ratio=step_ratio(then, self._layout, self._rules),
            num_coming=0,
            waiting_since_s=stretch.begin_s,
            last_change_s=self._trained_s,
            step_s=step_s,
            num_steps_left=_STEPS_LEFT,
            pause_s=self._pause_s,
            next_fault_s=growth.next_fault_s(self._faults, self._now_s, num_members, self._growth),
        )
        decision = growth.decide(facts, self._growth)
        if not decision.grow:
            return min(decision.retry_at_s, stretch.end_s)
        self._form(stretch.num_nodes, is_loss=False)
        return self._now_s

    def _train_until(self, end_s: float) -> None:
        if self._layout is not None:
            trained_s = max(0.0, end_s - max(self._now_s, self._trained_s))
            self._steps += trained_s / self._cluster.forecast(self._layout).step_s
        self._now_s = end_s


def greedy(cluster: Cluster, trace: Sequence[Stretch]) -> float:
    """Return how many steps a run makes that takes the fastest layout at once, at any price."""
    before, steps = None, 0.0
    for stretch in trace:
        layouts = cluster.layouts(stretch.num_nodes, any_stages=False)
        layout = min(layouts, key=lambda one: cluster.forecast(one).step_s, default=None)
        if layout is not None:
            stays = layout == before and not stretch.is_loss
            pause_s = 0.0 if stays else cluster.pause_s(layout, is_loss=stretch.is_loss)
            trained_s = max(0.0, stretch.end_s - stretch.begin_s - pause_s)
            steps += trained_s / cluster.forecast(layout).step_s
        before = layout
    return steps


def oracle(cluster: Cluster, trace: Sequence[Stretch], *, any_stages: bool) -> float:
    """Return the most steps that a run could make on a trace, all of which it knows.

    By dynamic programming over the layout in each stretch: a change in the middle of one would be
    better at its begin.
    """
    best: dict[ParallelLayout | None, float] = {None: 0.0}
    for stretch in trace:
        most, length_s = max(best.values()), stretch.end_s - stretch.begin_s
        made: dict[ParallelLayout | None, float] = {None: most}
        for layout in cluster.layouts(stretch.num_nodes, any_stages=any_stages):
            step_s = cluster.forecast(layout).step_s
            pause_s = cluster.pause_s(layout, is_loss=stretch.is_loss)
            made[layout] = most + max(0.0, length_s - pause_s) / step_s
            if layout in best and not stretch.is_loss:
                made[layout] = max(made[layout], best[layout] + length_s / step_s)
        best = made
    return max(best.values())
