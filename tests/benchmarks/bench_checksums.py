"""What the checksums of a snapshot take from a training thread that is busy in Python.

    python -m tests.benchmarks checksums [--rounds 15]

A loop of small operations of torch stands for training whose host is the bottleneck, as with small
models on a GPU. Meanwhile 8 buckets of 32 MiB are checksummed over and over: by a thread of the
same process, or by the process of ``workers.memory.checksums``. ``slower`` is how much longer the
loop takes than alone; ``ms_a_gb`` is the loop's time that 1 GB costs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from ucp_core.numerics import of_blocks
from workers.memory import Arena, Checksums
from workers.snapshot.buckets import BUCKET_BYTES
from workers.snapshot.buffer_layout import BLOCK_BYTES

NUM_BUCKETS: Final = 8
NUM_OPERATIONS: Final = 3000

Make = Callable[[Sequence[memoryview], int], Any]


def loop_s() -> float:
    """Return how long the loop takes."""
    tensor = torch.zeros(16, 16)
    begun_s = time.perf_counter()
    for _ in range(NUM_OPERATIONS):
        ((tensor + 1) * 2).sum()
    return time.perf_counter() - begun_s


def beside(make: Make | None, buckets: Sequence[memoryview]) -> tuple[float, float]:
    """Return how long the loop takes beside ``make``, and how many bytes were checksummed."""
    ends = threading.Event()
    done = 0

    def run() -> None:
        nonlocal done
        while make is not None and not ends.is_set():
            make([buckets[done % NUM_BUCKETS]], BLOCK_BYTES)
            done += 1

    thread = threading.Thread(target=run)
    thread.start()
    took_s = loop_s()
    num_bytes = done * BUCKET_BYTES
    ends.set()
    thread.join()
    return took_s, num_bytes


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    arena, checksums = Arena.create("bench", body_bytes=NUM_BUCKETS * BUCKET_BYTES), Checksums()
    checksums.attach(arena)
    body = arena.body(0)[: NUM_BUCKETS * BUCKET_BYTES]
    body[:] = os.urandom(1 << 20) * (len(body) >> 20)
    buckets = [body[low : low + BUCKET_BYTES] for low in range(0, len(body), BUCKET_BYTES)]
    ways: dict[str, Make | None] = {
        "alone": None,
        "thread": lambda views, size: [of_blocks(view, size) for view in views],
        "process": checksums.of_blocks,
    }
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, make in ways.items():
            seen[name].append(beside(make, buckets))
    alone_s = statistics.median(took_s for took_s, _ in seen["alone"])
    found = {}
    for name in ("thread", "process"):
        more_s = statistics.median(took_s for took_s, _ in seen[name]) - alone_s
        gigabytes = statistics.median(num_bytes for _, num_bytes in seen[name]) / 1e9
        took_s = more_s + alone_s
        found[name] = {
            "slower": round(more_s / alone_s, 3),
            "gb_per_s": round(gigabytes / took_s, 1),
            "ms_a_gb": round(1e3 * more_s / gigabytes, 1) if gigabytes else None,
        }
    checksums.detach(arena)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
