"""GPUs by their data sheets, and jobs to train on them: the sizes of a model and its batch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from ucp_core.layout import ParallelLayout
from workers.models import ModelShape, block_parameters, stage_layers

BF16_BYTES: Final = 2
_NARROW: Final = 256


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its data sheet, and the usual network of its machines."""

    memory_gb: float  #: In 1e9 bytes.
    tflops: float  #: Dense bfloat16 products, in 1e12 operations a second.
    node_gb_s: float  #: To the other GPUs of its node, one way, in 1e9 bytes a second.
    network_gbit_s: float  #: Its share of the node's network, one way.
    #: Share of its peak that a layer of a large model reaches, without communication and
    #: bubbles.
    reached: float = 0.5


#: The share of H100s is between Llama 3 (41 % in a pipeline that idles 12 %, with sums over tp;
#: arXiv 2407.21783, table 4) and NVIDIA's recipes (dgxc-benchmarking). The share of A100s is that
#: of torchtitan's 70B, which repeats the forward pass (docs/performance.md: 51.7 %).
GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "b200": Gpu(180, 2250, 900, 400),
        "h200": Gpu(141, 989, 450, 400, 0.54),
        "h100": Gpu(80, 989, 450, 400, 0.54),
        "a100": Gpu(80, 312, 300, 200, 0.67),
        "a100-40gb": Gpu(40, 312, 300, 200, 0.67),
        "l40s": Gpu(48, 362, 32, 50),
        "a10g": Gpu(24, 70, 32, 25),
        "l4": Gpu(24, 121, 32, 25),
        "v100": Gpu(16, 125, 150, 25),
    }
)


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts that replace each layer's feed-forward part."""

    num: int  #: Experts of a layer.
    num_used: int  #: Experts that process each token.
    ffn_dim: int  #: The width of each expert.
    num_shared: int = 0  #: Additional experts that process every token.
    num_dense: int = 0  #: Number of first layers with one feed-forward part instead.


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention whose matrices do not follow from the shape, such as multi-head latents."""

    parameters: int  #: Parameters of a layer.
    width: int  #: Half the width of a token's queries and values over all heads.


@dataclass(frozen=True, slots=True)
class Mixture:
    """A model with experts."""

    shape: ModelShape
    experts: Experts
    attention: Attention | None = None


def _shape(*sizes: int) -> ModelShape:
    vocab_size, dim, num_layers, num_heads, num_kv_heads, ffn_dim = sizes
    return ModelShape(
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        ffn_dim=ffn_dim,
        tied=False,
    )


#: Models with experts. They are not presets, because everstep trains those of ``transformers``.
#: DeepSeek-V3 has latents of 1,536 and 512, and heads of 128 + 64 and 128 (arXiv 2412.19437, 4.2).
MIXTURES: Mapping[str, Mixture] = MappingProxyType(
    {
        "mixtral-8x7b": Mixture(_shape(32_000, 4096, 32, 32, 8, 14_336), Experts(8, 2, 14_336)),
        "mixtral-8x22b": Mixture(_shape(32_768, 6144, 56, 48, 8, 16_384), Experts(8, 2, 16_384)),
        "deepseek-v3": Mixture(
            _shape(129_280, 7168, 61, 128, 128, 18_432),
            Experts(256, 8, 2048, num_shared=1, num_dense=3),
            Attention(187_105_280, 128 * (192 + 128) // 2),
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model and the batch that it trains on."""

    shape: ModelShape
    experts: Experts | None = None  #: None if each layer has one feed-forward part.
    attention: Attention | None = None  #: None for the usual one.
    sequence_length: int
    micro_batch: int
    num_micro_batches: int  #: Micro-batches of a step over all workers.
    compute_bytes: int = 4  #: Size of an element in the passes: 2 for bfloat16, 4 for float32.
    #: Whether a unit's gathered parameters are dropped after its forward pass.
    reshards: bool = True
    #: Whether gradients are reduced after each pass; otherwise they are added up unsharded. None to
    #: reduce only if unsharded ones would not fit (``train.reduce_gradients``).
    reduces: bool | None = None
    #: Whether layers keep only their inputs and are recomputed (activation checkpointing).
    recomputes: bool = False
    #: Pipeline stages of each worker; with more than 1 they are interleaved.
    stages_per_worker: int = 1
    #: Whether tensor parallelism also cuts the values between products and the logits (sequence and
    #: loss parallelism).
    cuts_sequences: bool = False
    #: Whether the loss is computed from a few logits at a time, as in the built-in model.
    chunks_loss: bool = False
    #: Whether gradients are summed in the order of one tree (``train.deterministic``).
    in_tree: bool = False

    @property
    def num_tokens(self) -> int:
        """Return the tokens of a micro-batch."""
        return self.micro_batch * self.sequence_length

    @property
    def embedding(self) -> int:
        """Return the parameters of one embedding, which are those of the output layer."""
        return self.shape.vocab_size * self.shape.dim

    @property
    def dense_block(self) -> int:
        """Return the parameters of a layer with one feed-forward part."""
        block, shape = block_parameters(self.shape), self.shape
        if self.attention is None:
            return block
        return self.attention.parameters + 3 * shape.ffn_dim * shape.dim + 2 * shape.dim

    @property
    def expert(self) -> int:
        """Return the parameters of an expert."""
        return 3 * self.experts.ffn_dim * self.shape.dim if self.experts is not None else 0

    @property
    def expert_block(self) -> int:
        """Return the parameters of the experts of a layer, without shared experts."""
        return self.experts.num * self.expert if self.experts is not None else 0

    @property
    def block(self) -> int:
        """Return the parameters of a layer."""
        if self.experts is None:
            return self.dense_block
        feed_forward = 3 * self.shape.ffn_dim * self.shape.dim
        router = self.experts.num * self.shape.dim
        whole = router + self.experts.num_shared * self.expert
        return self.dense_block - feed_forward + whole + self.expert_block

    @property
    def used_block(self) -> int:
        """Return how many parameters of a layer a token is multiplied with."""
        idle = self.experts.num - self.experts.num_used if self.experts is not None else 0
        return self.block - idle * self.expert

    def narrow(self, tp: int) -> int:
        """Return the extra time of narrow products in a layer's experts, as a number of parameters.

        Products of ``_NARROW`` columns take twice as long.
        """
        assert self.experts is not None, "the job has experts"
        return self.experts.num_used * self.expert * _NARROW * tp // self.experts.ffn_dim

    @property
    def width(self) -> int:
        """Return the products of a layer's forward pass for each pair of tokens."""
        return self.attention.width if self.attention is not None else self.shape.dim

    @property
    def num_parameters(self) -> int:
        """Return the parameters of the model."""
        embeddings = self.embedding * (1 if self.shape.tied else 2)
        return embeddings + self._layers(self.block) + self.shape.dim

    @property
    def num_used(self) -> int:
        """Return how many parameters a token is multiplied with."""
        return self.embedding + self._layers(self.used_block) + self.shape.dim

    @property
    def _num_dense(self) -> int:
        return self.experts.num_dense if self.experts is not None else 0

    def _layers(self, block: int) -> int:
        num = self.shape.num_layers - self._num_dense
        return self._num_dense * self.dense_block + num * block

    def stages(self, layout: ParallelLayout) -> int:
        """Return the stages of each worker."""
        return self.stages_per_worker if layout.pp > 1 else 1

    def layers(self, layout: ParallelLayout) -> tuple[int, ...]:
        """Return the number of layers of each worker of a pipeline."""
        per_rank = self.stages(layout)
        return _cut(self.shape.num_layers, layout.pp, per_rank, self.embedding / self.block)

    def num_layers(self, layout: ParallelLayout) -> int:
        """Return the number of layers of the worker that has the most."""
        return max(self.layers(layout))

    def stage(self, layout: ParallelLayout, rank: int) -> int:
        """Return the parameters of a worker of a pipeline."""
        if layout.pp == 1:
            return self.num_parameters
        ends = self.embedding * (rank == 0) + (self.embedding + self.shape.dim) * (
            rank == layout.pp - 1
        )
        num = self.layers(layout)[rank]
        num_dense = min(self._num_dense, num) if rank == 0 else 0
        return ends + num_dense * self.dense_block + (num - num_dense) * self.block

    def own_experts(self, layout: ParallelLayout, rank: int) -> float:
        """Return the parameters of the experts that a worker of a pipeline computes."""
        num = self.layers(layout)[rank] - (self._num_dense if rank == 0 else 0)
        return max(num, 0) * self.expert_block / (layout.ep * layout.tp)

    def whole(self, layout: ParallelLayout, rank: int) -> float:
        """Return the parameters that a worker of a pipeline gathers, without others' experts."""
        others = self.own_experts(layout, rank) * (layout.ep - 1)
        return self.stage(layout, rank) / layout.tp - others

    def foreign(self, layout: ParallelLayout, rank: int) -> float:
        """Return how many of the parameters that a worker gathers are on other ranks."""
        return sum(self.foreign_parts(layout, rank))

    def foreign_parts(self, layout: ParallelLayout, rank: int) -> tuple[float, float]:
        """Return ``foreign`` in two parts: parameters over all shards, and those of experts."""
        shards, experts = layout.dp_shard * layout.cp, self.own_experts(layout, rank)
        others = self.whole(layout, rank) - experts
        parts = others * (1 - 1 / shards), experts * (1 - layout.ep / shards)
        return parts if layout.ep > 1 else (sum(parts), 0.0)

    def num_passes(self, layout: ParallelLayout) -> int:
        """Return the passes of each data-parallel rank in a step.

        Interleaved stages run them in equal rounds, each of at least as many passes as workers.
        """
        num = math.ceil(self.num_micro_batches / layout.dp)
        while self.stages(layout) > 1 and num % max(1, num // layout.pp):
            num += 1
        return num


@lru_cache(maxsize=4096)
def _cut(num_layers: int, num_ranks: int, per_rank: int, head: float) -> tuple[int, ...]:
    total = num_ranks * per_rank
    sizes = [len(stage_layers(num_layers, stage, total, head)) for stage in range(total)]
    return tuple(sum(sizes[rank::num_ranks]) for rank in range(num_ranks))
