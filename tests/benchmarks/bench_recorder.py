"""Measures recording and abortability: per collective, per look of a keeper, per progress record.

    python -m tests.benchmarks recorder [--blocks 40]

Two ranks call a 1 KB all-reduce through a recorded group and through plain gloo, in turn, in blocks
of 100, in the same processes. ``wall_us`` is the fastest block of either, ``cpu_us`` the median of
the calling thread's own time; on a busy machine only the latter is meaningful.
``recorder_us`` is the two stores of one record by themselves.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.benchmarks.common import percentile
from tests.support.ranks import Place, running
from workers import collectives
from workers.protocol import WorkerPhase
from workers.records import (
    FINISHED,
    ProgressRecord,
    RecordRing,
    RingReader,
    read_progress,
    report_on,
)

NUM_CALLS = 100


def measure_collectives(place: Place, *, num_blocks: int) -> dict[str, dict[str, float]]:
    """Return the cost of an all-reduce through each group, in us."""
    collectives.form(**place.formation(1, 2, timeout_s=60.0))
    groups: dict[str, Any] = {"recorded": None, "gloo": dist.new_group(backend="gloo")}
    wall_us: dict[str, list[float]] = {name: [] for name in groups}
    cpu_us: dict[str, list[float]] = {name: [] for name in groups}
    value = torch.ones(256)
    for _ in range(num_blocks):
        for name, group in groups.items():
            dist.barrier()
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            for _ in range(NUM_CALLS):
                dist.all_reduce(value, group=group)
            wall_us[name].append((time.perf_counter() - wall_s) / NUM_CALLS * 1e6)
            cpu_us[name].append((time.thread_time() - cpu_s) / NUM_CALLS * 1e6)
    groups.clear()
    collectives.leave()
    return {
        name: {
            "wall_us": round(min(wall_us[name]), 1),
            "wall_us_p50": round(percentile(wall_us[name], 0.5), 1),
            "cpu_us": round(percentile(cpu_us[name], 0.5), 1),
        }
        for name in wall_us
    }


def measure_stores(directory: Path) -> dict[str, float]:
    """Return the cost of a record, of page stores, and of a keeper's look, in us."""
    page = ProgressRecord.create(directory / "w0.progress", worker="w0")
    page.assign(1, 0)
    ring = RecordRing(directory / "w0.ring", attempt=1, num_ranks=8)
    groups = [ring.group(f"g{index}", tuple(range(8))) for index in range(8)]

    def record() -> None:
        seq, number = ring.enter(groups[0], "all_reduce", 1024, 1)
        ring.leave(groups[0], seq, number, FINISHED)

    def span() -> None:
        ring.span("forward", step=1, micro_batch=1)

    for group in groups:
        ring.enter(group, "all_reduce", 1024, 1)

    def look() -> None:
        now_ns = time.monotonic_ns()
        groups = RingReader(directory / "w0.ring").look(now_ns=now_ns)
        report_on("w0", read_progress(directory / "w0.progress"), groups, now_ns=now_ns)

    found = {
        "recorder_us": _best_us(record, 20_000),
        "span_us": _best_us(span, 20_000),
        "page_enter_us": _best_us(lambda: page.enter(WorkerPhase.FORWARD), 20_000),
        "page_completed_us": _best_us(lambda: page.completed(1, 0.1, 2.0), 20_000),
        "observe_8_groups_us": _best_us(look, 500),
    }
    page.close()
    return found | measure_digests(directory)


def measure_digests(directory: Path) -> dict[str, float]:
    """Return what 10,000 digests cost a keeper, each of a step with 4 micro-batches."""
    ring = RecordRing(directory / "w1.ring", attempt=1, num_ranks=8)
    reader = RingReader(directory / "w1.ring")
    used_s = 0.0
    for step in range(1, 10_001):
        for micro_batch in range(4):
            for op in ("data", "forward", "backward"):
                ring.span(op, step=step, micro_batch=micro_batch)
        ring.span("optimizer", step=step)
        ring.span("data", step=step + 1)
        reader.look()
        begun_s = time.thread_time()
        reader.digest(now_ns=time.monotonic_ns())
        used_s += time.thread_time() - begun_s
    return {"digests_10000_s": round(used_s, 3)}


def _best_us(call: Callable[[], None], num_calls: int) -> float:
    return round(min(timeit.repeat(call, number=num_calls, repeat=7)) / num_calls * 1e6, 2)


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=40)
    num_blocks = parser.parse_args().blocks
    # Memory-backed, as a keeper's directory is: on a disk every write-back costs page faults.
    memory = Path("/dev/shm")  # noqa: S108 - a directory of its own is made in it
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        directory = Path(folder)
        stores = measure_stores(directory)
        measure = functools.partial(measure_collectives, num_blocks=num_blocks)
        with running(measure, 2, directory) as ranks:
            all_reduce = ranks.results()[0]
    recorded, gloo = all_reduce["recorded"], all_reduce["gloo"]
    report = {
        **stores,
        "all_reduce_1kb": all_reduce,
        "wrapper_cpu_us": round(recorded["cpu_us"] - gloo["cpu_us"], 1),
        "ratio_wall": round(recorded["wall_us"] / gloo["wall_us"], 3),
        "ratio_wall_p50": round(recorded["wall_us_p50"] / gloo["wall_us_p50"], 3),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
