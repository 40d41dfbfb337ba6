"""What it costs that another node has a snapshot too: from a replica there, or over the network.

    python -m tests.benchmarks.bench_replicas [--megabytes 32] [--rounds 8]

A state that two ranks on two nodes hold alike; each saves half of it. ``network``: the keepers, in
processes of their own, copy each other's halves. ``replicas``: each rank saves the other half, too.
Blocks of snapshots take turns; a snapshot is over when both nodes have all of it.

``processor_ms`` is the processor time of a snapshot, of both ranks and keepers together, and
``stall_ms`` what a rank's training waits for it; medians. ``ratio`` is the median over pairs of
blocks of the processor time of ``replicas`` to that of ``network``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch

from tests.benchmarks.common import load_average
from tests.support.node_memory import NodeProcess
from tests.support.snapshots import eventually
from ucp_core.boxes import Box
from ucp_core.layout import ParallelLayout
from workers.parallel.shares import cut
from workers.parallel.state import StateEntry
from workers.protocol import Assignment, KeeperOrder
from workers.snapshot.writing import Captured, SnapshotMemory, SnapshotWriter
from workers.train.settings import Settings, SnapshotSettings

WAYS: Final = ("network", "replicas")
NUM_TENSORS: Final = 64
BLOCK: Final = 10
#: Keepers copy at the lowest priority, perhaps on a busy machine.
COPIED_S_MAX: Final = 300.0


def shares(megabytes: int) -> list[list[StateEntry]]:
    """Return both halves of a state."""
    shape = (1024, 256 * megabytes // NUM_TENSORS)
    entries = [
        StateEntry(
            fqn=f"p{number}",
            slot="weight",
            shape=shape,
            box=Box.full(shape),
            tensor=torch.randn(shape),
        )
        for number in range(NUM_TENSORS)
    ]
    parts = [(entry.box, entry.tensor.element_size()) for entry in entries]
    return [[entries[number].part(box) for number, box in share] for share in cut(parts, 2)]


class Pair:
    """Two nodes and the writers of a rank on each.

    Args:
        way: How the other node gets what one has.
        folder: For both.
        halves: The state.
    """

    def __init__(self, way: str, folder: Path, halves: list[list[StateEntry]]) -> None:
        self._has_guards = way == "replicas"
        self._halves = halves
        size_bytes = sum(entry.tensor.nbytes for half in halves for entry in half)
        settings = Settings(snapshot=SnapshotSettings(node_memory_mib=64 + (size_bytes >> 18)))
        self.nodes = [
            NodeProcess(f"{way}-{name}", folder / way / name, folder / "run", settings)
            for name in "ab"
        ]
        peers = [node.peer() for node in self.nodes]
        self._writers = [
            SnapshotWriter(
                SnapshotMemory(node.directory, f"w{rank}"),
                self._assignment(rank),
                fenced=lambda: False,
                told=lambda: None,
            )
            for rank, node in enumerate(self.nodes)
        ]
        for rank, writer in enumerate(self._writers):
            others = () if self._has_guards else (peers[1 - rank],)
            order = KeeperOrder(attempt=1, lineage=((1, 0),), copies_of=others)
            self.nodes[rank].order(order)
            writer.prepare(self._state(rank, 0))
        assert eventually(lambda: all(writer.is_ready for writer in self._writers))

    def take(self, step: int) -> list[float]:
        """Take a snapshot on both ranks; return the seconds that each waited for it."""
        stalls_s = []
        for rank, writer in enumerate(self._writers):
            begun_s = time.perf_counter()
            assert writer.capture(self._state(rank, step))
            stalls_s.append(time.perf_counter() - begun_s)
            writer.complete(pin=False)
        for writer in self._writers:
            assert writer.wait_copied(step, time.monotonic() + COPIED_S_MAX)
        return stalls_s

    def used_s(self) -> float:
        """Return the processor time of this process and of the keepers."""
        return time.process_time() + sum(_processor_s(node.pid) for node in self.nodes)

    def close(self) -> None:
        """End both nodes."""
        for writer in self._writers:
            writer.close()
        for node in self.nodes:
            node.kill()

    def _assignment(self, rank: int) -> Assignment:
        return Assignment(
            attempt=1,
            rank=rank,
            layout=ParallelLayout(dp_replicate=2),
            store_host="",
            store_port=0,
            resume_step=0,
            resume_attempt=0,
            lineage=((1, 0),),
            guards=(1 - rank,) if self._has_guards else None,
        )

    def _state(self, rank: int, step: int) -> Captured:
        other = (1 - rank, self._halves[1 - rank])
        return Captured(
            step=step,
            entries=self._halves[rank],
            extra={"step": step},
            param_groups=[],
            guarded=(other,) if self._has_guards else (),
        )


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(megabytes: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Return what a snapshot costs in both ways."""
    halves = shares(megabytes)
    used_s: dict[str, list[float]] = {way: [] for way in WAYS}
    stalls_s: dict[str, list[float]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        pairs = {}
        for way in WAYS:
            pairs[way] = Pair(way, folder, halves)
            stack.callback(pairs[way].close)
        step = 0
        # In the first block the other node's memory is made.
        for number in range(rounds + 1):
            for way in WAYS if number % 2 else reversed(WAYS):
                before_s = pairs[way].used_s()
                for _ in range(BLOCK):
                    step += 1
                    stalls_s[way] += pairs[way].take(step)
                used_s[way].append((pairs[way].used_s() - before_s) / BLOCK)
        held = [part for node in pairs["replicas"].nodes for part in node.inventory().parts]
    pairs_s = list(zip(used_s["replicas"], used_s["network"], strict=True))[1:]
    return {
        "megabytes": megabytes,
        "saved_bytes": sorted({part.held.data_bytes for part in held}),
        "processor_ms": {
            way: round(1e3 * statistics.median(values[1:]), 2) for way, values in used_s.items()
        },
        "stall_ms": {
            way: round(1e3 * statistics.median(values), 2) for way, values in stalls_s.items()
        },
        "ratio": round(statistics.median(one / other for one, other in pairs_s), 3),
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.megabytes, options.rounds, Path(folder))
    print(json.dumps({**found, "load": load_average()}), flush=True)


if __name__ == "__main__":
    main()
