"""What a run pays for being watched: processor time of keepers and controller, per step time.

    python -m tests.benchmarks.bench_overhead --seconds 40 --json

Nothing of it is on the training threads' path: workers store into shared memory (measured by
``bench_recorder``), and what keepers and the controller take, they take from idle processors;
here, where workers use both cores of a small machine, it is taken from the training.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.bench_recovery import Bench, running
from tests.benchmarks.common import spread

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def processor_s(pid: int) -> float:
    """Return the processor time that ``pid`` has used."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    fields = stat[stat.rindex(")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def keeper_pids() -> list[int]:
    """Return the keepers' processes on this machine."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            title = (entry / "cmdline").read_bytes() if (entry / "cmdline").exists() else b""
            if title.startswith(b"ray::Keeper"):
                pids.append(int(entry.name))
    return pids


def measure(bench: Bench, seconds: float) -> dict[str, Any]:
    """Watch an undisturbed stretch of ``seconds``."""
    status = bench.settle()
    watchers = [*keeper_pids(), bench.run.controller_pid()]
    workers = [row["pid"] for row in status["workers"] if row["rank"] >= 0]
    before = {pid: processor_s(pid) for pid in watchers + workers}
    first = len(bench.lines())
    time.sleep(seconds)  # the stretch that is measured; nobody asks anything meanwhile
    used = {pid: processor_s(pid) - before[pid] for pid in before}
    watching_s = sum(used[pid] for pid in watchers)
    num_cores = os.cpu_count() or 1
    return {
        "step_s": spread([line["step_s"] for line in bench.lines()[first:]]),
        "watchers_processor_share": round(watching_s / (seconds * num_cores), 4),
        "watchers_per_worker_processor_time": round(
            watching_s / sum(used[pid] for pid in workers), 4
        ),
        "num_watchers": len(watchers),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with running(standby_per_node=1) as bench:
        result = measure(bench, arguments.seconds)
    print(json.dumps(result, indent=None if arguments.json else 2))


if __name__ == "__main__":
    main()
