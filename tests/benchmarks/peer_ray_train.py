"""How long Ray Train's elastic trainer pauses per fault, on simulated nodes of this machine.

The other side of ``tests.benchmarks.bench_recovery``: the same simulated nodes, the same model,
the same kind of step, the same clock. From the fault (our clock, just before the signal) to the
end of the first step of a process that was started after it.

    pip install "everstep[peers]"
    python -m tests.benchmarks peer_ray_train --fault worker --repeats 3 --json

``--tuned`` gives the peer the settings with which it recovers soonest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest.mock import patch

import psutil

from orchestrator.shell import HostedCluster
from workers.data import open_texts
from workers.settings import DataSettings

PEER: Final = "ray train 2.60"
JOB: Final = "tests.benchmarks.peer_ray_train_job"
REPOSITORY: Final = Path(__file__).resolve().parents[2]
FAULTS: Final = ("worker", "node")
NUM_NODES: Final = 2
FAULT_STEP: Final = 10
TRIAL_S_MAX: Final = 150.0
#: Ray Train commits a checkpoint when its controller polls, every 2 s by default. The fault comes
#: at a random time within such a period: right behind a step it would lose more or fewer steps.
POLL_S: Final = 2.0
#: Poll ten times as often; and do not wait 60 s for a placement that a lost node made impossible.
TUNING: Final = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",
}
_PLAIN_RAY: Final = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One step of one worker, as the worker wrote it down.

    Attributes:
        entered_s: Wall clock at which its process began to train.
        wall_time: Wall clock at the end of the step.
    """

    entered_s: float
    pid: int
    node: str
    rank: int
    world_size: int
    step: int
    wall_time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What one fault cost.

    Attributes:
        seconds: From the fault to the end of the first step after it.
        lost_steps: Steps that were done and had to be done again.
        world_size: Workers that went on.
    """

    seconds: float
    lost_steps: int
    world_size: int


def parse(text: str) -> list[Record]:
    """Return the records in ``text``; a last line that is still being written is left out."""
    return [Record(**json.loads(line)) for line in text[: text.rfind("\n") + 1].splitlines()]


def recovery(records: list[Record], fault_s: float) -> Recovery | None:
    """Return what the fault at ``fault_s`` cost, None while no new process has done a step."""
    new = [record for record in records if record.entered_s > fault_s]
    if not new:
        return None
    first = min(new, key=lambda record: record.wall_time)
    done = max(record.step for record in records if record.entered_s <= fault_s)
    return Recovery(
        seconds=first.wall_time - fault_s,
        lost_steps=done - first.step + 1,
        world_size=first.world_size,
    )


class Job:
    """One elastic job of the peer on simulated nodes, over within ``TRIAL_S_MAX``."""

    def __init__(self, cluster: HostedCluster, directory: Path, workers: int) -> None:
        self.cluster = cluster
        self._directory = directory
        self._deadline_s = time.monotonic() + TRIAL_S_MAX
        command = [sys.executable, "-m", JOB, "--address", cluster.address]
        command += ["--directory", str(directory), "--workers", str(workers)]
        with (directory / "driver.log").open("wb") as log:
            self._driver = subprocess.Popen(
                command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def records(self) -> list[Record]:
        """Return all steps of all processes so far."""
        paths = (self._directory / "steps").glob("*.jsonl")
        return [record for path in paths for record in parse(path.read_text())]

    def wait(self, found: Callable[[list[Record]], _T | None]) -> _T:
        """Return the first answer of ``found``; raise ``RuntimeError`` if none comes."""
        while (answer := found(self.records())) is None:
            if self._driver.poll() is not None:
                raise RuntimeError(f"the peer's driver ended early:\n{self._log()}")
            if time.monotonic() > self._deadline_s:
                raise RuntimeError(f"no answer within {TRIAL_S_MAX:.0f} s:\n{self._log()}")
            time.sleep(0.05)
        return answer

    def end(self) -> None:
        """Kill the driver; the workers are the cluster's."""
        self._driver.kill()
        self._driver.wait()

    def _log(self) -> str:
        return (self._directory / "driver.log").read_text(errors="replace")[-3000:]


@contextlib.contextmanager
def running(*, workers: int, tuned: bool) -> Iterator[Job]:
    """Bring up nodes and a job; take down every process and file of theirs at the end."""
    directory = Path(tempfile.mkdtemp(prefix="es-peer-"))
    environment = {**_PLAIN_RAY, "RAY_TMPDIR": str(directory), **(TUNING if tuned else {})}
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, directory, ignore_errors=True)
        cleanup.enter_context(patch.dict(os.environ, environment))
        cluster = HostedCluster(num_nodes=NUM_NODES, cpus_per_node=-(-workers // NUM_NODES))
        cleanup.callback(_sweep, cluster._process.pid)
        cleanup.callback(cluster.shutdown)
        job = Job(cluster, directory, workers)
        cleanup.callback(job.end)
        yield job


def _sweep(session: int) -> None:
    """Kill what is left of a cluster: workers on their way up outlive their node by seconds."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)


def hurt(job: Job, fault: str, victim: Record) -> float:
    """Kill the worker that wrote ``victim``, or its whole node; return the wall clock before."""
    fault_s = time.time()
    if fault == "worker":
        os.kill(victim.pid, signal.SIGKILL)
    else:
        job.cluster.kill_node(victim.node)
    return fault_s


def trial(fault: str, *, workers: int, tuned: bool, delay_s: float) -> Recovery:
    """Hurt a fresh job ``delay_s`` after ``FAULT_STEP`` and return what it cost."""

    def last_worker(records: list[Record]) -> Record | None:
        reached = [r for r in records if r.step >= FAULT_STEP and r.rank == workers - 1]
        return reached[0] if reached else None

    with running(workers=workers, tuned=tuned) as job:
        victim = job.wait(last_worker)
        time.sleep(delay_s)
        fault_s = hurt(job, fault, victim)
        return job.wait(lambda records: recovery(records, fault_s))


def measure(fault: str, *, workers: int, tuned: bool, repeats: int) -> dict[str, Any]:
    """Return what ``repeats`` faults cost, each in a job of its own."""
    open_texts(DataSettings())  # so that no job's first step pays for cutting the text
    delays = random.Random(0)
    costs, loads = [], []
    for number in range(repeats):
        delay_s = delays.uniform(0.0, POLL_S)
        cost = trial(fault, workers=workers, tuned=tuned, delay_s=delay_s)
        print(f"{PEER}: {fault} {number + 1}/{repeats}: {cost}", file=sys.stderr)
        costs.append(cost)
        loads.append(round(os.getloadavg()[0], 1))
    return {
        "fault": fault,
        "peer": PEER,
        "tuned": tuned,
        "settings": TUNING if tuned else {},
        "workers": workers,
        "seconds": [round(cost.seconds, 3) for cost in costs],
        "lost_steps": [cost.lost_steps for cost in costs],
        "workers_after": [cost.world_size for cost in costs],
        # Processes that wanted a core, mean of the last minute: on a busy machine all is slower.
        "load": loads,
    }


def main() -> None:
    """Measure and print one JSON object a fault."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--fault", choices=FAULTS, nargs="+", default=FAULTS)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--tuned", action="store_true", help=f"with {TUNING}")
    parser.add_argument("--json", action="store_true", help="one line")
    arguments = parser.parse_args()
    # Ended by a signal or by an error, what was started is stopped on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for fault in arguments.fault:
        result = measure(
            fault, workers=arguments.workers, tuned=arguments.tuned, repeats=arguments.repeats
        )
        print(json.dumps(result, indent=None if arguments.json else 2), flush=True)


if __name__ == "__main__":
    main()
