"""Checksums of snapshots, made beside the trainer by a process that maps the same memory.

A thread of the trainer would take the interpreter from training at every block: 40 ms of a training
thread that is busy in Python for 1 GB in blocks of 256 KiB, and 5 ms by a process. It also combines
those of blocks, which takes 5 ms for a state of 4 GB.

Counterpart, with the protocol: ``workers.memory.checksum_process``.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ucp_core.numerics import Sums, sums_of
from workers.memory.arena import Arena, address_of
from workers.memory.checksum_process import ATTACH, DETACH, HEAD, PLACE, SUM

_SCRIPT: Final = Path(__file__).with_name("checksum_process.py")
#: Buffers from this size on are worth a process, and so much at a time is worth a question.
_BUFFER_BYTES_MIN: Final = 16 << 20
_ASKED_BYTES_MIN: Final = 1 << 20
#: A bucket takes some ms. A process that is stopped for so long is given up.
_ANSWER_S: Final = 10.0
#: An answer for 4 GB has 160 KB.
_ANSWER_BYTES: Final = 256 << 10

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Question:
    """Memory that is to be checksummed, perhaps often, and the checksums once they are there."""

    views: Sequence[memoryview]
    block_bytes: int
    sums: list[Sums] | None = None
    #: The text for the process, and the numbers by which that knows the memory.
    request: bytes | None = None
    numbers: frozenset[int] = frozenset()


class Checksums:
    """Makes checksums of blocks: in another process where that pays, else here. Thread-safe.

    A process that dies or does not answer is replaced by this one, for good.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._is_given_up = False
        self._num_attached = 0
        #: Questions without an answer, the oldest first.
        self._open: deque[Question] = deque()
        #: Address here and size of each arena that the process has, by number; numbers by file.
        self._attached: dict[int, tuple[int, int]] = {}
        self._numbers: dict[int, int] = {}

    def __del__(self) -> None:
        self._end()

    def attach(self, arena: Arena) -> None:
        """Have the arena checksummed by the process from now on, if it is large enough."""
        if arena.body_bytes < _BUFFER_BYTES_MIN:
            return
        with self._lock, self._giving_up():
            if self._is_given_up or arena.fd in self._numbers:
                return
            number = self._num_attached
            request = HEAD.pack(ATTACH, number, arena.size_bytes)
            socket.send_fds(self._started(), [request], [arena.fd])
            self._num_attached += 1
            self._numbers[arena.fd] = number
            self._attached[number] = arena.address, arena.size_bytes

    def detach(self, arena: Arena) -> None:
        """Have the process release the arena; it ends with the last one."""
        with self._lock, self._giving_up():
            number = self._numbers.pop(arena.fd, None)
            if number is None or self._connection is None:
                return
            del self._attached[number]
            if self._attached:
                self._connection.sendall(HEAD.pack(DETACH, number, 0))
            else:
                self._end()

    def of(self, views: Sequence[memoryview], block_bytes: int) -> list[Sums]:
        """Return the checksums of each of ``views``; a last block may be shorter."""
        question = Question(views, block_bytes)
        self.ask(question)
        return self.answer(question)

    def ask(self, question: Question) -> None:
        """Send a question to the process: a new one, or one that was sent before.

        The memory stays as it is until then.
        """
        question.sums = None
        with self._lock, self._giving_up():
            if self._connection is None:
                return
            if question.request is None:
                self._prepare(question)
            if question.request and question.numbers <= self._attached.keys():
                self._connection.sendall(question.request)
                self._open.append(question)

    def answer(self, question: Question) -> list[Sums]:
        """Return the checksums; made here if the process has not made them."""
        with self._lock, self._giving_up():
            while question in self._open:
                self._receive(self._open[0])
                self._open.popleft()
        if question.sums is None:
            return [sums_of(view, question.block_bytes) for view in question.views]
        return question.sums

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Give the process up if it fails."""
        try:
            yield
        except OSError as error:
            log.warning("checksums are made in the trainer, their process failed: %s", error)
            self._is_given_up = True
            self._end()

    def _started(self) -> socket.socket:
        if self._connection is None:
            self._connection, its = socket.socketpair()
            self._connection.settimeout(_ANSWER_S)
            self._answers = self._connection.makefile("rb", _ANSWER_BYTES)
            with its:
                # It finds the libraries as this process does, and has no output to keep open.
                self._process = subprocess.Popen(  # noqa: S603
                    [sys.executable, "-P", str(_SCRIPT), str(its.fileno())],
                    pass_fds=[its.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
        return self._connection

    def _prepare(self, question: Question) -> None:
        """Write the request, an empty one if it does not pay or the process lacks the memory."""
        views = question.views
        places = [place for view in views if (place := self._place(view)) is not None]
        question.request = b""
        if len(places) == len(views) and sum(map(len, views)) >= _ASKED_BYTES_MIN:
            head = HEAD.pack(SUM, len(places), question.block_bytes)
            question.request = b"".join((head, *(PLACE.pack(*place) for place in places)))
            question.numbers = frozenset(number for number, _, _ in places)

    def _receive(self, question: Question) -> None:
        line = self._answers.readline()
        if not line.endswith(b"\n"):
            raise ConnectionResetError("it ended")
        wholes, *blocks = line[:-1].decode().split(";")
        question.sums = list(zip(map(int, wholes.split(" ")), blocks, strict=True))

    def _place(self, view: memoryview) -> tuple[int, int, int] | None:
        """Return the number of the arena, and where the view lies in it."""
        if not view:
            return min(self._attached), 0, 0
        address = address_of(view)
        for number, (start, size_bytes) in self._attached.items():
            if start <= address < start + size_bytes:
                return number, address - start, len(view)
        return None

    def _end(self) -> None:
        self._attached, self._numbers = {}, {}
        self._open.clear()
        connection, self._connection = self._connection, None
        process, self._process = self._process, None
        if connection is not None:
            self._answers.close()
            connection.close()
        if process is not None:
            process.kill()
            process.wait()
