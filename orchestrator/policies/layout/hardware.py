"""The memory that a layout needs on each worker, and the time of its steps, before anything runs.

Arithmetic on the sizes of a decoder and on data sheets. Memory is the least that training needs:
it leaves out the process itself, fragmentation and the buffers of collectives. Step times assume
that a GPU reaches a usual share of its peak, so their order says more than their values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model, and the batch that it trains on.

    Attributes:
        num_micro_batches: Those of a step, all workers together.
        compute_bytes: Size of an element in the passes: 2 for bfloat16, 4 for float32.
        reshards: Whether a unit's gathered parameters are dropped after its forward pass.
        recomputes: Whether layers keep their inputs alone and are computed again (activation
            checkpointing).
    """

    shape: ModelShape
    sequence_length: int
    micro_batch: int
    num_micro_batches: int
    compute_bytes: int = 4
    reshards: bool = True
    recomputes: bool = False

    @property
    def num_tokens(self) -> int:
        """Return the tokens of a micro-batch."""
        return self.micro_batch * self.sequence_length

    @property
    def embedding(self) -> int:
        """Return the parameters of one embedding, which are those of the output layer."""
        return self.shape.vocab_size * self.shape.dim

    @property
    def block(self) -> int:
        """Return the parameters of a layer."""
        return block_parameters(self.shape)

    def stage(self, layout: ParallelLayout) -> int:
        """Return the parameters of the largest stage of a pipeline."""
        if layout.pp == 1:
            return num_parameters(self.shape)
        return self.embedding + self.num_layers(layout) * self.block

    def num_layers(self, layout: ParallelLayout) -> int:
        """Return the layers of the largest stage."""
        head, num = self.embedding / self.block, self.shape.num_layers
        return max(len(stage_layers(num, stage, layout.pp, head)) for stage in range(layout.pp))

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
    if job.reshards:
        # The embeddings stay gathered; one block is computed and one is prefetched.
        gathered -= job.block * max(job.num_layers(layout) - 2, 0)
    if layout.dp_shard * layout.cp == 1:
        gathered = 0
    # 1F1B keeps as many micro-batches as there are stages, on the first one.
    num_open = min(layout.pp, job.num_passes(layout))
    num_layers, block = job.num_layers(layout), _block_activations(job.shape, layout.tp)
    activations = num_layers * num_open * block
    if job.recomputes:
        activations = num_layers * num_open * job.shape.dim + block
    # The loss is computed in float32: logits, their logarithms and their gradients.
    logit_bytes = 3 * 4 + (job.compute_bytes if job.compute_bytes == _BF16_BYTES else 0)
    return (
        math.ceil(stage * STATE_BYTES / (layout.dp_shard * layout.cp * layout.tp))
        + gathered * job.compute_bytes // layout.tp
        + tokens * activations * job.compute_bytes
        + tokens * job.shape.vocab_size * logit_bytes // layout.tp
    )


def _block_activations(shape: ModelShape, tp: int) -> int:
    """Return the values that a token keeps for the backward pass of a layer.

    The inputs of both norms, of the attention's and of the feed-forward products, whole on each
    tensor-parallel rank; and what is cut: queries, keys, values, the attention's output, and three
    of the feed-forward part.
    """
    kv_dim = shape.num_kv_heads * shape.head_dim
    return 4 * shape.dim + (2 * shape.dim + 2 * kv_dim + 3 * shape.ffn_dim) // tp


def forecast(layout: ParallelLayout, job: Job, gpu: Gpu, node_size: int) -> Forecast:
    """Return what to expect of a layout on nodes of ``node_size`` such GPUs.

    Tensor-parallel sums hide behind nothing, those of data parallelism behind the passes.
    """
    shape, tokens, tp = job.shape, job.num_tokens, layout.tp
    num_passes, sent = job.num_passes(layout), sent_bytes(layout, job)
    products = num_parameters(shape) - (0 if shape.tied else job.embedding)
    # Forward once and backward twice, each a product and a sum; attention sees half of all pairs.
    flops = (
        (8 if job.recomputes else 6)
        * tokens
        * (products + shape.num_layers * shape.dim * job.sequence_length)
    )
    peak = gpu.tflops * 1e12 * _BF16_BYTES / job.compute_bytes
    pass_s = flops / (peak * _REACHED * tp * layout.pp)
    within_s, across_s = gpu.node_gb_s * 1e9, gpu.network_gbit_s / 8 * 1e9
    pass_s += (sent["tp"] / within_s + sent["pp"] / across_s) / num_passes
    rate = within_s if tp * layout.dp_shard <= node_size else across_s
    data_s = sent["dp_shard"] / rate + sent["dp_replicate"] / across_s
    return Forecast(
        layout=layout,
        memory_bytes=memory_bytes(layout, job),
        room_bytes=int(gpu.memory_gb * 1e9 * _USABLE),
        step_s=max(pass_s * (num_passes + layout.pp - 1), data_s),
        bubble=(layout.pp - 1) / (num_passes + layout.pp - 1),
        idle=1 - job.num_micro_batches / (num_passes * layout.dp),
        state_bytes=num_parameters(shape) * SAVED_BYTES // (layout.dp_shard * tp * layout.pp),
    )


def sent_bytes(layout: ParallelLayout, job: Job) -> dict[str, float]:
    """Return how much each worker sends to others on each axis in a step; sums go as rings.

    With ``pp`` it is what a stage in the middle sends, half of it each way.
    """
    num_passes, tp = job.num_passes(layout), layout.tp
    stream_bytes = job.num_tokens * job.shape.dim * job.compute_bytes
    part_bytes = job.stage(layout) / tp
    num_gathers = 2 * num_passes if job.reshards else 1
    shards, copies = layout.dp_shard, layout.dp_replicate
    # Two sums forward and two backward in each layer.
    num_sums = 4 * job.num_layers(layout) * num_passes
    return {
        "tp": num_sums * 2 * (tp - 1) / tp * stream_bytes,
        "pp": 2 * stream_bytes * num_passes if layout.pp > 1 else 0.0,
        "dp_shard": (shards - 1) / shards * part_bytes * (num_gathers * job.compute_bytes + 4),
        "dp_replicate": 2 * (copies - 1) / copies * 4 * part_bytes / shards,
    }


def forecasts(job: Job, gpu: Gpu, num_nodes: int, node_size: int) -> list[Forecast]:
    """Return the layouts of all GPUs, the best first: those that fit, then the fastest."""
    shape, num_gpus = job.shape, num_nodes * node_size
    found = []
    for tp in _divisors(math.gcd(shape.num_heads, shape.num_kv_heads, shape.ffn_dim)):
        for pp in (1,) if shape.tied else range(1, shape.num_layers + 1):
            layout = ParallelLayout(pp=pp, tp=tp, dp_shard=max(num_gpus // (pp * tp), 1))
            is_whole = layout.world_size == num_gpus and node_size % tp == 0
            if is_whole and shape.num_layers % pp == 0 and job.num_passes(layout) >= pp:
                found.append(forecast(layout, job, gpu, node_size))
    return sorted(found, key=lambda one: (0, one.step_s) if one.fits else (1, one.memory_bytes))


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
