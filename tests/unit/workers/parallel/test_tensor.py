"""Tensor parallelism follows a plan; torch's fake group stands for the other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from ucp_core.geometry import Box
from ucp_core.layout import ParallelLayout
from workers.errors import TaskError
from workers.models import Decoder, resolve, tensor_plan
from workers.parallel import (
    ModelPlan,
    apply_tensor_plan,
    build_mesh,
    local_shards,
    materialize,
    shard_model,
)

LAYOUT = ParallelLayout(dp_replicate=2, dp_shard=2, tp=2)
SHAPE = resolve("tiny", {})


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def cut(rank: int, plan: ModelPlan, shape: Any = SHAPE) -> tuple[Decoder, Any]:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=LAYOUT.world_size)
    mesh = build_mesh(LAYOUT, device_type="cpu", attempt=rank + 1, rank=rank)
    with torch.device("meta"):
        model = Decoder(shape)
    apply_tensor_plan(model, mesh, plan, [name for name, _ in model.named_modules()])
    return model, mesh


def test_every_rank_has_the_box_that_torch_names() -> None:
    """FSDP2 shards what tensor parallelism left; together both ways must give one box."""
    for rank in (0, 3, 5):
        model, mesh = cut(rank, ModelPlan(tensor=tensor_plan()))
        shard_model(model, mesh, precision="fp32", reshard_after_forward=True)
        materialize(model, torch.device("cpu"))
        assert model.head is not None
        assert model.embedding is not None
        assert model.head.weight is model.embedding.weight
        for shard in local_shards(model, mesh):
            sharded: Any = shard.parameter
            (chunk,) = sharded.__create_chunk_list__()
            ends = (start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            assert shard.boxes == (Box(tuple(chunk.offsets), tuple(ends)),), shard.fqn
            # Norms are whole on both tensor-parallel ranks; each shard has two copies, besides.
            num_replicas = 4 if "norm" in shard.fqn else 2
            assert len(shard.replicas) == num_replicas, shard.fqn


@pytest.mark.parametrize(
    ("plan", "sizes", "told"),
    [
        (ModelPlan(), {}, "parallel.tp=2: model Decoder has no plan"),
        (
            ModelPlan(tensor={"layers.*.attn.query": ColwiseParallel()}),
            {},
            r"has no module named layers\.\*\.attn\.query",
        ),
        (
            ModelPlan(tensor=tensor_plan()),
            {"ffn_dim": 161},
            r"tp=2 does not divide dim 1 of layers\.0\.ffn\.down\.weight \[64, 161\], dim 0 of",
        ),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_refused(
    plan: ModelPlan, sizes: dict[str, int], told: str
) -> None:
    """torch warns of a name that fits nothing, and every rank would compute the whole matrix."""
    with pytest.raises(TaskError, match=told):
        cut(0, plan, resolve("tiny", sizes))
