"""Matrices cut by tensor parallelism compute on plain tensors what torch's styles compute."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.support.ranks import Place, running
from workers.parallel.plain_styles import are_plain, cut_plainly

PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


class Small(nn.Module):
    """Every style, with and without a bias; ``up`` is called twice with the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.up = nn.Linear(8, 6)
        self.down = nn.Linear(6, 8)
        self.head = nn.Linear(8, 12, bias=False)

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.embedding(tokens)
        return self.head(hidden + self.down(self.up(hidden) * self.up(hidden).sigmoid()))


def filled() -> nn.Module:
    torch.manual_seed(1)
    return Small().double()


def by_torch(module: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> None:
    parallelize_module(module, mesh, style)


def nodes_of(output: Tensor) -> set[str]:
    """Return the names of all nodes of the graph of ``output``."""
    found, left = set(), [output.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [each for each, _ in node.next_functions]
    return {node.name() for node in found}


def compute(place: Place) -> None:
    store = dist.TCPStore("127.0.0.1", place.port)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    tokens = torch.arange(24).view(3, 8) % 12
    found: list[tuple[Tensor, dict[str, Any]]] = []
    for cut in (by_torch, cut_plainly):
        model = filled()
        for name, style in PLAN.items():
            cut(model.get_submodule(name), style, mesh)
        output = model(tokens)
        is_planned = any("FromTorchTensor" in name for name in nodes_of(output))
        assert is_planned == (cut is by_torch)
        for _ in range(2):
            model(tokens).square().mean().backward()
        found.append((output.detach(), dict(model.named_parameters())))
    (output, theirs), (plain, ours) = found
    assert torch.allclose(output, filled()(tokens), rtol=1e-13, atol=1e-13)
    assert torch.allclose(output, plain, rtol=1e-13, atol=1e-13)
    assert theirs.keys() == ours.keys()
    for name in ours:
        parameter: Any = ours[name]
        other: Any = theirs[name]
        assert isinstance(ours[name], nn.Parameter), name
        assert parameter.placements == other.placements, name
        assert parameter.stride() == other.stride(), name
        assert torch.equal(parameter.to_local(), other.to_local()), name
        gradient: Any = parameter.grad
        assert gradient.placements == parameter.placements, name
        gap = (gradient.full_tensor() - other.grad.full_tensor()).abs().max()
        assert gap <= 1e-13 * other.grad.full_tensor().abs().max(), name
    dist.destroy_process_group()


def test_outputs_and_gradients_are_those_of_torchs_styles(tmp_path: Path) -> None:
    with running(compute, 2, tmp_path) as ranks:
        ranks.results()


class Float8Style(ColwiseParallel):
    """Stands for styles of other libraries that compute otherwise."""


@pytest.mark.parametrize(
    ("module", "style"),
    [
        (nn.Linear(4, 4), Float8Style()),
        (nn.Linear(4, 4), ColwiseParallel(use_local_output=False)),
        (nn.Linear(4, 4), ColwiseParallel(input_layouts=Shard(1))),
        (nn.Linear(4, 4), RowwiseParallel(output_layouts=Shard(1))),
        (nn.Embedding(4, 4, padding_idx=0), RowwiseParallel(input_layouts=Replicate())),
        (nn.LayerNorm(4), SequenceParallel()),
    ],
)
def test_one_other_style_leaves_all_to_torch(module: nn.Module, style: ParallelStyle) -> None:
    usual = (nn.Linear(4, 4), ColwiseParallel())
    assert are_plain([usual])
    assert not are_plain([usual, (module, style)])
