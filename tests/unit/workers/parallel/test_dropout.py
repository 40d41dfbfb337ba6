"""Dropout between matrices that are cut: another mask on each tensor-parallel rank."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.checkpoint import checkpoint

from tests.support.ranks import Place, running
from ucp_core.layout import ParallelLayout
from workers.data import random_seed, seed_all
from workers.parallel import ModelPlan, apply_tensor_plan, build_mesh, materialize

PLAN = {"up": ColwiseParallel(), "*_part": ColwiseParallel(), "down": RowwiseParallel()}


class Layer(nn.Module):
    """Two dropouts of what is cut, and one of what is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)
        self.one_part, self.other_part, self.whole = nn.Dropout(), nn.Dropout(), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.whole(self.down(self.other_part(self.one_part(self.up(x)))))
        return x + dropped


def masks_of(model: nn.Module, key: tuple[int, ...], how: Any) -> dict[str, Any]:
    """Return the masks of a pass, and of the pass repeated for its backward, if it is."""
    found: dict[str, Tensor] = {}

    def see(name: str) -> Any:
        def hook(_module: nn.Module, given: Any, dropped: Tensor) -> None:
            again = f"{name} again" if name in found else name
            found[again] = (dropped == 0) & (given[0] != 0)

        return hook

    handles = [
        module.register_forward_hook(see(name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Dropout)
    ]
    seed_all(random_seed(*key))
    given = torch.ones(4, 8, requires_grad=True)
    output = model(given) if how is None else checkpoint(model, given, use_reentrant=how)
    output.sum().backward()
    found["afterwards"] = torch.rand(4)
    for handle in handles:
        handle.remove()
    # Tensors would be shared with the process, which ends.
    return {name: mask.numpy() for name, mask in found.items()}


def compute(place: Place) -> dict[str, dict[str, Any]]:
    store = dist.TCPStore("127.0.0.1", place.port)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=2)
    mesh = build_mesh(ParallelLayout(tp=2), device_type="cpu", attempt=1, rank=place.rank)
    with torch.device("meta"):
        model = Layer()
    names = [name for name, _ in model.named_modules()]
    apply_tensor_plan(model, mesh, ModelPlan(tensor=PLAN), names)
    materialize(model, torch.device("cpu"))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    found = {
        "first": masks_of(model, (0, 1, 0), None),
        "the same again": masks_of(model, (0, 1, 0), None),
        "the next": masks_of(model, (0, 2, 0), None),
        "repeated": masks_of(model, (0, 1, 0), False),
        "repeated by hand": masks_of(model, (0, 1, 0), True),
    }
    model.eval()
    found["evaluated"] = masks_of(model, (0, 1, 0), None)
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    with running(compute, 2, folder) as started:
        return started.results()


def test_each_rank_drops_its_own_part_and_all_drop_what_is_whole_alike(ranks: Any) -> None:
    """With one mask for all parts the same units of every rank would be missing together."""
    mine, other = (each["first"] for each in ranks)
    for name in ("one_part", "other_part"):
        assert mine[name].shape == (4, 16)
        assert (mine[name] != other[name]).mean() > 0.2, name
        assert 0.1 < mine[name].mean() < 0.9, name
    assert not np.array_equal(mine["one_part"], mine["other_part"])
    assert np.array_equal(mine["whole"], other["whole"])
    assert np.array_equal(mine["afterwards"], other["afterwards"])


def test_a_step_draws_the_same_masks_whenever_it_is_computed(ranks: Any) -> None:
    """After a kill another process computes it; a pass that is repeated must drop the same."""
    for each in ranks:
        first = each["first"]
        for name, mask in first.items():
            assert np.array_equal(mask, each["the same again"][name]), name
        assert not np.array_equal(first["one_part"], each["the next"]["one_part"])
        for way in ("repeated", "repeated by hand"):
            # A repeated pass may end before it reaches what is whole.
            for name in ("one_part", "other_part"):
                assert np.array_equal(first[name], each[way][name]), (way, name)
                assert np.array_equal(first[name], each[way][f"{name} again"]), (way, name)


def test_an_evaluation_drops_nothing(ranks: Any) -> None:
    for each in ranks:
        assert not any(mask.any() for name, mask in each["evaluated"].items() if "part" in name)
