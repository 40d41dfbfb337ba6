"""Taking a snapshot, beside copying the same bytes.

    python -m tests.benchmarks snapshot [--megabytes 3 50 300] [--writers 1 2 4] [--plain]

One process holds a keeper's memory. Every writer is a process with the weights and Adam moments
that one of four FSDP workers has of a decoder. All writers at once, in turn

- ``copy``: copy the bytes into the next buffer of their arena with one call of memcpy (numpy's);
- ``tensors``: the same with a call per tensor, because a real state is not one piece of memory;
- ``snapshot``: take a snapshot as training does. The tensors are copied into the next buffer, then
  another thread checksums them, writes the record and tells the keeper. The next snapshot starts
  after that; in a training, the second part runs beside the next step.

``stall`` is the speed of the part that training waits for, ``commit`` that of the whole snapshot,
both over that of copies; ``processor`` compares the processor time of all threads. Each is the
median over rounds of the ratio within a round. ``ms_each`` is the median time of the slowest
writer. A round repeats small states until it copied about as much as for a large one. Small states
stay in the caches, where a copy is nearly free, so look at ``processor_ms_each`` for them.

All processes get the environment that everstep gives to the nodes it starts
(``workers.process.environment``); with ``--plain`` none does.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from tests.benchmarks.common import load_average, paired
from tests.benchmarks.decoder_parts import NUM_WORKERS, DecoderPart, assignment
from tests.support.node_memory import NodeProcess
from tests.support.ranks import Place, running
from workers.memory import descriptor_socket, open_arena
from workers.process import tuned
from workers.settings import Settings, SnapshotSettings
from workers.snapshot import Captured, SnapshotMemory, SnapshotWriter

#: Issue of this part: at least so much of a copy's speed.
TARGET: Final = 0.80
ROUND_BYTES: Final = 300_000_000
READY_S_MAX: Final = 120.0
RUN_S_MAX: Final = 900.0
NODE_MIB: Final = 12 << 10
#: AdamW's values beside its moments, as a record has them.
EXTRA: Final = {"order_position": 1, "loss": 1.0, "optimizer": {"step": 1.0}}


class Writer:
    """One rank: its state, and the memory it goes to."""

    def __init__(self, place: Place, megabytes: int) -> None:
        self.part = DecoderPart(megabytes, place.rank, NUM_WORKERS)
        self.num_bytes = self.part.block.nbytes
        self.sources: list[NDArray[np.uint8]] = [
            entry.tensor.reshape(-1).view(torch.uint8).numpy() for entry in self.part.entries
        ]
        memory = SnapshotMemory(place.directory, f"w{place.rank:04d}")
        self.writer = SnapshotWriter(
            memory,
            assignment(place.rank, NUM_WORKERS),
            fenced=lambda: False,
            told=lambda: None,
        )
        self.step = 0
        self.stall_s = 0.0
        self.writer.prepare(self.state())
        end_s = time.monotonic() + READY_S_MAX
        while not self.writer.is_ready:
            assert time.monotonic() < end_s, "the keeper gives no memory"
            time.sleep(0.01)
        # The same memory, mapped once more and touched, to copy into.
        self.arena = open_arena(descriptor_socket(place.directory), memory.name)
        self.arena.populate()

    def state(self) -> Captured:
        """Return the state as a training hands it over."""
        names = sorted({entry.fqn for entry in self.part.entries})
        return Captured(
            step=self.step,
            entries=self.part.entries,
            extra=EXTRA,
            param_groups=[{"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "params": names}],
        )

    def copy(self) -> None:
        """Copy the bytes and nothing else."""
        body = self.arena.body(self.arena.choose(()))
        np.copyto(np.frombuffer(body, np.uint8)[: self.num_bytes], self.part.block)

    def tensors(self) -> None:
        """Copy the bytes tensor by tensor."""
        body = np.frombuffer(self.arena.body(self.arena.choose(())), np.uint8)
        start = 0
        for source in self.sources:
            np.copyto(body[start : start + source.size], source)
            start += source.size

    def snapshot(self) -> None:
        """Take a snapshot and wait until it is complete."""
        self.step += 1
        state = self.state()
        begun_s = time.perf_counter()
        assert self.writer.capture(state), "no memory"
        self.writer.complete(pin=False)
        self.stall_s += time.perf_counter() - begun_s
        assert self.writer.wait(self.step), "the snapshot was not completed"

    def close(self) -> None:
        """End the writer's thread."""
        self.arena.close()
        assert self.writer.close()


def write(place: Place, *, megabytes: int, writers: int, rounds: int) -> dict[str, Any]:
    """Be one writer; return begin, end and processor seconds by way and round, and stalls."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", place.port)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=writers)
    writer = Writer(place, megabytes)
    repeats = max(1, ROUND_BYTES // writer.num_bytes)
    ways: list[tuple[str, Callable[[], None]]] = [
        ("copy", writer.copy),
        ("tensors", writer.tensors),
        ("snapshot", writer.snapshot),
    ]
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name, _ in ways}
    stalls_s: list[float] = []
    for number in range(rounds + 1):
        # There and back, so that neither is always the first.
        for name, way in ways if number % 2 else reversed(ways):
            writer.stall_s = 0.0
            dist.barrier()
            used_s, begun_s = time.process_time(), time.perf_counter()
            for _ in range(repeats):
                way()
            ended_s = time.perf_counter()
            # The first round pays for what is touched first.
            if number:
                taken[name].append((begun_s, ended_s, time.process_time() - used_s))
                if name == "snapshot":
                    stalls_s.append(writer.stall_s)
    writer.close()
    dist.destroy_process_group()
    return {
        "bytes": writer.num_bytes * repeats,
        "repeats": repeats,
        "taken": taken,
        "stalls_s": stalls_s,
    }


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return ratios from what all writers of one setting returned."""
    wall_s: dict[str, list[float]] = {}
    used_s: dict[str, list[float]] = {}
    for name in results[0]["taken"]:
        # One clock for all processes of a machine: a round lasts until the last one is done.
        rounds = list(zip(*(result["taken"][name] for result in results), strict=True))
        wall_s[name] = [max(r[1] for r in each) - min(r[0] for r in each) for each in rounds]
        used_s[name] = [sum(r[2] for r in each) for each in rounds]
    stalls_s = [max(each) for each in zip(*(r["stalls_s"] for r in results), strict=True)]
    num_bytes, repeats = (sum(result[key] for result in results) for key in ("bytes", "repeats"))
    return {
        "stall_of_copy": paired(wall_s["copy"], stalls_s),
        "stall_of_tensors": paired(wall_s["tensors"], stalls_s),
        "commit_of_copy": paired(wall_s["copy"], wall_s["snapshot"]),
        "processor_of_copy": paired(used_s["copy"], used_s["snapshot"]),
        "processor_of_tensors": paired(used_s["tensors"], used_s["snapshot"]),
        "ms_each": {
            name: round(1e3 * statistics.median(times) / results[0]["repeats"], 3)
            for name, times in {**wall_s, "stall": stalls_s}.items()
        },
        "gb_per_s": {
            name: round(num_bytes / statistics.median(times) / 1e9, 2)
            for name, times in wall_s.items()
        },
        "processor_ms_each": {
            name: round(1e3 * statistics.median(times) / repeats, 3)
            for name, times in used_s.items()
        },
    }


@contextmanager
def keeper(directory: Path) -> Iterator[NodeProcess]:
    """Hold a node's memory in a process of its own; its door is in ``directory``."""
    chosen = Settings(snapshot=SnapshotSettings(node_memory_mib=NODE_MIB))
    node = NodeProcess("node", directory, directory / "run", chosen)
    try:
        yield node
    finally:
        node.kill()


def measure(megabytes: int, writers: int, rounds: int) -> dict[str, Any]:
    """Measure one setting, on a keeper of its own."""
    with tempfile.TemporaryDirectory() as folder, keeper(Path(folder)):
        function = functools.partial(write, megabytes=megabytes, writers=writers, rounds=rounds)
        with running(function, writers, Path(folder)) as ranks:
            found = summary(ranks.results(RUN_S_MAX))
    return {"megabytes": megabytes, "writers": writers, **found, "load": load_average()}


def main() -> None:
    """Print one JSON object a setting; ``missed`` names the ratios below the target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[3, 50, 300])
    parser.add_argument("--writers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--plain", action="store_true", help="copies without any tuning")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not options.plain:
        os.environ.update(tuned(os.environ))
    for megabytes in options.megabytes:
        for writers in options.writers:
            found = measure(megabytes, writers, options.rounds)
            found["missed"] = [
                name
                for name in ("stall_of_copy", "stall_of_tensors", "commit_of_copy")
                if found[name]["median"] < TARGET
            ]
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
