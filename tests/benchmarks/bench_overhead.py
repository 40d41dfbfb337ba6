"""Measures the costs of a failure-free run: of its session, and of being watched.

    python -m tests.benchmarks overhead --only bare [--models tiny llama-10m 125m]
    python -m tests.benchmarks overhead --only layouts [--models 10m]
    python -m tests.benchmarks overhead --only watched --rounds 120 --json

``bare`` trains the same model in turns by a session, by a plain loop of FSDP2 as a tutorial has it
(a unit per layer, the optimizer over DTensors, the loss read after every step), and by a loop
``alike``: plain too, but with the session's units and its reduction. All are in the same processes,
which recorded groups and plain ones of gloo or NCCL connect. ``wall`` and ``processor`` are ratios,
pair by pair of blocks. Snapshots are off, and no keeper watches. It takes a CUDA device per worker
where there are any; ``--cuda`` skips where there is none.

``layouts`` does the same for two tensor-parallel workers, and for two stages of a pipeline: beside
them stands torch's ``parallelize_module`` or ``Schedule1F1B`` alone, with one small all-reduce for
norm and loss.

``watched``: keepers and controller run and are stopped (SIGSTOP) for a second each, in turn, and
the steps of both kinds of seconds are compared: workers wait for neither, so nothing else changes.
The processor time of keepers and controller stands beside that of as many idle Ray actors, because
a part of it is Ray's own. The work of being watched (a record per collective, stores into the
progress record) is counted per step and multiplied by its price, which is measured first. Snapshots
are off; they have ``bench_snapshot_steps``.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import tempfile
import time
import timeit
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import ray
import torch

from orchestrator.shell import RunNames
from tests.benchmarks.bare_loop import MICRO_BATCH, MODELS, WAYS, compare
from tests.benchmarks.bench_recovery import Bench, running
from tests.benchmarks.common import load_average, processor_s, spread
from tests.benchmarks.steps import Job
from ucp_core.layout import ParallelLayout
from workers.keeper import OPTIONS
from workers.keeper.trainer_watch import NodeWatch
from workers.models import PRESETS
from workers.telemetry import FINISHED, RecordRing

#: Shorter than any bound after which a silent node or controller would be missed.
STRETCH_S = 1.0
#: The goal: a step of a session, of a step of the bare loop.
STEP_RATIO_MAX: Final = 1.03
#: The same of ``layouts``.
LAYOUT_RATIO_MAX: Final = 1.05
LAYOUTS: Final = (ParallelLayout(tp=2), ParallelLayout(pp=2))
#: Rounds, and steps in a block, by the size of the model.
BLOCKS: Final = {"tiny": (60, 15), "small": (40, 10), "10m": (15, 5), "125m": (5, 3)}


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
    time.sleep(seconds)  # the measured stretch, without requests
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
        recorder_us = recorder_cost_us(Path(folder))
    step_s = statistics.median(line["step_s"] for line in bench.lines()[-50:])
    recorded_us = statistics.fmean(per_step) * recorder_us
    return {
        "collectives_per_step": round(statistics.fmean(per_step), 1),
        "recorder_us": recorder_us,
        "share_of_step": round(recorded_us / 1e6 / step_s, 5),
    }


def recorder_cost_us(directory: Path) -> float:
    """Return what the record of one collective costs the training thread: two stores."""
    ring = RecordRing(directory / "w0.ring", attempt=1, num_ranks=8)
    group = ring.group("g", tuple(range(8)))

    def record() -> None:
        seq, number = ring.enter(group, "all_reduce", 1024, 1)
        ring.leave(group, seq, number, FINISHED)

    return round(min(timeit.repeat(record, number=20_000, repeat=7)) / 20_000 * 1e6, 2)


def bare(models: Sequence[str], workers: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield what a step of each model takes in a session, beside plain loops."""
    for model in models:
        num_rounds, block = BLOCKS[model.removeprefix("llama-")]
        job = Job(
            shape=PRESETS["tiny"],
            workers=workers,
            global_batch=2 * MICRO_BATCH * workers,
            rounds=rounds or num_rounds,
            block=block,
            ways=WAYS,
        )
        with tempfile.TemporaryDirectory() as folder:
            found = compare(job, model, Path(folder))
        missed = found["session_of_bare"]["wall"]["median"] > STEP_RATIO_MAX
        yield {"model": model, "workers": workers, **found, "missed": missed}


def layouts(models: Sequence[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield what a step of each layout takes in a session, beside torch alone."""
    decoders = [model for model in models if model in BLOCKS]
    alone = torch.cuda.device_count() == 1
    for model, layout in itertools.product(decoders, () if alone else LAYOUTS):
        num_rounds, block = BLOCKS[model]
        job = Job(
            shape=PRESETS["tiny"],
            workers=layout.world_size,
            global_batch=4 * MICRO_BATCH,
            rounds=rounds or num_rounds,
            block=block,
            ways=("bare", "session"),
            layout=layout,
        )
        with tempfile.TemporaryDirectory() as folder:
            found = compare(job, model, Path(folder))
        missed = found["session_of_bare"]["wall"]["median"] > LAYOUT_RATIO_MAX
        yield {"model": model, "layout": str(layout), **found, "missed": missed}


def watched(rounds: int, seconds: float, nodes: int) -> dict[str, Any]:
    """Return what it costs to be watched."""
    settings = ["snapshot.every_steps=0", f"cluster.local_nodes={nodes}"]
    with running(standby_per_node=0, more=settings) as bench:
        watchers = watching(bench)
        return {
            "steps": compare_steps(bench, watchers, rounds),
            "processor": processor_shares(bench, watchers, seconds),
            "recorder": recording(bench),
        }


def main() -> None:
    """Measure and print, a JSON object a model and one for being watched."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("bare", "layouts", "watched"))
    parser.add_argument("--models", nargs="+", default=(), choices=MODELS, help="by the part")
    parser.add_argument("--workers", type=int, default=2, help="of `bare`; one a CUDA device")
    parser.add_argument("--cuda", action="store_true", help="skip `bare` without a CUDA device")
    parser.add_argument("--rounds", type=int, default=0, help="default: by the model; 120")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--nodes", type=int, default=1, help="simulated nodes, a keeper on each")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    indent = None if arguments.json else 2
    if arguments.cuda and not torch.cuda.is_available():
        print(json.dumps({"skipped": "no CUDA device: steps of a GPU cannot be measured"}))
    elif arguments.only != "watched":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        workers = min(arguments.workers, torch.cuda.device_count() or arguments.workers)
        parts = {
            "bare": bare(arguments.models or ["tiny", "llama-small"], workers, arguments.rounds),
            "layouts": layouts(arguments.models or ["10m"], arguments.rounds),
        }
        for name, rows in parts.items():
            for found in rows if arguments.only in (None, name) else ():
                print(json.dumps({**found, "load": load_average()}, indent=indent), flush=True)
    if arguments.only in (None, "watched"):
        result = watched(arguments.rounds or 120, arguments.seconds, arguments.nodes)
        print(json.dumps({**result, "load": load_average()}, indent=indent))


if __name__ == "__main__":
    main()
