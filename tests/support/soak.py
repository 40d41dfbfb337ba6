"""A trainer process that takes snapshots and loads them again for as long as it is asked to.

It is two ranks at once, each with memory at the keeper of a node of its own, so that every load
takes one part from near and one over the wire. Its resources are measured from outside.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.forking import forking
from tests.support.made import assignment_of, tensor_of
from ucp_core.geometry import Box
from ucp_core.layout import ParallelLayout
from ucp_core.native import load
from workers.keeper import MemorySources
from workers.protocol import PartRef
from workers.snapshot import Captured, SnapshotMemory, SnapshotWriter
from workers.state import StateEntry

ROWS, COLUMNS = 4096, 64
WORLD = 2
#: One of this many snapshots is stored.
STORED_EVERY = 5
_ANSWER_S_MAX = 240.0
_ARENA = "memfd:everstep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The resources of a process."""

    memory_kib: int  #: Resident, shared memory included.
    files: int  #: Open file descriptors.
    threads: int  #: Threads of the operating system.
    arenas: int  #: Mappings of snapshot memory.


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Load, and take snapshots of the steps that follow."""

    lineage: tuple[tuple[int, int], ...]  #: Up to this one.
    memory: tuple[PartRef, ...]  #: Where the version to load is held; nothing in the first attempt.
    num_snapshots: int  #: How many.
    #: Ids of the two ranks' processes; a new id gets new memory, as a new process does.
    workers: tuple[str, str]


class SoakTrainer:
    """The parent's handle of the process."""

    def __init__(self, nodes: Sequence[tuple[str, Path]]) -> None:
        context: Any = forking()
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=self._target(), args=(theirs, list(nodes)), daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Return the process."""
        assert self._process.pid is not None
        return self._process.pid

    def run(self, attempt: Attempt) -> int:
        """Return the last step of the attempt, when it is over."""
        self.begin(attempt)
        return self.last_step()

    def begin(self, attempt: Attempt) -> None:
        """Have it do what an attempt says."""
        self._pipe.send(attempt)

    def last_step(self) -> int:
        """Return the last step of the attempt that was begun, when it is over."""
        assert self._pipe.poll(_ANSWER_S_MAX), "the trainer does not answer"
        step: int = self._pipe.recv()
        return step

    def kill(self) -> None:
        """End it."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _target(self) -> Callable[[Connection, Sequence[tuple[str, Path]]], None]:
        """Return what the process runs."""
        return _serve


def usage_of(pid: int) -> Usage:
    """Return what a process of this machine holds."""
    proc = Path(f"/proc/{pid}")
    status = dict(line.split(":\t") for line in (proc / "status").read_text().splitlines())
    return Usage(
        memory_kib=int(status["VmRSS"].split()[0]),
        files=sum(1 for _ in (proc / "fd").iterdir()),
        threads=int(status["Threads"]),
        arenas=(proc / "maps").read_text().count(_ARENA),
    )


def weights(step: int) -> Tensor:
    """Return the whole state after ``step``."""
    rows = torch.arange(ROWS, dtype=torch.float32)
    return (rows + step)[:, None].expand(ROWS, COLUMNS).contiguous()


class SoakRank:
    """One rank in the process: its tensor, and its memory at the keeper of its node."""

    def __init__(self, rank: int, node: str, directory: Path) -> None:
        self._rank, self._node, self._directory = rank, node, directory
        self._box = Box.full((ROWS, COLUMNS)).piece(0, rank, WORLD)
        self._tensor = torch.zeros(self._box.shape)
        self._entries = [
            StateEntry(
                fqn="w", slot="weight", shape=(ROWS, COLUMNS), box=self._box, tensor=self._tensor
            )
        ]
        self._whole = torch.zeros(ROWS, COLUMNS)
        self._worker = ""
        self.memory = SnapshotMemory(directory, "")
        self.writer: SnapshotWriter | None = None

    def begin(self, attempt: Attempt) -> None:
        """Load, and get ready."""
        number, step = attempt.lineage[-1]
        if attempt.memory:
            self._load(attempt.memory, step)
        if self._worker != attempt.workers[self._rank]:
            self.memory.leave()
            self._worker = attempt.workers[self._rank]
            self.memory = SnapshotMemory(self._directory, self._worker)
        assignment = assignment_of(
            self._rank,
            attempt=number,
            layout=ParallelLayout(dp_shard=WORLD),
            resume=(step, 0),
            lineage=attempt.lineage,
        )
        self.writer = SnapshotWriter(
            self.memory, assignment, fenced=lambda: False, told=lambda: None
        )
        self.writer.prepare(self.state(step))
        _wait(lambda: self.writer is not None and self.writer.is_ready, "there is no memory")

    def state(self, step: int) -> Captured:
        """Return the state after ``step``."""
        self._tensor.copy_(weights(step)[self._box.start[0] : self._box.stop[0]])
        return Captured(step=step, entries=self._entries, extra={"cursor": step}, param_groups=[])

    def _load(self, memory: Sequence[PartRef], step: int) -> None:
        need = tensor_of("w", (ROWS, COLUMNS), self._whole.numpy().data.cast("B"))
        self._whole.zero_()
        sources = MemorySources(memory, node=self._node, keeper_directory=self._directory)
        with closing(sources):
            sources.load(lambda checkpoint: load(checkpoint, [need], threads=2))
        assert not sources.skipped, sources.skipped
        assert len(sources.taken_bytes) == WORLD, sources.taken_bytes
        assert torch.equal(self._whole, weights(step)), "not the state that was written"


def run_attempt(ranks: Sequence[SoakRank], attempt: Attempt) -> int:
    """Return the last step of an attempt that all ranks have gone through."""
    for rank in ranks:
        rank.begin(attempt)
    writers = [rank.writer for rank in ranks if rank.writer is not None]
    step = attempt.lineage[-1][1]
    for _ in range(attempt.num_snapshots):
        step += 1
        _wait(lambda: not any(one.is_behind() for one in writers), "no peer copies")
        pins = step % STORED_EVERY == 0 and not any(one.is_pinned() for one in writers)
        for rank, writer in zip(ranks, writers, strict=True):
            assert writer.capture(rank.state(step))
            writer.complete(pin=pins)
        for writer in writers:
            assert writer.wait(step), "the snapshot was not completed"
    for writer in writers:
        assert writer.close(), "a thread did not let go of the memory"
    return step


def _wait(is_so: Callable[[], bool], what_if_not: str) -> None:
    end_s = time.monotonic() + _ANSWER_S_MAX / 2
    while not is_so():
        assert time.monotonic() < end_s, what_if_not
        time.sleep(0.001)


def _serve(pipe: Connection, nodes: Sequence[tuple[str, Path]]) -> None:
    torch.set_num_threads(1)
    ranks = [SoakRank(rank, *node) for rank, node in enumerate(nodes)]
    while True:
        try:
            attempt = pipe.recv()
        except EOFError:
            return
        pipe.send(run_attempt(ranks, attempt))
