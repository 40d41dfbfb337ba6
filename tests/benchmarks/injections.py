"""Real faults in real runs on simulated nodes, and what the runs say of them.

One endless run a layout. A fault is ordered of a rank and a phase by a file; what the run puts on
record afterwards is compared with it. ``suspected`` and ``named`` are seconds from the fault to the
first suspicion of that worker and to the verdict.
"""

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
    "kill": (("data", "forward", "backward", "update"), frozenset({"dead"})),
    "stop": (("data", "forward", "backward", "update"), frozenset({"frozen"})),
    "gil": (("forward", "update"), frozenset({"interpreter_held", "absent"})),
    "idle": (("data", "forward", "update"), frozenset({"absent", "slow_data"})),
    "slow3": (("forward",), frozenset({"slow_compute"})),
    "slow1.5": (("forward",), frozenset({"slow_compute"})),
    "skip": (("update",), frozenset({"desync", "mismatch", "absent"})),
    "size": (("update",), frozenset({"mismatch", "desync"})),
    "nan": (("forward", "backward"), frozenset({"not_finite"})),
    "flip": (("update",), frozenset({"diverged"})),
    "kernel": (("forward",), frozenset({"device_stuck"})),
}
#: The last one needs a GPU: ``tests.gpu`` asks for it.
ON_CPU: Final = tuple(KINDS)[:-1]
PROGRAMS: Final = frozenset({"skip", "size"})
NAMED_S_MAX: Final = 20.0
#: These end in time by themselves: a suspicion is all that is due.
_SUSPENDS: Final = frozenset({"gil", "idle", "slow3", "slow1.5", "size", "kernel"})
#: Records of the journal that name a fault, and its kind if they do not say one.
_VERDICTS: Final = {
    "HangFound": "", "WorkerExited": "dead", "NotFiniteFound": "not_finite", "WorkerRaised": "",
}  # fmt: skip
_NUM_WORKERS: Final = 4
#: Two ranks of a role are compared with their own past: so many steps make one.
_PAST: Final = 20


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


def injections(
    kinds: Sequence[str], layouts: Sequence[str], repeats: int, *, phases_max: int = 4
) -> list[Injection]:
    """Return the outcome of each fault, ``repeats`` of each kind, phase and layout."""
    found: list[Injection] = []
    for repeat, layout, programs in product(range(repeats), layouts, ({"skip"}, {"size"})):
        # Two mistakes of the program would end the run.
        work = [
            (kind, phase)
            for kind in kinds
            for phase in KINDS[kind][0][:phases_max]
            if _can(kind, layout)
            and (kind in programs or (kind not in PROGRAMS and "skip" in programs))
        ]
        if not work:
            continue
        with _running(layout) as (bench, orders):
            for number, (kind, phase) in enumerate(work, start=repeat):
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
    before = bench.settle(calm=True, steps=_PAST if kind.startswith("slow") else 5)
    rank = bench.victim(before, number)
    if layout == "pp" and phase == "backward":
        # Only the last stage has a loss.
        rank = _NUM_WORKERS - 1 - number % 2
    victim = next(w for w in before["workers"] if w["rank"] == rank)
    num_before = len(journaled(bench))
    (orders / f"{kind}-{phase}-{victim['rank']}").touch()
    deadline_s = time.monotonic() + NAMED_S_MAX
    lines: list[dict[str, Any]] = []
    while time.monotonic() < deadline_s and not _is_over(lines, kind, victim["worker"]):
        time.sleep(0.05)
        lines = journaled(bench)[num_before:]
    fault_s = _done_s(orders)
    if fault_s is None:
        return _lost(kind, phase, layout, "")._replace(verdict="not injected")
    return _judged(kind, phase, layout, victim, lines, fault_s)


def _done_s(orders: Path) -> float | None:
    done = [float(path.name.split()[1]) for path in orders.glob("done *")]
    return max(done, default=None)


def _clear(orders: Path) -> None:
    for path in orders.iterdir():
        path.unlink()


def _is_over(lines: Sequence[dict[str, Any]], kind: str, worker: str) -> bool:
    """Return whether the run has said what it can; a fault that ends by itself convicts no rank."""
    if any(line["kind"] in _VERDICTS for line in lines):
        return True
    return kind in _SUSPENDS and any(one["worker"] == worker for one in _suspects(lines))


def _suspects(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**one, "wall_time": line["wall_time"]}
        for line in lines
        if line["kind"] == "Suspected"
        for one in line["suspects"]
    ]


def _judged(
    kind: str, phase: str, layout: str, victim: dict[str, Any], lines: Sequence[dict[str, Any]],
    fault_s: float,
) -> Injection:  # fmt: skip
    told = next((line for line in lines if line["kind"] in _VERDICTS), None)
    suspects, rights = _suspects(lines), KINDS[kind][1]
    mine = [one for one in suspects if one["worker"] == victim["worker"] and one["kind"] in rights]
    suspected_s = round(mine[0]["wall_time"] - fault_s, 3) if mine else None
    others = sorted({f"{one['worker']} {one['kind']}" for one in suspects if one not in mine})
    if told is None:
        return Injection(
            kind, phase, layout, suspected_s, None, mine[0]["kind"] if mine else "",
            bool(mine), False, f"also suspected: {', '.join(others)}" if others else "",
        )  # fmt: skip
    guilty = told.get("guilty") or ([told["worker"]] if told["kind"] == "WorkerExited" else [])
    verdict = str(told.get("verdict") or _VERDICTS[told["kind"]])
    evidence = str(told.get("evidence") or told.get("error") or told.get("detail") or "")
    if "DivergedError" in evidence:
        verdict = "diverged"
    names_victim = victim["worker"] in guilty or victim["rank"] in (
        *told.get("ranks", ()),
        *told.get("at_odds", ()),
    )
    return Injection(
        kind, phase, layout, suspected_s, round(told["wall_time"] - fault_s, 3), verdict,
        is_right=names_victim and verdict in rights,
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
        # A device that hangs is given up after it.
        "parallel.collective_timeout_s=15",
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
