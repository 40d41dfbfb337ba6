"""Starting a run from a checkpoint: four ranks of a session, beside raw reads of the same bytes.

    python -m tests.benchmarks init_from --megabytes 3006 --rounds 5 --json

The checkpoint is Hugging Face's: safetensors files of float32 weights. Each rank of a session with
``run.init_from`` loads its quarter of every weight (FSDP2), from ``session.optimizer`` on.

``raw`` reads as many bytes, a quarter of every file for each rank, at most 8 MiB a call with as
many threads as a session has (``checkpoint.threads``), into memory that is as fresh as the
session's weights. It parses nothing and puts nothing in its place. The page cache is warm.

All ranks begin together; a time is from the first begin to the last end. Each round has one of
both, the session first. ``memory`` is the most anonymous and shared memory of a rank until it is
loaded, above what it had before it built the model, over the bytes of its state.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from tests.benchmarks.common import load_average, paired
from tests.support.ranks import Place, running
from ucp_core.layout import ParallelLayout
from ucp_core.storage import open_store
from workers.protocol import Assignment, Raised
from workers.records import ProgressRecord
from workers.settings import CheckpointSettings, RunSettings, Settings, SnapshotSettings
from workers.train import Session, WorkerContext, run_attempt

NUM_RANKS: Final = 4
WIDTH: Final = 4096
FILES: Final = 8
READ_BYTES: Final = 8 << 20
RUN_S_MAX: Final = 1800


class Loaded(Exception):  # noqa: N818  it ends an attempt that has nothing to train
    """The state is loaded and the times are known."""


def build(num_layers: int) -> nn.Module:
    """Return a model of square layers, 64 MiB each in float32."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))


def write(directory: Path, num_layers: int) -> None:
    """Write the checkpoint as ``save_pretrained`` does, in some files with an index."""
    from safetensors.numpy import save_file

    directory.mkdir()
    weight_map: dict[str, str] = {}
    for number in range(FILES):
        name = f"model-{number + 1:05d}-of-{FILES:05d}.safetensors"
        tensors = {
            f"{layer}.weight": np.full((WIDTH, WIDTH), layer + 1, np.float32)
            for layer in range(number, num_layers, FILES)
        }
        save_file(tensors, directory / name)
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": 4 * WIDTH**2 * num_layers}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def resident_bytes() -> int:
    """Return this process's memory that is no page of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))


class Peak:
    """Looks at the process's memory every few milliseconds."""

    def __init__(self) -> None:
        self.before_bytes = self.most_bytes = resident_bytes()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def end(self) -> int:
        """Return the most above what was there at first."""
        self._ends.set()
        self._thread.join()
        return self.most_bytes - self.before_bytes

    def _look(self) -> None:
        while not self._ends.wait(0.005):
            self.most_bytes = max(self.most_bytes, resident_bytes())


def read_raw(path: Path, rank: int, threads: int) -> int:
    """Read this rank's quarter of every file; return the bytes."""
    reads: list[tuple[Path, int, memoryview]] = []
    for file in sorted(path.glob("*.safetensors")):
        share = file.stat().st_size // NUM_RANKS
        data = memoryview(torch.empty(share, dtype=torch.uint8).numpy().data).cast("B")
        reads += [
            (file, rank * share + at, data[at : at + READ_BYTES])
            for at in range(0, share, READ_BYTES)
        ]

    def read(one: tuple[Path, int, memoryview]) -> int:
        file, offset, data = one
        with file.open("rb", buffering=0) as opened:
            return os.preadv(opened.fileno(), [data], offset)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(read, reads))


def task(session: Session, *, num_layers: int, seen: dict[str, Any]) -> None:
    """Load as a run that starts does, then read raw; note when each began and ended."""
    path, threads = Path(session.settings.run.init_from), session.settings.checkpoint.threads
    peak = Peak()
    model = session.model(lambda: build(num_layers))
    dist.barrier()
    begun_s = time.perf_counter()
    session.optimizer(lambda named: torch.optim.SGD(named.values(), lr=0.1))
    seen["session"] = (begun_s, time.perf_counter())
    seen["peak_bytes"] = peak.end()
    local = [one.to_local() for one in model.parameters()]
    seen["state_bytes"] = sum(one.nbytes for one in local)
    values = [float(one.flatten()[-1]) for one in local]
    assert values == [layer + 1.0 for layer in range(num_layers)], values
    dist.barrier()
    begun_s = time.perf_counter()
    seen["raw_bytes"] = read_raw(path, session.rank, threads)
    seen["raw"] = (begun_s, time.perf_counter())
    dist.barrier()
    raise Loaded


def rank_of(place: Place, *, path: str, num_layers: int, rounds: int) -> list[dict[str, Any]]:
    """Be one worker for some attempts; return what each saw."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store, directory = open_store(str(place.directory / "run"))
    context = WorkerContext(
        worker=f"w{place.rank:04d}",
        settings=Settings(
            run=RunSettings(directory="run", init_from=path),
            checkpoint=CheckpointSettings(every_steps=10**9),
            snapshot=SnapshotSettings(every_steps=0),
        ),
        store=store,
        directory=directory,
        progress=ProgressRecord.create(place.progress_path, worker=f"w{place.rank:04d}"),
        ring_path=str(place.ring_path),
        yield_requested=lambda _: False,
        fenced=lambda _: False,
    )
    found: list[dict[str, Any]] = []
    for attempt in range(1, rounds + 1):
        assignment = Assignment(
            attempt=attempt,
            rank=place.rank,
            layout=ParallelLayout(dp_shard=NUM_RANKS),
            store_host="127.0.0.1",
            store_port=place.port,
            resume_step=0,
            resume_attempt=0,
            lineage=((attempt, 0),),
        )
        found.append({})
        load = functools.partial(task, num_layers=num_layers, seen=found[-1])
        outcome = run_attempt(assignment, context, load)
        assert isinstance(outcome, Raised), outcome
        assert "Loaded" in outcome.error, outcome.traceback
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=3006, help="2.8 GiB by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    num_layers = max(FILES, given.megabytes * 10**6 // (4 * WIDTH**2))
    directory = Path(tempfile.mkdtemp(prefix="everstep-bench-"))
    try:
        path = directory / "model"
        write(path, num_layers)
        function = functools.partial(
            rank_of, path=str(path), num_layers=num_layers, rounds=given.rounds + 1
        )
        with running(function, NUM_RANKS, directory) as ranks:
            by_rank = ranks.results(RUN_S_MAX)
    finally:
        shutil.rmtree(directory)
    # The first round fills caches.
    rounds = list(zip(*by_rank, strict=True))[1:]
    times_s = {
        way: [
            max(one[way][1] for one in each) - min(one[way][0] for one in each) for each in rounds
        ]
        for way in ("session", "raw")
    }
    state_bytes = sum(one["state_bytes"] for one in rounds[0])
    rates = {
        "session": [state_bytes / taken_s for taken_s in times_s["session"]],
        "raw": [
            sum(one["raw_bytes"] for one in each) / taken_s
            for each, taken_s in zip(rounds, times_s["raw"], strict=True)
        ],
    }
    memory = [one["peak_bytes"] / one["state_bytes"] for each in rounds for one in each]
    found = {
        "load": load_average(),
        "gigabytes": round(state_bytes / 1e9, 2),
        "gigabytes_per_s": {
            way: round(statistics.median(each) / 1e9, 2) for way, each in rates.items()
        },
        "session_of_raw": paired(rates["session"], rates["raw"]),
        "memory_of_state_max": round(max(memory), 3),
    }
    print(json.dumps(found) if given.json else json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
