"""Records as a trace for Perfetto or ``chrome://tracing``, in the Trace Event Format.

A rank is a process with a row for its own work and one for each communicator, more if calls
overlap. Verdicts are instants, and arrows point from a send to its receive.

Clocks of machines differ. A call ends on all its members at nearly the same time, so the ends of
shared calls show how far two clocks are apart.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import count
from statistics import median
from typing import Any, Final

from orchestrator.diagnosis.records import Operation, Records
from orchestrator.diagnosis.verdicts import Verdict

#: Time to show before the first verdict.
BEFORE_S: Final = 30.0
#: Clocks that are closer than this count as one clock, read by processes that wake up late.
_SAME_CLOCK_S: Final = 0.05
_US: Final = 1e6


def trace(
    records: Records, verdicts: Sequence[Verdict] = (), *, before_s: float = BEFORE_S
) -> dict[str, Any]:
    """Return the trace as a JSON document, from ``before_s`` before the first verdict on.

    Its times are microseconds since its first event. If no verdict has a time, it shows the last
    ``before_s`` of the records.
    """
    ahead = _clocks(records.operations)
    rows = sorted(
        (
            # An operation in flight ends at infinity.
            (
                one.enter_s - ahead[one.clock],
                math.inf if one.exit_s is None else one.exit_s - ahead[one.clock],
                one,
            )
            for one in records.operations
            if one.op and math.isfinite(one.enter_s)
        ),
        key=lambda row: row[0],
    )
    times = [row[0] for row in rows] + [row[1] for row in rows]
    last_s = max((each for each in times if math.isfinite(each)), default=0.0)
    if records.now_s is not None:
        last_s = max(last_s, records.now_s)
    since = {one.enter_s: one.enter_s - ahead[one.clock] for _, _, one in rows}
    at = [
        last_s if one.since_s is None else since.get(one.since_s, one.since_s) for one in verdicts
    ]
    first_s = min(at, default=last_s) - before_s
    shown = [(enter, min(end, last_s), one) for enter, end, one in rows if end >= first_s]
    began_s = min((enter for enter, _, _ in shown), default=last_s)
    drawing = _Drawing(began_s)
    drawing.ranks(shown)
    for verdict, at_s in zip(verdicts, at, strict=True):
        drawing.verdict(verdict, max(began_s, at_s))
    return {
        "traceEvents": drawing.events,
        "displayTimeUnit": "ms",
        "otherData": {"began_s": began_s, "source": "everstep diagnose"},
    }


def _clocks(operations: Iterable[Operation]) -> dict[str, float]:
    """Return how far each clock is ahead of the first clock that it is linked to, in seconds."""
    ends: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    clocks: dict[str, None] = {}
    for one in operations:
        clocks[one.clock] = None
        if one.comm and one.op and one.exit_s is not None and math.isfinite(one.exit_s):
            ends[one.comm, one.seq].setdefault(one.clock, one.exit_s)
    apart: dict[tuple[str, str], list[float]] = defaultdict(list)
    for by_clock in ends.values():
        first, *others = sorted(by_clock)
        for other in others:
            apart[first, other].append(by_clock[other] - by_clock[first])
    near: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for (a, b), found in apart.items():
        ahead_s = median(found)
        if abs(ahead_s) < _SAME_CLOCK_S:
            ahead_s = 0.0
        near[a].append((b, ahead_s))
        near[b].append((a, -ahead_s))
    return _walked(clocks, near)


def _walked(clocks: Iterable[str], near: dict[str, list[tuple[str, float]]]) -> dict[str, float]:
    """Return the sum of the differences along a path from the first linked clock to each clock."""
    known: dict[str, float] = {}
    for start in clocks:
        known.setdefault(start, 0.0)
        left = deque([start])
        while left:
            clock = left.popleft()
            for other, ahead_s in near.pop(clock, ()):
                if other not in known:
                    known[other] = known[clock] + ahead_s
                    left.append(other)
    return known


class _Drawing:
    def __init__(self, began_s: float) -> None:
        self.events: list[dict[str, Any]] = []
        self._began_s = began_s
        self._threads, self._arrows = count(1), count(1)
        self._row_of: dict[int, int] = {}
        #: The ends of transfers, which arrows join.
        self._ends: dict[tuple[str, int], dict[str, tuple[int, int, float]]] = defaultdict(dict)

    def ranks(self, shown: Sequence[tuple[float, float, Operation]]) -> None:
        """Draw a process for each rank, with its rows."""
        rows: dict[int, dict[str, list[tuple[float, float, Operation]]]] = {}
        for enter, end, one in shown:
            by_comm = rows.setdefault(one.rank, {"": []})
            by_comm.setdefault(one.comm, []).append((enter, end, one))
        for rank, by_comm in sorted(rows.items()):
            node = next((one.node for each in by_comm.values() for _, _, one in each), "")
            self._process(rank + 1, f"rank {rank}{f' on {node}' if node else ''}", rank)
            for comm, calls in by_comm.items():
                for place, lane in enumerate(_lanes(calls) or [[]]):
                    thread = self._thread(rank + 1, comm or "own work", place)
                    self._row_of.setdefault(rank, thread)
                    for enter, end, one in lane:
                        self._slice(rank + 1, thread, enter, end, one)
        for ends in self._ends.values():
            if len(ends) == 2:  # noqa: PLR2004  a send and its receive
                self._arrow(ends["send"], ends["recv"])

    def verdict(self, verdict: Verdict, at_s: float) -> None:
        """Draw a verdict on the row for verdicts and on the rows of the guilty ranks."""
        if 0 not in {event["pid"] for event in self.events if event["ph"] == "M"}:
            self._process(0, "verdicts", -1)
            self._thread(0, "verdicts", 0)
        told = verdict.to_json()
        # Perfetto draws an instant of scope "g" on a row without a name, not on this one.
        marks = [(0, 0, "t")]
        ends = (rank for link in verdict.guilty.links for rank in link)
        ranks = dict.fromkeys((*verdict.guilty.ranks, *ends))
        marks += [(rank + 1, self._row_of.get(rank, 0), "p") for rank in ranks]
        for process, thread, scope in marks:
            self.events.append(
                {"ph": "i", "s": scope, "cat": "verdict", "name": told["kind"], "pid": process,
                 "tid": thread, "ts": self._us(at_s), "args": told}
            )  # fmt: skip

    def _slice(self, process: int, thread: int, enter: float, end: float, one: Operation) -> None:
        told: dict[str, Any] = {"step": one.step, "bytes": one.size_bytes}
        if one.comm:
            told |= {"seq": one.seq, "comm": one.comm, "ranks": list(one.members)}
            told |= {"dtype": one.dtype} if one.dtype else {}
        event: dict[str, Any] = {
            "ph": "X", "cat": "work" if one.is_span else "collective", "name": one.op,
            "pid": process, "tid": thread, "ts": self._us(enter),
            "dur": round((end - enter) * _US, 3), "args": told,
        }  # fmt: skip
        if one.exit_s is None:
            event |= {"cname": "terrible"}
            told["in_flight"] = True
        self.events.append(event)
        if one.op in {"send", "recv"}:
            at_s = enter if one.op == "send" else end
            self._ends[one.comm, one.seq][one.op] = (process, thread, at_s)

    def _arrow(self, sent: tuple[int, int, float], received: tuple[int, int, float]) -> None:
        number = next(self._arrows)
        for phase, (process, thread, at_s) in (("s", sent), ("f", received)):
            self.events.append(
                {"ph": phase, "cat": "transfer", "name": "transfer", "id": number, "pid": process,
                 "tid": thread, "ts": self._us(at_s)} | ({"bp": "e"} if phase == "f" else {})
            )  # fmt: skip

    def _process(self, process: int, name: str, place: int) -> None:
        for kind, told in (
            ("process_name", {"name": name}),
            ("process_sort_index", {"sort_index": place}),
        ):
            self.events.append({"ph": "M", "name": kind, "pid": process, "tid": 0, "args": told})

    def _thread(self, process: int, name: str, place: int) -> int:
        thread = next(self._threads) if process else 0
        name = f"{name} ({place + 1})" if place else name
        self.events.append(
            {"ph": "M", "name": "thread_name", "pid": process, "tid": thread,
             "args": {"name": name}}
        )  # fmt: skip
        return thread

    def _us(self, at_s: float) -> float:
        return round((at_s - self._began_s) * _US, 3)


def _lanes(
    calls: Iterable[tuple[float, float, Operation]],
) -> list[list[tuple[float, float, Operation]]]:
    """Return ``calls``, sorted by time, on as few rows as possible without overlap."""
    lanes: list[list[tuple[float, float, Operation]]] = []
    for enter, end, one in calls:
        lane = next((each for each in lanes if each[-1][1] <= enter), None)
        if lane is None:
            lanes.append(lane := [])
        lane.append((enter, end, one))
    return lanes
