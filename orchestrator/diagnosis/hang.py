"""Find the ranks that delay the others, from what each has called and waits in.

1. The sinks of the wait graph have not called what the others wait in: they are ``absent``, or
   ``slow_data`` if they read data. On a device, a call counts once the device has reached it. A
   sink whose process has called more than its device reached is ``device_stuck``.
2. Without sinks, a rank that others wait for and that waits only in what all have called is delayed
   by its own device or by a link: if both ends of one transfer are such ranks, the verdict is
   ``link_dead``, otherwise ``device_stuck``. The host of a dead device continues to call. If all
   members of a group wait like this in one collective, the records do not show which of its
   transfers makes no progress.
3. Ranks that wait for each other in a circle called their groups in different orders: ``desync``.

A rule that blames the rank that is furthest behind would name ranks that wait themselves. A rank
whose records are missing or incomplete may have called anything.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from orchestrator.diagnosis.graph import WaitGraph, wait_graph
from orchestrator.diagnosis.programs import outnumbered
from orchestrator.diagnosis.records import Doing, Operation, Records, at_line
from orchestrator.diagnosis.verdicts import Alternative, Guilty, Verdict, listed, waiting
from orchestrator.fault_kinds import FaultKind
from ucp_core.numerics import counted
from workers.protocol import GroupState

_PAIR = 2
#: A wait is a hang after this many times its usual length, and at least this many seconds.
_USUAL_TIMES = 3.0
_HANG_S = 3.0


def hangs(records: Records) -> list[Verdict]:
    """Return the verdicts on operations in flight; none if no rank waits longer than usual."""
    case = _HangCase(records)
    waits = case.graph.waits_for
    if not waits or (records.now_s is not None and not case.is_overdue(records.now_s)):
        return []
    sinks = case.graph.sinks
    # If the records of a rank have gaps, a missing record proves nothing.
    unknown = sinks - case.rows.keys() - records.doing.keys() | sinks & records.unknown.keys()
    if sinks - unknown:
        return list(case.absent(sinks - unknown))
    if unknown:
        return [case.unrecorded(unknown)]
    return list(case.stuck(case.graph.ends - records.unknown.keys()))


class _HangCase:
    """Ranks, and what each waits in."""

    def __init__(self, records: Records) -> None:
        self.unknown, self.doing = records.unknown, records.doing
        self.rows: dict[int, list[Operation]] = defaultdict(list)
        for one in records.operations:
            self.rows[one.rank].append(one)
        #: The first call of each communicator that a rank waits in.
        self.waited = {rank: _waited(rows) for rank, rows in self.rows.items()}
        self.graph = records.graph or self._graph(records)
        #: Number of calls that a rank's device has not reached, by rank.
        self._ahead = Counter(one.rank for one in records.operations if not one.is_reached)

    def _graph(self, records: Records) -> WaitGraph:
        ranks = set(records.unknown).union(*(one.members for one in records.operations))
        groups = {
            rank: list(_states(rows, {one.comm: one for one in self.waited[rank]}))
            for rank, rows in self.rows.items()
        }
        return wait_graph(groups, ranks)

    def is_overdue(self, now_s: float) -> bool:
        usual: dict[str, list[float]] = defaultdict(list)
        for rows in self.rows.values():
            for one in rows:
                if one.exit_s is not None and not one.is_span:
                    usual[one.op].append(one.exit_s - one.enter_s)
        return any(
            now_s - one.enter_s >= max(_HANG_S, _USUAL_TIMES * _p99(usual[one.op]))
            for waited in self.waited.values()
            for one in waited
        )

    def absent(self, sinks: frozenset[int]) -> Iterator[Verdict]:
        doing = {rank: self._doing(rank) for rank in sorted(sinks)}
        for kind in sorted({kind for kind, _ in doing.values()}):
            ranks = frozenset(rank for rank in doing if doing[rank].kind is kind)
            # A running process itself reports how far its device is.
            others = (FaultKind.DEAD, FaultKind.FROZEN, FaultKind.INTERPRETER_HELD)
            also = (FaultKind.ABSENT,) if kind is FaultKind.SLOW_DATA else others
            now = "; ".join(f"rank {rank} {doing[rank].text}" for rank in sorted(ranks)[:8])
            do = "reach" if kind is FaultKind.DEVICE_STUCK else "call"
            yield Verdict(
                kind=kind,
                guilty=self._guilty(ranks),
                confidence=0.8 if kind is FaultKind.DEVICE_STUCK else 0.95,
                since_s=self._since_s(ranks),
                evidence=f"{self._not_called(ranks, do)} {now[0].upper()}{now[1:]}.",
                alternatives=tuple(Alternative(one, self._guilty(ranks)) for one in also),
            )

    def unrecorded(self, ranks: frozenset[int]) -> Verdict:
        why = "; ".join(
            f"rank {rank}: {self.unknown.get(rank, 'no record of it')}" for rank in sorted(ranks)
        )
        return Verdict(
            kind=FaultKind.UNDECIDED,
            confidence=0.5,
            since_s=self._since_s(ranks),
            evidence=f"{self._not_called(ranks, 'call')} But records are missing ({why}).",
            alternatives=(Alternative(FaultKind.ABSENT, self._guilty(ranks)),),
        )

    def stuck(self, ends: frozenset[int]) -> Iterator[Verdict]:
        """Yield verdicts on ranks that wait in what all have called; others wait for ``ends``."""
        waits = self.graph.waits_for
        held = ends or frozenset(rank for rank in waits if not waits[rank]) - self.unknown.keys()
        if not held:
            yield self._circle()
            return
        calls = self._calls(held)
        links = {
            (one.members[0], one.members[1])
            for each in calls.values()
            for one in each
            if len(one.members) == _PAIR and len(each) == _PAIR
        }
        at_links = frozenset(rank for link in links for rank in link)
        if links:
            yield Verdict(
                kind=FaultKind.LINK_DEAD,
                guilty=self._guilty((), links),
                confidence=0.8,
                since_s=self._since_s(at_links, own=True),
                evidence="Both ends of a transfer wait in it, and others wait for them: "
                + ", ".join(f"rank {a} to rank {b}" for a, b in sorted(links))
                + ".",
                alternatives=(Alternative(FaultKind.DEVICE_STUCK, self._guilty(at_links)),),
            )
        whole = {
            one.rank
            for each in calls.values()
            for one in each
            if len(each) == len(one.members) > _PAIR
        }
        alone = held - at_links - whole
        if ends and alone:
            yield Verdict(
                kind=FaultKind.DEVICE_STUCK,
                guilty=self._guilty(alone),
                confidence=0.8,
                since_s=self._since_s(alone, own=True),
                evidence=f"{waiting(alone).capitalize()} in a call that all members have made, "
                "while others wait for a later one: a device or a link to it is stuck.",
                alternatives=(Alternative(FaultKind.LINK_DEAD),),
            )
        elif not links:
            yield self._undecided(
                held,
                "All members have called what they wait in, so the network or a device is stuck. "
                "Records of its transfers or sockets are missing.",
            )

    def _calls(self, ranks: Iterable[int]) -> dict[tuple[str, int], list[Operation]]:
        """Return the operations that ranks wait in, by call."""
        calls: dict[tuple[str, int], list[Operation]] = defaultdict(list)
        for rank in sorted(ranks):
            for one in self.waited.get(rank, ()):
                calls[one.comm, one.seq].append(one)
        return calls

    def _circle(self) -> Verdict:
        """Return the verdict that ranks called groups in different orders, so that all wait."""
        waits = frozenset(self.graph.waits_for)
        if self.unknown:
            return self._undecided(waits, "They wait for each other in a circle.")
        odd = outnumbered([one.rank for one in each] for each in self._calls(waits).values())
        return Verdict(
            kind=FaultKind.DESYNC,
            guilty=self._guilty(odd),
            confidence=0.9 if odd else 0.6,
            since_s=self._since_s(waits, own=True),
            evidence=f"Ranks wait for each other in a circle: {self._places(waits)}.",
        )

    def _undecided(self, ranks: frozenset[int], why: str) -> Verdict:
        where = self._places(ranks) or waiting(ranks)
        return Verdict(
            kind=FaultKind.UNDECIDED,
            confidence=0.5,
            since_s=self._since_s(ranks, own=True),
            evidence=f"{where[0].upper()}{where[1:]}. {why}",
            alternatives=(Alternative(FaultKind.LINK_DEAD), Alternative(FaultKind.DEVICE_STUCK)),
        )

    def _places(self, ranks: Iterable[int]) -> str:
        """Return for people where ranks wait: the first eight calls."""
        return "; ".join(
            f"{waiting(one.rank for one in each)} in {_named(each[0])}{at_line(each)}"
            for each in list(self._calls(ranks).values())[:8]
        )

    def _waiting_for(self, ranks: frozenset[int]) -> Iterator[Operation]:
        for rank, others in self.graph.waits_for.items():
            if others & ranks:
                yield from (
                    one
                    for one in self.waited.get(rank, ())
                    if any(each in one.members for each in ranks)
                )

    def _since_s(self, ranks: frozenset[int], *, own: bool = False) -> float | None:
        rows = (
            [one for rank in ranks for one in self.waited.get(rank, ())]
            if own
            else list(self._waiting_for(ranks))
        )
        times = [one.enter_s for one in rows if math.isfinite(one.enter_s)]
        return min(times, default=None)

    def _not_called(self, ranks: frozenset[int], do: str) -> str:
        held = sorted(self._waiting_for(ranks), key=lambda each: each.enter_s)
        if not held:
            return f"{listed(ranks).capitalize()} did not come."
        by = {each.rank for each in held if each.comm == held[0].comm}
        call = f"{_named(held[0])}, in which {waiting(by)}"
        return f"{listed(ranks).capitalize()} did not {do} {call}."

    def _doing(self, rank: int) -> Doing:
        if rank in self.doing:
            return self.doing[rank]
        if num_ahead := self._ahead[rank]:
            behind = f"has a device that is {counted(num_ahead, 'call')} behind its process"
            return Doing(FaultKind.DEVICE_STUCK, behind)
        work = _own_work(self.rows[rank])
        if work is not None:
            kind = FaultKind.SLOW_DATA if work.op == "data" else FaultKind.ABSENT
            return Doing(kind, f"has been in {work.op} since {work.enter_s:.3f} s")
        ended = [one for one in self.rows[rank] if one.exit_s is not None and one.op]
        if not ended:
            return Doing(FaultKind.ABSENT, "has no recorded call")
        last = max(ended, key=lambda one: one.exit_s or 0.0)
        over = f"did nothing after {last.op} of step {last.step}, over since {last.exit_s:.3f} s"
        return Doing(FaultKind.ABSENT, over)

    def _guilty(self, ranks: Iterable[int], links: Iterable[tuple[int, int]] = ()) -> Guilty:
        ranks = set(ranks)
        return Guilty.of(ranks, links, nodes_of(self.rows, ranks))


def nodes_of(rows: Mapping[int, list[Operation]], ranks: Iterable[int]) -> set[str]:
    """Return the machines of ``ranks`` that are known."""
    return {node for rank in ranks for one in rows.get(rank, ())[:1] if (node := one.node)}


def _own_work(rows: list[Operation]) -> Operation | None:
    """Return the span of its own work that a rank is in."""
    spans = [one for one in rows if one.exit_s is None and one.is_span]
    return max(spans, key=lambda one: one.enter_s, default=None)


def _waited(rows: list[Operation]) -> list[Operation]:
    """Return the calls that a rank waits in: the first of each communicator.

    A rank that began a span of its own after its last call computes, and its calls in flight run
    ahead.
    """
    calls = [one for one in rows if one.exit_s is None and one.comm and not one.is_ahead]
    work = _own_work(rows)
    if work is not None and all(one.enter_s < work.enter_s for one in calls):
        return []
    first: dict[str, Operation] = {}
    for one in sorted(calls, key=lambda each: each.seq):
        first.setdefault(one.comm, one)
    return list(first.values())


def _states(rows: list[Operation], waited: Mapping[str, Operation]) -> Iterator[GroupState]:
    entered: dict[str, Operation] = {}
    for one in rows:
        is_call = one.comm and one.is_reached
        if is_call and (one.comm not in entered or one.seq > entered[one.comm].seq):
            entered[one.comm] = one
    for comm, last in entered.items():
        at = waited.get(comm)
        yield GroupState(
            group=comm,
            ranks=last.members,
            entered_seq=last.seq,
            finished_seq=last.seq if at is None else at.seq - 1,
            op=last.op,
            size_bytes=last.size_bytes,
            waiting_s=0.0 if at is None else 1.0,
        )


def _named(call: Operation) -> str:
    return f"{call.op or 'call'} number {call.seq} of {call.comm}"


def _p99(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0.0
