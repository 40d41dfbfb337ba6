"""A parity of other ranks' shares that a rank computes from its own replica: no network needed.

Replicas on other nodes have the same state, and each saves one share of it. In a group of n, a rank
also keeps the XOR of one block of each other share: 1/(n-1) of a share instead of a whole one, and
any one share may be lost. The blocks are XORed in place while the state stands still; the keeper
adds the records. While memory is refused there is no parity; the rank's own snapshots go on.

Source: RAIM5 of REFT (arXiv 2310.12670), over shares that differ in size.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.errors import ArenaError
from workers.memory import Arena, SnapshotMemory, replica_parity_name
from workers.parity import ParityRecord, Stripes, buffer_bytes, write_draft
from workers.protocol import Assignment, Member
from workers.snapshot.buffer_layout import BufferLayout, Captured
from workers.state import StateEntry

#: Refused memory is requested again after this. The previous attempt's memory is freed once this
#: one's versions are proven; until then nothing survives a lost node.
_REFUSED_S: Final = 2.0
#: XORed at once: intermediate results stay in the cache.
_WINDOW_BYTES: Final = 256 << 10

log = logging.getLogger(__name__)

_Bytes = npt.NDArray[np.uint8]
#: Begin and end of bytes in a block.
_Run = tuple[int, int]


class ReplicaParity:
    """The parity that one rank keeps in one attempt; used like ``guards.Guards``."""

    def __init__(self, memory: SnapshotMemory, assignment: Assignment) -> None:
        self._memory = memory
        self._assignment = assignment
        self._others: list[tuple[int, BufferLayout]] = []
        self._draft: ParityRecord | None = None
        self._beside: SnapshotMemory | None = None
        self._arena: Arena | None = None
        self._body_bytes = 0
        self._buffer = -1
        self._for_cuda = False
        self._refused_until_s = float("-inf")
        self._seen: list[Sequence[memoryview]] = []
        self._folds: list[tuple[_Run, list[_Bytes]]] = []
        self._on_device: Tensor | None = None

    @property
    def are_whole(self) -> bool:
        """Return whether there is memory for it."""
        return self._arena is not None

    def takes(self, guarded: Sequence[tuple[int, Sequence[StateEntry]]]) -> bool:
        """Return whether these tensors are laid out like those that were prepared for."""
        return [rank for rank, _ in guarded] == [rank for rank, _ in self._others] and all(
            layout.takes(entries)
            for (_, layout), (_, entries) in zip(self._others, guarded, strict=True)
        )

    def prepare(self, state: Captured, *, for_cuda: bool) -> None:
        """Reserve memory for states like this one, if it is granted."""
        assignment, ranks = self._assignment, self._assignment.parity
        layouts = {
            rank: BufferLayout(replace(state, entries=entries), replace(assignment, rank=rank))
            for rank, entries in state.guarded
        }
        self._others = list(layouts.items())
        layouts[assignment.rank] = BufferLayout(state, assignment)
        lengths = [layouts[rank].data_bytes for rank in ranks]
        self._draft = ParityRecord(
            attempt=assignment.attempt,
            step=0,
            world_size=assignment.layout.world_size,
            tolerance=1,
            place=ranks.index(assignment.rank),
            members=tuple(
                Member(rank=rank, data_bytes=layouts[rank].data_bytes, record_bytes=0)
                for rank in ranks
            ),
            with_records=True,
        )
        records_bytes = sum(layout.body_bytes - layout.data_bytes for layout in layouts.values())
        self._body_bytes = buffer_bytes(lengths, tolerance=1) + records_bytes
        self._for_cuda, self._arena, self._seen, self._on_device = for_cuda, None, [], None
        (self._beside,) = self._memory.beside([replica_parity_name(self._memory.worker)])
        self._refused_until_s = float("-inf")
        self.reserve()

    def capture(
        self, step: int, kept: tuple[int, int] | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Compute the parity; return (targets, sources) of what is to be copied off a device."""
        self._buffer = -1
        if self._arena is None or self._draft is None:
            return [], []
        assignment = self._assignment
        self._buffer = self._arena.choose(assignment.lineage, kept=kept)
        self._arena.begin(
            self._buffer,
            attempt=assignment.attempt,
            step=step,
            # Not a rank: a reader that takes it for one must find none.
            rank=-1 - assignment.rank,
            world_size=assignment.layout.world_size,
        )
        self._draft = replace(self._draft, step=step)
        block = self._arena.body(self._buffer)[: self._draft.parities_bytes]
        views = [layout.bytes() for _, layout in self._others]
        seen = [view for view in views if view is not None]
        if len(seen) < len(views):
            return self._fold_on_device(block)
        if len(seen) != len(self._seen) or any(
            view is not before for view, before in zip(seen, self._seen, strict=True)
        ):
            self._seen = seen
            self._folds = self._folds_of([[np.asarray(one) for one in view] for view in seen])
        target = np.frombuffer(block, dtype=np.uint8)
        for (start, stop), sources in self._folds:
            fold(target[start:stop], sources)
        return [], []

    def complete(self, state: Captured, *, check: Callable[[], None]) -> None:
        """Write the draft record; the keeper completes it. ``check`` as for ``Guards``."""
        if self._arena is None or self._buffer < 0 or self._arena.held(self._buffer) is not None:
            return
        assert self._draft is not None
        assert self._draft.step == state.step, "what was captured is completed"
        body = self._arena.body(self._buffer)[: self._body_bytes]
        data_bytes, record_bytes = write_draft(self._draft, body)
        check()
        self._arena.finish(self._buffer, data_bytes=data_bytes, record_bytes=record_bytes)

    def reserve(self) -> None:
        """Reserve missing memory, unless it was refused a moment ago."""
        if self._beside is None or self._arena is not None:
            return
        if time.monotonic() < self._refused_until_s:
            return
        try:
            self._arena = self._beside.ensure(
                self._body_bytes, attempt=self._assignment.attempt, for_cuda=self._for_cuda
            )
        except ArenaError as error:
            log.info("no_parity", extra={"reason": str(error)})
            self._refused_until_s = time.monotonic() + _REFUSED_S

    def leave(self) -> None:
        """Stop writing into the memory."""
        if self._beside is not None:
            self._beside.leave()

    def _folds_of(
        self, tensors: Sequence[Sequence[Any]], window_bytes: int = _WINDOW_BYTES
    ) -> list[tuple[_Run, list[Any]]]:
        assert self._draft is not None
        ranks = self._assignment.parity
        members = {
            ranks.index(rank): flat for (rank, _), flat in zip(self._others, tensors, strict=True)
        }
        return folds(self._draft.stripes, self._draft.place, members, window_bytes)

    def _fold_on_device(self, block: memoryview) -> tuple[list[Tensor], list[Tensor]]:
        """Compute the parity on the tensors' device; return (targets, sources) of its copy.

        A device without memory for it costs the parity, not the training.
        """
        every = [tensor.device for _, layout in self._others for tensor in layout.sources]
        device = next((device for device in every if device.type == "cuda"), every[0])
        size = len(block)
        try:
            # Copies what is not contiguous.
            flat = [
                [tensor.detach().reshape(-1).view(torch.uint8) for tensor in layout.sources]
                for _, layout in self._others
            ]
            if self._on_device is None:
                self._on_device = torch.empty(size, dtype=torch.uint8, device=device)
            for (start, stop), sources in self._folds_of(flat, size):
                # Some of a state may be off the device.
                fold(self._on_device[start:stop], [source.to(device) for source in sources])
        except torch.OutOfMemoryError:
            self._buffer = -1
            return [], []
        return [torch.frombuffer(block, dtype=torch.uint8)], [self._on_device]


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
    """Return the bytes of a member in its block of a stripe, and where they lie in the block."""
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
