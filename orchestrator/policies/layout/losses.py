"""The cost of losing a node in a layout, and the best layouts with that taken into account."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from orchestrator.policies.layout.candidates import LayoutRules, Refused
from orchestrator.policies.layout.choose import choose
from orchestrator.policies.layout.fit import rooms_of
from orchestrator.policies.layout.forecasts import Forecast, forecast
from orchestrator.policies.layout.hardware import Gpu, Job

#: Llama 3 was interrupted 419 times in 54 days on 16,384 GPUs (arXiv 2407.21783, 3.3.4); nearly
#: every time a machine was removed.
FAILURES_PER_GPU_HOUR: Final = 419 / (54 * 24 * 16_384)
#: Hours until a machine is repaired or replaced.
AWAY_H: Final = 4.0
#: How many layouts are weighed: slower ones would not come first, whatever a loss costs them.
_NUM_WEIGHED: Final = 40
#: How many layouts are tried for the remaining nodes.
_NUM_TRIED: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Machines of one kind, and how a run on them may change."""

    gpu: Gpu
    num: int  #: Number of machines.
    size: int  #: GPUs of each.
    fixed: tuple[str, ...] = ()  #: Axes that keep their degree with fewer workers.
    num_min: int = 1  #: Workers below which the run waits.

    @property
    def loss_every_h(self) -> float:
        """Return the mean number of hours between two losses of a node."""
        return 1 / (FAILURES_PER_GPU_HOUR * self.num * self.size)

    @property
    def away(self) -> float:
        """Return the share of the time in which at least one node is away."""
        return 1 - math.exp(-AWAY_H / self.loss_every_h)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """A layout, and the layout to which the run changes when it loses a node."""

    forecast: Forecast
    after: Forecast | None  #: None if the run would wait for another node.
    expected_s: float  #: The mean step time, with the share of time in which a node is away.


def weigh(found: Sequence[Forecast], job: Job, nodes: Nodes) -> list[Weighed]:
    """Return the layouts of ``forecasts``, the best first.

    Layouts that can continue without a node come before others; among equals, the fastest is first.
    """
    fits = [one for one in found if one.fits][:_NUM_WEIGHED]
    weighed = [_weighed(one, job, nodes) for one in fits]
    weighed.sort(key=lambda one: (one.forecast.is_short, one.after is None, one.expected_s))
    rest = (one for one in found if one not in fits)
    return [*weighed, *(Weighed(forecast=one, after=None, expected_s=one.step_s) for one in rest)]


def _weighed(one: Forecast, job: Job, nodes: Nodes) -> Weighed:
    after = after_loss(one, job, nodes)
    if after is None:
        return Weighed(forecast=one, after=None, expected_s=one.step_s / (1 - nodes.away))
    expected_s = (1 - nodes.away) * one.step_s + nodes.away * after.step_s
    return Weighed(forecast=one, after=after, expected_s=expected_s)


def after_loss(one: Forecast, job: Job, nodes: Nodes) -> Forecast | None:
    """Return the layout that a run uses without one node; None if it waits for a replacement.

    As a run does, try the chosen layout, and refuse it if it does not fit.
    """
    layout, num_left = one.layout, (nodes.num - 1) * nodes.size
    rules = LayoutRules(
        dp_replicate=layout.dp_replicate,
        cp=layout.cp,
        tp=layout.tp,
        pp=layout.pp,
        ep=layout.ep,
        stages_per_worker=one.stages_per_worker,
        fixed=nodes.fixed,
        num_micro_batches=job.num_micro_batches,
    )
    rooms = rooms_of([nodes.size] * (nodes.num - 1))
    same = replace(
        job,
        reshards=one.reshards,
        recomputes=one.recomputes,
        stages_per_worker=one.stages_per_worker,
    )
    for _ in range(_NUM_TRIED):
        chosen = choose(rooms, num_left, rules, nodes.num_min) if num_left else None
        if chosen is None:
            return None
        found = forecast(chosen, same, nodes.gpu, nodes.size)
        if found.fits:
            return found
        refused = Refused(chosen, "", "it does not fit")
        rules = replace(rules, refused=(*rules.refused, refused))
    return None
