"""Record every call of a process group, over gloo and NCCL.

One Python subclass of ``ProcessGroup`` sees every collective of plain calls, functional
collectives, DTensor, FSDP2 and DeviceMesh's sub-groups. torch 2.13 calls some collectives by new
names (``all_gather_single``) and some by old ones (``_allgather_base``). The class has both;
otherwise calls would not be recorded.
"""

import functools
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from workers.collectives import nccl
from workers.collectives.attempt import Attempt
from workers.collectives.torch_names import (
    REDUCE_SCATTER,
    REDUCE_SCATTER_COALESCED,
    check_exchange,
    distributed_c10d,
    new_gloo,
)
from workers.collectives.work import Call, RecordedWork, StreamWork
from workers.telemetry import DTYPES

#: torch knows the recorded groups by these names.
BACKENDS: Final = {"gloo": "everstep_gloo", "nccl": "everstep_nccl"}

#: Larger groups are named by their first and last member and their size.
_NUM_RANKS_NAMED: Final = 8

#: Recorded operation by method of ``ProcessGroup``.
_COLLECTIVES: Final = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "_allgather_base": "all_gather",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "gather_single": "gather",
    "scatter": "scatter",
}
#: Collectives that may be called without the sizes of their splits.
_SPLIT: Final = frozenset({"alltoall_base", "all_to_all_single"})
#: Stands for any member as the sender.
_ANY: Final = -1
#: Collectives whose first argument is the output; the second one is their payload.
_OUTPUT_FIRST: Final = frozenset({"all_gather", "all_to_all", "gather", "reduce_scatter"})
_DTYPES: Final = {getattr(torch, name): code for code, name in enumerate(DTYPES) if name}


class RecordedGroup(dist.ProcessGroup):
    """A process group that records every call and whose waits an abort ends.

    The C++ group ``inner`` does the work; ``backends`` are its backends by device type, "cpu" and
    perhaps "cuda". ``ranks`` are the global ranks of the members, in group order, and ``rank`` is
    this process's index in them.
    """

    def __init__(
        self,
        attempt: Attempt,
        inner: dist.ProcessGroup,
        backends: dict[str, Any],
        *,
        ranks: tuple[int, ...],
        rank: int,
    ) -> None:
        # The C++ constructor takes no store from a Python subclass; torch's stub says otherwise.
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self._attempt = attempt
        self._inner: Any = inner
        self._backends = backends
        self._ranks = ranks
        self._rank = rank
        self._index: int | None = None
        self._label = ""
        self._pairs: dict[tuple[int, int], int] = {}
        self._coalesced: list[Call] | None = None
        # Functional collectives find the group in C++ by a name that needs its own backend.
        for device, (kind, backend) in backends.items():
            self._register_backend(torch.device(device), kind, backend)
        self._set_default_backend(next(iter(backends.values()))[0])

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the backend with which the group was made."""
        return BACKENDS[self._attempt.backend]

    def abort(self) -> None:
        """Abort the whole attempt: no group outlives the others."""
        self._attempt.abort()

    def on_device(self) -> Any:
        """Return the device's backend, or None."""
        return self._backends["cuda"][1] if "cuda" in self._backends else None

    def connect_pairs(self) -> None:
        """Connect each member with every other, by the function ``exchange``."""
        if self.on_device() is None or len(self._ranks) == 1:
            return
        received, sent = torch.zeros(2, len(self._ranks), device="cuda")
        self._attempt.interruptible(
            f"connecting the pairs of ranks {_some(self._ranks)}",
            lambda: nccl.exchange(self._inner, received, sent),
        )

    def shutdown(self) -> None:
        """End the inner backends, unless an abort left work in them."""
        if self._attempt.aborted.is_set():
            return
        for device, (_, backend) in self._backends.items():
            try:
                backend.shutdown()
            except RuntimeError:
                # Ending NCCL's backend waits for the other members, one of which may be gone.
                if device != "cuda":
                    raise
                nccl.abort_together([backend])

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later collectives."""
        for _, backend in self._backends.values():
            backend.set_timeout(timeout)

    def release(self) -> list[Any]:
        """Release the inner group; return the objects that must outlive it if work is in flight."""
        held = [self._inner, self._backends]
        self._inner, self._backends = None, {}
        return held

    def _start_coalescing(self, device: torch.device) -> None:
        # Without the matching end, this thread would stay in NCCL's group; ``batch_isend_irecv``
        # ends it.
        self._inner._start_coalescing(device)  # noqa: SLF001 - torch's name
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:
        calls, self._coalesced = self._coalesced, None
        inner = self._inner
        if not calls:
            return inner._end_coalescing(device)  # noqa: SLF001 - torch's name
        return self._launched(calls, lambda: inner._end_coalescing(device))  # noqa: SLF001

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for every member."""
        on_device = "cuda" in self._backends
        opts = opts if opts is not None else dist.BarrierOptions()
        if on_device:
            # torch assumes a group on the host, by the name of the group's backend.
            opts.device = torch.device("cuda")
        call = self._enter("barrier", (0, 0), on_device=on_device)
        waits = on_device and _return_work(opts)
        return self._begun(
            call, lambda: self._inner.barrier(opts), on_device=on_device, waits_at_once=waits
        )

    def reduce_scatter_single(self, output: Any, value: Any, opts: Any = None) -> dist.Work:
        """Reduce ``value`` over the members and leave this rank's part in ``output``."""
        return self._reduce_scatter([output], [value], opts, single=True)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Any], values: list[Any], opts: Any = None
    ) -> dist.Work:
        """Reduce each pair as ``reduce_scatter_single`` does."""
        return self._reduce_scatter(outputs, values, opts, single=False)

    # Their names before torch 2.12.
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def reduce_scatter(  # type: ignore[override]  # the overload that torch calls
        self, outputs: list[Any], values: list[list[Any]], opts: Any = None
    ) -> dist.Work:
        """Reduce the members' lists and leave this rank's entry in ``outputs``."""
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        on_device = outputs[0].is_cuda
        call = self._enter("reduce_scatter", _payload(values), on_device=on_device)
        waits = on_device and _return_work(opts)
        return self._begun(
            call,
            lambda: self._inner.reduce_scatter(outputs, values, opts),
            on_device=on_device,
            waits_at_once=waits,
            keep=(outputs, values),
            sliced=False,
        )

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        """Send to the member ``peer``, by its index in the group."""
        return self._point_to_point("send", self._rank, peer, tensors, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        """Receive from the member ``peer``, by its index in the group."""
        return self._point_to_point("recv", peer, self._rank, tensors, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> dist.Work:
        """Receive from the member that sends first."""
        mine = self._ranks[self._rank]
        pair = self._pairs.get((_ANY, self._rank))
        if pair is None:
            # The record names only this rank, which may wait for any member.
            pair = self._attempt.ring.group(f"{self._named()} *>{mine}", (mine,))
            self._pairs[_ANY, self._rank] = pair
        on_device = tensors[0].is_cuda
        call = self._enter("recv", _payload(tensors), on_device=on_device, pair=pair)
        return self._begun(
            call,
            lambda: self._inner.recv_anysource(tensors, tag),
            on_device=on_device,
            keep=tensors,
            sliced=False,
        )

    def _enter(
        self,
        op: str,
        payload: tuple[int, int],
        *,
        on_device: bool = False,
        pair: int | None = None,
    ) -> Call | None:
        """Record a call; return None while a CUDA graph is captured, because the call runs later.

        An event in a graph cannot be queried: the error would look like a failed device.
        """
        size_bytes, dtype = payload
        attempt = self._attempt
        if attempt.aborted.is_set():
            raise attempt.error(f"; {op} was not started", op)
        if on_device and nccl.is_recording_graph():
            return None
        if on_device:
            attempt.let_catch_up(op)
        index = pair if pair is not None else self._index
        if index is None:
            index = self._index = attempt.ring.group(self._named(), self._ranks)
        seq, number = attempt.ring.enter(index, op, size_bytes, dtype, on_device=on_device)
        if on_device:
            attempt.note_call()
        # This comes before the call, because a synchronous call makes the stream wait for its end.
        start = attempt.start() if on_device else None
        return Call(attempt, index, self._label, op, number, seq, start)

    def _reduce_scatter(
        self, outputs: list[Any], values: list[Any], opts: Any, *, single: bool
    ) -> dist.Work:
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        on_device = outputs[0].is_cuda
        call = self._enter("reduce_scatter", _payload(values), on_device=on_device)
        if on_device:
            waits = _return_work(opts)
            if single:
                reduce, tensors = getattr(self._inner, REDUCE_SCATTER), (outputs[0], values[0])
            else:
                reduce, tensors = getattr(self._inner, REDUCE_SCATTER_COALESCED), (outputs, values)
            return self._begun(
                call, lambda: reduce(*tensors, opts), on_device=True, waits_at_once=waits
            )
        assert call is not None, "graphs are recorded on devices"
        # gloo does this too (torch 2.13, ProcessGroupGloo::reduce_scatter_tensor_coalesced): an
        # all-reduce of a copy. But a caller can wait for this one in slices.
        buffers = [value.clone(memory_format=torch.contiguous_format) for value in values]
        reduce_opts = dist.AllreduceOptions()
        reduce_opts.reduceOp = opts.reduceOp
        works = [self._inner.allreduce([buffer], reduce_opts) for buffer in buffers]

        def finish() -> None:
            for output, buffer in zip(outputs, buffers, strict=True):
                part = buffer.view(len(self._ranks), -1)[self._rank]
                output.copy_(part.view(output.shape))

        return RecordedWork(call, works, finish=finish, keep=buffers)

    def _point_to_point(
        self, op: str, source: int, target: int, tensors: list[torch.Tensor], tag: int
    ) -> dist.Work:
        pair = self._pairs.get((source, target))
        if pair is None:
            ranks = (self._ranks[source], self._ranks[target])
            # The name has a direction, so that the k-th send matches the k-th receive.
            pair = self._attempt.ring.group(f"{self._named()} {ranks[0]}>{ranks[1]}", ranks)
            self._pairs[source, target] = pair
        on_device = tensors[0].is_cuda
        call = self._enter(op, _payload(tensors), on_device=on_device, pair=pair)
        peer = target if op == "send" else source
        try:
            return self._begun(
                call,
                lambda: getattr(self._inner, op)(tensors, peer, tag),
                on_device=on_device,
                keep=tensors,
                sliced=False,
            )
        except RuntimeError as error:
            # gloo refuses at once if the peer's connection is closed.
            if call is None:
                raise
            raise call.failed(error) from error

    def described(self) -> str:
        """Return the group's name, which other groups of the same members may share."""
        return group_name(self.group_desc, self._ranks, self._attempt.world_size)

    def _named(self) -> str:
        # This runs at the first call, because torch describes a group after creating it.
        if not self._label:
            name = self.described()
            # Number groups by the order of creation, which torch requires to be equal on all
            # members. The order of first calls may differ.
            count = 1 + sum(one.described() == name for one in self._attempt.made_before(self))
            self._label = name if count == 1 else f"{name}#{count}"
        return self._label

    def _begun(
        self,
        call: Call | None,
        begin: Callable[[], Any],
        *,
        on_device: bool,
        waits_at_once: bool = False,
        keep: Any = None,
        sliced: bool = True,
    ) -> dist.Work:
        if call is None:
            return cast("dist.Work", begin())
        if not on_device:
            return RecordedWork(call, [begin()], keep=keep, sliced=sliced)
        if self._coalesced is not None:
            # The call starts when the coalescing ends, and only then has a work to wait for.
            self._coalesced.append(call)
            return cast("dist.Work", begin())
        return self._launched([call], begin, waits_at_once=waits_at_once)

    def _launched(
        self, calls: list[Call], begin: Callable[[], Any], *, waits_at_once: bool = False
    ) -> dist.Work:
        launched = StreamWork(calls, waits_at_once=waits_at_once)
        # This comes first: NCCL may make this rank's host wait for the others before it returns.
        self._attempt.note_launched(calls[0].group, launched.in_flight)
        launched.begin(begin)
        self._attempt.note_begun(calls[0].group)
        return launched


def _collective(method: str, op: str) -> Callable[..., dist.Work]:
    payload_at = 1 if op in _OUTPUT_FIRST else 0

    def call(self: RecordedGroup, *args: Any, **kwargs: Any) -> dist.Work:
        payload = args[payload_at]
        on_device = "cuda" in self._backends and _on_device(payload)
        entered = self._enter(op, _payload(payload), on_device=on_device)
        waits = False
        if on_device:
            waits = any(_return_work(option) for option in (*args, *kwargs.values()))
            if method in _SPLIT:
                args = _with_splits(args, len(self._ranks))
        begin = functools.partial(getattr(self._inner, method), *args, **kwargs)
        return self._begun(entered, begin, on_device=on_device, waits_at_once=waits, keep=args)

    call.__name__ = method
    call.__doc__ = f"Record an {op} and pass it to the inner group."
    return call


for _method, _op in _COLLECTIVES.items():
    setattr(RecordedGroup, _method, _collective(_method, _op))


def group_name(description: str, ranks: tuple[int, ...], world_size: int) -> str:
    """Return the name of a group, which is equal on all its members.

    It is ``world``, or mesh axis and global ranks, as in ``dp_shard[0,2]``. Long groups are named
    by first member, last member and size, and, if the ranks are not evenly spaced, by a checksum.
    """
    axis = description.removeprefix("mesh_")
    if axis in {"default_pg", "default"} and len(ranks) == world_size:
        return "world"
    if len(ranks) > _NUM_RANKS_NAMED:
        step = ranks[1] - ranks[0]
        is_range = ranks == tuple(range(ranks[0], ranks[0] + step * len(ranks), step or 1))
        which = "" if is_range else f", {zlib.crc32(repr(ranks).encode()):08x}"
        return f"{axis}[{ranks[0]}..{ranks[-1]} of {len(ranks)}{which}]"
    return f"{axis}[{','.join(map(str, ranks))}]"


def _return_work(option: Any) -> bool:
    """Make NCCL return the work of a call, because nothing else shows the device's position.

    Return whether torch waits for the work in the call. Since torch 2.8 a synchronous call returns
    no work. If it returns one, torch waits for it: the current stream then waits for the device, as
    it would have without this.
    """
    if not hasattr(option, "asyncOp"):
        return False
    waits = not option.asyncOp
    option.asyncOp = True
    return waits


def _with_splits(args: tuple[Any, ...], num_ranks: int) -> tuple[Any, ...]:
    """Return the arguments of an all-to-all with the sizes of its splits.

    Without sizes torch calls NCCL's own all-to-all (NCCL 2.28 and later), and mistakes "in
    progress", the answer of a non-blocking communicator, for an error.
    """
    output, value, *splits = args
    sizes, rest = splits[:2], splits[2:]
    equal = ([len(tensor) // num_ranks] * num_ranks for tensor in (output, value))
    given = [list(size) or even for size, even in zip(sizes or ((), ()), equal, strict=True)]
    return (output, value, *given, *rest)


def _payload(value: Any) -> tuple[int, int]:
    """Return size in bytes and dtype code of a tensor or of nested lists of tensors."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size(), _DTYPES.get(value.dtype, 0)
    parts = [_payload(part) for part in value]
    return sum(size for size, _ in parts), parts[0][1] if parts else 0


def _on_device(value: Any) -> bool:
    while not isinstance(value, torch.Tensor):
        if not value:
            return False
        value = value[0]
    return bool(value.is_cuda)


def build_group(
    attempt: Attempt, store: dist.Store, rank: int, ranks: tuple[int, ...]
) -> RecordedGroup:
    """Return a recorded group of ``ranks``, once all of them have joined."""
    kinds = dist.ProcessGroup.BackendType
    backends: dict[str, Any] = {}
    if attempt.backend == "nccl":
        device_store = dist.PrefixStore("cuda", store)
        options = nccl.options(attempt.timeout, ranks)
        backend = dist.ProcessGroupNCCL(device_store, rank, len(ranks), options)
        backends["cuda"] = (kinds.NCCL, backend)
    # A gloo group connects each member with every other. With NCCL only the world has one.
    if attempt.backend == "gloo" or len(ranks) == attempt.world_size:
        gloo = attempt.interruptible(
            f"waiting for ranks {_some(ranks)}",
            lambda: new_gloo(store, rank, len(ranks), attempt.timeout, attempt.address),
        )
        backends["cpu"] = (kinds.GLOO, gloo)
    inner = dist.ProcessGroup(store, rank, len(ranks))
    for device, (kind, backend) in backends.items():
        inner._register_backend(torch.device(device), kind, backend)  # noqa: SLF001
    inner._set_default_backend(next(iter(backends.values()))[0])  # noqa: SLF001
    group = RecordedGroup(attempt, inner, backends, ranks=ranks, rank=rank)
    attempt.add(group)
    if (backend := group.on_device()) is not None:
        place = torch.device("cuda", torch.cuda.current_device())
        attempt.interruptible(
            f"connecting the GPUs of ranks {_some(ranks)}", lambda: nccl.connect(backend, place)
        )
    return group


def connect_pairs(group: dist.ProcessGroup) -> None:
    """Connect each pair of a group's GPUs. Groups that send, receive or exchange need this.

    NCCL would do so at the first exchange, in the training thread. There it would wait for a dead
    member, and an abort does not end that wait within 30 s. On the host this does nothing.
    """
    assert isinstance(group, RecordedGroup), "groups are made between form() and leave()"
    group.connect_pairs()


def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
    """Send and receive like torch's function of this name, in one call of NCCL.

    torch 2.13 coalesces only for its own class of groups. On a device, two ranks that each send and
    then receive would wait for each other forever without coalescing.
    """
    group = (p2p_op_list and p2p_op_list[0].group) or dist.group.WORLD
    device = p2p_op_list[0].tensor.device if p2p_op_list else torch.device("cpu")
    if not isinstance(group, RecordedGroup) or device.type != "cuda":
        return _torch_batch_isend_irecv(p2p_op_list)
    check_exchange(p2p_op_list)
    group._start_coalescing(device)  # noqa: SLF001 - torch's name
    try:
        for one in p2p_op_list:
            peer = {"group_dst" if one.op is dist.isend else "group_src": one.group_peer}
            one.op(one.tensor, group=group, tag=one.tag, **peer)
    finally:
        # If NCCL's group is not ended, all later calls of this thread join it and never run.
        work = group._end_coalescing(device)  # noqa: SLF001 - torch's name
    return [work]


_torch_batch_isend_irecv = distributed_c10d.batch_isend_irecv
# Scripts may have imported the name from the first module; torch itself uses the second.
dist.batch_isend_irecv = distributed_c10d.batch_isend_irecv = batch_isend_irecv


def _some(ranks: tuple[int, ...]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"{ranks[0]} to {ranks[-1]}"  # noqa: PLR2004
