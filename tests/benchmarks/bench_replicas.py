"""Measures a second node's copy of a snapshot: from replicas, or over the network.

    python -m tests.benchmarks replicas [--megabytes 32] [--rounds 8] [--replicas 2]

Ranks on as many nodes hold the same state, and each saves its share. With ``network`` the keepers
(processes of their own) copy each other's shares. With ``replicas`` each rank saves another rank's
share as well. With ``parity`` (three replicas or more) each keeps a parity of the others' shares.
Blocks of snapshots take turns; a snapshot is complete when it survives the loss of a node.

``processor_ms`` is the processor time of a snapshot of all ranks and keepers, ``stall_ms`` that of
a rank's training thread; both are medians. ``ratio`` is the median over pairs of blocks of the
processor time of ``replicas`` over that of ``network``, ``parity_ratio`` that of ``parity`` over
``replicas``, ``stall_ratio`` that of the stalls.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch

from tests.benchmarks.common import load_average
from tests.support.node_memory import NodeProcess
from tests.support.snapshots import eventually
from ucp_core.geometry import Box
from ucp_core.layout import ParallelLayout
from workers.protocol import Assignment, GroupPlace, KeeperOrder, ParityGroup, Peer
from workers.settings import Settings, SnapshotSettings
from workers.snapshot import Captured, SnapshotMemory, SnapshotWriter
from workers.state import StateEntry
from workers.state.replica_shares import cut

WAYS: Final = ("network", "replicas", "parity")
NUM_TENSORS: Final = 64
BLOCK: Final = 10
#: Keepers copy at the lowest priority, perhaps on a busy machine.
COPIED_S_MAX: Final = 300.0


def shares(megabytes: int, replicas: int) -> list[list[StateEntry]]:
    """Return a state in as many shares."""
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
    return [[entries[number].rows(box) for number, box in share] for share in cut(parts, replicas)]


class Replicas:
    """Nodes, and the writer of a rank on each.

    Args:
        way: How other nodes get what one has.
        folder: For all.
        shares: The state.
    """

    def __init__(self, way: str, folder: Path, shares: list[list[StateEntry]]) -> None:
        self._way = way
        self._shares = shares
        size_bytes = sum(entry.tensor.nbytes for share in shares for entry in share)
        settings = Settings(snapshot=SnapshotSettings(node_memory_mib=64 + (size_bytes >> 18)))
        self.nodes = [
            NodeProcess(f"{way}-{rank}", folder / way / str(rank), folder / "run", settings)
            for rank in range(len(shares))
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
            self.nodes[rank].order(self._order(rank, peers))
            writer.prepare(self._state(rank, 0))
        assert eventually(lambda: all(writer.is_ready for writer in self._writers))

    def take(self, step: int) -> list[float]:
        """Take a snapshot on all ranks; return the processor seconds that each waited for it."""
        stalls_s = []
        for rank, writer in enumerate(self._writers):
            begun_s = time.thread_time()
            assert writer.capture(self._state(rank, step))
            stalls_s.append(time.thread_time() - begun_s)
            writer.complete(pin=False)
        for writer in self._writers:
            assert writer.wait_copied(step, time.monotonic() + COPIED_S_MAX)
        return stalls_s

    def used_s(self) -> float:
        """Return the processor time of this process and of the keepers."""
        return time.process_time() + sum(_processor_s(node.pid) for node in self.nodes)

    def close(self) -> None:
        """End all nodes."""
        for writer in self._writers:
            writer.close()
        for node in self.nodes:
            node.kill()

    def _order(self, rank: int, peers: Sequence[Peer]) -> KeeperOrder:
        copies_of = (peers[rank - 1],) if self._way == "network" else ()
        places = tuple(
            GroupPlace(peer=None if at == rank else peer, ranks=(at,))
            for at, peer in enumerate(peers)
        )
        group = ParityGroup(attempt=1, tolerance=1, places=places, over_replicas=True)
        return KeeperOrder(
            attempt=1,
            lineage=((1, 0),),
            copies_of=copies_of,
            parity=group if self._way == "parity" else None,
        )

    def _assignment(self, rank: int) -> Assignment:
        size = len(self._shares)
        return Assignment(
            attempt=1,
            rank=rank,
            layout=ParallelLayout(dp_replicate=size),
            store_host="",
            store_port=0,
            resume_step=0,
            resume_attempt=0,
            lineage=((1, 0),),
            guards=((rank - 1) % size,) if self._way == "replicas" else None,
            parity=tuple(range(size)) if self._way == "parity" else (),
        )

    def _state(self, rank: int, step: int) -> Captured:
        saved_too = self._assignment(rank).saved_too
        return Captured(
            step=step,
            entries=self._shares[rank],
            extra={"step": step},
            param_groups=[],
            guarded=tuple((other, self._shares[other]) for other in saved_too),
        )


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(megabytes: int, rounds: int, replicas: int, folder: Path) -> dict[str, Any]:
    """Return what a snapshot costs in each way."""
    cut_shares = shares(megabytes, replicas)
    ways = WAYS if replicas > 2 else WAYS[:2]
    used_s: dict[str, list[float]] = {way: [] for way in ways}
    stalls_s: dict[str, list[float]] = {way: [] for way in ways}
    with ExitStack() as stack:
        groups = {}
        for way in ways:
            groups[way] = Replicas(way, folder, cut_shares)
            stack.callback(groups[way].close)
        step = 0
        # In the first block the other nodes' memory is made.
        for number in range(rounds + 1):
            for way in ways if number % 2 else reversed(ways):
                before_s = groups[way].used_s()
                stalled_s = 0.0
                for _ in range(BLOCK):
                    step += 1
                    stalled_s += sum(groups[way].take(step))
                used_s[way].append((groups[way].used_s() - before_s) / BLOCK)
                stalls_s[way].append(stalled_s / BLOCK / replicas)
        held = [part for node in groups["replicas"].nodes for part in node.inventory().parts]

    def ratio(of: dict[str, list[float]], way: str, other: str) -> float:
        pairs = list(zip(of[way], of[other], strict=True))[1:]
        return round(statistics.median(one / another for one, another in pairs), 3)

    found = {
        "megabytes": megabytes,
        "replicas": replicas,
        "saved_bytes": sorted({part.held.data_bytes for part in held}),
        "processor_ms": {
            way: round(1e3 * statistics.median(values[1:]), 2) for way, values in used_s.items()
        },
        "stall_ms": {
            way: round(1e3 * statistics.median(values[1:]), 2) for way, values in stalls_s.items()
        },
        "ratio": ratio(used_s, "replicas", "network"),
    }
    if "parity" in ways:
        found["parity_ratio"] = ratio(used_s, "parity", "replicas")
        found["stall_ratio"] = ratio(stalls_s, "parity", "replicas")
    return found


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.megabytes, options.rounds, options.replicas, Path(folder))
    print(json.dumps({**found, "load": load_average()}), flush=True)


if __name__ == "__main__":
    main()
