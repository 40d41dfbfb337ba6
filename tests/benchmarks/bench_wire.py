"""Snapshots from a peer's memory beside a plain TCP stream, and how soon a copy is there.

    python -m tests.benchmarks.bench_wire [--mib 512] [--repeat 7] [--snapshots 200]

Another process holds the peer's arenas. Over loopback this one fills the same memory in turn from
a plain stream (sendall there, recv_into here) and through the wire (both crc32 included, as a
mirror reads it); the best of each counts, so the ratio holds on a busy machine and the rates do
not. ``copied_ms`` runs from a trainer's notice that a small slot is finished until that trainer
sees that the peer has it: notice, listing, bytes, and the note back.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.common import spread
from workers.keeper.arena import Arena
from workers.keeper.door import Door, door_path, notify
from workers.keeper.mirror import Mirrors
from workers.keeper.shelf import Shelf
from workers.keeper.wire import WireClient, WireServer
from workers.protocol import Peer

SECRET = b"of this benchmark"
NODE = "holder"
LARGE, SMALL = "w0000.0", "w0001.0"
SMALL_BYTES = 64 << 10
COPIED_S_MAX = 5.0
#: Issue of this part: at least so much of a stream's speed, and a copy within so much time.
TARGETS = {"of_stream": 0.60, "copied_ms": 10.0}


def write(arena: Arena, step: int, size_bytes: int) -> None:
    """Make the next slot a version of ``size_bytes``; random, all that were written before."""
    slot = arena.choose(())
    arena.begin(slot, attempt=1, step=step, rank=0, world_size=1)
    arena.finish(slot, data_bytes=size_bytes, record_bytes=0)


def hold(size_bytes: int) -> None:
    """Be the peer: hold the memory and serve it both ways until the input ends.

    A line of input is a number of small snapshots to take; answered by how long the copies took.
    """
    shelf = Shelf(budget_bytes=4 * (size_bytes + SMALL_BYTES) * 3)
    large = shelf.reserve(LARGE, body_bytes=size_bytes)
    rng = np.random.default_rng(0)
    slot = large.choose(())
    np.frombuffer(large.body(slot), np.uint8)[:size_bytes] = rng.integers(
        0, 256, size_bytes, np.uint8
    )
    write(large, 1, size_bytes)
    view = large.body(slot)[:size_bytes]
    server = WireServer(shelf, host="127.0.0.1", secret=SECRET)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=stream, args=(listener, view), daemon=True).start()
    print(json.dumps([server.address[1], listener.getsockname()[1]]), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        path = door_path(Path(directory))
        door = Door(path, shelf)
        for line in sys.stdin:
            shelf.drop(LARGE)
            small = shelf.reserve(SMALL, body_bytes=SMALL_BYTES)
            print(json.dumps([snapshot(small, path, n) for n in range(int(line))]), flush=True)
        door.close()
    server.close()


def stream(listener: socket.socket, view: memoryview) -> None:
    """Send ``view`` for every byte that a connection asks with."""
    while True:
        connection, _ = listener.accept()
        with connection:
            while connection.recv(1):
                connection.sendall(view)


def snapshot(arena: Arena, path: Path, step: int) -> float:
    """Finish a small slot and return how long its copy took, in seconds."""
    wait(arena.attended)
    write(arena, step, SMALL_BYTES)
    begun_s = time.perf_counter()
    notify(path, SMALL)
    wait(lambda: not arena.copy_behind())
    return time.perf_counter() - begun_s


def wait(is_so: Callable[[], bool]) -> None:
    """Look 20 times a millisecond, as a trainer would between two steps, but more often."""
    end_s = time.perf_counter() + COPIED_S_MAX
    while not is_so():
        if time.perf_counter() > end_s:
            raise TimeoutError("the peer does not copy")
        time.sleep(50e-6)


@contextmanager
def holder(size_bytes: int) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """Start the peer; give its process, the port of its wire and that of its stream."""
    command = [sys.executable, "-m", "tests.benchmarks.bench_wire", "--hold", str(size_bytes)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        ports = json.loads(process.stdout.readline())
        yield process, ports[0], ports[1]
        assert process.stdin is not None
        process.stdin.close()


def measure_speed(size_bytes: int, repeat: int, wire: int, plain: int) -> dict[str, float]:
    """Return the best rate of each way and their ratio."""
    target = memoryview(bytearray(size_bytes))
    client = WireClient(("127.0.0.1", wire), secret=SECRET)
    (held,) = client.list_arenas(after=-1, timeout_s=0.0).arenas[LARGE].parts
    best_s = {"stream": float("inf"), "wire": float("inf")}
    with socket.create_connection(("127.0.0.1", plain)) as connection:
        for _ in range(repeat):
            begun_s = time.perf_counter()
            connection.sendall(b".")
            left = target
            while len(left):
                left = left[connection.recv_into(left) :]
            best_s["stream"] = min(best_s["stream"], time.perf_counter() - begun_s)
            begun_s = time.perf_counter()
            client.read(LARGE, held, 0, [target])
            best_s["wire"] = min(best_s["wire"], time.perf_counter() - begun_s)
    client.close()
    rates = {name: size_bytes / took_s / 1e9 for name, took_s in best_s.items()}
    return {f"{name}_gb_per_s": round(rate, 2) for name, rate in rates.items()} | {
        "of_stream": round(rates["wire"] / rates["stream"], 3)
    }


def measure_copies(process: subprocess.Popen[str], port: int, number: int) -> dict[str, float]:
    """Return how long the copies of ``number`` small snapshots took, in milliseconds."""
    assert process.stdin is not None
    assert process.stdout is not None
    mirrors = Mirrors(Shelf(budget_bytes=1 << 30), print)
    process.stdin.write(f"{number}\n")
    process.stdin.flush()
    mirrors.follow([Peer(node=NODE, host="127.0.0.1", port=port, secret=SECRET)])
    took_s = json.loads(process.stdout.readline())
    mirrors.stop()
    # The first one waits for memory.
    return spread([1e3 * each for each in took_s[1:]])


def main() -> None:
    """Print one JSON object; ``missed`` names the targets that were not reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--snapshots", type=int, default=200)
    parser.add_argument("--hold", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.hold:
        hold(given.hold)
        return
    with holder(given.mib << 20) as (process, wire, plain):
        found: dict[str, Any] = dict(
            measure_speed(given.mib << 20, given.repeat, wire, plain).items()
        )
        found["copied_ms"] = measure_copies(process, wire, given.snapshots)
    missed = [
        name
        for name, is_missed in {
            "of_stream": found["of_stream"] < TARGETS["of_stream"],
            "copied_ms": found["copied_ms"]["p50"] > TARGETS["copied_ms"],
        }.items()
        if is_missed
    ]
    print(json.dumps({"mib": given.mib, **found, "missed": missed}))


if __name__ == "__main__":
    main()
