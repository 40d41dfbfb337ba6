"""Elementwise optimizers have the same bits for any cut of a tensor into rows."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn, optim

from ucp_core.geometry import Box
from workers.parallel import LocalShard
from workers.state import TrainingState, fitted, in_whole_vectors, local_parameters, reserve

State = Mapping[str, Tensor]

#: Optimizers of torch with what else they are made with.
OPTIONS: Final[Mapping[type[optim.Optimizer], Sequence[Mapping[str, Any]]]] = {
    optim.ASGD: [{}, {"weight_decay": 0.1, "maximize": True}],
    optim.Adadelta: [{}, {"weight_decay": 0.1, "maximize": True}],
    optim.Adagrad: [{}, {"weight_decay": 0.1, "lr_decay": 0.1, "maximize": True}],
    optim.Adam: [{}, {"amsgrad": True, "weight_decay": 0.1}, {"maximize": True}],
    optim.AdamW: [{}, {"amsgrad": True, "weight_decay": 0.1}, {"maximize": True}],
    optim.Adamax: [{}, {"weight_decay": 0.1, "maximize": True}],
    optim.NAdam: [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    optim.RAdam: [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    optim.RMSprop: [{}, {"centered": True, "momentum": 0.9, "weight_decay": 0.1}],
    optim.Rprop: [{}, {"maximize": True}],
    optim.SGD: [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
}
#: In these all of torch's kernels run, where the optimizer has them.
KERNELS: Final = ({"foreach": False}, {"foreach": True}, {"fused": True})
#: Their sizes are whole vectors, so plain torch has no last elements of another kind.
SHAPES: Final = ((64,), (64, 3), (192, 1), (32, 5, 2))
NUM_STEPS: Final = 4


class Atan(optim.SGD):
    """Adam-atan2 in short. torch computes atan2 and pow behind the last vector otherwise."""

    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                mean = self.state[one].setdefault("mean", torch.zeros_like(one))
                mean.lerp_(one.grad, 0.1)
                one.data.sub_(torch.atan2(mean, mean.square().pow(0.75)), alpha=float(group["lr"]))


def made_of(kind: type[optim.Optimizer], **given: Any) -> Callable[[list[Any]], optim.Optimizer]:
    return lambda parameters: kind(parameters, **{"lr": 0.01, **given})


def plain(make: Callable[[list[Any]], optim.Optimizer], shape: tuple[int, ...]) -> State:
    """Return weight and state after some steps of torch alone."""
    weight, gradients = values(shape)
    parameter = nn.Parameter(weight)
    optimizer = make([parameter])
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    held = {slot: one for slot, one in optimizer.state[parameter].items() if one.dim()}
    return {"weight": parameter.detach(), **held}


def in_parts(
    make: Callable[[list[Any]], optim.Optimizer], shape: tuple[int, ...], num_ranks: int
) -> State:
    """Return the same of shards, put together."""
    weight, gradients = values(shape)
    found = {"weight": torch.full(shape, torch.nan)}
    size = -(-shape[0] // num_ranks)
    for start in range(0, shape[0], size):
        rows = slice(start, min(start + size, shape[0]))
        box = Box.full(shape).with_dim(0, rows.start, rows.stop)
        local = weight[rows].clone()
        shard = LocalShard(
            fqn="w", shape=shape, boxes=(box,), replicas=(0,), parameter=nn.Parameter(local),
            local=local,
        )  # fmt: skip
        reserve([shard])
        parameters = local_parameters([shard])
        (parameter,) = parameters.values()
        in_whole_vectors([parameter])
        optimizer = make([parameter])
        for gradient in gradients:
            parameter.grad = fitted(gradient[rows], parameter)
            optimizer.step()
        for entry in TrainingState([shard], parameters, optimizer).entries():
            assert entry.box == box
            found.setdefault(entry.slot, torch.full(shape, torch.nan))[rows] = entry.tensor
    return found


def values(shape: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """Return a weight and the gradients of the steps, whose magnitudes differ."""
    draw = torch.Generator().manual_seed(len(shape))
    weight = torch.randn(shape, generator=draw)
    return weight, [torch.randn(shape, generator=draw) * 10.0**power for power in range(NUM_STEPS)]


def cases() -> list[Any]:
    every = [
        (kind, {**options, **kernels})
        for kind, chosen in OPTIONS.items()
        for options, kernels in itertools.product(chosen, KERNELS)
        if "fused" not in kernels or kind in (optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad)
    ]
    every += [(kind, {"lr": torch.tensor(0.01)}) for kind in (optim.Adam, optim.AdamW, optim.SGD)]
    every += [(optim.AdamW, {"lr": torch.tensor(0.01), "fused": True}), (Atan, {})]
    return [pytest.param(*one, id=f"{one[0].__name__}{_said(one[1])}") for one in every]


def _said(options: Mapping[str, Any]) -> str:
    return "".join(
        f"-{key}" if value is not False else f"-no-{key}" for key, value in options.items()
    )


@pytest.mark.parametrize(("kind", "given"), cases())
def test_shards_of_any_size_have_the_bits_of_the_whole_tensor(
    kind: type[optim.Optimizer], given: Mapping[str, Any]
) -> None:
    """Moments too: they differ long before a weight does. Plain torch says what is right."""
    make = made_of(kind, **given)
    for shape in SHAPES:
        expected = plain(make, shape)
        for num_ranks in (1, 2, 3, 5, 7):
            found = in_parts(make, shape, num_ranks)
            assert found.keys() == expected.keys()
            for slot, whole in expected.items():
                assert torch.equal(found[slot], whole), (slot, shape, num_ranks)


@pytest.mark.parametrize("shape", [(65,), (211,), (7, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("given", [{"fused": True}, {"foreach": True}], ids=["fused", "foreach"])
def test_a_tensor_of_any_size_has_the_same_bits_in_one_part_and_in_several(
    given: Mapping[str, Any], shape: tuple[int, ...]
) -> None:
    """Alone, too, a tensor may have elements behind the last vector."""
    make = made_of(optim.AdamW, **given)
    alone = in_parts(make, shape, 1)

    for num_ranks in (2, 3, 5):
        found = in_parts(make, shape, num_ranks)
        assert all(torch.equal(found[slot], whole) for slot, whole in alone.items())
