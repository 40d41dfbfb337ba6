"""Checksum snapshots, in a process that shares their memory with a trainer.

A request begins with ``HEAD``: the kind and two numbers.

    ATTACH  number, size in bytes, with the descriptor of the memory
    DETACH  number, 0
    SUM     count, size of a block; then so many ``PLACE``: number, offset, size in bytes

Only ``SUM`` gets an answer, a line with the crc32 of all places, and for each place the checksums
of its blocks as a record lists them: "3 4;1,2;4". The process ends when the trainer does. It
imports only the standard library and isal, so it starts in 30 ms and takes 10 MB.

``workers.memory.checksums`` is the trainer's side.
"""

import contextlib
import mmap
import os
import signal
import socket
import struct
import sys
import threading
from queue import SimpleQueue
from typing import Any

try:
    from isal import isal_zlib as zlib
except ImportError:  # a platform without isal wheels
    import zlib  # type: ignore[no-redef]

crc32: Any = zlib.crc32
combine: Any = getattr(zlib, "crc32_combine", None)
#: One thread checksums 4 GB/s, and a GPU's bus brings 50. Small machines have few cores.
NUM_THREADS = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
ATTACH, DETACH, SUM = 1, 2, 3
HEAD = struct.Struct("<IIQ")
PLACE = struct.Struct("<IQQ")

#: Fault pages in for reading (Linux 5.14), some at a time.
_MADV_POPULATE_READ = 22
_POPULATE_BYTES = 64 << 20


def serve(connection: socket.socket) -> None:
    """Answer until the trainer ends."""
    requests: SimpleQueue[tuple[int, int, int, list[int], bytes] | None] = SimpleQueue()
    # The trainer sends several requests before it reads an answer. This process must receive them
    # in the meantime, or both would wait for each other once the socket is full.
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    arenas: dict[int, mmap.mmap] = {}
    while (request := requests.get()) is not None:
        what, number, size_bytes, fds, places = request
        if what == ATTACH:
            arenas[number] = _mapped(fds[0], size_bytes)
        elif what == DETACH:
            arenas.pop(number).close()
        else:
            answer = answer_to(arenas, list(PLACE.iter_unpack(places)), size_bytes)
            connection.sendall(f"{answer}\n".encode())


def _receive(connection: socket.socket, requests: SimpleQueue[Any]) -> None:
    """Put requests into a queue, and None once the trainer has ended."""
    try:
        while True:
            head, fds, _, _ = socket.recv_fds(connection, HEAD.size, 1)
            if not head:
                return
            head += _received(connection, HEAD.size - len(head))
            what, number, size_bytes = HEAD.unpack(head)
            places = _received(connection, number * PLACE.size) if what == SUM else b""
            requests.put((what, number, size_bytes, fds, places))
    except ConnectionError:
        return
    finally:
        requests.put(None)


def answer_to(
    arenas: dict[int, mmap.mmap], places: list[tuple[int, int, int]], block_bytes: int
) -> str:
    """Return the checksums of each place, given as arena, offset and size."""
    blocks = [
        (arena, low, min(low + block_bytes, offset + num_bytes))
        for arena, offset, num_bytes in places
        for low in range(offset, offset + num_bytes, block_bytes)
    ]
    sums = _sums(arenas, blocks)
    wholes, texts, at = [], [], 0
    for arena, offset, num_bytes in places:
        begin, at = at, at - (-num_bytes // block_bytes)
        if combine is None:
            with memoryview(arenas[arena]) as memory, memory[offset : offset + num_bytes] as data:
                whole = crc32(data)
        else:
            whole = 0
            for (_, low, high), value in zip(blocks[begin:at], sums[begin:at], strict=True):
                whole = combine(whole, value, high - low)
        wholes.append(str(whole))
        texts.append(",".join(map("%d".__mod__, sums[begin:at])))
    return ";".join((" ".join(wholes), *texts))


def _sums(arenas: dict[int, mmap.mmap], blocks: list[tuple[int, int, int]]) -> list[Any]:
    """Return the crc32 of each block, given as arena, begin and end; None where a thread failed."""
    sums: list[Any] = [None] * len(blocks)

    def work(first: int) -> None:
        for number in range(first, len(blocks), NUM_THREADS):
            arena, low, high = blocks[number]
            with memoryview(arenas[arena]) as memory, memory[low:high] as block:
                sums[number] = crc32(block)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, NUM_THREADS)]
    for thread in threads:
        thread.start()
    work(0)
    for thread in threads:
        thread.join()
    return sums


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    parts = []
    while num_bytes:
        part = connection.recv(num_bytes)
        if not part:
            raise ConnectionResetError("the trainer ended")
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def _mapped(fd: int, size_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
    os.close(fd)
    with contextlib.suppress(OSError):
        for start in range(0, size_bytes, _POPULATE_BYTES):
            num_bytes = min(_POPULATE_BYTES, size_bytes - start)
            memory.madvise(_MADV_POPULATE_READ, start, num_bytes)
    return memory


if __name__ == "__main__":
    # Only the trainer ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ConnectionError):
        serve(socket.socket(fileno=int(sys.argv[1])))
