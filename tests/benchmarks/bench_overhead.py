"""What a failure-free run pays for being watched: recorder, heartbeats and control.

    python -m tests.benchmarks overhead --rounds 120 --json

Keepers and controller run and are stopped (SIGSTOP) for a second each, in turn, and the steps of
both kinds of seconds are compared: workers wait for neither, so nothing else changes. The processor
time of keepers and controller stands beside that of as many idle Ray actors, because a part of it
is Ray's own.
What workers do to be watched (a record per collective, stores into the progress record) is counted
per step and multiplied by its price, which is measured first. Snapshots are off; they have
``bench_snapshot_steps``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from orchestrator.shell import RunNames
from tests.benchmarks.bench_recorder import measure_stores
from tests.benchmarks.bench_recovery import Bench, running
from tests.benchmarks.common import load_average, processor_s, spread
from workers.keeper import OPTIONS
from workers.keeper.watch import NodeWatch

#: Shorter than any bound after which a silent node or controller would be missed.
STRETCH_S = 1.0


class Idle:
    """A Ray actor that does nothing."""

    async def pid(self) -> int:
        """Return its process."""
        return os.getpid()


def watching(bench: Bench) -> list[int]:
    """Return the processes of the run's keepers and of its controller."""
    # By what the run says: this machine may have keepers of other runs.
    keepers = [row["keeper_pid"] for row in bench.settle()["nodes"]]
    return [*keepers, bench.run.controller_pid()]


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """Have processes stand still meanwhile."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def compare_steps(bench: Bench, watchers: list[int], rounds: int) -> dict[str, Any]:
    """Return how long steps are with the watchers running and with them stopped."""
    stretches: list[tuple[bool, float, float]] = []
    for _ in range(rounds):
        for watched in (True, False):
            with stopped([] if watched else watchers):
                begun_s = time.time()
                time.sleep(STRETCH_S)  # a stretch that is measured
                stretches.append((watched, begun_s, time.time()))
    bench.settle()
    found: dict[bool, list[float]] = {True: [], False: []}
    for line in bench.lines():
        ended_s, step_s = line["wall_time"], line["step_s"]
        for watched, low_s, high_s in stretches:
            if low_s <= ended_s - step_s and ended_s <= high_s:
                found[watched].append(step_s)
    with_s, without_s = found[True], found[False]
    if min(len(with_s), len(without_s)) <= rounds:
        raise SystemExit("steps are too long on this busy machine for stretches of a second")
    mean_s = statistics.fmean(without_s)
    error = sum(statistics.variance(steps) / len(steps) for steps in (with_s, without_s)) ** 0.5
    return {
        "watched_step_s": spread(with_s),
        "unwatched_step_s": spread(without_s),
        "share_of_step": round(statistics.fmean(with_s) / mean_s - 1, 4),
        "standard_error": round(error / mean_s, 4),
    }


def processor_shares(bench: Bench, watchers: list[int], seconds: float) -> dict[str, Any]:
    """Return what watchers, and as many idle actors, take of the machine's processor time."""
    idle_actor: Any = ray.remote(Idle).options(**OPTIONS)
    actors: list[Any] = [idle_actor.remote() for _ in watchers]
    idle = ray.get([actor.pid.remote() for actor in actors])
    bench.settle()
    before = {pid: processor_s(pid) for pid in (*watchers, *idle)}
    begun_s = time.monotonic()
    time.sleep(seconds)  # the stretch that is measured; nobody asks anything meanwhile
    machine_s = (time.monotonic() - begun_s) * (os.cpu_count() or 1)
    used = {pid: processor_s(pid) - before[pid] for pid in before}
    for actor in actors:
        ray.kill(actor)
    return {
        "watchers": round(sum(used[pid] for pid in watchers) / machine_s, 4),
        "idle_actors": round(sum(used[pid] for pid in idle) / machine_s, 4),
        "num_each": len(watchers),
    }


def recording(bench: Bench) -> dict[str, Any]:
    """Return what workers do to be seen, as a share of a step."""
    names: RunNames = bench.run.names
    status = bench.settle()
    nodes = {row["node"] for row in status["workers"]}
    watches = [NodeWatch(node=n, directory=Path(names.shared_directory(n))) for n in nodes]

    def places() -> dict[str, tuple[int, int]]:
        rows = (row for watch in watches for row in watch.report().workers)
        return {row.worker: (row.step, sum(g.entered_seq for g in row.groups)) for row in rows}

    before = places()
    bench.settle()
    after = places()
    per_step = [
        (after[name][1] - calls) / (after[name][0] - step)
        for name, (step, calls) in before.items()
        if after[name][0] > step
    ]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        costs_us = measure_stores(Path(folder))
    step_s = statistics.median(line["step_s"] for line in bench.lines()[-50:])
    recorded_us = statistics.fmean(per_step) * costs_us["recorder_us"]
    return {
        "collectives_per_step": round(statistics.fmean(per_step), 1),
        "recorder_us": costs_us["recorder_us"],
        "share_of_step": round(recorded_us / 1e6 / step_s, 5),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--nodes", type=int, default=1, help="simulated nodes, a keeper on each")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    settings = ["snapshot.every_steps=0", f"cluster.local_nodes={arguments.nodes}"]
    with running(standby_per_node=0, more=settings) as bench:
        watchers = watching(bench)
        result = {
            "steps": compare_steps(bench, watchers, arguments.rounds),
            "processor": processor_shares(bench, watchers, arguments.seconds),
            "recorder": recording(bench),
            "load": load_average(),
        }
    print(json.dumps(result, indent=None if arguments.json else 2))


if __name__ == "__main__":
    main()
