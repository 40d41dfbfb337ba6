import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ucp_core.geometry import Box
from workers.errors import StateError
from workers.parallel import LocalShard
from workers.state import HostBuffer, TrainingState, local_parameters, set_scalars
from workers.state.entries import state_of
from workers.train.executor.norm import row_squares, sum_of_squares


class Sharded(nn.Parameter):
    """FSDP2's gradient of a parameter, which has a local part."""

    @property
    def _local_tensor(self) -> torch.Tensor:
        return self.data


def shard(
    fqn: str, whole: torch.Tensor, start: int, stop: int, num_replicas: int = 1
) -> LocalShard:
    local = whole[start:stop].clone()
    parameter = nn.Parameter(local)
    gradient = Sharded(local * 2, requires_grad=False)
    parameter.grad = gradient
    box = Box((start, *(0 for _ in whole.shape[1:])), (stop, *whole.shape[1:]))
    return LocalShard(
        fqn=fqn,
        shape=tuple(whole.shape),
        boxes=(box,),
        replicas=tuple(range(num_replicas)),
        parameter=parameter,
        local=local,
    )


def trained(shards: list[LocalShard]) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    parameters = local_parameters(shards)
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return parameters, optimizer


def scalars(
    held: list[LocalShard], parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    steady = TrainingState(held, parameters, optimizer)
    steady.entries()
    return steady.scalars()


WEIGHTS = {"a.weight": torch.randn(6, 4), "b.weight": torch.randn(5)}


def test_the_optimizer_updates_the_memory_of_the_model() -> None:
    """It holds parameters of its own; a copy would train beside the model."""
    held = [shard("a.weight", WEIGHTS["a.weight"], 2, 5)]

    trained(held)

    assert not torch.equal(held[0].local, WEIGHTS["a.weight"][2:5])


class Reads(TorchDispatchMode):
    """Counts reads of single numbers, each of which waits for a device."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_scalars_are_read_together() -> None:
    """A fused AdamW keeps each parameter's ``step`` on the device."""
    held = [shard(name, whole, 1, 4) for name, whole in WEIGHTS.items()]
    parameters, optimizer = trained(held)
    optimizer.state[parameters["b.weight"]]["step"].add_(0.5)
    optimizer.state[parameters["b.weight"]]["scale"] = torch.tensor(3, dtype=torch.int64)
    with Reads() as reads:
        found = scalars(held, parameters, optimizer)

    assert found == {"step": {"a.weight": 1.0, "b.weight": 1.5}, "scale": {"b.weight": 3.0}}
    assert reads.num == 0


def test_a_capture_is_a_copy_of_weights_and_moments() -> None:
    """The next step changes them while the background still writes."""
    held = [shard(name, whole, 1, 4) for name, whole in WEIGHTS.items()]
    parameters, optimizer = trained(held)
    captured = HostBuffer().capture(state_of(held, parameters, optimizer))
    before = {(one.fqn, one.slot): bytes(one.data) for one in captured}

    optimizer.step()

    assert sorted(before) == [
        (fqn, slot) for fqn in sorted(WEIGHTS) for slot in ("exp_avg", "exp_avg_sq", "weight")
    ]
    assert {(one.fqn, one.slot): bytes(one.data) for one in captured} == before
    assert all(one.box.start[0] == 1 and one.box.stop[0] == 4 for one in captured)


def test_a_buffer_captures_other_states_after_one_another() -> None:
    """It keeps its views from one save to the next; another state needs others."""
    buffer = HostBuffer()
    for stop in (4, 4, 5, 4):
        held = [shard(name, whole, 1, stop) for name, whole in WEIGHTS.items()]
        parameters, optimizer = trained(held)
        entries = state_of(held, parameters, optimizer)
        for entry, one in zip(entries, buffer.capture(entries), strict=True):
            assert (one.fqn, one.slot) == (entry.fqn, entry.slot)
            assert bytes(one.data) == bytes(entry.local_tensor(entry.tensor).data)


def test_a_large_buffer_starts_at_a_huge_page() -> None:
    """A copy into pages of 4 KiB takes a quarter longer, and their first touch three times."""
    held = [shard("large", torch.zeros(1 << 20), 0, 1 << 20)]
    [copied] = HostBuffer().capture(
        state_of(held, local_parameters(held), torch.optim.SGD([torch.zeros(1)]))
    )

    assert torch.frombuffer(copied.data, dtype=torch.uint8).data_ptr() % (2 << 20) == 0


@pytest.mark.parametrize("num_shares", [2, 3])
def test_replicas_capture_shares_that_make_up_the_whole(num_shares: int) -> None:
    """A view of the wrong rows has a record that proves, and bytes of other elements."""
    held = [shard(name, whole, 1, 5, num_shares) for name, whole in WEIGHTS.items()]
    parameters, optimizer = trained(held)
    filled = {
        (entry.fqn, entry.slot): torch.full_like(entry.tensor, torch.nan)
        for entry in state_of(held, parameters, optimizer)
    }
    for share in range(num_shares):
        steady = TrainingState(held, parameters, optimizer, rank=share)
        for one in HostBuffer().capture(steady.saved()):
            low, high = one.box.start[0] - 1, one.box.stop[0] - 1
            rows = filled[one.fqn, one.slot][low:high]
            assert rows.isnan().all(), "saved twice"
            rows.copy_(torch.frombuffer(one.data, dtype=torch.float32).view(rows.shape))

    for entry in state_of(held, parameters, optimizer):
        assert torch.equal(filled[entry.fqn, entry.slot], entry.tensor)


def test_a_share_is_taken_from_where_the_tensor_is_now() -> None:
    """``tensor.data = other`` keeps the tensor; a view of it shows the memory that it had."""
    held = [shard(name, whole, 0, 5, 2) for name, whole in WEIGHTS.items()]
    parameters, optimizer = trained(held)
    steady = TrainingState(held, parameters, optimizer, rank=1)
    saved = steady.saved()
    optimizer.step()
    assert steady.saved() is saved

    moved = optimizer.state[parameters["b.weight"]]["exp_avg"]
    moved.data = torch.full((5,), 3.0)
    found = {(entry.fqn, entry.slot): entry.tensor for entry in steady.saved()}
    assert set(found["b.weight", "exp_avg"].tolist()) == {3.0}


def test_scalars_return_to_every_parameter() -> None:
    """One number stands for all as long as they agree, and no longer."""
    held = [shard(name, whole, 0, 5) for name, whole in WEIGHTS.items()]
    parameters, optimizer = trained(held)
    assert scalars(held, parameters, optimizer) == {"step": 1.0}
    optimizer.state[parameters["b.weight"]]["step"].fill_(7.0)
    told = scalars(held, parameters, optimizer)
    assert told == {"step": {"a.weight": 1.0, "b.weight": 7.0}}

    other_parameters, other = trained(held)
    set_scalars(other_parameters, other, told)

    assert scalars(held, other_parameters, other) == told


def test_a_parameter_that_the_optimizer_has_nothing_of_gets_no_scalars() -> None:
    """A frozen one has no step count; a made-up one is a state that Adam cannot go on from."""
    held = [shard(name, whole, 0, 5) for name, whole in WEIGHTS.items()]
    parameters, optimizer = trained(held)
    del optimizer.state[parameters["b.weight"]]
    told = scalars(held, parameters, optimizer)
    assert told == {"step": {"a.weight": 1.0}}

    set_scalars(parameters, optimizer, told)
    set_scalars(parameters, optimizer, {"step": 4.0})

    assert scalars(held, parameters, optimizer) == {"step": {"a.weight": 4.0}}
    assert parameters["b.weight"] not in optimizer.state


def test_a_tensor_that_the_optimizer_replaced_is_looked_up_again() -> None:
    """The state is looked up once; a copy of what was there before would pass every checksum."""
    held = [shard(name, whole, 0, 5) for name, whole in WEIGHTS.items()]
    parameters, optimizer = trained(held)
    steady = TrainingState(held, parameters, optimizer)
    entries = steady.entries()
    optimizer.step()
    assert steady.entries() is entries

    optimizer.state[parameters["b.weight"]]["exp_avg"] = torch.full((5,), 3.0)
    found = {(entry.fqn, entry.slot): entry.tensor for entry in steady.entries()}
    assert found["b.weight", "exp_avg"].tolist() == [3.0] * 5

    optimizer.state[parameters["a.weight"]]["max_exp_avg"] = torch.zeros(5, 4)
    assert ("a.weight", "max_exp_avg") in {(one.fqn, one.slot) for one in steady.entries()}


def test_groups_name_their_parameters() -> None:
    """A checkpoint outlives the objects; an ``id`` means nothing to who loads it."""
    held = [shard(name, whole, 0, 5) for name, whole in WEIGHTS.items()]
    parameters, optimizer = trained(held)
    optimizer.param_groups[0]["lr"] = 0.25
    (group,) = TrainingState(held, parameters, optimizer).param_groups()

    assert (group["lr"], group["params"]) == (0.25, ["a.weight", "b.weight"])


def test_an_optimizer_that_cannot_be_sharded_is_refused() -> None:
    """Its state would be lost in silence, and the run would go on with another."""
    held = [shard("a.weight", WEIGHTS["a.weight"], 0, 6)]
    parameters, optimizer = trained(held)
    optimizer.state[parameters["a.weight"]]["rows"] = torch.zeros(6)

    with pytest.raises(StateError, match=r"rows of a\.weight"):
        state_of(held, parameters, optimizer)


def test_an_optimizer_whose_tensors_are_of_a_type_that_is_not_saved_is_refused() -> None:
    """They have the shape of their parameter: the first save would fail without naming them."""
    held = [shard("a.weight", WEIGHTS["a.weight"], 1, 4)]
    parameters, optimizer = trained(held)
    optimizer.state[parameters["a.weight"]]["exp_avg"] = torch.zeros(3, 4, dtype=torch.complex64)

    with pytest.raises(StateError, match=r"exp_avg of a\.weight is torch\.complex64"):
        state_of(held, parameters, optimizer)


@pytest.mark.parametrize("cuts", [(0, 6, 6), (0, 1, 6), (0, 3, 6)], ids=str)
def test_row_squares_add_up_alike_however_rows_are_cut(cuts: tuple[int, int, int]) -> None:
    """A rank may hold one row or none, for which torch could take another path."""
    whole = torch.randn(6, 513)
    device = torch.device("cpu")

    parts = [
        row_squares([shard("w", whole, start, stop)], {"w": (6, 4)}, 0, device)
        for start, stop in itertools.pairwise(cuts)
    ]

    together = row_squares([shard("w", whole, 0, 6)], {"w": (6, 4)}, 0, device)
    assert torch.equal(parts[0] + parts[1], together)
    assert together.sum().item() == pytest.approx(
        sum_of_squares([shard("w", whole, 0, 6)], 0, device).item(), rel=1e-6
    )
