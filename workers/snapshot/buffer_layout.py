"""Lay out the tensors of a rank in a buffer, and copy them within this machine's memory.

Another thread (``workers.snapshot.device``) later checksums tensors of a block or more, because
training would wait a fifth longer if that were done while copying. Smaller tensors are checksummed
while copying, because for each of them another thread would take the interpreter from training.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ucp_core.native import LocalTensor, RankSaver
from ucp_core.numerics import NO_SUMS, Sums, crc32
from workers.memory import NUM_BUFFERS, Arena, ArenaStore
from workers.protocol import Assignment
from workers.state import StateEntry

#: Size of a block. A new layout needs parts of blocks, but blocks are read whole. With this size a
#: tenth to a third more than needed is read, with 1 MiB half as much again.
BLOCK_BYTES: Final = 256 << 10
#: A record has room for twice the small values of the first snapshot, plus this.
_RECORD_SPARE_BYTES: Final = 64 << 10

#: From this size on, the copy releases the interpreter, which takes 2 us.
_LARGE_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A state to put into a buffer, as ``ucp_core.native.save_rank`` takes it."""

    step: int  #: The step after which it was taken.
    entries: Sequence[StateEntry]  #: The part of the state's tensors that this rank saves.
    extra: Mapping[str, Any]  #: Small named values.
    param_groups: Sequence[Mapping[str, Any]]  #: The optimizer's groups.
    #: ``(rank, tensors)`` that this rank saves for other ranks, as copies or in a parity.
    guarded: Sequence[tuple[int, Sequence[StateEntry]]] = ()


def source_of(assignment: Assignment) -> dict[str, Any]:
    """Return the note about its writer that a checkpoint has."""
    return {"writer": "everstep", "layout": assignment.layout.to_json()}


class BufferLayout:
    """The position of everything in a buffer, as ``save_rank`` writes it, for one layout."""

    def __init__(self, state: Captured, assignment: Assignment) -> None:
        self._entries = state.entries
        self._places = [_layout(entry) for entry in state.entries]
        self.saver = RankSaver(
            [entry.local_tensor(None) for entry in state.entries],
            attempt=assignment.attempt,
            rank=assignment.rank,
            world_size=assignment.layout.world_size,
            source=source_of(assignment),
            block_bytes=BLOCK_BYTES,
        )
        self._take(state.entries)
        small = len(json.dumps([dict(state.extra), list(state.param_groups)]))
        record_bytes_max = self.saver.record_bytes_max + 2 * small + _RECORD_SPARE_BYTES
        self.data_bytes = sum(self.saver.sizes_bytes)
        self.body_bytes = self.data_bytes + record_bytes_max
        self.data: list[list[memoryview]] = []
        self.views: list[list[Tensor]] = []

    def takes(self, entries: Sequence[StateEntry]) -> bool:
        """Return whether these tensors have this layout. If so, copy from them from now on."""
        if entries is self._entries:
            return True
        if [_layout(entry) for entry in entries] != self._places:
            return False
        self._take(entries)
        return True

    def _take(self, entries: Sequence[StateEntry]) -> None:
        self._entries = entries
        self._written = [entries[index] for index in self.saver.order]
        self.sources = [entry.tensor for entry in self._written]
        self._host = HostTensors(self.sources, block_bytes=BLOCK_BYTES)

    def bytes(self) -> Sequence[memoryview] | None:
        """Return the bytes of every tensor in place, in the order of the data, or None."""
        return self._host.views()

    def copy(self, buffer: int) -> list[Sums] | None:
        """Copy the state into the buffer and return its checksums; None if it is on a device."""
        return self._host.copy_to(self.data[buffer])

    def lay_out(self, arena: Arena) -> None:
        """Find the position of every tensor in every buffer."""
        for buffer in range(NUM_BUFFERS):
            body = arena.body(buffer)
            block = torch.frombuffer(body, dtype=torch.uint8)
            data: list[memoryview] = []
            views: list[Tensor] = []
            start = 0
            for entry, size in zip(self._written, self.saver.sizes_bytes, strict=True):
                data.append(body[start : start + size])
                flat = block[start : start + size].view(entry.tensor.dtype)
                views.append(flat.view(entry.tensor.shape))
                start += size
            self.data.append(data)
            self.views.append(views)

    def complete(
        self,
        arena: Arena,
        buffer: int,
        state: Captured,
        sums: Sequence[Sums],
        check: Callable[[], None],
    ) -> None:
        """Write the record of the captured state, with its checksums, by an ``ArenaStore``."""
        self.saver.save(
            ArenaStore(arena, buffer, check=check),
            "",
            step=state.step,
            data=self.data[buffer],
            extra=state.extra,
            param_groups=state.param_groups,
            fsync=False,
            sums=sums,
        )

    def tensors(self, buffer: int) -> list[LocalTensor]:
        """Return the tensors as they lie in a buffer."""
        return [
            entry.local_tensor(view)
            for entry, view in zip(self._written, self.views[buffer], strict=True)
        ]


class HostTensors:
    """The bytes of tensors, of any dtype on any device, that are copied repeatedly."""

    def __init__(self, tensors: Sequence[Tensor], *, block_bytes: int) -> None:
        self._tensors = tensors
        self._block_bytes = block_bytes
        self._addresses: list[int] = []
        self._bytes: list[memoryview] = []

    def views(self) -> Sequence[memoryview] | None:
        """Return the bytes of every tensor in place; None if one is on a device or not contiguous.

        The list is the same as last time if no tensor has moved.
        """
        if self._tensors and self._tensors[0].is_cuda:
            return None
        # A tensor with the same name and shape may have moved in memory.
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        if addresses != self._addresses:
            if any(t.is_cuda or not t.is_contiguous() for t in self._tensors):
                return None
            self._bytes = [_bytes_of(tensor) for tensor in self._tensors]
            self._addresses = addresses
        return self._bytes

    def copy_to(self, targets: Sequence[memoryview]) -> list[Sums] | None:
        """Copy every tensor to ``targets``; return its checksums.

        A large tensor gets ``NO_SUMS``: its checksums are computed later. If the bytes are not
        accessible, copy nothing and return None.
        """
        sources = self.views()
        if sources is None:
            return None
        sums: list[Sums] = []
        for source, target in zip(sources, targets, strict=True):
            # Most tensors of most models are small, and this is faster for them.
            if len(source) < _LARGE_BYTES:
                target[:] = source
            else:
                np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
            is_small = 0 < len(target) < self._block_bytes
            sums.append(((value := crc32(target)), str(value)) if is_small else NO_SUMS)
        return sums


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _layout(entry: StateEntry) -> tuple[Any, ...]:
    """Return the properties that decide an entry's position."""
    tensor = entry.tensor
    return (entry.fqn, entry.slot, entry.shape, entry.box, tensor.dtype)
