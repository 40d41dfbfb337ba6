"""Tensor parallelism follows a plan; torch's fake group stands for the other ranks."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, _dispatch, _random, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn import functional
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

pytestmark = pytest.mark.usefixtures("group")

LAYOUT = ParallelLayout(dp_replicate=2, dp_shard=2, tp=2)
SHAPE = resolve("tiny", {})


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


class RandomStates:
    """Stands for the random states of a device, as ``torch.cuda`` has them."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def get_rng_state() -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    @staticmethod
    def set_rng_state(state: torch.Tensor) -> None:
        """Keep nothing."""


def test_a_random_operation_on_tensors_over_the_mesh_calls_no_other_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's first one in a process broadcasts: a newcomer would do so among survivors."""
    monkeypatch.setattr(_random, "_rng_tracker", None)
    for room in (_random, _dispatch):
        monkeypatch.setattr(room, "is_rng_supported_mesh", lambda _mesh: True)
    monkeypatch.setattr(_random, "_get_device_handle", lambda _kind: RandomStates)
    monkeypatch.setattr(_random, "_resolve_device", lambda **_mesh: torch.device("meta"))
    called: list[str] = []
    monkeypatch.setattr(dist, "broadcast", lambda *_args: called.append("broadcast"))
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)

    mesh = build_mesh(ParallelLayout(tp=2), device_type="cpu", attempt=1, rank=1).tensor
    assert mesh is not None
    whole = distribute_tensor(torch.ones(4), mesh, [Replicate()], src_data_rank=None)
    # A meta device has no states to set; torch has chosen its tracker by then.
    with contextlib.suppress(RuntimeError):
        functional.dropout(whole, 0.5)

    assert isinstance(_random._rng_tracker, _random.OffsetBasedRNGTracker)
    assert called == []
