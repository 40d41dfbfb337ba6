"""Let a process that maps the same memory compute the checksums of snapshots.

A thread of the trainer would take the interpreter from training at every block. For 1 GB in blocks
of 256 KiB, that costs a training thread that is busy in Python 40 ms; a process costs it 5 ms. The
process also combines the checksums of blocks, which takes 5 ms for a state of 4 GB.

``workers.memory.checksum_process`` is the process, and describes the protocol.
"""

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
#: Smallest buffer for which a process is started, and fewest bytes for which it gets a request.
_BUFFER_BYTES_MIN: Final = 16 << 20
_ASKED_BYTES_MIN: Final = 1 << 20
#: A bucket takes some ms. The trainer stops using a process that does not answer for this long.
_ANSWER_S: Final = 10.0
#: An answer for 4 GB has 160 KB.
_ANSWER_BYTES: Final = 256 << 10

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Question:
    """Memory to checksum, perhaps repeatedly, and the checksums once they are known."""

    views: Sequence[memoryview]
    block_bytes: int
    sums: list[Sums] | None = None
    #: The request, and the numbers that the process uses for the memory's arenas.
    request: bytes | None = None
    numbers: frozenset[int] = frozenset()


class Checksums:
    """Computes checksums of blocks: in another process if that pays, else here. Thread-safe.

    If that process dies or does not answer, this process computes all later checksums.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._is_given_up = False
        self._num_attached = 0
        #: Requests without an answer, the oldest first.
        self._open: deque[Question] = deque()
        #: Address here and size of each arena that the process maps, by number; and the numbers by
        #: file.
        self._attached: dict[int, tuple[int, int]] = {}
        self._numbers: dict[int, int] = {}

    def __del__(self) -> None:
        self._end()

    def attach(self, arena: Arena) -> None:
        """Let the process checksum the arena from now on, if it is large enough."""
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
        """Make the process release the arena. The process ends with its last arena."""
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
        """Send a request to the process, even if it was sent before.

        The memory must not change until the answer is read.
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
        """Return the checksums, computed here if the process has not done so."""
        with self._lock, self._giving_up():
            while question in self._open:
                self._receive(self._open[0])
                self._open.popleft()
        if question.sums is None:
            return [sums_of(view, question.block_bytes) for view in question.views]
        return question.sums

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Stop using the process if it fails."""
        try:
            yield
        except OSError as error:
            log.warning(
                "checksums are now made in the trainer, because their process failed: %s", error
            )
            self._is_given_up = True
            self._end()

    def _started(self) -> socket.socket:
        if self._connection is None:
            self._connection, its = socket.socketpair()
            self._connection.settimeout(_ANSWER_S)
            self._answers = self._connection.makefile("rb", _ANSWER_BYTES)
            with its:
                # The process finds the libraries as this one does, and keeps no output open.
                self._process = subprocess.Popen(  # noqa: S603
                    [sys.executable, "-P", str(_SCRIPT), str(its.fileno())],
                    pass_fds=[its.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
        return self._connection

    def _prepare(self, question: Question) -> None:
        """Build the request; leave it empty if it does not pay or the process lacks the memory."""
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
        """Return the number of the view's arena, the view's offset in it, and its size."""
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
