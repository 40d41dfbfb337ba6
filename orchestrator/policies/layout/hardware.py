"""The memory that a layout needs on each worker, and the time of its steps, before anything runs.

Arithmetic on the sizes of a decoder and on data sheets. Memory is the least that training needs:
it leaves out the process itself, fragmentation and the buffers of collectives. Step times assume
that a GPU reaches a usual share of its peak, so their order says more than their values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Final

from ucp_core.layout import ParallelLayout
from workers.models import ModelShape, block_parameters, num_parameters, stage_layers

#: float32 master, its gradient, and AdamW's two moments: bytes of state per parameter.
STATE_BYTES: Final = 4 + 4 + 4 + 4
#: The part of the state that a checkpoint has: all but gradients.
SAVED_BYTES: Final = 4 + 4 + 4
_BF16_BYTES: Final = 2
#: Share of a GPU's peak that matrix products of large models reach (Llama 3: 0.38 to 0.43).
_REACHED: Final = 0.4
#: Share of a GPU's memory that tensors may take: the rest is NCCL's, CUDA's and lost in pieces.
_USABLE: Final = 0.92


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its data sheet, and the usual network of its machines.

    Attributes:
        memory_gb: In 1e9 bytes.
        tflops: Dense bfloat16 products, in 1e12 operations a second.
        node_gb_s: To the others of its node, one way, in 1e9 bytes a second.
        network_gbit_s: Its share of the node's network, one way.
    """

    memory_gb: float
    tflops: float
    node_gb_s: float
    network_gbit_s: float


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "b200": Gpu(180, 2250, 900, 400),
        "h200": Gpu(141, 989, 450, 400),
        "h100": Gpu(80, 989, 450, 400),
        "a100": Gpu(80, 312, 300, 200),
        "a100-40gb": Gpu(40, 312, 300, 200),
        "l40s": Gpu(48, 362, 32, 50),
        "a10g": Gpu(24, 70, 32, 25),
        "l4": Gpu(24, 121, 32, 25),
        "v100": Gpu(16, 125, 150, 25),
    }
)


def _mixtral(
    vocab_size: int, dim: int, num_layers: int, num_heads: int, ffn_dim: int
) -> ModelShape:
    return ModelShape(
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        ffn_dim=ffn_dim,
        tied=False,
    )


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts in place of each layer's feed-forward part, all of its size.

    Attributes:
        num: Experts of a layer.
        num_used: Those that compute a token.
    """

    num: int
    num_used: int


#: Models with experts, which are no presets: everstep trains those of ``transformers``.
MIXTURES: Mapping[str, tuple[ModelShape, Experts]] = MappingProxyType(
    {
        "mixtral-8x7b": (_mixtral(32_000, 4096, 32, 32, 14_336), Experts(8, 2)),
        "mixtral-8x22b": (_mixtral(32_768, 6144, 56, 48, 16_384), Experts(8, 2)),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model, and the batch that it trains on.

    Attributes:
        experts: None if each layer has one feed-forward part.
        num_micro_batches: Those of a step, all workers together.
        compute_bytes: Size of an element in the passes: 2 for bfloat16, 4 for float32.
        reshards: Whether a unit's gathered parameters are dropped after its forward pass.
        recomputes: Whether layers keep their inputs alone and are computed again (activation
            checkpointing).
        stages_per_worker: Pipeline stages of each worker; with more than 1 they are interleaved.
    """

    shape: ModelShape
    experts: Experts | None = None
    sequence_length: int
    micro_batch: int
    num_micro_batches: int
    compute_bytes: int = 4
    reshards: bool = True
    recomputes: bool = False
    stages_per_worker: int = 1

    @property
    def num_tokens(self) -> int:
        """Return the tokens of a micro-batch."""
        return self.micro_batch * self.sequence_length

    @property
    def embedding(self) -> int:
        """Return the parameters of one embedding, which are those of the output layer."""
        return self.shape.vocab_size * self.shape.dim

    @property
    def feed_forward(self) -> int:
        """Return the parameters of one feed-forward part, or expert."""
        return 3 * self.shape.ffn_dim * self.shape.dim

    @property
    def expert_block(self) -> int:
        """Return the parameters of the experts of a layer."""
        return self.experts.num * self.feed_forward if self.experts is not None else 0

    @property
    def block(self) -> int:
        """Return the parameters of a layer."""
        block = block_parameters(self.shape)
        if self.experts is None:
            return block
        router = self.experts.num * self.shape.dim
        return block - self.feed_forward + router + self.expert_block

    @property
    def num_parameters(self) -> int:
        """Return the parameters of the model."""
        layers = self.shape.num_layers * (self.block - block_parameters(self.shape))
        return num_parameters(self.shape) + layers

    @property
    def num_used(self) -> int:
        """Return the parameters that a token is multiplied with."""
        idle = self.experts.num - self.experts.num_used if self.experts is not None else 0
        lookups = 0 if self.shape.tied else self.embedding
        return self.num_parameters - lookups - self.shape.num_layers * idle * self.feed_forward

    def stages(self, layout: ParallelLayout) -> int:
        """Return the stages of each worker."""
        return self.stages_per_worker if layout.pp > 1 else 1

    def stage(self, layout: ParallelLayout) -> int:
        """Return the parameters of the worker with the most layers of a pipeline."""
        if layout.pp == 1:
            return self.num_parameters
        return self.embedding + self.num_layers(layout) * self.block

    def num_layers(self, layout: ParallelLayout) -> int:
        """Return the layers of the worker that has the most."""
        head, num = self.embedding / self.block, self.shape.num_layers
        total = layout.pp * self.stages(layout)
        sizes = [len(stage_layers(num, stage, total, head)) for stage in range(total)]
        return max(sum(sizes[rank :: layout.pp]) for rank in range(layout.pp))

    def num_passes(self, layout: ParallelLayout) -> int:
        """Return the micro-batches that each data-parallel rank computes in a step."""
        return math.ceil(self.num_micro_batches / layout.dp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The memory and the speed that a layout is expected to have.

    Attributes:
        memory_bytes: The least that each worker needs.
        room_bytes: How much it has for tensors.
        step_s: Duration of a step.
        bubble: Share of it in which a stage waits for others.
        idle: Share of the passes that repeat a micro-batch, as there are fewer than ranks.
        state_bytes: Each worker's share of a checkpoint, which a change of layout moves at most.
    """

    layout: ParallelLayout
    memory_bytes: int
    room_bytes: int
    step_s: float
    bubble: float
    idle: float
    state_bytes: int

    @property
    def fits(self) -> bool:
        """Return whether the worker's memory is enough."""
        return self.memory_bytes <= self.room_bytes


def memory_bytes(layout: ParallelLayout, job: Job) -> int:
    """Return the least memory that training needs on each worker.

    Counts parameters, gradients and optimizer state of the shard, the parameters that are gathered
    at one time, the activations that the backward pass reads, and the logits.
    """
    stage, tokens = job.stage(layout), job.num_tokens // layout.cp
    gathered = stage
    num_layers, num_gathered = job.num_layers(layout), job.num_layers(layout)
    if job.reshards:
        # The embeddings stay gathered; one block is computed and one is prefetched.
        num_gathered = min(num_layers, 2)
        gathered -= job.block * (num_layers - num_gathered)
    # A rank gathers its own experts alone.
    gathered -= num_gathered * job.expert_block * (layout.ep - 1) // layout.ep
    if layout.dp_shard * layout.cp == 1:
        gathered = 0
    # 1F1B keeps as many micro-batches as there are stages, on the first one; interleaved, those
    # and a stage's share of them for each other worker (Megatron-LM, arXiv 2104.04473, 2.2).
    num_open = min(
        layout.pp + _waited(layout, job) * (job.stages(layout) > 1), job.num_passes(layout)
    )
    block = _block_activations(job, layout.tp)
    activations = math.ceil(num_layers * num_open * block)
    if job.recomputes:
        activations = math.ceil(num_layers * num_open * job.shape.dim) + block
    # The loss is computed in float32: logits, their logarithms and their gradients.
    logit_bytes = 3 * 4 + (job.compute_bytes if job.compute_bytes == _BF16_BYTES else 0)
    return (
        math.ceil(stage * STATE_BYTES / (layout.dp_shard * layout.cp * layout.tp))
        + gathered * job.compute_bytes // layout.tp
        + tokens * activations * job.compute_bytes
        + tokens * job.shape.vocab_size * logit_bytes // layout.tp
    )


def _waited(layout: ParallelLayout, job: Job) -> float:
    """Return how many passes a stage waits in a step."""
    return (layout.pp - 1) / job.stages(layout)


def _block_activations(job: Job, tp: int) -> int:
    """Return the values that a token keeps for the backward pass of a layer.

    The inputs of both norms, of the attention's and of the feed-forward products, whole on each
    tensor-parallel rank; and what is cut: queries, keys, values, the attention's output, and three
    of the feed-forward part. Each expert that a token has keeps its input and its output, too. In
    float32 no fused attention takes fewer heads of keys than of queries: its weights are kept.
    """
    shape = job.shape
    kv_dim = shape.num_kv_heads * shape.head_dim
    num_used = job.experts.num_used if job.experts is not None else 1
    copies = 2 * num_used * shape.dim if job.experts is not None else 0
    cut = 2 * shape.dim + 2 * kv_dim + 3 * num_used * shape.ffn_dim
    if shape.num_kv_heads < shape.num_heads and job.compute_bytes > _BF16_BYTES:
        cut += shape.num_heads * job.sequence_length
    return 4 * shape.dim + copies + cut // tp


def forecast(layout: ParallelLayout, job: Job, gpu: Gpu, node_size: int) -> Forecast:
    """Return what to expect of a layout on nodes of ``node_size`` such GPUs.

    Traffic of activations hides behind nothing, that of weights behind the passes.
    """
    num_passes, shards = job.num_passes(layout), layout.dp_shard * layout.cp
    sent = sent_bytes(layout, job)
    within_s, across_s = gpu.node_gb_s * 1e9, gpu.network_gbit_s / 8 * 1e9
    inner = layout.tp * layout.cp

    def rate(num_ranks: int) -> float:
        return within_s if num_ranks <= node_size else across_s

    pass_s = _products_s(layout, job, gpu)
    pass_s += (
        sent["tp"] / within_s
        + sent["pp"] / across_s
        + sent["cp"] / rate(inner)
        + sent["ep"] / rate(inner * layout.ep)
    ) / num_passes
    data_s = sent["dp_shard"] / rate(layout.tp * shards) + sent["dp_replicate"] / across_s
    num_waited = _waited(layout, job)
    return Forecast(
        layout=layout,
        memory_bytes=memory_bytes(layout, job),
        room_bytes=int(gpu.memory_gb * 1e9 * _USABLE),
        step_s=max(pass_s * (num_passes + num_waited), data_s),
        bubble=num_waited / (num_passes + num_waited),
        idle=1 - job.num_micro_batches / (num_passes * layout.dp),
        state_bytes=job.num_parameters * SAVED_BYTES // (shards * layout.tp * layout.pp),
    )


def _products_s(layout: ParallelLayout, job: Job, gpu: Gpu) -> float:
    """Return how long the products of a pass take on the slowest rank.

    Forward once and backward twice, each a product and a sum; attention sees half of all pairs. If
    heads cannot be shared out among the parts of sequences, the last part has nearly twice as many.
    """
    shape = job.shape
    pairs = shape.num_layers * shape.dim * job.sequence_length
    if not _shares_heads(layout, shape):
        pairs = pairs * (2 * layout.cp - 1) // layout.cp
    flops = (8 if job.recomputes else 6) * job.num_tokens * (job.num_used + pairs)
    peak = gpu.tflops * 1e12 * _BF16_BYTES / job.compute_bytes
    return flops / (peak * _REACHED * layout.tp * layout.pp * layout.cp)


def _shares_heads(layout: ParallelLayout, shape: ModelShape) -> bool:
    return not (
        shape.num_heads // layout.tp % layout.cp or shape.num_kv_heads // layout.tp % layout.cp
    )


def sent_bytes(layout: ParallelLayout, job: Job) -> dict[str, float]:
    """Return how much each worker sends to others on each axis in a step; sums go as rings.

    With ``pp`` it is what a stage in the middle sends, half of it each way.
    """
    shape, num_passes, tp, cp = job.shape, job.num_passes(layout), layout.tp, layout.cp
    num_layers, num_layer_passes = job.num_layers(layout), job.num_layers(layout) * num_passes
    value_bytes = job.num_tokens // cp * job.compute_bytes
    stream_bytes = value_bytes * shape.dim
    kv_dim = shape.num_kv_heads * shape.head_dim
    # Queries, keys, values and outputs change places; or keys and values come of all parts.
    width = 2 * (shape.dim + kv_dim) / cp if _shares_heads(layout, shape) else 2 * kv_dim
    num_used = job.experts.num_used if job.experts is not None else 0
    part = job.stage(layout) - num_layers * job.expert_block * (layout.ep - 1) // layout.ep
    part_bytes = part / tp
    num_gathers = 2 * num_passes if job.reshards else 1
    shards, copies = layout.dp_shard * cp, layout.dp_replicate
    return {
        # Two sums forward and two backward in each layer.
        "tp": 4 * num_layer_passes * 2 * (tp - 1) / tp * stream_bytes,
        "pp": 2 * job.stages(layout) * stream_bytes * num_passes if layout.pp > 1 else 0.0,
        "cp": 2 * num_layer_passes * (cp - 1) * width / tp * value_bytes,
        # There and back, forward and backward; each tensor-parallel rank sends a part.
        "ep": 4 * num_layer_passes * num_used * (1 - 1 / layout.ep) * stream_bytes / tp,
        "dp_shard": (shards - 1) / shards * part_bytes * (num_gathers * job.compute_bytes + 4),
        "dp_replicate": 2 * (copies - 1) / copies * 4 * part_bytes / shards,
    }


def forecasts(job: Job, gpu: Gpu, num_nodes: int, node_size: int) -> list[Forecast]:
    """Return the layouts of all GPUs, the best first: those that fit, then the fastest."""
    found = (
        forecast(layout, job, gpu, node_size)
        for layout in _layouts(job, num_nodes * node_size, node_size)
        if job.num_passes(layout) >= layout.pp
    )
    return sorted(found, key=lambda one: (0, one.step_s) if one.fits else (1, one.memory_bytes))


def _layouts(job: Job, num_gpus: int, node_size: int) -> Iterator[ParallelLayout]:
    """Yield the layouts that use all GPUs, with tensor-parallel groups inside of a node."""
    shape = job.shape
    heads = math.gcd(shape.num_heads, shape.num_kv_heads, shape.ffn_dim)
    stages = [1] if shape.tied else _divisors(shape.num_layers)
    for tp, pp in product(_divisors(math.gcd(heads, node_size)), stages):
        if num_gpus % (tp * pp) or (pp > 1 and shape.num_layers % (pp * job.stages_per_worker)):
            continue
        ranks = num_gpus // (tp * pp)
        for cp in _divisors(math.gcd(ranks, job.sequence_length)):
            dp_shard = ranks // cp
            for ep in _divisors(math.gcd(dp_shard, job.experts.num if job.experts else 1)):
                yield ParallelLayout(pp=pp, dp_shard=dp_shard, cp=cp, tp=tp, ep=ep)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
