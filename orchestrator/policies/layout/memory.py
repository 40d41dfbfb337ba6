"""The memory that a layout needs on each worker, as a lower bound.

It excludes the process itself, fragmentation and the buffers of collectives.
"""

import math
from typing import Final

from orchestrator.policies.layout.hardware import BF16_BYTES, Job
from ucp_core.layout import ParallelLayout
from workers.models import chunks_of

#: Bytes of state per parameter: the float32 master, its gradient, and AdamW's two moments.
STATE_BYTES: Final = 4 + 4 + 4 + 4
_GRADIENT_BYTES: Final = 4


def memory_bytes(layout: ParallelLayout, job: Job) -> int:
    """Return the least memory that training needs, on the worker that needs the most.

    In a pipeline the first stage has the most open passes, the last one has the logits, and those
    in between receive from both sides.
    """
    return max(_of_rank(layout, job, rank) for rank in {0, min(1, layout.pp - 1), layout.pp - 1})


def _of_rank(layout: ParallelLayout, job: Job, rank: int) -> int:
    """Return the memory that one worker of a pipeline needs.

    It consists of the parameters, gradients and optimizer state of the shard, the parameters that
    are gathered at the same time, the gradients that are added up before they are reduced, the
    activations for the backward pass, the buffers for other stages, and the logits.
    """
    tokens = job.num_tokens // layout.cp
    is_last = rank == layout.pp - 1
    needed = job.stage(layout, rank) * STATE_BYTES / (layout.dp_shard * layout.cp * layout.tp)
    needed += _gathered(layout, job, rank) * job.compute_bytes
    needed += _added_up(layout, job, rank) * _GRADIENT_BYTES
    needed += tokens * _activations(layout, job, rank) * job.compute_bytes
    needed += _received(layout, rank) * tokens * _stream(layout, job) * job.compute_bytes
    if is_last:
        # The loss is computed in float32: logits, their logarithms and their gradients.
        logit_bytes = 3 * 4 + (job.compute_bytes if job.compute_bytes == BF16_BYTES else 0)
        parts = layout.tp if job.cuts_sequences else 1
        num_chunks = chunks_of(tokens, job.shape.vocab_size) if job.chunks_loss else 1
        num_logits = tokens * job.shape.vocab_size / num_chunks
        needed += num_logits * logit_bytes / parts
        if layout.tp > parts:
            # Every rank gathers all logits besides those that it computed.
            needed += num_logits * job.compute_bytes / layout.tp
    return math.ceil(needed)


def _gathered(layout: ParallelLayout, job: Job, rank: int) -> float:
    """Return the parameters that are gathered at the same time."""
    if layout.dp_shard * layout.cp == 1:
        return 0.0
    gathered, num_layers = job.whole(layout, rank), job.layers(layout)[rank]
    if job.reshards:
        # The embeddings stay gathered; one block is computed and one is prefetched.
        own = job.block - job.expert_block * (layout.ep - 1) / layout.ep
        gathered -= (num_layers - min(num_layers, 2)) * own / layout.tp
    return gathered


def _added_up(layout: ParallelLayout, job: Job, rank: int) -> float:
    """Return the gradients that each rank keeps unsharded between the passes of a step.

    FSDP2 adds them up in float32 until they are reduced. A tree of sums instead keeps one unsharded
    sum at each of its levels.
    """
    num_passes = job.num_passes(layout)
    if job.in_tree:
        return job.whole(layout, rank) * num_passes.bit_length()
    if num_passes == 1 or job.reduces:
        return 0.0
    # The rank's own part counts as state.
    return job.foreign(layout, rank)


def _activations(layout: ParallelLayout, job: Job, rank: int) -> float:
    """Return the values of a token that a worker keeps for its backward passes.

    1F1B keeps as many micro-batches as there are stages from the worker's on. With interleaving, a
    worker begins with two passes for each later stage, plus one through all its own stages but the
    last for each worker (Megatron-LM, arXiv 2104.04473, 2.2).
    """
    num_layers, stages = job.layers(layout)[rank], job.stages(layout)
    num_open: float = layout.pp - rank
    if stages > 1:
        num_open = (2 * (layout.pp - rank - 1) + (stages - 1) * layout.pp + 1) / stages
    num_open = min(num_open, job.num_passes(layout))
    block = _block_activations(job, layout.tp)
    if not job.recomputes:
        return num_layers * num_open * block
    return num_layers * num_open * _stream(layout, job) + block


def _stream(layout: ParallelLayout, job: Job) -> float:
    """Return the values of a token between two layers."""
    return job.shape.dim / (layout.tp if job.cuts_sequences else 1)


def _received(layout: ParallelLayout, rank: int) -> int:
    """Return how many outputs and gradients of other stages a worker has buffers for.

    Each side has one in use and one on its way. Those of open passes count as activations.
    """
    return 2 * ((rank > 0) + (rank < layout.pp - 1))


def _block_activations(job: Job, tp: int) -> float:
    """Return the values that a token keeps for the backward pass of a layer.

    Each tensor-parallel rank keeps the whole inputs of both norms and of the attention's and the
    feed-forward products. It keeps its part of queries, keys, values, the attention's output, and
    three values of the feed-forward part. Each expert of a token also keeps its input and its
    output. In float32 no fused attention supports fewer heads of keys than of queries, so the
    attention weights are kept.
    """
    shape, experts = job.shape, job.experts
    kv_dim = shape.num_kv_heads * shape.head_dim
    copies = 2 * experts.num_used * shape.dim if experts is not None else 0
    hidden = shape.ffn_dim
    if experts is not None:
        hidden = (experts.num_used + experts.num_shared) * experts.ffn_dim
    cut = 2 * shape.dim + 2 * kv_dim if job.attention is None else 4 * job.attention.width
    cut += 3 * hidden
    if shape.num_kv_heads < shape.num_heads and job.compute_bytes > BF16_BYTES:
        cut += shape.num_heads * job.sequence_length
    whole = 4 * shape.dim + copies
    return (whole + cut) / tp if job.cuts_sequences else whole + cut / tp
