"""The state of a plain torch script: which rank saves which elements, under any placement."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ucp_core
from tests.support.fake_ranks import built_of
from tests.support.foreign_reading import loaded
from tests.support.made import tensor_of
from ucp_core.errors import CheckpointCorruptError
from ucp_core.layout import ParallelLayout
from ucp_core.native import LocalTensor, RankSaver
from ucp_core.numerics import BLOCK_BYTES
from ucp_core.storage import LocalStore
from workers.errors import StateError
from workers.models import Decoder, resolve, tensor_plan
from workers.parallel import ModelPlan
from workers.state import HostBuffer, PlainState

pytestmark = pytest.mark.usefixtures("group")

SHAPE = replace(resolve("tiny", {}), num_layers=2, num_kv_heads=4, tied=False)
LAYOUTS = [
    ParallelLayout(dp_shard=3),
    ParallelLayout(dp_replicate=2, dp_shard=2),
    ParallelLayout(dp_shard=2, tp=2),
    ParallelLayout(pp=2, dp_shard=2),
]


def whole(fqn: str, slot: str, shape: tuple[int, ...]) -> Tensor:
    seed = sum(map(ord, fqn + slot))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(model: nn.Module, rank: int) -> PlainState:
    """Return the state of a rank in which each element of each tensor has another value."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)  # of several meshes
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    state = PlainState(model, [optimizer], rank, is_alone=False)
    for entry in state.training.entries():
        ends = zip(entry.box.start, entry.box.stop, strict=True)
        value = whole(entry.fqn, entry.slot, entry.shape)
        entry.tensor.copy_(value[tuple(slice(*end) for end in ends)])
    return state


def save(folder: Path, state: PlainState, rank: int, world_size: int) -> int:
    """Save as a rank; return the bytes that it wrote."""
    tensors = HostBuffer().capture(state.training.saved())
    return write(folder, tensors, rank, world_size, roles=state.roles)


def write(
    folder: Path, tensors: list[LocalTensor], rank: int, world_size: int, **options: Any
) -> int:
    saver = RankSaver(
        tensors,
        attempt=1,
        rank=rank,
        world_size=world_size,
        source={},
        block_bytes=BLOCK_BYTES,
        uncoordinated=True,
        **options,
    )
    data = [tensors[index].data for index in saver.order]
    extra = {"of": {str(rank): rank}, "all": rank}
    saver.save(
        LocalStore(), str(folder), step=1, data=data, extra=extra, param_groups=[], fsync=False
    )
    return sum(saver.sizes_bytes)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_element_is_saved_from_where_it_belongs(
    tmp_path: Path, layout: ParallelLayout
) -> None:
    """FSDP over tensor parallelism cuts a tensor by its inner axis first; replicas save shares."""
    plan = ModelPlan(tensor=tensor_plan(), keep_stage=Decoder.keep_stage, sequence=("input_ids",))
    written = 0
    for rank in range(layout.world_size):
        built = built_of(lambda: Decoder(SHAPE), plan, layout, rank, 1000 + rank)
        written += save(tmp_path, filled(built.model, rank), rank, layout.world_size)

    checkpoint = ucp_core.open(str(tmp_path))
    shapes = {name: tuple(one.shape) for name, one in Decoder(SHAPE).named_parameters()}
    assert {key.fqn for key in checkpoint.state_map.entries} == shapes.keys()
    for key, entry in checkpoint.state_map.entries.items():
        assert torch.equal(loaded(checkpoint, *key), whole(*key, entry.shape)), key
    # Norms that tensor parallelism leaves alone are on ranks that do not know of each other.
    assert written <= 1.05 * checkpoint.state_map.num_bytes
    assert checkpoint.extra == {"of": {str(r): r for r in range(layout.world_size)}, "all": 0}


def tensors_of(value: float, *, num: int, fqn: str = "norm") -> list[LocalTensor]:
    """Return a tensor that each rank has, and as many others as make the record large."""
    return [
        tensor_of(f"{fqn}{number}", (2, 2), memoryview(bytes(torch.full((4,), value).numpy().data)))
        for number in range(num)
    ]


@pytest.mark.parametrize("num", [1, 200])
def test_one_copy_of_several_ranks_counts_if_all_are_equal(tmp_path: Path, num: int) -> None:
    """Small records are read value by value, large ones as columns."""
    write(tmp_path / "equal", tensors_of(1.0, num=num), 1, 2)
    write(tmp_path / "equal", tensors_of(1.0, num=num), 0, 2)
    checkpoint = ucp_core.open(str(tmp_path / "equal"))
    for entry in checkpoint.state_map.entries.values():
        assert [one.file for one in entry.fragments] == ["a0001-r00000.bin"]
    assert torch.equal(loaded(checkpoint, f"norm{num - 1}"), torch.ones(2, 2))

    write(tmp_path / "other", tensors_of(1.0, num=num), 0, 2)
    said = r"norm0 \(weight\): box .* different values in a0001-r00000.bin and in a0001-r00001.bin"
    with pytest.raises(CheckpointCorruptError, match=said):
        write(tmp_path / "other", tensors_of(2.0, num=num), 1, 2)

    buffers = {f"norm{number}": "buffer" for number in range(num)}
    write(tmp_path / "buffers", tensors_of(2.0, num=num), 1, 2, roles=buffers)
    write(tmp_path / "buffers", tensors_of(1.0, num=num), 0, 2, roles=buffers)
    checkpoint = ucp_core.open(str(tmp_path / "buffers"))
    assert torch.equal(loaded(checkpoint, "norm0"), torch.ones(2, 2))
    assert checkpoint.manifest.roles == buffers


def test_what_cannot_be_saved_is_named() -> None:
    """A checkpoint without it would load, and the training would go another way."""
    model = nn.Linear(2, 2)
    with pytest.raises(StateError, match=r"AdamW updates a parameter of shape \[2, 2\]"):
        PlainState(model, [torch.optim.AdamW(nn.Linear(2, 2).parameters())], 0, is_alone=True)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    with pytest.raises(StateError, match=r"the optimizer's .* of weight is neither a number"):
        PlainState(model, [optimizer], 0, is_alone=True).training.saved()
    with pytest.raises(StateError, match="is on the meta device"):
        PlainState(nn.Linear(2, 2, device="meta"), [], 0, is_alone=True)
    model.register_parameter("odd", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    with pytest.raises(StateError, match=r"odd is Parameter of torch\.complex64|odd is Tensor"):
        PlainState(model, [], 0, is_alone=True)


def test_a_hook_that_changes_the_state_dict_is_refused() -> None:
    """A load would fill a copy that the model does not use."""
    model = nn.Linear(2, 2)

    def add(_: nn.Module, state: dict[str, Tensor], *__: Any) -> None:
        state["double"] = state["weight"] * 2

    handle = model.register_state_dict_post_hook(add)
    with pytest.raises(StateError, match=r"^double has another name in the model's state dict"):
        PlainState(model, [], 0, is_alone=True)
    handle.remove()

    def rename(_: nn.Module, state: dict[str, Tensor], *__: Any) -> None:
        state["other"] = state.pop("weight")

    model.register_state_dict_post_hook(rename)
    with pytest.raises(StateError, match=r"^other has another name in the model's state dict"):
        PlainState(model, [], 0, is_alone=True)
