"""One rank that takes snapshots, and the memory of its node, both in this process."""

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support.made import assignment_of
from tests.support.snapshots import eventually
from ucp_core.geometry import Box
from ucp_core.layout import ParallelLayout
from ucp_core.native import LocalTensor, load
from workers.keeper.arena_table import ArenaTable
from workers.keeper.descriptor_server import DescriptorServer
from workers.memory import Arena, CopyStream, LocalPart, descriptor_socket, open_version
from workers.snapshot import Captured, SnapshotMemory, SnapshotWriter
from workers.state import StateEntry


class Node:
    """The arenas of a node and their descriptor server, in this process."""

    def __init__(
        self,
        directory: Path,
        *,
        budget_bytes: int = 64 << 20,
        dead: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self.directory = directory
        self._budget_bytes, self._dead = budget_bytes, dead
        self.start()

    def start(self) -> None:
        self.table = ArenaTable(budget_bytes=self._budget_bytes, dead=self._dead)
        self._server = DescriptorServer(descriptor_socket(self.directory), self.table)

    def close(self) -> None:
        self._server.close()

    def restart(self, *, budget_bytes: int | None = None) -> None:
        self.close()
        self._budget_bytes = budget_bytes or self._budget_bytes
        self.start()

    def arena(self) -> Arena:
        (arena,) = self.table.arenas().values()
        return arena

    def steps(self) -> list[int]:
        return [held.step for held in self.arena().versions()]


@dataclass
class Rank:
    """A writer with what is around it."""

    memory: SnapshotMemory
    attempt: int = 1
    rank: int = 0
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    guards: tuple[int, ...] | None = None
    parity: tuple[int, ...] = ()
    fenced: threading.Event = field(default_factory=threading.Event)
    may_tell: threading.Event = field(default_factory=threading.Event)
    stream: CopyStream | None = None

    def __post_init__(self) -> None:
        self.may_tell.set()
        self.writer = SnapshotWriter(
            self.memory,
            assignment_of(
                self.rank,
                attempt=self.attempt,
                layout=self.layout,
                guards=self.guards,
                parity=self.parity,
            ),
            fenced=self.fenced.is_set,
            told=self._wait,
            stream=self.stream,
        )

    def _wait(self) -> None:
        self.may_tell.wait(20)

    def ready(self, entries: list[StateEntry]) -> bool:
        self.writer.prepare(captured(0, entries))
        settled = eventually(lambda: self.writer.is_ready or self.writer.is_broken)
        # The writer's thread says so a moment before it is idle.
        self.writer.wait(-1)
        return settled and self.writer.is_ready_for(entries)

    def take(self, step: int, entries: list[StateEntry], *, pin: bool = False) -> bool:
        if not self.writer.capture(captured(step, entries)):
            return False
        self.writer.complete(pin=pin)
        return True

    def hold(self, step: int, entries: list[StateEntry]) -> list[StateEntry]:
        """Take the first snapshot of ``entries``, wait until it is held, and return them."""
        assert self.ready(entries)
        assert self.take(step, entries)
        assert self.writer.wait(step)
        return entries


def state(*, num_rows: int = 40) -> list[StateEntry]:
    """Return a state with empty boxes, and elements of several sizes."""
    made = []
    kinds = ((torch.float32, "a"), (torch.bfloat16, "b"), (torch.float64, "c"))
    for dtype, fqn in kinds:
        for rows, slot in ((num_rows, "weight"), (1, "exp_avg"), (0, "other")):
            made.append(
                StateEntry(
                    fqn=fqn,
                    slot=slot,
                    shape=(rows, 3),
                    box=Box.full((rows, 3)),
                    tensor=torch.randn(rows, 3).to(dtype),
                )
            )
    return made


def captured(step: int, entries: list[StateEntry], **extra: Any) -> Captured:
    groups = [{"lr": 0.1, "params": ["a", "b", "c"]}]
    return Captured(step=step, entries=entries, extra={"step": step, **extra}, param_groups=groups)


def loaded(arena: Arena, entries: list[StateEntry]) -> dict[tuple[str, str], torch.Tensor]:
    """Return what the newest version in the arena says, verified."""
    checkpoint = open_version({0: LocalPart(arena, arena.versions()[-1])})
    found: dict[tuple[str, str], torch.Tensor] = {}
    need: list[LocalTensor] = []
    for entry in entries:
        host = torch.zeros_like(entry.tensor, device="cpu")
        found[entry.fqn, entry.slot] = host
        need.append(entry.local_tensor(host))
    load(checkpoint, need)
    assert checkpoint.extra["step"] == checkpoint.step
    return found
