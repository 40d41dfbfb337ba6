"""Collectives as scripts, DTensor and FSDP call them, each as a case.

A case runs on a recorded group and on torch's own group of the same transport; both must leave the
same tensors. Each case lists the operations that it must record, the same ones on every rank.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from workers.collectives.group import RecordedGroup


class Caller:
    """One rank in one group, for a case."""

    def __init__(self, group: Any, device: torch.device, *, is_async: bool) -> None:
        self.group = group  #: The recorded group of all ranks, or torch's own.
        self.device = device
        #: Whether collectives return work, for which the case waits afterwards.
        self.is_async = is_async
        self.rank, self.size = group.rank(), group.size()

    def own(self, *shape: int) -> Tensor:
        """Return values of this rank, the same each time."""
        generator = torch.Generator().manual_seed(self.rank)
        return torch.randn(shape, generator=generator).to(self.device)

    def empty(self, *shape: int) -> Tensor:
        """Return room for results."""
        return torch.zeros(shape, device=self.device)

    def call(self, collective: Any, *args: Any, **kwargs: Any) -> None:
        """Call a function of ``torch.distributed``; return when its results are there."""
        work = collective(*args, **kwargs, group=self.group, async_op=self.is_async)
        if self.is_async:
            work.wait()

    def mesh(self) -> DeviceMesh:
        """Return a mesh of this group. torch confuses meshes that have the same names."""
        names = (type(self.group).__name__,)
        return DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=names)


_Run = Callable[[Caller], list[Tensor]]


class Case(NamedTuple):
    """A way to call collectives."""

    run: _Run  #: Calls them; returns what they leave.
    records: tuple[str, ...]  #: The records that each rank must make, in any order.
    records_on_device: tuple[str, ...]  #: The same where the tensors are on a device.
    ways: tuple[bool, ...]  #: Values of ``async_op`` that it is called with.


CASES: Final[dict[str, Case]] = {}


def case(
    *records: str,
    on_device: tuple[str, ...] | None = None,
    ways: tuple[bool, ...] = (False, True),
) -> Callable[[_Run], _Run]:
    """Add a case by the name of its function."""

    def add(run: _Run) -> _Run:
        CASES[run.__name__] = Case(run, records, records if on_device is None else on_device, ways)
        return run

    return add


def _torchs(*names: str) -> Any:
    """Return the function of ``torch.distributed`` that has one of these names."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


all_gather_single: Final = _torchs("all_gather_single", "all_gather_into_tensor")
reduce_scatter_single: Final = _torchs("reduce_scatter_single", "reduce_scatter_tensor")


@case("all_reduce", "all_reduce")
def all_reduce(c: Caller) -> list[Tensor]:
    total, largest = c.own(12), c.own(12)
    c.call(dist.all_reduce, total)
    c.call(dist.all_reduce, largest, op=dist.ReduceOp.MAX)
    return [total, largest]


@case("all_reduce")
def all_reduce_coalesced(c: Caller) -> list[Tensor]:
    values = [c.own(3), c.own(5)]
    c.call(dist.all_reduce_coalesced, values)
    return values


@case("all_gather")
def all_gather_list(c: Caller) -> list[Tensor]:
    parts = [c.empty(6) for _ in range(c.size)]
    c.call(dist.all_gather, parts, c.own(6))
    return parts


@case("all_gather")
def all_gather_tensor(c: Caller) -> list[Tensor]:
    parts = c.empty(c.size * 6)
    c.call(all_gather_single, parts, c.own(6))
    return [parts]


@case("reduce_scatter")
def reduce_scatter_list(c: Caller) -> list[Tensor]:
    part = c.empty(3)
    c.call(dist.reduce_scatter, part, list(c.own(c.size * 3).chunk(c.size)))
    return [part]


@case("reduce_scatter")
def reduce_scatter_tensor(c: Caller) -> list[Tensor]:
    part = c.empty(3)
    c.call(reduce_scatter_single, part, c.own(c.size * 3))
    return [part]


@case("all_to_all")
def all_to_all_list(c: Caller) -> list[Tensor]:
    parts = [c.empty(2) for _ in range(c.size)]
    c.call(dist.all_to_all, parts, list(c.own(c.size * 2).chunk(c.size)))
    return parts


@case("all_to_all")
def all_to_all_equal(c: Caller) -> list[Tensor]:
    parts = c.empty(c.size * 2, 3)
    c.call(dist.all_to_all_single, parts, c.own(c.size * 2, 3))
    return [parts]


@case("all_to_all")
def all_to_all_splits(c: Caller) -> list[Tensor]:
    """Rank r sends r + 1 rows to the first rank, one more to each further one."""
    sent = [c.rank + to + 1 for to in range(c.size)]
    got = [of + c.rank + 1 for of in range(c.size)]
    parts = c.empty(sum(got), 2)
    c.call(dist.all_to_all_single, parts, c.own(sum(sent), 2), got, sent)
    return [parts]


@case("broadcast")
def broadcast(c: Caller) -> list[Tensor]:
    value = c.own(5)
    c.call(dist.broadcast, value, src=1)
    return [value]


@case("reduce")
def reduce(c: Caller) -> list[Tensor]:
    value = c.own(5)
    c.call(dist.reduce, value, dst=1)
    # The others' values are not defined.
    return [value] if c.rank == 1 else []


@case("gather")
def gather(c: Caller) -> list[Tensor]:
    parts = [c.empty(4) for _ in range(c.size)] if c.rank == 1 else None
    c.call(dist.gather, c.own(4), parts, dst=1)
    return parts or []


if hasattr(dist, "gather_single"):  # torch 2.14

    @case("gather")
    def gather_tensor(c: Caller) -> list[Tensor]:
        parts = c.empty(c.size * 4) if c.rank == 1 else None
        c.call(_torchs("gather_single"), c.own(4), parts, dst=1)
        return [] if parts is None else [parts]


@case("scatter")
def scatter(c: Caller) -> list[Tensor]:
    part = c.empty(4)
    c.call(dist.scatter, part, list(c.own(c.size, 4)) if c.rank == 1 else None, src=1)
    return [part]


@case("barrier")
def barrier(c: Caller) -> list[Tensor]:
    c.call(dist.barrier)
    return []


@case("send", "recv", ways=(False,))
def send_and_recv(c: Caller) -> list[Tensor]:
    got = c.empty(4)
    to, of = (c.rank + 1) % c.size, (c.rank - 1) % c.size
    # One of each two sends first, or both would wait.
    for sends in (c.rank % 2 == 0, c.rank % 2 == 1):
        if sends:
            dist.send(c.own(4), to, group=c.group)
        else:
            dist.recv(got, of, group=c.group)
    return [got]


@case("send", "recv", ways=(False,))
def recv_from_anybody(c: Caller) -> list[Tensor]:
    got = c.empty(4)
    sent = dist.isend(c.own(4), (c.rank + 1) % c.size, group=c.group)
    sender = dist.recv(got, group=c.group)
    assert sent is not None
    sent.wait()
    return [got, torch.tensor(sender)]


@case("send", "recv", ways=(True,))
def batched_send_and_recv(c: Caller) -> list[Tensor]:
    got = c.empty(4)
    to, of = (c.rank + 1) % c.size, (c.rank - 1) % c.size
    both = [
        dist.P2POp(dist.isend, c.own(4), to, group=c.group),
        dist.P2POp(dist.irecv, got, of, group=c.group),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return [got]


@case("all_reduce", ways=(True,))
def future(c: Caller) -> list[Tensor]:
    value = c.own(12)
    work = dist.all_reduce(value, group=c.group, async_op=True)
    assert work is not None
    work.get_future().wait()
    return [value]


@case("all_gather", "all_gather", "broadcast", "broadcast", ways=(False,))
def objects(c: Caller) -> list[Tensor]:
    """Sizes first, then what was pickled."""
    gathered: list[Any] = [None] * c.size
    dist.all_gather_object(gathered, {"rank": c.rank}, group=c.group)
    told = [c.rank]
    dist.broadcast_object_list(told, src=2, group=c.group, device=c.device)
    return [torch.tensor([*(one["rank"] for one in gathered), *told])]


@case("all_reduce", "all_gather", "reduce_scatter")
def coalesced(c: Caller) -> list[Tensor]:
    """Two calls of a kind are one call of the group."""
    return _coalesced(c, None)


@case("all_reduce", "all_gather", "reduce_scatter")
def coalesced_on_device(c: Caller) -> list[Tensor]:
    """The group is told where a block of calls begins and ends."""
    return _coalesced(c, c.device)


def _coalesced(c: Caller, device: torch.device | None) -> list[Tensor]:
    sizes = (3, 5)
    sums = [c.own(size) for size in sizes]
    gathered = [c.empty(c.size * size) for size in sizes]
    parts = [c.empty(size) for size in sizes]

    def sum_up(at: int) -> None:
        dist.all_reduce(sums[at], group=c.group)

    def gather_up(at: int) -> None:
        all_gather_single(gathered[at], c.own(sizes[at]), group=c.group)

    def scatter_sums(at: int) -> None:
        reduce_scatter_single(parts[at], c.own(c.size * sizes[at]), group=c.group)

    for call in (sum_up, gather_up, scatter_sums):
        manager = dist._coalescing_manager(c.group, device, async_ops=c.is_async)
        with manager as works:
            call(0)
            call(1)
        if c.is_async:
            works.wait()
    return [*sums, *gathered, *parts]


@case(
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "all_to_all",
    "broadcast",
    ways=(True,),
)
def functional_collectives(c: Caller) -> list[Tensor]:
    """torch finds the group in C++, by its name."""
    even = [2] * c.size
    return [
        functional.wait_tensor(each)
        for each in (
            functional.all_reduce(c.own(4), "sum", c.group),
            functional.all_gather_tensor(c.own(4), 0, c.group),
            functional.reduce_scatter_tensor(c.own(c.size * 2), "sum", 0, c.group),
            functional.all_to_all_single(c.own(c.size * 2), even, even, c.group),
            functional.all_to_all_single(c.own(c.size * 2), None, None, c.group),
            functional.broadcast(c.own(4), 1, c.group),
        )
    ]


@case("all_reduce", "all_gather", "reduce_scatter", ways=(True,))
def functional_coalesced(c: Caller) -> list[Tensor]:
    values, parts = [c.own(4), c.own(6)], [c.own(c.size), c.own(c.size * 2)]
    called = (
        functional.all_reduce_coalesced(values, "sum", c.group),
        functional.all_gather_into_tensor_coalesced(values, c.group),
        functional.reduce_scatter_tensor_coalesced(parts, "sum", [0, 0], c.group),
    )
    return [functional.wait_tensor(each) for several in called for each in several]


@case("all_gather", "reduce_scatter", "all_reduce", ways=(True,))
def dtensor_redistribute(c: Caller) -> list[Tensor]:
    mesh, value = c.mesh(), c.own(c.size * 2, c.size)
    rows = DTensor.from_local(value, mesh, [Shard(0)])
    sums = DTensor.from_local(value, mesh, [Partial()])
    moved = (
        rows.redistribute(placements=[Replicate()]),
        sums.redistribute(placements=[Shard(0)]),
        sums.redistribute(placements=[Replicate()]),
    )
    return [functional.wait_tensor(each.to_local()) for each in moved]


# On the host torch gathers everything and keeps its part.
@case("all_gather", on_device=("all_to_all",), ways=(True,))
def dtensor_to_another_dim(c: Caller) -> list[Tensor]:
    rows = DTensor.from_local(c.own(c.size * 2, c.size), c.mesh(), [Shard(0)])
    columns = rows.redistribute(placements=[Shard(1)])
    return [functional.wait_tensor(columns.to_local())]


@case("all_reduce", "all_reduce", ways=(True,))
def mesh_sub_groups(c: Caller) -> list[Tensor]:
    mesh, values = _square_mesh(c), [c.own(6), c.own(6)]
    for value, axis in zip(values, mesh.get_all_groups(), strict=True):
        dist.all_reduce(value, group=axis)
    return values


def _square_mesh(c: Caller) -> DeviceMesh:
    """Return a mesh whose sub-groups are of the kind of the caller's group."""
    names = tuple(f"{type(c.group).__name__}_{axis}" for axis in ("replicate", "shard"))
    own = None if isinstance(c.group, RecordedGroup) else dict.fromkeys(names, c.group.name())
    return init_device_mesh(
        c.device.type, (2, c.size // 2), mesh_dim_names=names, backend_override=own
    )


@case(*["all_gather"] * 4, *["reduce_scatter"] * 2, ways=(True,))
def fsdp_step(c: Caller) -> list[Tensor]:
    return _step(c, c.mesh())


@case(*["all_gather"] * 4, *["reduce_scatter"] * 2, *["all_reduce"] * 2, ways=(True,))
def fsdp_step_with_replicas(c: Caller) -> list[Tensor]:
    return _step(c, _square_mesh(c))


def _step(c: Caller, mesh: DeviceMesh) -> list[Tensor]:
    torch.manual_seed(0)
    # 33 rows are not cut evenly.
    model = nn.Sequential(nn.Linear(16, 33), nn.Linear(33, 16)).to(c.device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(c.own(4, 16)).square().mean()
    loss.backward()
    optimizer.step()
    found: list[Any] = [each for one in model.parameters() for each in (one, one.grad)]
    return [loss.detach(), *(each.to_local().detach() for each in found)]


def _methods(*names: str) -> list[str]:
    """Return those that this release of torch has. Some have an old and a new name."""
    return [name for name in names if hasattr(dist.ProcessGroup, name)]


_GATHERS: Final = _methods("all_gather_single", "_allgather_base")
_GATHERS_SEVERAL: Final = _methods("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
_SCATTERS: Final = _methods("reduce_scatter_single", "_reduce_scatter_base")
_SCATTERS_SEVERAL: Final = _methods(
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
)
_EXCHANGES: Final = _methods("all_to_all_single", "alltoall_base")


@case(
    *["all_gather"] * len(_GATHERS + _GATHERS_SEVERAL),
    *["reduce_scatter"] * len(_SCATTERS + _SCATTERS_SEVERAL),
    *["all_to_all"] * len(_EXCHANGES),
    ways=(True,),
)
def methods_by_all_names(c: Caller) -> list[Tensor]:
    found: list[Tensor] = []

    def call(name: str, output: Any, *args: Any) -> None:
        getattr(c.group, name)(output, *args).wait()
        found.extend([output] if isinstance(output, Tensor) else output)

    for name in _GATHERS:
        call(name, c.empty(c.size * 3), c.own(3))
    for name in _GATHERS_SEVERAL:
        call(name, [c.empty(c.size * 3), c.empty(c.size)], [c.own(3), c.own(1)])
    for name in _SCATTERS:
        call(name, c.empty(3), c.own(c.size * 3))
    for name in _SCATTERS_SEVERAL:
        call(name, [c.empty(3), c.empty(1)], [c.own(c.size * 3), c.own(c.size)])
    for name in _EXCHANGES:
        call(name, c.empty(c.size * 2), c.own(c.size * 2), [], [])
    return found


@case("all_gather")
def all_gather_coalesced(c: Caller) -> list[Tensor]:
    parts = [[c.empty(3), c.empty(2)] for _ in range(c.size)]
    c.call(dist.all_gather_coalesced, parts, [c.own(3), c.own(2)])
    return [part for of_rank in parts for part in of_rank]
