"""Compute the layouts of a run on other hardware (``everstep plan --gpus``)."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from orchestrator.config import RunConfig, job_of, load_for_gpus
from orchestrator.driver.traffic_plan import TrafficPlan, plan_traffic
from orchestrator.errors import ConfigError
from orchestrator.policies import (
    AWAY_H,
    GPUS,
    MIXTURES,
    Asked,
    Forecast,
    Job,
    Nodes,
    Weighed,
    forecasts,
    weigh,
)
from ucp_core.numerics import format_bytes
from workers.models import PRESETS
from workers.settings import model_shape

#: With a smaller relative difference, two layouts are equally fast as far as data sheets show.
_ALIKE = 0.03
_NUM_SHOWN = 8
_HOURS_FEW = 48
_AXES = ("pp", "dp_replicate", "cp", "tp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPlan:
    """The layouts on all GPUs, the best first, and the best one after the loss of a node."""

    job: Job  #: The model, and the batch that it trains on.
    num_parameters: int
    gpu: str  #: Kind of GPU, a key of ``GPUS``.
    num_nodes: int
    node_size: int
    layouts: tuple[tuple[Forecast, str], ...]  #: The layouts, each with why it is chosen or not.
    kept: str  #: The settings that the configuration fixes, by key; "" for none.
    after_loss: Forecast | None  #: None if the run would wait for another node.
    load_s: float  #: How long workers would then load their shares over the network, in seconds.
    loss_every_h: float  #: Mean hours between two losses of a node.
    recheck_cost: str  #: Cost of ``train.recheck`` in the best layout; "" if it is off.
    #: Traffic of the best layout over the links of ``topology``; None without one.
    traffic: TrafficPlan | None

    @property
    def loss_text(self) -> str:
        """Return, for people, what the loss of a node costs."""
        hours = self.loss_every_h
        often = f"{hours / 24:,.0f} days" if hours > _HOURS_FEW else f"{hours:,.0f} hours"
        text = (
            f"at the rate of Llama 3's training a node is lost about every {often}; until "
            "one is back"
        )
        after, before = self.after_loss, self.layouts[0][0]
        if after is None:
            return f"{text} (say {AWAY_H:.0f} hours), the run waits"
        slower = after.step_s / before.step_s - 1
        return f"{text} (say {AWAY_H:.0f} hours), steps take {slower:.0%} longer"

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        after = self.after_loss
        return {
            "gpu": self.gpu,
            "nodes": self.num_nodes,
            "gpus_per_node": self.node_size,
            "parameters": self.num_parameters,
            "kept": self.kept,
            "layouts": [{**_values(one), "why": why} for one, why in self.layouts],
            "after_loss": None if after is None else {**_values(after), "load_s": self.load_s},
            "loss_every_h": self.loss_every_h,
            "recheck_cost": self.recheck_cost,
            "traffic": None if self.traffic is None else self.traffic.to_json(),
        }


def plan_layouts(
    target: str,
    overrides: Sequence[str],
    *,
    gpus: str,
    gpu: str,
    model: str | None = None,
    recomputes: bool | None = None,
) -> LayoutPlan:
    """Return the layouts in which ``gpus`` of a kind could train.

    Args:
        target: A configuration: batch, sequence length, precision, ``parallel`` and, without
            ``model``, the model. Its machines are ignored.
        overrides: As ``section.key=value``.
        gpus: Nodes and GPUs of each, as ``8x8``.
        gpu: A key of ``GPUS``.
        model: A preset, with or without "llama-" before it, or a key of ``MIXTURES``.
        recomputes: Whether layers are recomputed in the backward pass; None for the better choice.

    Raises:
        ConfigError: One of these is unknown or wrong, or no layout fits what the configuration
            fixes.
    """
    sizes = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", gpus)
    if sizes is None:
        raise ConfigError(f"--gpus {gpus}: write nodes x GPUs of each, as 8x8")
    if gpu not in GPUS:
        raise ConfigError(f"--gpu {gpu}: the known ones are {', '.join(GPUS)}")
    num_nodes, node_size = map(int, sizes.groups())
    config, named, job = _loaded(target, overrides, model, num_nodes * node_size)
    job = replace(job, recomputes=bool(recomputes))
    kept = _kept(config, named)
    asked = Asked(
        degrees=kept,
        reshards="parallel.reshard_after_forward" not in named,
        recomputes=recomputes is None,
        stages="parallel.stages_per_worker" not in named,
    )
    found = forecasts(job, GPUS[gpu], num_nodes, node_size, asked)
    text = " x ".join(f"parallel.{axis}={degree}" for axis, degree in kept.items())
    if not found:
        raise ConfigError(_why_none(config, kept, text, num_nodes, node_size))
    fixed, least = config.parallel.fixed, config.workers.min
    nodes = Nodes(gpu=GPUS[gpu], num=num_nodes, size=node_size, fixed=fixed, num_min=least)
    weighed = weigh(found, job, nodes)
    best, after = weighed[0].forecast, weighed[0].after
    return LayoutPlan(
        job=job,
        num_parameters=job.num_parameters,
        gpu=gpu,
        num_nodes=num_nodes,
        node_size=node_size,
        layouts=tuple((one.forecast, _why(one, weighed)) for one in weighed[:_NUM_SHOWN]),
        kept=text,
        after_loss=after,
        load_s=0.0 if after is None else after.state_bytes / (GPUS[gpu].network_gbit_s / 8 * 1e9),
        loss_every_h=nodes.loss_every_h,
        recheck_cost=config.train.recheck_cost(best.layout.dp),
        traffic=plan_traffic(config, job, best.layout, node_size, best.state_bytes),
    )


def _loaded(
    target: str, overrides: Sequence[str], model: str | None, num_workers: int
) -> tuple[RunConfig, frozenset[str], Job]:
    """Return the configuration for these machines, the keys that it names, and the job."""
    preset = (model or "").removeprefix("llama-")
    mixture = MIXTURES.get(preset)
    sizes: dict[str, Any] | None = None
    if mixture is not None:
        # Any preset works: each of its sizes is overridden.
        sizes = {"preset": "8b", **asdict(mixture.shape)}
        del sizes["rope_theta"]
    elif preset in PRESETS:
        sizes = {"preset": preset}
    elif model is not None:
        raise ConfigError(f"--model {model}: the known ones are {', '.join((*PRESETS, *MIXTURES))}")
    config, named = load_for_gpus(
        target,
        overrides,
        num_workers=num_workers,
        model=sizes,
        num_experts=0 if mixture is None else mixture.experts.num,
    )
    if config.run.script or config.model.folder:
        raise ConfigError("the model is the script's own: name its sizes by --model llama-8b")
    job = job_of(config, model_shape(config.model))
    if mixture is not None or "run.script" in named:
        job = replace(job, chunks_loss=False)
    if mixture is not None:
        experts = mixture.experts
        if experts.ffn_dim == mixture.shape.ffn_dim:
            experts = replace(experts, ffn_dim=job.shape.ffn_dim)
        job = replace(job, experts=experts, attention=mixture.attention)
    return config, named, job


def _kept(config: RunConfig, named: frozenset[str]) -> dict[str, int]:
    """Return the degrees that the configuration names, fixes or needs, by axis."""
    parallel = config.parallel
    return {
        axis: getattr(parallel, axis)
        for axis in _AXES
        if f"parallel.{axis}" in named
        or axis in parallel.fixed
        or (config.train.recheck and axis in ("pp", "tp"))
    }


def _why_none(
    config: RunConfig, kept: dict[str, int], text: str, num_nodes: int, node_size: int
) -> str:
    num_gpus, multiple = num_nodes * node_size, prod(kept.values())
    if node_size % kept.get("tp", 1):
        return f"parallel.tp: {kept['tp']} does not divide the {node_size} GPUs of a node"
    if num_gpus % multiple:
        return f"{text} takes GPUs in multiples of {multiple}, and there are {num_gpus}"
    return (
        f"no layout of {num_gpus} GPUs has {text} with train.global_batch="
        f"{config.train.global_batch} and train.micro_batch={config.train.micro_batch}: leave out "
        "a key of parallel, or give each pipeline as many micro-batches as it has stages"
    )


def _why(one: Weighed, weighed: Sequence[Weighed]) -> str:
    best, found = weighed[0], one.forecast
    if not found.fits:
        return f"needs {format_bytes(found.memory_bytes)}"
    fastest = min((each.forecast.step_s for each in weighed if each.forecast.fits), default=0.0)
    if one is best:
        if found.step_s == fastest:
            return "the fastest that fits"
        return (
            "the fastest, counting lost nodes" if one.after else "the fastest without short parts"
        )
    if found.is_short and not best.forecast.is_short:
        return "cuts sequences into short parts"
    if one.after is None and best.after is not None:
        return "waits without a node"
    slower = found.step_s / best.forecast.step_s - 1
    if slower <= 0:
        return "slower, counting lost nodes"
    if slower < _ALIKE:
        return "as fast, but needs other memory"
    first = best.forecast
    causes = {"stages wait": found.bubble - first.bubble, "passes repeat": found.idle - first.idle}
    cause = max(causes, key=causes.__getitem__)
    return f"{slower:.0%} slower: {cause if causes[cause] > _ALIKE else 'it sends more'}"


def _values(one: Forecast) -> dict[str, Any]:
    return {**asdict(one), "layout": str(one.layout), "fits": one.fits}
