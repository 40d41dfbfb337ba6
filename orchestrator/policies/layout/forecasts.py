"""Forecast the memory and step time of a layout on GPUs that are not here.

Step times assume that a GPU reaches a usual share of its peak, so their order is more reliable than
their values.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Final

from orchestrator.policies.layout.hardware import BF16_BYTES, Gpu, Job
from orchestrator.policies.layout.memory import memory_bytes
from ucp_core.layout import ParallelLayout
from workers.models import ModelShape
from workers.settings import USABLE_MEMORY

#: Bytes per parameter in a checkpoint, which has no gradients.
SAVED_BYTES: Final = 4 + 4 + 4
#: Cutting a sequence pays only if its parts have at least this many tokens: Llama 3 cut 131,072
#: tokens into 16 parts and did not cut 8,192 (arXiv 2407.21783, table 4).
PART_TOKENS: Final = 8192
#: Seconds that each machine of a ring adds to a gather or a sum (NCCL's tuning.cc: LL128 over a
#: network).
_HOP_S: Final = 4e-6
#: With more stages per worker the bubble is hardly smaller, and more data is sent.
_STAGES_MAX: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The expected memory and speed of a layout."""

    layout: ParallelLayout
    memory_bytes: int  #: The least memory that each worker needs.
    room_bytes: int  #: The memory that a GPU has for tensors.
    step_s: float  #: Duration of a step.
    mfu: float  #: Share of the GPUs' peak that the matrix products of the model use.
    bubble: float  #: Share of the step in which a stage waits for others.
    idle: float  #: Share of passes that repeat a micro-batch because there are fewer than ranks.
    #: Each worker's share of a checkpoint: the most that a change of layout moves.
    state_bytes: int
    is_short: bool  #: Whether the parts of sequences are too short for cutting to pay.
    reshards: bool  #: These four are as in ``Job``.
    reduces: bool
    recomputes: bool
    stages_per_worker: int

    @property
    def fits(self) -> bool:
        """Return whether a worker has enough memory."""
        return self.memory_bytes <= self.room_bytes

    @property
    def order(self) -> tuple[float, ...]:
        """Return the sort key: whether it fits, whether cutting pays, its expected step time."""
        return (0, self.is_short, self.step_s) if self.fits else (1, 0, self.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The properties that all compared layouts share, and those that may be chosen for each."""

    degrees: Mapping[str, int] = field(default_factory=dict)  #: By axis; the other axes are chosen.
    reshards: bool = False  #: Whether ``reshards`` may be chosen; otherwise it is as in the job.
    recomputes: bool = False  #: The same for ``recomputes``.
    stages: bool = False  #: The same for the stages of each worker.


def forecast(layout: ParallelLayout, job: Job, gpu: Gpu, node_size: int) -> Forecast:
    """Return the forecast of a layout on nodes of ``node_size`` such GPUs.

    Traffic of weights overlaps with the passes; traffic of activations does not.
    """
    room = int(gpu.memory_gb * 1e9 * USABLE_MEMORY)
    needed = memory_bytes(layout, job)
    if needed > room and job.reduces is None:
        least = replace(job, reduces=True)
        if memory_bytes(layout, least) <= room:
            job, needed = least, memory_bytes(layout, least)
    num_passes, num_waited = job.num_passes(layout), _waited(layout, job)
    step_s = _step_s(layout, job, gpu, node_size)
    flops = 6 * job.num_micro_batches * job.num_tokens * (job.num_used + _pairs(job))
    shards = layout.dp_shard * layout.cp
    return Forecast(
        layout=layout,
        memory_bytes=needed,
        room_bytes=room,
        step_s=step_s,
        mfu=flops / (step_s * layout.world_size * gpu.tflops * 1e12),
        bubble=num_waited / (num_passes + num_waited),
        idle=1 - job.num_micro_batches / (num_passes * layout.dp),
        state_bytes=job.num_parameters * SAVED_BYTES // (shards * layout.tp * layout.pp),
        is_short=layout.cp > 1 and job.sequence_length < layout.cp * PART_TOKENS,
        reshards=job.reshards,
        reduces=bool(job.reduces),
        recomputes=job.recomputes,
        stages_per_worker=job.stages(layout),
    )


def _step_s(layout: ParallelLayout, job: Job, gpu: Gpu, node_size: int) -> float:
    """Return how long a step takes: its passes, and the work that is done once a step.

    The gathers and sums of a pass overlap with its own half, forward or backward.
    """
    num_passes, shards = job.num_passes(layout), layout.dp_shard * layout.cp
    sent = sent_bytes(layout, job)
    within_s, across_s = gpu.node_gb_s * 1e9, gpu.network_gbit_s / 8 * 1e9
    inner = layout.tp * layout.cp

    def rate(num_ranks: int) -> float:
        return within_s if num_ranks <= node_size else across_s

    forward = 1 / 4 if job.recomputes else 1 / 3
    pass_s = _products_s(layout, job, gpu)
    pass_s += (
        sent["tp"] / within_s
        + sent["pp"] / across_s
        + sent["cp"] / rate(inner)
        + sent["ep"] / rate(inner * layout.ep)
    ) / num_passes
    forward_s, backward_s = pass_s * forward, pass_s * (1 - forward)
    hops = shards * layout.tp / node_size if shards * layout.tp > node_size else 0
    called_s = (job.num_layers(layout) + 1) * hops * _HOP_S
    part = max(job.foreign(layout, rank) for rank in {0, layout.pp - 1})
    gather_s = part * job.compute_bytes / rate(layout.tp * shards) + called_s
    sum_s = part * 4 / rate(layout.tp * shards) + called_s
    copies_s = sent["dp_replicate"] / across_s
    again_s = gather_s if job.reshards else 0.0
    each_s = max(forward_s, again_s)
    first_s = max(forward_s, gather_s) - each_s
    is_each = bool(job.reduces) or job.in_tree
    back_s = max(backward_s, again_s + sum_s * is_each)
    last_s = max(backward_s, again_s + sum_s + copies_s) - back_s
    return (each_s + back_s) * (num_passes + _waited(layout, job)) + first_s + last_s


def _waited(layout: ParallelLayout, job: Job) -> float:
    """Return the length of a stage's wait in a step, in passes."""
    return (layout.pp - 1) / job.stages(layout)


def _pairs(job: Job) -> int:
    """Return the products of each token with other tokens; causal attention needs half of them."""
    return job.shape.num_layers * job.width * job.sequence_length


def _products_s(layout: ParallelLayout, job: Job, gpu: Gpu) -> float:
    """Return how long the matrix products of a pass take on the slowest rank.

    The backward pass counts twice the forward pass, and each product two operations. Attention sees
    half of all pairs. If heads cannot be distributed over the parts of sequences, the last part has
    nearly twice as many pairs.
    """
    pairs = job.width * job.sequence_length
    if not _shares_heads(layout, job.shape):
        pairs = pairs * (2 * layout.cp - 1) // layout.cp
    # Narrow products reach a smaller share: experts of 2,048 that tp cuts are several times slower
    # than whole ones (arXiv 2504.14960, table 3: 8.7 to 28.8 % of the peak).
    pairs += job.narrow(layout.tp) if job.experts is not None else 0
    if layout.pp == 1:
        used = job.num_used + job.shape.num_layers * pairs
    else:
        heads = [*[0] * (layout.pp - 1), job.embedding]
        rows = zip(job.layers(layout), heads, strict=True)
        used = max(num * (job.used_block + pairs) + head for num, head in rows)
    flops = (8 if job.recomputes else 6) * job.num_tokens * used
    peak = gpu.tflops * 1e12 * BF16_BYTES / job.compute_bytes
    return flops / (peak * gpu.reached * layout.tp * layout.cp)


def _shares_heads(layout: ParallelLayout, shape: ModelShape) -> bool:
    return not (
        shape.num_heads // layout.tp % layout.cp or shape.num_kv_heads // layout.tp % layout.cp
    )


def sent_bytes(layout: ParallelLayout, job: Job) -> dict[str, float]:
    """Return how many bytes each worker sends on each axis in a step; sums use rings.

    For ``pp``, count what a middle stage sends, half of it each way.
    """
    shape, num_passes, tp, cp = job.shape, job.num_passes(layout), layout.tp, layout.cp
    num_layer_passes = job.num_layers(layout) * num_passes
    value_bytes = job.num_tokens // cp * job.compute_bytes
    stream_bytes = value_bytes * shape.dim
    kv_dim = shape.num_kv_heads * shape.head_dim
    # Queries, keys, values and outputs are exchanged; or keys and values of all parts are gathered.
    width = 2 * (shape.dim + kv_dim) / cp if _shares_heads(layout, shape) else 2 * kv_dim
    num_used = job.experts.num_used if job.experts is not None else 0
    num_gathers = 2 * num_passes if job.reshards else 1
    num_sums = num_passes if job.reduces or job.in_tree else 1
    ends = {0, layout.pp - 1}
    part, expert_part = (
        max(each[kind] for each in (job.foreign_parts(layout, rank) for rank in ends))
        for kind in (0, 1)
    )
    whole = max(job.whole(layout, rank) for rank in ends)
    per_parameter = num_gathers * job.compute_bytes + 4 * num_sums
    shards, copies = layout.dp_shard * cp, layout.dp_replicate
    # Two sums forward and two backward in each layer; recomputing repeats the forward ones.
    per_layer = 6 if job.recomputes else 4
    handed = stream_bytes / (tp if job.cuts_sequences else 1)
    return {
        "tp": per_layer * num_layer_passes * 2 * (tp - 1) / tp * stream_bytes,
        "pp": 2 * job.stages(layout) * handed * num_passes if layout.pp > 1 else 0.0,
        "cp": 2 * num_layer_passes * (cp - 1) * width / tp * value_bytes,
        # To the experts and back, forward and backward; each tensor-parallel rank sends a part.
        "ep": per_layer * num_layer_passes * num_used * (1 - 1 / layout.ep) * stream_bytes / tp,
        "dp_shard": part * per_parameter,
        "efsdp": expert_part * per_parameter,
        "dp_replicate": 2 * (copies - 1) / copies * 4 * whole / shards,
    }


def forecasts(
    job: Job, gpu: Gpu, num_nodes: int, node_size: int, asked: Asked | None = None
) -> list[Forecast]:
    """Return a forecast for each layout that uses all GPUs, with its best choices, best first."""
    asked = asked or Asked()
    found = []
    for layout in _layouts(job, num_nodes * node_size, node_size, asked.degrees):
        ways: list[Forecast] = []
        for each in _choices(job, layout, asked):
            # A layout that fits without recomputing is never faster with it.
            plain = (one for one in ways if not one.recomputes)
            is_needed = not each.recomputes or not any(
                one.fits and not one.reduces for one in plain
            )
            if _is_filled(layout, each) and is_needed:
                ways.append(forecast(layout, each, gpu, node_size))
        found += [min(ways, key=lambda one: one.order)] if ways else []
    return sorted(found, key=lambda one: one.order)


def _is_filled(layout: ParallelLayout, job: Job) -> bool:
    return (
        job.num_passes(layout) >= layout.pp
        and layout.pp * job.stages(layout) <= job.shape.num_layers
    )


def _choices(job: Job, layout: ParallelLayout, asked: Asked) -> Iterator[Job]:
    """Yield the job with each combination of what may be chosen, the plainest first."""
    both = (True, False)
    reshards = both if asked.reshards else (job.reshards,)
    recomputes = both[::-1] if asked.recomputes else (job.recomputes,)
    stages: Iterable[int] = (job.stages_per_worker,)
    if asked.stages:
        most = min(_STAGES_MAX, job.shape.num_layers // layout.pp)
        stages = sorted({min(num, most) for num in (1, 2, 4, most)}) if layout.pp > 1 else (1,)
    for again, num, drops in product(recomputes, stages, reshards):
        yield replace(job, stages_per_worker=num, recomputes=again, reshards=drops)


def _layouts(
    job: Job, num_gpus: int, node_size: int, degrees: Mapping[str, int]
) -> Iterator[ParallelLayout]:
    """Yield the layouts that use all GPUs, with tensor-parallel groups within a node.

    Stages may have different numbers of layers.
    """
    shape = job.shape
    hidden = job.experts.ffn_dim if job.experts is not None else shape.ffn_dim
    heads = math.gcd(shape.num_heads, shape.num_kv_heads, shape.ffn_dim, hidden, node_size)

    def may_be(axis: str, found: Iterable[int]) -> list[int]:
        return [each for each in found if degrees.get(axis, each) == each]

    stages = range(1, 2 if shape.tied else shape.num_layers + 1)
    copies = degrees.get("dp_replicate", 1)
    for tp, pp in product(may_be("tp", _divisors(heads)), may_be("pp", stages)):
        if num_gpus % (tp * pp * copies):
            continue
        ranks = num_gpus // (tp * pp * copies)
        parts = 1 if job.in_tree else math.gcd(ranks, job.sequence_length)
        for cp in may_be("cp", _divisors(parts)):
            dp_shard = ranks // cp
            num = job.experts.num if job.experts and not job.in_tree else 1
            for ep in may_be("ep", _divisors(math.gcd(dp_shard, num))):
                yield ParallelLayout(
                    pp=pp, dp_replicate=copies, dp_shard=dp_shard, cp=cp, tp=tp, ep=ep
                )


def _divisors(number: int) -> list[int]:
    low = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return low + [number // each for each in reversed(low) if each * each != number]
