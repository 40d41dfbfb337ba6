"""What any layout saves, any other loads to the bit: all axes, growing and shrinking.

torch's fake group stands for the other ranks, so a process builds each of them in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import ucp_core
from ucp_core.layout import ParallelLayout
from ucp_core.native import save_rank
from ucp_core.storage import LocalStore
from workers.models import Decoder, resolve, tensor_plan
from workers.parallel import ModelPlan, build_mesh
from workers.settings import ModelSettings, Settings
from workers.state import HostBuffer, StateEntry, TrainingState, local_parameters
from workers.train.building import build_model

SHAPE = replace(resolve("tiny", {}), num_layers=4, num_kv_heads=4, tied=False)
LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(dp_shard=3),
    ParallelLayout(dp_shard=4),
    ParallelLayout(dp_replicate=2),
    ParallelLayout(dp_replicate=2, dp_shard=2),
    ParallelLayout(tp=2),
    ParallelLayout(tp=4),
    ParallelLayout(dp_shard=2, tp=2),
    ParallelLayout(pp=2),
    ParallelLayout(pp=4),
    ParallelLayout(pp=2, dp_shard=2),
    ParallelLayout(pp=2, tp=2),
    ParallelLayout(pp=2, dp_replicate=2, dp_shard=1, tp=2),
]


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _rank(layout: ParallelLayout, rank: int, attempt: int) -> TrainingState:
    """Return the state of a rank, after a step of its optimizer."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    mesh = build_mesh(layout, device_type="cpu", attempt=attempt, rank=rank)
    built = build_model(
        lambda: Decoder(SHAPE),
        ModelPlan(tensor=tensor_plan(), keep_stage=Decoder.keep_stage),
        mesh=mesh,
        settings=Settings(model=ModelSettings(preset="tiny")),
        device=torch.device("cpu"),
    )
    own = local_parameters(built.shards)
    optimizer = torch.optim.AdamW(own.values())
    for parameter in own.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return TrainingState(built.shards, own, optimizer, rank)


def _value(entry: StateEntry) -> Tensor:
    """Return the elements of an entry: each of the whole state has another one."""
    ends = zip(entry.box.start, entry.box.stop, strict=True)
    return _whole(entry.fqn, entry.slot, entry.shape)[tuple(slice(*end) for end in ends)]


@lru_cache(maxsize=1000)
def _whole(fqn: str, slot: str, shape: tuple[int, ...]) -> Tensor:
    seed = sum(map(ord, fqn + slot))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_every_layout_loads_what_every_layout_saved(tmp_path: Path) -> None:
    """Each rank saves its share of what others hold too, and no element twice."""
    store, states = LocalStore(), list[list[TrainingState]]()
    for layout in LAYOUTS:
        ranks = range(layout.world_size)
        states.append([_rank(layout, rank, 100 * len(states) + rank + 1) for rank in ranks])
        for rank, state in enumerate(states[-1]):
            for entry in state.entries():
                entry.tensor.detach().copy_(_value(entry))
            save_rank(
                store,
                str(tmp_path / str(layout)),
                step=1,
                attempt=1,
                rank=rank,
                world_size=layout.world_size,
                tensors=HostBuffer().capture(state.saved()),
                extra={},
                param_groups=[],
                source={},
                fsync=False,
            )
    for saved in LAYOUTS:
        checkpoint = ucp_core.open(str(tmp_path / str(saved)))
        for layout, loading in zip(LAYOUTS, states, strict=True):
            for rank, state in enumerate(loading):
                entries = state.entries()
                for entry in entries:
                    entry.tensor.detach().fill_(torch.nan)
                ucp_core.load(checkpoint, [entry.local_tensor(entry.tensor) for entry in entries])
                for entry in entries:
                    where = f"{saved} -> {layout}, rank {rank}: {entry.fqn} {entry.slot}"
                    assert torch.equal(entry.tensor, _value(entry)), where
