"""Say which layouts a run could have on hardware that is not here (``everstep plan --gpus``)."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from orchestrator.config import RunConfig, job_of
from orchestrator.driver.traffic_plan import TrafficPlan, plan_traffic
from orchestrator.errors import ConfigError
from orchestrator.policies import (
    GPUS,
    MIXTURES,
    Forecast,
    Gpu,
    Job,
    LayoutRules,
    choose,
    forecast,
    forecasts,
    rooms_of,
)
from ucp_core.numerics import format_bytes
from workers.models import PRESETS
from workers.settings import model_shape

#: Below this share two layouts are as fast, as far as data sheets can tell.
_ALIKE = 0.03
_NUM_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPlan:
    """The layouts of all GPUs, the best first, and the one that follows the loss of a node.

    Attributes:
        job: The model, and the batch that it trains on.
        gpu: Kind of GPU, as ``GPUS`` names it.
        layouts: Each with why it is taken or not.
        after_loss: None if the run would wait for another node.
        load_s: How long the workers would take to load their shares then, by the network.
        traffic: What the best layout sends over the links of ``topology``; None without one.
    """

    job: Job
    num_parameters: int
    gpu: str
    num_nodes: int
    node_size: int
    layouts: tuple[tuple[Forecast, str], ...]
    after_loss: Forecast | None
    load_s: float
    traffic: TrafficPlan | None

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        after = self.after_loss
        return {
            "gpu": self.gpu,
            "nodes": self.num_nodes,
            "gpus_per_node": self.node_size,
            "parameters": self.num_parameters,
            "layouts": [{**_values(one), "why": why} for one, why in self.layouts],
            "after_loss": None if after is None else {**_values(after), "load_s": self.load_s},
            "traffic": None if self.traffic is None else self.traffic.to_json(),
        }


def plan_layouts(
    config: RunConfig, gpus: str, gpu: str, model: str | None, *, recomputes: bool
) -> LayoutPlan:
    """Return the layouts that ``gpus`` of a kind could train in.

    Args:
        config: Batch, sequence length, precision and, without ``model``, the model.
        gpus: Nodes and GPUs of each, as ``8x8``.
        gpu: A key of ``GPUS``.
        model: A preset, with or without "llama-" before it, or a key of ``MIXTURES``.
        recomputes: Whether layers are computed again in the backward pass.

    Raises:
        ConfigError: One of these is unknown.
    """
    sizes = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", gpus)
    if sizes is None:
        raise ConfigError(f"--gpus {gpus}: write nodes x GPUs of each, as 8x8")
    if gpu not in GPUS:
        raise ConfigError(f"--gpu {gpu}: known are {', '.join(GPUS)}")
    job = replace(_job(config, model), recomputes=recomputes)
    num_nodes, node_size = map(int, sizes.groups())
    found = forecasts(job, GPUS[gpu], num_nodes, node_size)
    best = found[0]
    after = _after_loss(job, best, GPUS[gpu], num_nodes, node_size)
    rate = GPUS[gpu].network_gbit_s / 8 * 1e9
    return LayoutPlan(
        job=job,
        num_parameters=job.num_parameters,
        gpu=gpu,
        num_nodes=num_nodes,
        node_size=node_size,
        layouts=tuple((one, _why(one, best)) for one in found[:_NUM_SHOWN]),
        after_loss=after,
        load_s=0.0 if after is None else after.state_bytes / rate,
        traffic=plan_traffic(config, job, best.layout, node_size, best.state_bytes),
    )


def _job(config: RunConfig, model: str | None) -> Job:
    if model is None:
        if config.run.script or config.model.folder:
            raise ConfigError("the model is the script's own: name its sizes by --model llama-8b")
        return job_of(config, model_shape(config.model))
    if model in MIXTURES:
        shape, experts = MIXTURES[model]
        return replace(job_of(config, shape), experts=experts)
    preset = model.removeprefix("llama-")
    if preset not in PRESETS:
        raise ConfigError(f"--model {model}: known are {', '.join((*PRESETS, *MIXTURES))}")
    return job_of(config, PRESETS[preset])


def _after_loss(
    job: Job, best: Forecast, gpu: Gpu, num_nodes: int, node_size: int
) -> Forecast | None:
    layout, num_left = best.layout, (num_nodes - 1) * node_size
    rules = LayoutRules(
        cp=layout.cp,
        tp=layout.tp,
        pp=layout.pp,
        ep=layout.ep,
        num_micro_batches=job.num_micro_batches,
    )
    chosen = choose(rooms_of([node_size] * (num_nodes - 1)), num_left, rules)
    found = None if chosen is None else forecast(chosen, job, gpu, node_size)
    return found if found is not None and found.fits else None


def _why(one: Forecast, best: Forecast) -> str:
    if not one.fits:
        return f"needs {format_bytes(one.memory_bytes)}"
    if one is best:
        return "the fastest that fits"
    slower = one.step_s / best.step_s - 1
    if slower < _ALIKE:
        return "as fast, with other memory"
    causes = {"stages wait": one.bubble - best.bubble, "passes repeat": one.idle - best.idle}
    cause = max(causes, key=causes.__getitem__)
    return f"{slower:.0%} slower: {cause if causes[cause] > _ALIKE else 'it sends more'}"


def _values(one: Forecast) -> dict[str, Any]:
    return {**asdict(one), "layout": str(one.layout), "fits": one.fits}
