"""A thousand faults of every kind in runs that no one looks after, and what the runs made of them.

    python -m tests.benchmarks soak --faults 1000 --seed 7 --results runs/soak.jsonl
    python -m tests.benchmarks soak --faults 20 --seed 7 --from 412     # these again
    python -m tests.benchmarks soak --faults 20 --local --kinds worker-kill keeper-stop
    python -m tests.benchmarks soak --faults 1000 --seed 7 --redis      # lost heads come back

Four nodes with a worker each and a head are machines of Linux namespaces, beside an S3 server that
can fail. A fault has an index: its kind, whether a second one comes with it or while the run
recovers, and its machines follow from the seed and the index. The soak does what an operator's
tools do by themselves: it boots a lost machine again, and begins ``everstep run`` again where its
command ended.

A sitting is one run; after so many faults it is stopped, resumed to its end, and compared with the
same training in one process. A fault that a run does not survive ends its sitting. The soak then
keeps what the run wrote beside the results, and it does so for each healthy worker that is blamed,
and for each fault after which nothing trained for long.
Each fault and each sitting is a line of the results; the same command goes on behind the last one.

``--local`` uses simulated nodes, for faults that need no network. Else it needs root, ``gcc``, and
``ip`` and ``tc`` of iproute2.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from orchestrator.core import AvoidRules
from orchestrator.report import JOURNAL
from tests.benchmarks.common import load_average
from tests.benchmarks.soak_faults import KINDS, Order, draw
from tests.benchmarks.soak_ledger import (
    LOST,
    blamed,
    next_index,
    redone,
    summed,
    table,
    time_parts,
)
from tests.benchmarks.soak_site import (
    ENDLESS,
    NUM_NODES,
    PACE_S,
    WORKERS_MIN,
    Deed,
    Ended,
    Operator,
    Undo,
    keepers,
    kept_journal,
    ranks,
    storage_and_site,
)
from tests.support import train_paced
from tests.support.forking import run_script
from tests.support.history import read_history
from tests.support.network_cluster import HEAD, why_no_redis, why_not
from tests.support.run_command import ACT_S_MAX
from ucp_core.errors import UcpError
from ucp_core.storage import join, open_store, read_all_appended

#: A second fault comes while the run recovers from the first, if that shows within this.
_RECOVERS_S = 20.0
#: The same where training goes on through the first.
_LASTS_S = 3.0
#: A fault, and the end of a sitting, wait until so many of the four train again.
_WHOLE = NUM_NODES - 1
#: The soak waits so long for them: for a while a run avoids nodes that failed several times.
_WHOLE_S_MAX = AvoidRules().avoid_s + ACT_S_MAX
#: So many sittings in a row may fail before their first fault.
_IDLE_MAX = 3
#: The journal is kept of a fault after which the run did not train for so long.
_SLOW_S = 9.0
#: Longest wait for the journal after a fault: a request to silent storage takes long to fail.
_JOURNAL_S_MAX = 90.0
#: Number of faults of a sitting after which its resources are first measured.
_WARM_FAULTS = 5
#: Steps of a run after its last fault.
_LAST_STEPS = 20
_MIB = 1 << 20


def used_by(pid: int | None) -> dict[str, float] | None:
    """Return what a process has now; None if it is away."""
    process = Path(f"/proc/{pid}")
    try:
        pages = int((process / "statm").read_text(encoding="ascii").split()[1])
        return {
            "rss_mib": pages * os.sysconf("SC_PAGE_SIZE") / _MIB,
            "fds": len(list((process / "fd").iterdir())),
            "threads": len(list((process / "task").iterdir())),
        }
    except OSError:
        return None


class _Watch:
    """Says how long each part of something took."""

    def __init__(self) -> None:
        self.parts_s: dict[str, float] = {}
        self._since_s = time.monotonic()

    def end(self, part: str) -> None:
        """Count the time since the last part to ``part``."""
        now_s = time.monotonic()
        self.parts_s[part] = round(self.parts_s.get(part, 0.0) + now_s - self._since_s, 2)
        self._since_s = now_s


class Journal:
    """Reads each record of a run's journal once."""

    def __init__(self, url: str) -> None:
        self._store, path = open_store(url)
        self._folder = join(path, JOURNAL)
        self._segment, self._at_bytes = "", 0

    def new(self) -> list[dict[str, Any]]:
        """Return the records since the last call."""
        found = read_all_appended(
            self._store, self._folder, first=self._segment, offset_bytes=self._at_bytes
        )
        records = []
        for name, text in found.items():
            whole = text[: text.rfind(b"\n") + 1]
            before_bytes = self._at_bytes if name == self._segment else 0
            self._segment, self._at_bytes = name, before_bytes + len(whole)
            records += [json.loads(line) for line in whole.splitlines()]
        return records


class Sitting:
    """One run, and the faults made to it."""

    def __init__(self, operator: Operator, seed: int, kept: Path) -> None:
        self._operator, self._seed, self._kept = operator, seed, kept
        self._machines: dict[str, int] = {}
        self._journal = Journal(operator.url)
        self._hurt_before: set[int] = set()
        #: Records of the journal that belong to a fault which is not judged yet.
        self._unjudged: list[dict[str, Any]] = []
        self._attempt = 0  #: The newest attempt of which the journal has the start.
        operator.training(NUM_NODES, steps=20)
        last = read_history(operator.url).lines[-15:]
        self._calm_s = statistics.median(line["step_s"] for line in last)
        self._resources = [self._used()]
        self._num_faults = 0
        #: Faults count from here on; what a start costs is measured elsewhere.
        self._begun_s, self._begun_step = time.monotonic(), last[-1]["step"]
        self._step = 0  # the journal of the first fault begins with the run

    def suffer(self, order: Order) -> dict[str, Any]:
        """Make one fault; return its line."""
        watch = _Watch()
        deeds: list[Deed] = []
        undone: list[Undo] = []
        why, attempt = "", 0
        at = "before this fault: "
        try:
            before = self._operator.training(_WHOLE, timeout_s=_WHOLE_S_MAX)
            watch.end("before")
            at = ""
            self._make(order, before, deeds, undone)
            watch.end("strike")
            self._hold(deeds, undone, order.lasts)
            watch.end("hold")
            while undone:
                undone.pop()()
            watch.end("undo")
            attempt = self._operator.training(WORKERS_MIN)["attempt"]
        except Exception as error:  # noqa: BLE001  what a fault does to the soak is told, too
            why = at + (str(error) if isinstance(error, (TimeoutError, Ended)) else repr(error))
        watch.end("before" if at else "train")
        for undo in reversed(undone):
            with contextlib.suppress(Exception):
                undo()
        took_s = sum(watch.parts_s.values()) - watch.parts_s.get("before", 0.0)
        judged = self._judged(deeds, attempt)
        watch.end("judge")
        line = {
            "fault": order.number, "seed": self._seed, "kinds": order.kinds, "when": order.when,
            "machines": [deed.machine for deed in deeds], "survived": not why, "why": why,
            "missed": [f"{deed.kind}: {deed.missed}" for deed in deeds if deed.missed],
            "seconds": round(took_s, 1), "parts_s": watch.parts_s, "journal": "", **judged,
        }  # fmt: skip
        self._num_faults += 1
        if self._num_faults == _WARM_FAULTS and not why:
            with contextlib.suppress(Ended, TimeoutError):  # the next fault says what is wrong
                self._resources = [self._used()]
        if why or judged["blamed"] or watch.parts_s.get("train", 0.0) > _SLOW_S:
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
                first = deeds[0].what
                recovers = first.shows == "attempt" and not first.steady
                with contextlib.suppress(TimeoutError):
                    self._operator.until(
                        "a recovery",
                        lambda s: s["phase"] != "training" or s["attempt"] > before["attempt"],
                        _RECOVERS_S if recovers else _LASTS_S,
                    )
            places = free[number:] + free[:number]
            forward = order.places % 2 == 0
            deeds.append(Deed(self._operator, kind, before, places, forward=forward))
            undone.append(deeds[-1].do())

    def _hold(self, deeds: Sequence[Deed], undone: list[Undo], lasts: float) -> None:
        """Let the faults last; undo those that last although the run shows them."""
        begun_s = time.monotonic()
        made = [deed for deed in deeds if not deed.missed]
        time.sleep(max((deed.what.steady_s(lasts) for deed in made), default=0.0))
        for number in reversed(range(len(deeds))):
            if deeds[number].what.steady:
                undone.pop(number)()
        others = [deed for deed in made if not deed.what.steady]
        if others:
            left_s = max(deed.what.hold_s for deed in others) + begun_s - time.monotonic()
            with contextlib.suppress(TimeoutError):
                self._operator.until(
                    "what the fault shows",
                    lambda s: all(deed.has_shown(s) for deed in others),
                    max(left_s, 1.0),
                )

    def _judged(self, deeds: Sequence[Deed], attempt: int) -> dict[str, Any]:
        """Return what the journal says since the last fault, once it has the start of ``attempt``.

        The journal is late after storage was silent.
        """
        nodes = self._operator.site.nodes()
        hurt = {machine for deed in deeds for machine in deed.hurt}

        def is_told(_: object = None) -> bool:
            self._unjudged += self._journal.new()
            started = (r["attempt"] for r in self._unjudged if r["kind"] == "StartAttempt")
            self._attempt = max(self._attempt, *started, 0)
            return self._attempt >= attempt

        try:
            with contextlib.suppress(TimeoutError, Ended):
                if not is_told():
                    self._operator.until("the journal of its attempt", is_told, _JOURNAL_S_MAX)
        except (UcpError, OSError, ValueError) as error:
            # The next fault's judge reads the same records.
            self._hurt_before |= hurt
            return {
                "verdicts": 0,
                "blamed": [],
                "incidents": [],
                "redone": 0,
                "unread": repr(error),
            }
        new, self._unjudged = self._unjudged, []
        for record in new:
            if record["kind"] == "WorkerReady" and record["node"] in nodes:
                self._machines[record["worker"]] = nodes[record["node"]]
        verdicts, healthy = blamed(new, self._machines, hurt | self._hurt_before)
        self._hurt_before = hurt
        incidents = [record["incident"] for record in new if record["kind"] == "ReportIncident"]
        num_redone, self._step = redone(new, self._step)
        return {
            "verdicts": verdicts, "blamed": healthy, "incidents": incidents, "redone": num_redone
        }  # fmt: skip

    def _used(self) -> dict[str, Any]:
        """Return memory, descriptors and threads by kind of process, and files of the run."""
        import fsspec

        site, found = self._operator.site, dict[str, Any]()

        def is_whole(status: dict[str, Any]) -> bool:
            seen = self._processes(status)
            is_there = all(looks and None not in looks for looks in seen.values())
            if len(ranks(status)) < _WHOLE or not is_there:
                return False  # a process is on its way
            for name, looks in seen.items():
                kind = [look for look in looks if look is not None]
                found[name] = {what: round(max(each[what] for each in kind), 1) for what in kind[0]}
            return True

        self._operator.until("its processes", is_whole)
        files, root = fsspec.core.url_to_fs(self._operator.url)
        files.invalidate_cache()
        return {
            **found,
            "processes": len(site.pids()),
            "storage_mib": round(files.du(root) / (1 << 20), 2),
            "shared_memory_mib": round(site.folder_bytes() / (1 << 20), 1),
        }

    def _processes(self, status: Mapping[str, Any]) -> dict[str, list[dict[str, float] | None]]:
        """Return what each process of a run uses, by its kind; None for one that is away."""
        site, nodes = self._operator.site, self._operator.site.nodes()
        numbers = {
            "controller": [(HEAD, self._operator.controller()[1])],
            "keeper": [(nodes.get(node, HEAD), number) for node, number in keepers(status)],
            "worker": [(nodes.get(one["node"], HEAD), one["pid"]) for one in ranks(status)],
        }
        return {
            name: [used_by(site.pid(*each)) for each in of_kind if each[1]]
            for name, of_kind in numbers.items()
        }

    def end(self, number: int, *, is_lost: bool) -> dict[str, Any]:
        """Bring the run to its end, and judge the whole of it; return the sitting's line."""
        wall_s = time.monotonic() - self._begun_s
        line = {
            "sitting": number, "seed": self._seed, "wall_s": round(wall_s, 1),
            "redis": self._operator.site.has_redis,
        }  # fmt: skip
        if is_lost:
            return {**line, "ended": False, "why": LOST}
        try:
            return {**line, "ended": True, **self._whole(wall_s)}
        except Exception as error:  # noqa: BLE001  the next sitting may do better
            kept = kept_journal(self._operator, self._kept / f"{self._seed}-sitting-{number}")
            return {**line, "ended": False, "why": f"{error!r}, see {kept}"}

    def _whole(self, wall_s: float) -> dict[str, Any]:
        operator = self._operator
        parts = time_parts(
            read_history(operator.url), self._calm_s, wall_s, after_step=self._begun_step
        )
        why = ""
        try:
            operator.training(_WHOLE, timeout_s=_WHOLE_S_MAX)
            self._resources.append(self._used())
        except TimeoutError as error:  # what it trained is judged all the same
            kept = kept_journal(
                operator, self._kept / f"{self._seed}-not-whole-{operator.folder.name}"
            )
            why = f"not whole at its end: {error}, see {kept}"
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
            "steps": steps, "samples": samples, "nans": nans, "why": why,
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
def sitting(seed: int, kept: Path, *, local: bool, has_redis: bool) -> Iterator[Sitting]:
    """Bring up a cluster with storage and an endless run; take all down at the end."""
    with tempfile.TemporaryDirectory(prefix="everstep-soak-") as name:
        folder = Path(name)
        (orders := folder / "orders").mkdir()
        with storage_and_site(folder, local=local, has_redis=has_redis) as (site, proxy):
            operator = Operator(site, proxy, f"s3://bucket/{folder.name}", folder, orders)
            operator.begin(ENDLESS, PACE_S)
            yield Sitting(operator, seed, kept)


def soak(
    orders: Sequence[Order],
    seed: int,
    results: Path,
    *,
    per_sitting: int,
    local: bool,
    has_redis: bool,
) -> list[dict[str, Any]]:
    """Make faults, in as many sittings as it takes; append a line for each; return the lines.

    A sitting whose cluster or storage fails has a line as well, and the next one goes on. If none
    makes a fault in ``_IDLE_MAX`` sittings in a row, no more are begun.
    """
    left = list(orders)
    written: list[dict[str, Any]] = []

    def write(line: dict[str, Any]) -> None:
        written.append(line)
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(time.strftime("%H:%M:%S"), json.dumps(line), file=sys.stderr, flush=True)

    num_idle = 0
    for number in count(1):
        num_before = len(left)
        try:
            kept = results.with_suffix(".kept")
            with sitting(seed, kept, local=local, has_redis=has_redis) as one:
                survived = True
                for _ in range(min(per_sitting, len(left))):
                    write(line := one.suffer(left.pop(0)))
                    survived = line["survived"]
                    if not survived:
                        break
                write(one.end(number, is_lost=not survived))
        except BaseException as error:
            traceback.print_exc()
            write(
                {"sitting": number, "seed": seed, "wall_s": 0.0, "ended": False, "why": repr(error)}
            )
            if not isinstance(error, Exception):
                raise
        num_idle = num_idle + 1 if len(left) == num_before else 0
        if not left or num_idle >= _IDLE_MAX:
            break
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
        "--redis", action="store_true", help="keep the head's state in a Redis, as the guide has it"
    )
    parser.add_argument(
        "--table", action="store_true", help="only print what the results amount to"
    )
    arguments = parser.parse_args()
    kinds = [k for k in arguments.kinds if not (arguments.local and KINDS[k].network)]
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    lines = read_lines(arguments.results)
    first = next_index(lines, arguments.seed) if arguments.first is None else arguments.first
    last = arguments.faults if arguments.first is None else first + arguments.faults
    try:
        if not arguments.table and first < last:
            needs = why_no_redis if arguments.redis else why_not
            if not arguments.local and (reason := needs()):
                parser.error(reason)
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
            soak(
                [draw(arguments.seed, index, kinds) for index in range(first, last)],
                arguments.seed, arguments.results,
                per_sitting=arguments.per_sitting, local=arguments.local,
                has_redis=arguments.redis,
            )  # fmt: skip
    finally:
        result = summed(read_lines(arguments.results))
        print(table(result), flush=True)
    good = (result["faults"], result["sittings"], result["ended"], result["ended"])
    seen = ("survived", "ended", "exactly_once", "same_weights")
    is_good = good == tuple(result[key] for key in seen) and not result["problems"]
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
