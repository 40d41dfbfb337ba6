"""Save other ranks' shares from a rank's own replica, without the network.

Replicas on other nodes have the same state, and each saves one share of it. A rank copies some
other shares into separate memory. They equal those ranks' own snapshots bit for bit, so the keeper
of its node treats them as copies of those. Or, in a group of n, the rank keeps the XOR of one block
of each other share. That takes 1/(n-1) of a share, and any one share may be lost. The blocks are
XORed in place while the state does not change, and the keeper adds the records. While the keeper
refuses memory, the rank saves nothing for others, but continues its own snapshots.

Source: the redundant copies and RAIM5 of REFT (arXiv 2310.12670), over shares that differ in size.
"""

import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ucp_core.numerics import NO_SUMS, Sums
from workers.errors import ArenaError
from workers.memory import Arena, SnapshotMemory, guard_name, replica_parity_name
from workers.parity import ParityRecord, Stripes, buffer_bytes, write_draft
from workers.protocol import Assignment, Member
from workers.snapshot.buffer_layout import BLOCK_BYTES, BufferLayout, Captured
from workers.state import StateEntry

#: Period of requesting refused memory again. The previous attempt's memory is freed once this one's
#: versions are proven; until then no snapshot survives the loss of a node.
_REFUSED_S: Final = 2.0
#: Bytes to XOR at once, so that intermediate results stay in the cache.
_WINDOW_BYTES: Final = 256 << 10

log = logging.getLogger(__name__)

_Bytes = npt.NDArray[np.uint8]
#: Start and end of bytes in a block.
_Run = tuple[int, int]
#: Targets and sources of copies off a device.
_Copies: TypeAlias = tuple[Sequence[Tensor], Sequence[Tensor]]


class ForOthers:
    """The copies, or the parity, that one rank saves for others in one attempt.

    Only ``takes`` and ``capture`` are quick. The training thread calls these two, and never while
    another call runs.
    """

    def __init__(self, memory: SnapshotMemory, assignment: Assignment) -> None:
        self._memory = memory
        self._assignment = assignment
        self._others: list[tuple[int, BufferLayout]] = []
        self._blocks: Sequence[_Block] = ()

    @property
    def are_whole(self) -> bool:
        """Return whether there is memory for the whole assignment."""
        return all(block.arena is not None for block in self._blocks)

    def takes(self, guarded: Sequence[tuple[int, Sequence[StateEntry]]]) -> bool:
        """Return whether these tensors have the prepared layout."""
        return [rank for rank, _ in guarded] == [rank for rank, _ in self._others] and all(
            layout.takes(entries)
            for (_, layout), (_, entries) in zip(self._others, guarded, strict=True)
        )

    def prepare(self, state: Captured, *, for_cuda: bool) -> None:
        """Reserve as much memory for states like this one as the keeper grants."""
        assignment, worker = self._assignment, self._memory.worker
        self._others = [
            (rank, BufferLayout(replace(state, entries=entries), replace(assignment, rank=rank)))
            for rank, entries in state.guarded
        ]
        if assignment.parity:
            (memory,) = self._memory.beside([replica_parity_name(worker)])
            layouts = {**dict(self._others), assignment.rank: BufferLayout(state, assignment)}
            self._blocks = [_parity(memory, assignment, layouts, for_cuda=for_cuda)]
        else:
            names = [guard_name(number, worker) for number in range(len(self._others))]
            self._blocks = [
                _Copy(
                    memory=memory,
                    assignment=assignment,
                    rank=rank,
                    body_bytes=layout.body_bytes,
                    for_cuda=for_cuda,
                    layout=layout,
                )
                for memory, (rank, layout) in zip(
                    self._memory.beside(names), self._others, strict=True
                )
            ]
        self.reserve()

    def reserve(self) -> None:
        """Reserve missing memory, unless it was refused a moment ago."""
        for block in self._blocks:
            block.reserve()

    def capture(self, step: int, kept: tuple[int, int] | None = None) -> _Copies:
        """Capture the whole assignment; return (targets, sources) of copies off a device.

        ``kept`` has the attempt and the step of the newest version that all ranks have, which is
        not overwritten.
        """
        found = [block.fill() for block in self._blocks if block.begin(step, kept)]
        targets = [target for some, _ in found for target in some]
        return targets, [source for _, some in found for source in some]

    def complete(self, state: Captured, *, check: Callable[[], None]) -> None:
        """Write the records of the captured data.

        ``check`` is called before each block is completed. If it raises an error, the block stays
        incomplete.
        """
        for block in self._blocks:
            # A block may be complete already, if the fence came while a later block was completed.
            if block.is_open:
                block.complete(state, check)

    def leave(self) -> None:
        """Stop writing into the memory."""
        for block in self._blocks:
            block.memory.leave()


@dataclass(slots=True, kw_only=True, eq=False)
class _Block(ABC):
    """A block of other ranks' shares, its memory, and the last version begun there."""

    memory: SnapshotMemory
    assignment: Assignment
    #: The rank in its buffers' headers; below 0 for a parity, so that readers do not mistake it for
    #: a rank's part.
    rank: int
    body_bytes: int
    for_cuda: bool
    arena: Arena | None = None
    buffer: int = -1
    step: int = 0
    refused_until_s: float = float("-inf")

    @property
    def is_open(self) -> bool:
        """Return whether a buffer was begun and not completed."""
        if self.arena is None or self.buffer < 0:
            return False
        return self.arena.held(self.buffer) is None

    def reserve(self) -> None:
        """Reserve missing memory, unless it was refused a moment ago."""
        if self.arena is not None or time.monotonic() < self.refused_until_s:
            return
        try:
            arena = self.memory.ensure(
                self.body_bytes, attempt=self.assignment.attempt, for_cuda=self.for_cuda
            )
        except ArenaError as error:
            log.info("not_saved_for_others", extra={"rank": self.rank, "reason": str(error)})
            self.refused_until_s = time.monotonic() + _REFUSED_S
            return
        self.lay_out(arena)
        self.arena = arena

    def begin(self, step: int, kept: tuple[int, int] | None) -> bool:
        """Begin a buffer for the version of ``step``; return whether there is memory."""
        self.buffer, self.step = -1, step
        if self.arena is None:
            return False
        self.buffer = self.arena.choose(self.assignment.lineage, kept=kept)
        self.arena.begin(
            self.buffer,
            attempt=self.assignment.attempt,
            step=step,
            rank=self.rank,
            world_size=self.assignment.layout.world_size,
        )
        return True

    def lay_out(self, arena: Arena) -> None:  # noqa: B027  a parity has no places to find
        """Find the positions of tensors in new memory."""

    @abstractmethod
    def fill(self) -> _Copies:
        """Fill the buffer that was begun; return the copies off a device."""

    @abstractmethod
    def complete(self, state: Captured, check: Callable[[], None]) -> None:
        """Write the record after the data, which completes the buffer."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Copy(_Block):
    """Another rank's share."""

    layout: BufferLayout
    sums: Sequence[Sums] = ()

    def lay_out(self, arena: Arena) -> None:
        """Find the positions of the share's tensors."""
        self.layout.lay_out(arena)

    def fill(self) -> _Copies:
        """Copy the share."""
        sums = self.layout.copy(self.buffer)
        self.sums = sums or [NO_SUMS for _ in self.layout.sources]
        if sums is not None:
            return [], []
        return self.layout.views[self.buffer], self.layout.sources

    def complete(self, state: Captured, check: Callable[[], None]) -> None:
        """Write the same record as the rank itself."""
        data, sums = self.layout.data[self.buffer], list(self.sums)
        unknown = [place for place, known in enumerate(sums) if not known[1]]
        made = self.memory.checksums.of([data[i] for i in unknown], BLOCK_BYTES)
        for place, found in zip(unknown, made, strict=True):
            sums[place] = found
        assert self.arena is not None
        self.layout.complete(self.arena, self.buffer, state, sums, check)


@dataclass(slots=True, kw_only=True, eq=False)
class _Parity(_Block):
    """The parity of a block of each other share of a group."""

    draft: ParityRecord
    others: Mapping[int, BufferLayout]  #: By place in the group.
    seen: list[Sequence[memoryview]] = field(default_factory=list)
    folds: list[tuple[_Run, list[_Bytes]]] = field(default_factory=list)
    on_device: Tensor | None = None

    def fill(self) -> _Copies:
        """Compute the parity."""
        assert self.arena is not None
        block = self.arena.body(self.buffer)[: self.draft.parities_bytes]
        views = [layout.bytes() for layout in self.others.values()]
        seen = [view for view in views if view is not None]
        if len(seen) < len(views):
            return self._fold_on_device(block)
        if len(seen) != len(self.seen) or any(
            view is not before for view, before in zip(seen, self.seen, strict=True)
        ):
            self.seen = seen
            self.folds = self._folds_of([[np.asarray(one) for one in view] for view in seen])
        target = np.frombuffer(block, dtype=np.uint8)
        for (start, stop), sources in self.folds:
            fold(target[start:stop], sources)
        return [], []

    def complete(self, state: Captured, check: Callable[[], None]) -> None:
        """Write the draft record, which the keeper completes."""
        assert self.step == state.step, "the captured version is completed"
        assert self.arena is not None
        draft = replace(self.draft, step=self.step)
        sizes = write_draft(draft, self.arena.body(self.buffer)[: self.body_bytes])
        check()
        self.arena.finish(self.buffer, data_bytes=sizes[0], record_bytes=sizes[1])

    def _folds_of(
        self, tensors: Sequence[Sequence[Any]], window_bytes: int = _WINDOW_BYTES
    ) -> list[tuple[_Run, list[Any]]]:
        members = dict(zip(self.others, tensors, strict=True))
        return folds(self.draft.stripes, self.draft.place, members, window_bytes)

    def _fold_on_device(self, block: memoryview) -> _Copies:
        """Compute the parity on the tensors' device; return (targets, sources) of its copy.

        If the device does not have enough memory, there is no parity, but the training continues.
        """
        every = [tensor.device for layout in self.others.values() for tensor in layout.sources]
        device = next((device for device in every if device.type == "cuda"), every[0])
        size = len(block)
        try:
            # This copies tensors that are not contiguous.
            flat = [
                [tensor.detach().reshape(-1).view(torch.uint8) for tensor in layout.sources]
                for layout in self.others.values()
            ]
            if self.on_device is None:
                self.on_device = torch.empty(size, dtype=torch.uint8, device=device)
            for (start, stop), sources in self._folds_of(flat, size):
                # A part of a state may be off the device.
                fold(self.on_device[start:stop], [source.to(device) for source in sources])
        except torch.OutOfMemoryError:
            self.buffer = -1
            return [], []
        return [torch.frombuffer(block, dtype=torch.uint8)], [self.on_device]


def _parity(
    memory: SnapshotMemory,
    assignment: Assignment,
    layouts: Mapping[int, BufferLayout],
    *,
    for_cuda: bool,
) -> _Parity:
    """Return the parity of the shares with these layouts, by rank, including the rank's own."""
    ranks = assignment.parity
    draft = ParityRecord(
        attempt=assignment.attempt,
        step=0,
        world_size=assignment.layout.world_size,
        tolerance=1,
        place=ranks.index(assignment.rank),
        members=tuple(
            Member(rank=rank, data_bytes=layouts[rank].data_bytes, record_bytes=0) for rank in ranks
        ),
        with_records=True,
    )
    records_bytes = sum(layout.body_bytes - layout.data_bytes for layout in layouts.values())
    return _Parity(
        memory=memory,
        assignment=assignment,
        rank=-1 - assignment.rank,
        body_bytes=buffer_bytes(draft.lengths, tolerance=1) + records_bytes,
        for_cuda=for_cuda,
        draft=draft,
        others={ranks.index(at): one for at, one in layouts.items() if at != assignment.rank},
    )


def fold(target: Any, sources: Sequence[Any]) -> None:
    """Write the XOR of ``sources``, numpy arrays or tensors of its length, into ``target``."""
    xor: Any = torch.bitwise_xor if isinstance(target, Tensor) else np.bitwise_xor
    if not sources:
        target[:] = 0
    elif len(sources) == 1:
        target[:] = sources[0]
    else:
        xor(sources[0], sources[1], out=target)
        for source in sources[2:]:
            xor(target, source, out=target)


def folds(
    stripes: Stripes,
    stripe: int,
    members: Mapping[int, Sequence[Any]],
    window_bytes: int = _WINDOW_BYTES,
) -> list[tuple[_Run, list[Any]]]:
    """Return the byte ranges of a stripe's parity, each with the views to XOR for it.

    ``members`` has all data of each member, by place and in order, as flat arrays or tensors of
    bytes; a range has at most ``window_bytes``.
    """
    size = stripes.block_bytes
    blocks = [_block(stripes, stripe, place, members[place]) for place in sorted(members)]
    edges = {0, size, *range(0, size, window_bytes)}
    edges |= {edge for runs in blocks for where, _ in runs for edge in where}
    found: list[tuple[_Run, list[Any]]] = []
    at = [0] * len(blocks)
    for low, high in itertools.pairwise(sorted(edges)):
        sources: list[Any] = []
        for number, runs in enumerate(blocks):
            while at[number] < len(runs) and runs[at[number]][0][1] <= low:
                at[number] += 1
            if at[number] < len(runs) and runs[at[number]][0][0] <= low:
                (start, _), source = runs[at[number]]
                sources.append(source[low - start : high - start])
        found.append(((low, high), sources))
    return found


def _block(
    stripes: Stripes, stripe: int, place: int, data: Sequence[Any]
) -> list[tuple[_Run, Any]]:
    """Return the bytes of a member in its block of a stripe, and their positions in the block."""
    length = sum(map(len, data))
    runs: list[tuple[_Run, Any]] = []
    for data_block in stripes.blocks(place, length):
        end = 0
        for each in data if data_block.stripe == stripe else ():
            start, end = end, end + len(each)
            low, high = max(start, data_block.start), min(end, data_block.stop)
            if low < high:
                where = (low - data_block.start, high - data_block.start)
                runs.append((where, each[low - start : high - start]))
    return runs
