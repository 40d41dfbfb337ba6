"""Whether processes leak: memory, descriptors and threads over many snapshots and recoveries.

    python -m tests.benchmarks growth [--recoveries 150] [--steps 10]

Two workers train on two nodes, and the keepers copy each other's snapshots after every step. After
some steps one worker is killed and a new one takes its place; both load from the keepers' memory
and continue. The benchmark looks at the worker that survives all recoveries and at the keepers,
which must release what dead workers held. Each list has five medians, over a fifth of the
recoveries each, without the start. ``rss_mib`` is resident memory, shared memory included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support.attempts import lines, settings, wait_for_steps, write_texts
from tests.support.node_memory import NodeProcess, newest
from tests.support.snapshots import eventually
from tests.support.trainers import Run, Trainer
from workers.protocol import KeeperOrder
from workers.settings import CheckpointSettings, Settings, SnapshotSettings

NODES = ("node-a", "node-b")
NEVER = 10**9
_MIB = 1 << 20


def look(pid: int) -> dict[str, float]:
    """Return what a process has now."""
    process = Path(f"/proc/{pid}")
    pages = int((process / "statm").read_text(encoding="ascii").split()[1])
    return {
        "rss_mib": pages * os.sysconf("SC_PAGE_SIZE") / _MIB,
        "fds": len(list((process / "fd").iterdir())),
        "threads": len(list((process / "task").iterdir())),
    }


def tell(nodes: list[NodeProcess], run: Run, resume_step: int, living: list[str]) -> None:
    """Tell the keepers of the next attempt, and who is alive."""
    attempt = len(run.lineage) + 1
    lineage = (*run.lineage, (attempt, resume_step))
    peers = {node.node: node.peer() for node in nodes}
    for node in nodes:
        others = tuple(peer for name, peer in peers.items() if name != node.node)
        node.order(KeeperOrder(attempt=attempt, lineage=lineage, copies_of=others))
        node.tend(living)


def measure(root: Path, recoveries: int, steps: int) -> dict[str, Any]:
    """Kill and recover; return what every process had at first and at last."""
    base = settings(write_texts(root), steps=NEVER)
    chosen = Settings(
        model=base.model,
        data=base.data,
        train=base.train,
        checkpoint=CheckpointSettings(every_steps=NEVER, keep=0),
        snapshot=SnapshotSettings(tolerance=1),
    )
    (root / "run").mkdir()
    seen: dict[str, list[dict[str, float]]] = {}
    nodes = [NodeProcess(name, root / name, root / "run", chosen) for name in NODES]

    def is_held() -> bool:
        return newest(nodes)[0][1] == len(run.lineage)

    try:
        with Run(root / "run", nodes=[(node.node, node.directory) for node in nodes]) as run:
            for number in range(recoveries + 1):
                resume, memory = newest(nodes) if number else ((0, 0), ())
                # Worker 0 lives through all; beside it trains a new one each time.
                tell(nodes, run, resume[0], ["w0000", f"w{number + 1:04d}"])
                while len(run.trainers) < number + 2:
                    run.trainers.append(Trainer(f"w{len(run.trainers):04d}", run.directory))
                before = len(lines(run)) if number else 0
                members = run.begin(
                    chosen,
                    num_workers=2,
                    resume=resume,
                    memory=memory,
                    members=(0, number + 1),
                )
                wait_for_steps(run, before + steps)
                assert eventually(is_held), "no snapshot of the attempt is whole"
                for name, pid in (
                    ("survivor", run.trainers[0].process.pid or 0),
                    *((node.node, node.pid) for node in nodes),
                ):
                    seen.setdefault(name, []).append(look(pid))
                members[1].process.kill()
                members[0].fence(number + 1)
                members[0].left()
                members[1].process.join()
            num_steps = len(lines(run))
    finally:
        for node in nodes:
            node.kill()
    return {
        "recoveries": recoveries,
        "steps": num_steps,
        "processes": {
            name: {what: fifths([one[what] for one in found[1:]]) for what in found[0]}
            for name, found in seen.items()
        },
    }


def fifths(values: list[float]) -> list[float]:
    """Return the median of each fifth."""
    bounds = [round(len(values) * part / 5) for part in range(6)]
    return [round(statistics.median(values[low:high]), 1) for low, high in pairwise(bounds)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recoveries", type=int, default=150)
    parser.add_argument("--steps", type=int, default=10, help="After each recovery, at least.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        print(json.dumps(measure(Path(root), options.recoveries, options.steps)), flush=True)


if __name__ == "__main__":
    main()
