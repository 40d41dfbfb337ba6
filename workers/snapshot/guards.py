"""Copies of other ranks' shares that a rank saves from its own replica: no network needed.

Replicas on other nodes have the same state. Each share goes into memory of its own, which the
keeper of this node treats as a copy of what the other rank wrote; and it is one, bit for bit. While
memory is refused the share has no copy; the rank's own snapshots go on.

Source: the redundant copies of REFT (arXiv 2310.12670).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from ucp_core.numerics import NO_SUMS, Sums
from workers.errors import ArenaError
from workers.memory import Arena, SnapshotMemory, guard_name
from workers.protocol import Assignment
from workers.snapshot.buffer_layout import BLOCK_BYTES, BufferLayout, Captured
from workers.state import StateEntry

#: Refused memory is requested again after this: older attempts' arenas may be gone.
_REFUSED_S: Final = 10.0

log = logging.getLogger(__name__)


class Guards:
    """The shares of other ranks, named by the assignment, that one rank saves in one attempt.

    Only ``takes`` and ``capture`` are quick. The training thread calls these, and never while
    another call runs.
    """

    def __init__(self, memory: SnapshotMemory, assignment: Assignment) -> None:
        self._memory = memory
        self._assignment = assignment
        self._shares: list[_Share] = []
        self._for_cuda = False

    @property
    def are_whole(self) -> bool:
        """Return whether there is memory for all of them."""
        return all(share.arena is not None for share in self._shares)

    def takes(self, guarded: Sequence[tuple[int, Sequence[StateEntry]]]) -> bool:
        """Return whether these tensors are laid out like those that were prepared for."""
        return [rank for rank, _ in guarded] == [share.rank for share in self._shares] and all(
            share.layout.takes(entries)
            for share, (_, entries) in zip(self._shares, guarded, strict=True)
        )

    def prepare(self, state: Captured, *, for_cuda: bool) -> None:
        """Reserve memory for states like this one, as far as it is granted."""
        self._for_cuda = for_cuda
        names = [guard_name(place, self._memory.worker) for place in range(len(state.guarded))]
        memories = self._memory.beside(names)
        self._shares = [
            _Share(rank, memory, self._layout_of(rank, entries, state))
            for memory, (rank, entries) in zip(memories, state.guarded, strict=True)
        ]
        self.reserve()

    def capture(
        self, step: int, kept: tuple[int, int] | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Copy all shares; return (targets, sources) of what is to be copied off a device.

        ``kept`` is attempt and step of the newest version that all ranks have: not overwritten.
        """
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for share in self._shares:
            share.buffer = -1
            if share.arena is None:
                continue
            share.buffer = share.arena.choose(self._assignment.lineage, kept=kept)
            share.arena.begin(
                share.buffer,
                attempt=self._assignment.attempt,
                step=step,
                rank=share.rank,
                world_size=self._assignment.layout.world_size,
            )
            sums = share.layout.copy(share.buffer)
            share.sums = sums or [NO_SUMS for _ in share.layout.sources]
            if sums is None:
                targets += share.layout.views[share.buffer]
                sources += share.layout.sources
        return targets, sources

    def complete(self, state: Captured, *, check: Callable[[], None]) -> None:
        """Write the records of what was captured.

        ``check`` is called before each share is completed; if it raises, the share stays
        incomplete.
        """
        for share in self._shares:
            if share.arena is None or share.buffer < 0:
                continue
            if share.arena.held(share.buffer) is None:
                data = share.layout.data[share.buffer]
                sums = list(share.sums)
                unknown = [place for place, known in enumerate(sums) if not known[1]]
                made = self._memory.checksums.of([data[i] for i in unknown], BLOCK_BYTES)
                for place, found in zip(unknown, made, strict=True):
                    sums[place] = found
                share.layout.complete(share.arena, share.buffer, state, sums, check)

    def leave(self) -> None:
        """Stop writing into the memory."""
        for share in self._shares:
            share.memory.leave()

    def _layout_of(self, rank: int, entries: Sequence[StateEntry], state: Captured) -> BufferLayout:
        return BufferLayout(replace(state, entries=entries), replace(self._assignment, rank=rank))

    def reserve(self) -> None:
        """Reserve missing memory, unless it was refused a moment ago."""
        for share in self._shares:
            if share.arena is not None or time.monotonic() < share.refused_until_s:
                continue
            try:
                arena = share.memory.ensure(
                    share.layout.body_bytes,
                    attempt=self._assignment.attempt,
                    for_cuda=self._for_cuda,
                )
            except ArenaError as error:
                log.info("no_guard", extra={"rank": share.rank, "reason": str(error)})
                share.refused_until_s = time.monotonic() + _REFUSED_S
                continue
            share.layout.lay_out(arena)
            share.arena = arena


@dataclass(slots=True)
class _Share:
    """One rank's share, where it goes, and what was captured of it last."""

    rank: int
    memory: SnapshotMemory
    layout: BufferLayout
    arena: Arena | None = None
    buffer: int = -1
    sums: Sequence[Sums] = ()
    refused_until_s: float = float("-inf")
