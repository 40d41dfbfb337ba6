"""A thousand faults of every kind in runs that no one looks after, and what the runs made of them.

    python -m tests.benchmarks soak --faults 1000 --seed 7 --results runs/soak.jsonl
    python -m tests.benchmarks soak --faults 20 --seed 7 --from 412     # these again
    python -m tests.benchmarks soak --faults 20 --local --kinds worker-kill keeper-stop

Four nodes with a worker each and a head are machines of Linux namespaces, beside an S3 server that
can fail. A fault has an index: its kind, whether a second one comes with it or while the run
recovers, and its machines follow from the seed and the index. The things that an operator's tools
do by themselves is done here: a machine that was lost is booted again, and ``everstep run`` is
begun again where its command ended.

A sitting is one run; after so many faults it is stopped, resumed to its end, and compared with the
same training in one process. A fault that a run does not survive ends its sitting, and what the run
wrote is kept beside the results. Each fault and each sitting is a line of the results; the same
command goes on behind the last one.

``--local`` uses simulated nodes, for faults that need no network. Else it needs root, ``gcc``, and
``ip`` and ``tc`` of iproute2.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from orchestrator.run_directory import read_run
from tests.benchmarks.common import load_average
from tests.benchmarks.soak_faults import KINDS, Order, draw
from tests.benchmarks.soak_ledger import LOST, blamed, next_index, summed, table, time_parts
from tests.benchmarks.soak_site import (
    ENDLESS,
    NUM_NODES,
    PACE_S,
    WORKERS_MIN,
    Deed,
    Ended,
    Operator,
    Undo,
    kept_journal,
    ranks,
    storage_and_site,
)
from tests.support import train_paced
from tests.support.forking import run_script
from tests.support.history import read_history
from tests.support.network_cluster import HEAD, why_not

#: A second fault comes while the run recovers from the first, if that shows within this.
_RECOVERS_S = 20.0
#: Faults are waited for until so many of the four train again.
_WHOLE = NUM_NODES - 1
#: Steps of a run after its last fault.
_LAST_STEPS = 20
_MIB = 1 << 20


def _look(pid: int) -> dict[str, float]:
    """Return what a process has now."""
    process = Path(f"/proc/{pid}")
    pages = int((process / "statm").read_text(encoding="ascii").split()[1])
    return {
        "rss_mib": pages * os.sysconf("SC_PAGE_SIZE") / _MIB,
        "fds": len(list((process / "fd").iterdir())),
        "threads": len(list((process / "task").iterdir())),
    }


class Sitting:
    """One run, and the faults made to it."""

    def __init__(self, operator: Operator, seed: int, kept: Path) -> None:
        self._operator, self._seed, self._kept = operator, seed, kept
        self._machines: dict[str, int] = {}
        self._num_records = 0
        self._hurt_before: set[int] = set()
        self._begun_s = time.monotonic()
        operator.training(NUM_NODES, steps=20)
        self._calm_s = statistics.median(
            line["step_s"] for line in read_history(operator.url).lines[-15:]
        )
        self._resources = [self._used()]

    def suffer(self, order: Order) -> dict[str, Any]:
        """Make one fault; return its line."""
        begun_s = time.monotonic()
        deeds: list[Deed] = []
        undone: list[Undo] = []
        why = ""
        at = "before this fault: "
        try:
            before = self._operator.training(_WHOLE)
            at = ""
            begun_s = time.monotonic()
            self._make(order, before, deeds, undone)
            self._hold(deeds, before)
            while undone:
                undone.pop()()
            self._operator.training(WORKERS_MIN)
        except Exception as error:  # noqa: BLE001  what a fault does to the soak is told, too
            why = at + (str(error) if isinstance(error, (TimeoutError, Ended)) else repr(error))
        took_s = time.monotonic() - begun_s
        for undo in reversed(undone):
            with contextlib.suppress(Exception):
                undo()
        line = {
            "fault": order.number, "seed": self._seed, "kinds": order.kinds, "when": order.when,
            "machines": [deed.machine for deed in deeds], "survived": not why, "why": why,
            "seconds": round(took_s, 1), "journal": "", **self._judged(deeds),
        }  # fmt: skip
        if why:
            to = self._kept / f"{self._seed}-{order.number}"
            line["journal"] = kept_journal(self._operator, to)
        return line

    def _make(
        self, order: Order, before: dict[str, Any], deeds: list[Deed], undone: list[Undo]
    ) -> None:
        nodes = self._operator.site.nodes()
        free = sorted(nodes[worker["node"]] for worker in ranks(before))
        random.Random(order.places).shuffle(free)
        for number, kind in enumerate(order.kinds):
            if number and order.when == "recovering":
                with contextlib.suppress(TimeoutError):
                    self._operator.until(
                        "a recovery",
                        lambda s: s["phase"] != "training" or s["attempt"] > before["attempt"],
                        _RECOVERS_S,
                    )
            places = free[number:] + free[:number]
            forward = order.places % 2 == 0
            deeds.append(Deed(self._operator, kind, before, places, forward=forward))
            undone.append(deeds[-1].do())

    def _hold(self, deeds: Sequence[Deed], before: dict[str, Any]) -> None:
        """Let the faults last."""
        begun_s = time.monotonic()
        steady_s = max((deed.what.hold_s for deed in deeds if deed.what.steady), default=0.0)
        rest_s = max(deed.what.hold_s for deed in deeds) - steady_s
        time.sleep(steady_s)
        if rest_s > 0.0:
            with contextlib.suppress(TimeoutError):
                self._operator.until(
                    "a later attempt",
                    lambda s: (
                        s["attempt"] > before["attempt"] and s["phase"] == "training" and s["step"]
                    ),
                    begun_s + steady_s + rest_s - time.monotonic(),
                )

    def _judged(self, deeds: Sequence[Deed]) -> dict[str, Any]:
        """Return what the journal says since the last fault."""
        records = read_run(self._operator.url).journal
        nodes = self._operator.site.nodes()
        new = records[self._num_records :]
        self._num_records = len(records)
        for record in new:
            if record["kind"] == "WorkerReady" and record["node"] in nodes:
                self._machines[record["worker"]] = nodes[record["node"]]
        hurt = {machine for deed in deeds for machine in deed.hurt}
        verdicts, healthy = blamed(new, self._machines, hurt | self._hurt_before)
        self._hurt_before = hurt
        incidents = [record["incident"] for record in new if record["kind"] == "ReportIncident"]
        return {"verdicts": verdicts, "blamed": healthy, "incidents": incidents}

    def _used(self) -> dict[str, Any]:
        """Return memory, descriptors and threads by kind of process, and files of the run."""
        import fsspec

        status = self._operator.until("its processes", lambda s: len(ranks(s)) == NUM_NODES)
        site, nodes = self._operator.site, self._operator.site.nodes()
        pids = {
            "controller": [site.pid(HEAD, self._operator.files.contact()["pid"])],
            "keeper": [
                site.pid(nodes[view["node"]], view["keeper_pid"])
                for view in status["nodes"]
                if view["keeper_pid"]
            ],
            "worker": [site.pid(nodes[one["node"]], one["pid"]) for one in ranks(status)],
        }
        found: dict[str, Any] = {
            name: {
                what: round(max(each[what] for each in looks), 1)
                for looks in [[_look(pid) for pid in of_kind]]
                for what in looks[0]
            }
            for name, of_kind in pids.items()
        }
        files, root = fsspec.core.url_to_fs(self._operator.url)
        files.invalidate_cache()
        return {
            **found,
            "processes": len(site.pids()),
            "storage_mib": round(files.du(root) / (1 << 20), 2),
            "shared_memory_mib": round(site.folder_bytes() / (1 << 20), 1),
        }

    def end(self, number: int, *, is_lost: bool) -> dict[str, Any]:
        """Bring the run to its end, and judge the whole of it; return the sitting's line."""
        wall_s = round(time.monotonic() - self._begun_s, 1)
        line = {"sitting": number, "seed": self._seed, "wall_s": wall_s}
        if is_lost:
            return {**line, "ended": False, "why": LOST}
        try:
            return {**line, "ended": True, **self._whole()}
        except Exception as error:  # noqa: BLE001  the next sitting may do better
            kept = kept_journal(self._operator, self._kept / f"{self._seed}-sitting-{number}")
            return {**line, "ended": False, "why": f"{error!r}, see {kept}"}

    def _whole(self) -> dict[str, Any]:
        operator = self._operator
        operator.training(NUM_NODES)
        self._resources.append(self._used())
        parts = time_parts(
            read_history(operator.url), self._calm_s, time.monotonic() - self._begun_s
        )
        steps = operator.stop()["steps"] + _LAST_STEPS
        operator.begin(steps, 0.0)
        summary = operator.ended("completed")
        history = read_history(operator.url)
        nans = [line["step"] for line in history.committed() if line["loss"] is None]
        digest = _alone(operator.folder, steps, nans)
        try:
            history.check_exactly_once(operator.files.settings())
            samples = ""
        except AssertionError as error:
            samples = str(error)[:500]
        return {
            "steps": steps, "samples": samples, "nans": nans,
            "steps_lost": len(history.lines) - len(history.committed()),
            "same_weights": digest == summary["weights_digest"], "calm_s": round(self._calm_s, 3),
            "time": parts, "resources": self._resources, "load": load_average(),
        }  # fmt: skip


def _alone(folder: Path, steps: int, nans: Sequence[int]) -> str:
    """Return the weights' digest of the same training in one process."""
    place, orders = folder / "alone", folder / "alone-orders"
    for each in (place, orders):
        each.mkdir()
    for step in nans:
        (orders / f"nan-{step}").touch()
    run_script(Path(train_paced.__file__), place, "0.0", str(steps), str(orders))
    return str(json.loads((place / "run/result.json").read_text())["weights_digest"])


@contextmanager
def sitting(seed: int, kept: Path, *, local: bool) -> Iterator[Sitting]:
    """Bring up a cluster with storage and an endless run; take all down at the end."""
    with tempfile.TemporaryDirectory(prefix="everstep-soak-") as name:
        folder = Path(name)
        (orders := folder / "orders").mkdir()
        with storage_and_site(folder, local=local) as (site, proxy):
            operator = Operator(site, proxy, f"s3://bucket/{folder.name}", folder, orders)
            operator.begin(ENDLESS, PACE_S)
            yield Sitting(operator, seed, kept)


def soak(
    orders: Sequence[Order], seed: int, results: Path, *, per_sitting: int, local: bool
) -> list[dict[str, Any]]:
    """Make faults, in as many sittings as it takes; append a line for each; return the lines."""
    left = list(orders)
    written: list[dict[str, Any]] = []

    def write(line: dict[str, Any]) -> None:
        written.append(line)
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(time.strftime("%H:%M:%S"), json.dumps(line), file=sys.stderr, flush=True)

    for number in count(1):
        with sitting(seed, results.with_suffix(".kept"), local=local) as one:
            survived = True
            for _ in range(min(per_sitting, len(left))):
                write(line := one.suffer(left.pop(0)))
                survived = line["survived"]
                if not survived:
                    break
            write(one.end(number, is_lost=not survived))
        if not left:
            return written
    return written


def read_lines(results: Path) -> list[dict[str, Any]]:
    """Return the lines of results; none if there is no such file."""
    text = results.read_text() if results.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def main() -> int:
    """Soak and print; return 1 if a fault was not survived or a sitting ended otherwise."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--faults", type=int, default=40, help="the index to which it goes; so many with --from"
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--from", type=int, dest="first", metavar="INDEX")
    parser.add_argument("--results", type=Path, default=Path("runs/soak.jsonl"))
    parser.add_argument("--per-sitting", type=int, default=100, metavar="FAULTS")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, metavar="KIND", default=list(KINDS))
    parser.add_argument("--local", action="store_true")
    parser.add_argument(
        "--table", action="store_true", help="only print what the results amount to"
    )
    arguments = parser.parse_args()
    kinds = [k for k in arguments.kinds if not (arguments.local and KINDS[k].network)]
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    lines = read_lines(arguments.results)
    first = next_index(lines, arguments.seed) if arguments.first is None else arguments.first
    last = arguments.faults if arguments.first is None else first + arguments.faults
    if not arguments.table and first < last:
        if not arguments.local and (reason := why_not()):
            parser.error(reason)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        orders = [draw(arguments.seed, index, kinds) for index in range(first, last)]
        lines += soak(
            orders, arguments.seed, arguments.results,
            per_sitting=arguments.per_sitting, local=arguments.local,
        )  # fmt: skip
    result = summed(lines)
    print(table(result))
    good = (result["faults"], result["sittings"], result["ended"], result["ended"])
    seen = ("survived", "ended", "exactly_once", "same_weights")
    return 0 if good == tuple(result[key] for key in seen) else 1


if __name__ == "__main__":
    sys.exit(main())
