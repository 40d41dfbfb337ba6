"""Real faults in real runs on simulated nodes, and what the runs say of them.

One endless run a layout. A fault is ordered of a rank and a phase by a file; what the run puts on
record afterwards is compared with it. ``suspected`` and ``named`` are seconds from the fault to the
first suspicion of that worker and to the verdict.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

from orchestrator.config import demo_config
from orchestrator.driver.cluster import open_cluster
from orchestrator.errors import CapacityError
from tests.benchmarks.bench_recovery import Bench, journaled
from tests.support.train_injected import __file__ as script

LAYOUTS: Final = {"dp": "", "tp": "parallel.tp=2", "pp": "parallel.pp=2", "copies": "copies"}
#: By kind: phases in which it is tried, and the verdicts that are right. "" is any.
KINDS: Final[dict[str, tuple[tuple[str, ...], frozenset[str]]]] = {
    "kill": (("data", "forward", "backward", "update"), frozenset({"dead", ""})),
    "stop": (("data", "forward", "backward", "update"), frozenset({"frozen", ""})),
    "gil": (("forward", "update"), frozenset({"interpreter_held", "absent"})),
    "idle": (("data", "forward", "update"), frozenset({"absent", "slow_data"})),
    "slow3": (("forward",), frozenset({"slow_compute"})),
    "slow1.5": (("forward",), frozenset({"slow_compute"})),
    "skip": (("update",), frozenset({"desync", "mismatch", "absent"})),
    "size": (("update",), frozenset({"mismatch"})),
    "nan": (("forward", "backward"), frozenset({"not_finite"})),
    "flip": (("update",), frozenset({"diverged"})),
}
NAMED_S_MAX: Final = 20.0
_NUM_WORKERS: Final = 4


class Injection(NamedTuple):
    """One fault and its outcome; seconds are None if it did not come to that."""

    kind: str
    phase: str
    layout: str
    suspected_s: float | None
    named_s: float | None
    verdict: str
    is_right: bool
    is_wrong: bool
    evidence: str


def injections(kinds: Sequence[str], layouts: Sequence[str], repeats: int) -> list[Injection]:
    """Return the outcome of each fault, ``repeats`` of each kind, phase and layout."""
    found: list[Injection] = []
    for layout in layouts:
        work = [(kind, phase) for kind in kinds for phase in KINDS[kind][0] if _can(kind, layout)]
        if not work or not repeats:
            continue
        with _running(layout) as (bench, orders):
            for number, (_, (kind, phase)) in enumerate(product(range(repeats), work)):
                try:
                    found.append(_inject(bench, orders, kind, phase, layout, number))
                except (CapacityError, AssertionError) as error:
                    found.append(_lost(kind, phase, layout, str(error)))
                    break
                print(json.dumps(found[-1]._asdict()), flush=True)
    return found


def table(found: Sequence[Injection]) -> list[dict[str, Any]]:
    """Return a row for each kind and layout."""
    rows = []
    for kind, layout in dict.fromkeys((one.kind, one.layout) for one in found):
        same = [one for one in found if (one.kind, one.layout) == (kind, layout)]
        named = sorted(one.named_s for one in same if one.named_s is not None)
        suspected = sorted(one.suspected_s for one in same if one.suspected_s is not None)
        rows.append(
            {
                "kind": kind,
                "layout": layout,
                "injected": len(same),
                "suspected_s_max": suspected[-1] if suspected else None,
                "named_s_max": named[-1] if named else None,
                "right": sum(one.is_right for one in same),
                "wrong": sum(one.is_wrong for one in same),
                "verdicts": sorted({one.verdict for one in same}),
            }
        )
    return rows


def _can(kind: str, layout: str) -> bool:
    return (kind == "flip") == (layout == "copies")


def _lost(kind: str, phase: str, layout: str, why: str) -> Injection:
    return Injection(kind, phase, layout, None, None, "run lost", False, False, why)


def _inject(
    bench: Bench, orders: Path, kind: str, phase: str, layout: str, number: int
) -> Injection:
    _clear(orders)
    before = bench.settle()
    rank = bench.victim(before, number)
    if layout == "pp" and phase == "backward":
        # Only the last stage has a loss.
        rank = _NUM_WORKERS - 1 - number % 2
    victim = next(w for w in before["workers"] if w["rank"] == rank)
    num_before = len(journaled(bench))
    (orders / f"{kind}-{phase}-{victim['rank']}").touch()
    suspected_s: float | None = None
    deadline_s = time.monotonic() + NAMED_S_MAX
    while time.monotonic() < deadline_s:
        fault_s = _done_s(orders)
        if fault_s is None:
            time.sleep(0.02)
            continue
        if suspected_s is None and _is_suspected(bench.run.status(), victim["worker"]):
            suspected_s = time.time() - fault_s
        told = [line for line in journaled(bench)[num_before:] if _is_told(line)]
        if told:
            return _judged(kind, phase, layout, victim, told[0], fault_s, suspected_s)
        time.sleep(0.05)
    if _done_s(orders) is None:
        return _lost(kind, phase, layout, "")._replace(verdict="not injected")
    return Injection(
        kind, phase, layout, suspected_s, None, "", suspected_s is not None, False, ""
    )  # fmt: skip


def _done_s(orders: Path) -> float | None:
    done = [float(path.name.split()[1]) for path in orders.glob("done *")]
    return max(done, default=None)


def _clear(orders: Path) -> None:
    for path in orders.iterdir():
        path.unlink()


def _is_told(line: dict[str, Any]) -> bool:
    """Return whether a record of the journal names a fault."""
    return line["kind"] in {"HangFound", "WorkerExited", "NotFiniteFound", "WorkerRaised"}


def _is_suspected(status: dict[str, Any] | None, worker: str) -> bool:
    return worker in json.dumps((status or {}).get("suspicions") or [])


def _judged(
    kind: str, phase: str, layout: str, victim: dict[str, Any], line: dict[str, Any],
    fault_s: float, suspected_s: float | None,
) -> Injection:  # fmt: skip
    guilty = line.get("guilty") or ([line["worker"]] if line["kind"] == "WorkerExited" else [])
    ranks = list(line.get("ranks") or ())
    kinds = {"NotFiniteFound": "not_finite", "WorkerExited": "dead"}
    verdict = str(line.get("verdict") or kinds.get(line["kind"], ""))
    evidence = str(line.get("evidence") or line.get("error") or line.get("detail") or "")
    if "DivergedError" in evidence:
        verdict = "diverged"
    names_victim = victim["worker"] in guilty or victim["rank"] in ranks
    return Injection(
        kind, phase, layout, suspected_s, round(line["wall_time"] - fault_s, 3), verdict,
        is_right=names_victim and bool({verdict, ""} & KINDS[kind][1]),
        is_wrong=bool(guilty) and guilty != [victim["worker"]],
        evidence=evidence,
    )  # fmt: skip


@contextlib.contextmanager
def _running(layout: str) -> Iterator[tuple[Bench, Path]]:
    """Bring up nodes and an endless run; take all down at the end."""
    root = Path(tempfile.mkdtemp(prefix="everstep-bench-"))
    orders = root / "orders"
    orders.mkdir()
    axis = LAYOUTS[layout]
    settings = [
        f"run.script={script}", f'run.arguments=["{orders}"]', "train.steps=1000000",
        "train.schedule=constant", "train.deterministic=false", "train.global_batch=16",
        "train.micro_batch=2", f"workers.max={_NUM_WORKERS}", "workers.standby_per_node=1",
        "recovery.infrastructure_failures_max=100000", "train.not_finite.most=100000",
        *(["parallel.dp_replicate=2"] if axis == "copies" else [axis] if axis else []),
    ]  # fmt: skip
    config = demo_config(str(root / "run"), settings)
    cluster = open_cluster(config)
    assert cluster is not None
    try:
        yield Bench(config, cluster), orders
    finally:
        cluster.shutdown()
        shutil.rmtree(root, ignore_errors=True)
