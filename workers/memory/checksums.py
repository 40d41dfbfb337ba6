"""Checksums of snapshots, made beside the trainer by a process that maps the same memory.

A thread of the trainer would take the interpreter from training at every block: 40 ms of a training
thread that is busy in Python for 1 GB in blocks of 256 KiB, and 5 ms by a process.

Counterpart, with the protocol: ``workers.memory.checksum_process``.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import threading
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from ucp_core.numerics import of_blocks
from workers.memory.arena import Arena, address_of
from workers.memory.checksum_process import ATTACH, DETACH, HEAD, PLACE, SUM

_SCRIPT: Final = Path(__file__).with_name("checksum_process.py")
#: Buffers from this size on are worth a process, and so much at a time is worth a question.
_BUFFER_BYTES_MIN: Final = 16 << 20
_ASKED_BYTES_MIN: Final = 1 << 20
#: A bucket takes some ms. A process that is stopped for so long is given up.
_ANSWER_S: Final = 10.0

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Question:
    """Memory that is to be checksummed, and the checksums once they are there."""

    views: Sequence[memoryview]
    block_bytes: int
    sums: list[list[int]] | None = None


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
        #: Number, address here and size of each arena that the process has.
        self._attached: dict[int, tuple[int, int, int]] = {}

    def __del__(self) -> None:
        self._end()

    def attach(self, arena: Arena) -> None:
        """Have the arena checksummed by the process from now on, if it is large enough."""
        if arena.body_bytes < _BUFFER_BYTES_MIN:
            return
        with self._lock, self._giving_up():
            if self._is_given_up or arena.fd in self._attached:
                return
            number = self._num_attached
            request = HEAD.pack(ATTACH, number, arena.size_bytes)
            socket.send_fds(self._started(), [request], [arena.fd])
            self._num_attached += 1
            self._attached[arena.fd] = number, arena.address, arena.size_bytes

    def detach(self, arena: Arena) -> None:
        """Have the process release the arena; it ends with the last one."""
        with self._lock, self._giving_up():
            known = self._attached.pop(arena.fd, None)
            if known is None or self._connection is None:
                return
            if self._attached:
                self._connection.sendall(HEAD.pack(DETACH, known[0], 0))
            else:
                self._end()

    def of_blocks(self, views: Sequence[memoryview], block_bytes: int) -> list[list[int]]:
        """Return the crc32 of every block of each of ``views``; a last block may be shorter."""
        return self.answer(self.ask(views, block_bytes))

    def ask(self, views: Sequence[memoryview], block_bytes: int) -> Question:
        """Have the process begin with ``of_blocks``, for ``answer``.

        The memory stays as it is until then.
        """
        question = Question(views, block_bytes)
        if self._attached and sum(map(len, views)) >= _ASKED_BYTES_MIN:
            with self._lock, self._giving_up():
                self._send(question)
        return question

    def answer(self, question: Question) -> list[list[int]]:
        """Return the checksums; made here if the process has not made them."""
        with self._lock, self._giving_up():
            while question in self._open:
                self._receive(self._open[0])
                self._open.popleft()
        if question.sums is None:
            return [of_blocks(view, question.block_bytes) for view in question.views]
        return question.sums

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Give the process up if it fails."""
        try:
            yield
        except OSError as error:
            log.warning("no_checksum_process", extra={"reason": str(error)})
            self._is_given_up = True
            self._end()

    def _started(self) -> socket.socket:
        if self._connection is None:
            self._connection, its = socket.socketpair()
            self._connection.settimeout(_ANSWER_S)
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

    def _send(self, question: Question) -> None:
        """Ask the process, if it has all of the memory."""
        places = [place for view in question.views if (place := self._place(view)) is not None]
        if self._connection is None or len(places) < len(question.views):
            return
        head = HEAD.pack(SUM, len(places), question.block_bytes)
        self._connection.sendall(b"".join((head, *(PLACE.pack(*place) for place in places))))
        self._open.append(question)

    def _receive(self, question: Question) -> None:
        assert self._connection is not None
        nums = [-(-len(view) // question.block_bytes) for view in question.views]
        sums = array("I", bytes(4 * sum(nums)))
        left = memoryview(sums).cast("B")
        while left:
            num_bytes = self._connection.recv_into(left)
            if not num_bytes:
                raise ConnectionResetError("it ended")
            left = left[num_bytes:]
        values = iter(sums)
        question.sums = [list(islice(values, num)) for num in nums]

    def _place(self, view: memoryview) -> tuple[int, int, int] | None:
        """Return the number of the arena, and where the view lies in it."""
        if not view:
            return 0, 0, 0
        address = address_of(view)
        for number, start, size_bytes in self._attached.values():
            if start <= address < start + size_bytes:
                return number, address - start, len(view)
        return None

    def _end(self) -> None:
        self._attached = {}
        self._open.clear()
        connection, self._connection = self._connection, None
        process, self._process = self._process, None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.wait()
