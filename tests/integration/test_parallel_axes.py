"""Tensor parallelism: the gradients of one process, and state that any layout loads."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import ucp_core
from tests.support.ranks import Place, running
from ucp_core.layout import ParallelLayout
from ucp_core.native import save_rank
from ucp_core.storage import LocalStore
from workers import collectives
from workers.models import Decoder, initial_value, resolve, tensor_plan
from workers.parallel import (
    Mesh,
    ModelPlan,
    apply_tensor_plan,
    build_mesh,
    local_shards,
    materialize,
    shard_model,
)
from workers.state import HostBuffer, TrainingState, local_parameters

TP = ParallelLayout(tp=2)
SHAPE = resolve("tiny", {})


def built(mesh: Mesh, dtype: torch.dtype) -> nn.Module:
    """Return the reference decoder as an attempt builds it, with its initial values."""
    with torch.device("meta"):
        model: nn.Module = Decoder(SHAPE).to(dtype)
    apply_tensor_plan(model, mesh, ModelPlan(tensor=tensor_plan()))
    shard_model(model, mesh, precision="fp32", reshard_after_forward=True)
    materialize(model, torch.device("cpu"))
    fill(model)
    return model


def fill(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        value = initial_value(name, tuple(parameter.shape), seed=1, num_layers=2)
        whole = value.to(parameter.dtype)
        with torch.no_grad():
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                placed = distribute_tensor(whole, mesh, placements)
                parameter.to_local().copy_(placed.to_local())
            else:
                parameter.copy_(whole)


def batch(number: int, num_samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(SHAPE.vocab_size, (num_samples, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def backward(model: nn.Module, number: int, num_samples: int = 4) -> None:
    """Add the gradient of the losses' sum."""
    inputs, targets = batch(number, num_samples)
    logits = model(inputs)
    flat = logits.double().reshape(-1, logits.shape[-1])
    nn.functional.cross_entropy(flat, targets.reshape(-1), reduction="sum").backward()


def gathered(named: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """Return whole tensors, as torch makes them of the ranks' parts."""
    return {
        name: one.full_tensor().detach().numpy()
        for name, one in named.items()
        if isinstance(one, DTensor)
    }


def gradients_over(layout: ParallelLayout, place: Place) -> dict[str, Any]:
    collectives.form(**place.formation(1, layout.world_size))
    mesh = build_mesh(layout, device_type="cpu", attempt=1, rank=place.rank)
    model = built(mesh, torch.float64)
    # Data-parallel ranks have samples of their own, all others the same ones.
    backward(model, number=mesh.data_rank)
    found = gathered({name: one.grad for name, one in model.named_parameters()})
    collectives.leave()
    return found


@pytest.mark.parametrize("layout", [ParallelLayout(dp_shard=2, tp=2)], ids=str)
def test_gradients_are_those_of_one_process(layout: ParallelLayout, tmp_path: Path) -> None:
    """In float64 a wrong sum is seen: a norm's gradient, say, that counts once for each rank."""
    with running(functools.partial(gradients_over, layout), layout.world_size, tmp_path) as ranks:
        found = ranks.results()
    alone = Decoder(SHAPE).double()
    fill(alone)
    for number in range(layout.dp):
        backward(alone, number)

    for of_rank in found:
        assert set(of_rank) == {name for name, _ in alone.named_parameters()}
        for name, parameter in alone.named_parameters():
            assert parameter.grad is not None
            expected = parameter.grad.numpy()
            np.testing.assert_allclose(of_rank[name], expected, rtol=1e-10, atol=1e-11)


class _State:
    """The training state of a rank, with an optimizer that has done a step."""

    def __init__(self, mesh: Mesh) -> None:
        self.model = built(mesh, torch.float32)
        self.shards = local_shards(self.model, mesh)
        self.own = local_parameters(self.shards)
        self.optimizer = torch.optim.AdamW(self.own.values())
        for shard in self.shards:
            self.own[shard.fqn].grad = shard.local.cos()
        self.optimizer.step()
        self.training = TrainingState(self.shards, self.own, self.optimizer, mesh.rank)

    def whole(self) -> dict[str, Any]:
        """Return every tensor as torch makes it of the ranks' parts, whatever our boxes say."""
        held: dict[str, Tensor] = {}
        for shard in self.shards:
            like: Any = shard.parameter
            slots = {"weight": shard.local, **self.optimizer.state[self.own[shard.fqn]]}
            for slot, local in slots.items():
                if local.dim():
                    placed = {"shape": like.shape, "stride": like.stride(), "run_check": False}
                    held[f"{shard.fqn}/{slot}"] = DTensor.from_local(
                        local, like.device_mesh, like.placements, **placed
                    )
        return gathered(held)


def saved_and_loaded(layout: ParallelLayout, place: Place) -> list[dict[str, Any]]:
    """Save the state of ``layout``, load it as two data-parallel ranks; return both, whole."""
    store, directory = LocalStore(), str(place.directory / "checkpoint")
    collectives.form(**place.formation(1, layout.world_size))
    before = _State(build_mesh(layout, device_type="cpu", attempt=1, rank=place.rank))
    save_rank(
        store,
        directory,
        step=1,
        attempt=1,
        rank=place.rank,
        world_size=layout.world_size,
        tensors=HostBuffer().capture(before.training.saved()),
        extra={},
        param_groups=[],
        source={},
        fsync=False,
    )
    found = [before.whole()]
    torch.distributed.barrier()
    collectives.leave()
    collectives.form(**place.formation(2, 2))
    data = ParallelLayout(dp_shard=2)
    after = _State(build_mesh(data, device_type="cpu", attempt=2, rank=place.rank))
    entries = after.training.entries()
    with torch.no_grad():
        for entry in entries:
            entry.tensor.fill_(torch.nan)
    need = [entry.local_tensor(entry.tensor) for entry in entries]
    ucp_core.load(ucp_core.open(directory), need)
    found.append(after.whole())
    collectives.leave()
    return found


def test_what_tensor_parallel_ranks_save_data_parallel_ranks_load_to_the_bit(
    tmp_path: Path,
) -> None:
    """Matrices are cut along other dims, and each rank saves a share of every norm."""
    with running(functools.partial(saved_and_loaded, TP), 2, tmp_path) as ranks:
        found = ranks.results()

    for before, after in found:
        assert before.keys() == after.keys()
        assert len(before) == 3 * len(list(Decoder(SHAPE).named_parameters()))
        for name, value in before.items():
            np.testing.assert_array_equal(after[name], value, err_msg=name)
