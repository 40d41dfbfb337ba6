"""Processes that end at a chosen moment of what they do: one moment after the other, none drawn.

A process counts the moments of a kind as it comes to them, at every line of the project's code in
each of its threads, and sends itself a signal at the chosen one. A test that tries all of them has
the process die everywhere, also in unexpected places.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any
from zlib import crc32

import numpy as np
import torch

from orchestrator.policies import versions
from tests.support.node_memory import NodeProcess, serve
from tests.support.soak import SoakRank, SoakTrainer, run_attempt
from ucp_core.lineage import Lineage
from ucp_core.storage import local
from workers.keeper.node_memory import NodeMemory
from workers.keeper.peers import server as wire
from workers.memory import NUM_BUFFERS, Arena, is_copy
from workers.memory.arena import PAGE_BYTES
from workers.protocol import PartRef

#: A small state has many chunks then.
CHUNK_BYTES = 8 << 10
#: A piece that is copied is longer.
_STRIDE = 61
_HEADER_BYTES = 64
#: Words that the writer of an arena stores: the pin, and how many buffers were finished.
_WRITER_WORDS = (0, 4)
_STORE_FILE = str(local.__file__)


class Moment(StrEnum):
    """The events that a doomed process counts."""

    #: Something has changed in the memory that it fills: a header, a chunk, a record.
    CHANGE = "change"
    #: It is about to send a chunk to whoever copies or loads.
    SEND = "send"
    #: It is about to do something to its storage.
    STORE = "store"


class Fate:
    """Sends a signal to this process at a moment; once.

    Args:
        watched: Arenas whose changes count; asked for with every line, so without a lock.
        mark: A file that is made just before: others see the end of a process some time later.
        stride: Bytes of a buffer's data between two that are compared.
    """

    def __init__(
        self,
        watched: Callable[[], Iterable[Arena]],
        mark: Path | None = None,
        stride: int = _STRIDE,
    ) -> None:
        self._watched, self._stride = watched, stride
        self._mark = mark
        self._lock = threading.Lock()
        self._moment: Moment | None = None
        self._signal = signal.SIGKILL
        self._left = 0
        self._seen = 0

    def install(self) -> None:
        """Look at this thread and at all that begin from now on."""
        threading.settrace(self.trace)
        sys.settrace(self.trace)

    def doom(self, moment: Moment, after: int, number: int = signal.SIGKILL) -> None:
        """Send the signal when as many moments have passed."""
        self._left, self._signal = after, signal.Signals(number)
        self._seen = self._look()
        self._moment = moment

    def trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        """Count; see ``sys.settrace``."""
        code = frame.f_code
        if event == "call":
            if code.co_filename == _STORE_FILE:
                self._count(Moment.STORE)
                return None
            if not code.co_filename.startswith(_WATCHED):
                return None
            if code.co_name == "_send_chunk":
                self._count(Moment.SEND)
        elif self._moment is Moment.CHANGE:
            with self._lock:
                now = self._look()
                has_changed, self._seen = now != self._seen, now
            if has_changed:
                self._count(Moment.CHANGE)
        return self.trace

    def _count(self, moment: Moment) -> None:
        if self._moment is not moment:
            return
        with self._lock:
            self._left -= 1
            if self._left >= 0:
                return
            # If it is only stopped, it goes on.
            self._moment = None
        if self._mark is not None:
            self._mark.touch()
        os.kill(os.getpid(), self._signal)

    def _look(self) -> int:
        value = 0
        for arena in self._watched():
            try:
                value = _print_of(arena, value, self._stride)
            except ValueError:
                # Another thread lets go of it.
                continue
        return value


class DoomedNode(NodeProcess):
    """A node's memory that can be told when to die; quickly made, because many are needed."""

    def doom(self, moment: Moment, after: int) -> None:
        """Have its process killed at a moment of what it does from now on."""
        self._ask("doom", moment, after)

    @property
    def is_alive(self) -> bool:
        """Return whether its process is there, and not about to end."""
        return self._process.is_alive() and not _mark_of(self.directory).exists()

    def start(self) -> None:
        """Start the process; again, if it was killed."""
        _mark_of(self.directory).unlink(missing_ok=True)
        super().start()

    def flush(self, attempt: int, step: int) -> bool:
        """Have it store what it holds of a version; return whether that is committed."""
        return bool(self._ask("flush", attempt, step))

    def problems(self) -> tuple[str, ...]:
        """Return what protects less than was asked for."""
        return tuple(self._ask("problems"))

    def _target(self) -> Callable[[Connection, dict[str, Any]], None]:
        return _serve_node


class DoomedTrainer(SoakTrainer):
    """Two ranks on two nodes in a process that can be told when to die, or to stop."""

    def doom(self, after: int, number: signal.Signals) -> None:
        """Have it get the signal when its snapshots' memory has changed so often."""
        self._pipe.send((after, number))
        assert self._pipe.recv()

    @property
    def is_stopped(self) -> bool:
        """Return whether a signal has stopped it."""
        status = Path(f"/proc/{self.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] == "T"

    @property
    def has_answered(self) -> bool:
        """Return whether it is done with what it was told."""
        return bool(self._pipe.poll())

    def wake(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def _target(self) -> Callable[[Connection, Sequence[tuple[str, Path]]], None]:
        return _serve_trainer


def newest(
    nodes: Sequence[DoomedNode], lineage: Lineage, stored: tuple[int, int] = (0, 0)
) -> versions.Version | None:
    """Return what a run would go on from; ``stored`` is step and attempt of what storage has."""
    inventories = [node.inventory() for node in nodes]
    return versions.newest(inventories, stored, lineage, total_steps=10**6)


def places_of(version: versions.Version, nodes: Sequence[DoomedNode]) -> list[PartRef]:
    """Return where a version can be read, as a loader is told."""
    peers = {node.node: node.peer() for node in nodes}
    return [replace(ref, peer=peers[ref.node]) for ref in (*version.parts, *version.parities)]


def _serve_node(pipe: Connection, how: dict[str, Any]) -> None:
    wire.CHUNK_BYTES = CHUNK_BYTES  # type: ignore[misc]
    arenas: dict[str, Arena] = {}
    fate = Fate(
        lambda: [arena for name, arena in list(arenas.items()) if is_copy(name)],
        _mark_of(how["directory"]),
    )
    fate.install()
    memory = NodeMemory(**how)
    # Not by its methods: the line that is looked at may have their lock.
    arenas = memory._table._arenas
    serve(pipe, memory, doom=fate.doom)


def _serve_trainer(pipe: Connection, nodes: Sequence[tuple[str, Path]]) -> None:
    torch.set_num_threads(1)
    ranks: list[SoakRank] = []
    fate = Fate(lambda: [rank.memory._arena for rank in ranks if rank.memory._arena is not None])
    fate.install()
    ranks += [SoakRank(rank, *node) for rank, node in enumerate(nodes)]
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        if isinstance(order, tuple):
            fate.doom(Moment.CHANGE, *order)
            pipe.send(True)
        else:
            pipe.send(run_attempt(ranks, order))


def _mark_of(directory: Path) -> Path:
    return directory / "doomed"


def _print_of(arena: Arena, value: int, stride: int) -> int:
    """Return a number that is another one when what its writer has written there is."""
    memory = np.frombuffer(arena._memory, np.uint8)
    for buffer in range(NUM_BUFFERS):
        body = arena.body_offset(buffer)
        head = body - PAGE_BYTES
        value = crc32(memory[head : head + _HEADER_BYTES].tobytes(), value)
        value = crc32(memory[body : body + arena.body_bytes : stride].tobytes(), value)
    return crc32(bytes(str([arena._words[word] for word in _WRITER_WORDS]), "ascii"), value)


_WATCHED = tuple(
    str(Path(str(sys.modules[name].__file__)).parent)
    for name in ("workers.keeper", "workers.snapshot")
)
