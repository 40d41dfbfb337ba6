"""The records on which a diagnosis is based, one per operation of a rank."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from orchestrator.diagnosis.graph import WaitGraph
from orchestrator.fault_kinds import FaultKind

#: A rank's own work; all other operations are calls in a communicator.
SPANS: Final = frozenset({"data", "forward", "backward", "optimizer"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of a rank: a span of its own work, or a call in a communicator."""

    rank: int
    #: One of ``SPANS``, a collective, ``send`` or ``recv``; "" if only its number is known.
    op: str
    comm: str = ""  #: Name of the communicator, equal on all members; "" for a span.
    seq: int = 0  #: Number of the call in the communicator, equal on all members.
    members: Sequence[int] = ()  #: Ranks of the communicator; for a transfer (sender, receiver).
    enter_s: float  #: When it was called, on ``clock``.
    exit_s: float | None  #: When it ended; None while it is in flight.
    #: For a span that has ended: its time without the rank's waits for others; None if only the
    #: calls within it show these.
    own_s: float | None = None
    is_ahead: bool = False  #: Whether it is in flight although the rank does not wait for it.
    #: Whether the device has reached it; always true for a call on the host.
    is_reached: bool = True
    size_bytes: int = 0  #: Payload of this rank; for a span the size of its input; 0 if unknown.
    dtype: str = ""
    #: Hash of all calls of the rank in the communicator up to this one; "" if unknown.
    history: str = ""
    step: int = 0
    place: tuple[int, int, int] | None = None  #: Its (dp, pp, tp) in the mesh; None if unknown.
    clock: str = ""  #: Times of different clocks are not compared.
    node: str = ""  #: Machine of the rank; "" if unknown.
    line: str = ""  #: Line of the script that called it; "" if unknown.

    @property
    def is_span(self) -> bool:
        """Return whether it is the rank's own work."""
        return not self.comm

    @property
    def role(self) -> tuple[int, ...]:
        """Return (stage, tp place), equal for ranks with equal work; the rank if unknown."""
        return (-1, self.rank) if self.place is None else self.place[1:]


class Doing(NamedTuple):
    """The state of a rank that has not come."""

    kind: FaultKind  #: The kind of fault, if the rank delays others.
    text: str  #: For people: what follows "rank 3" in a sentence.


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The records of a run, or of a part of it."""

    operations: tuple[Operation, ...]  #: In any order.
    #: For each rank that may have made calls without a record: the reason.
    unknown: Mapping[int, str] = field(default_factory=dict)
    #: When they were taken, on their clock; a call that had not waited unusually long by then does
    #: not hang. None if they were taken because of a hang.
    now_s: float | None = None
    graph: WaitGraph | None = None  #: Which rank waits for which; None if only the calls show it.
    #: The states of ranks that were seen; those of others follow from their calls.
    doing: Mapping[int, Doing] = field(default_factory=dict)


def overlap(rows: Sequence[Operation]) -> tuple[Operation, Operation] | None:
    """Return two spans of different steps of a rank that overlap; None if there are none.

    A rank executes one step after the other, so such times come from different clocks and durations
    cannot be compared. Spans of data do not count, because data may be read ahead. ``rows`` must be
    sorted by ``enter_s``.
    """
    before: Operation | None = None
    for one in rows:
        if not one.is_span or one.op == "data" or one.exit_s is None:
            continue
        if before is not None and before.exit_s is not None:
            amid_s = (before.enter_s + before.exit_s) / 2
            if one.step != before.step and one.enter_s < amid_s:
                return before, one
        if before is None or before.exit_s is None or one.exit_s >= before.exit_s:
            before = one
    return None


def at_line(operations: Iterable[Operation]) -> str:
    """Return for people where the script called all of them; "" if that is not one known line."""
    lines = {one.line for one in operations}
    return f" at {lines.pop()}" if len(lines) == 1 and "" not in lines else ""


def matched(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Return the operations, with the k-th send of a channel numbered like the k-th receive.

    A communicator may number sends and receives of both directions together: then the two ends of
    one transfer have different numbers. Communicators whose numbers agree stay as they are, because
    the first records of one end may be lost. A channel is named ``<communicator>
    <sender>><receiver>``.
    """
    kept: list[Operation] = []
    ends: dict[tuple[str, str], list[Operation]] = defaultdict(list)
    for one in operations:
        if one.op in {"send", "recv"}:
            ends[one.comm, one.op].append(one)
        else:
            kept.append(one)
    differ = {
        comm.rpartition(" ")[0]
        for (comm, op), rows in ends.items()
        if op == "recv"
        and (sent := {one.seq for one in ends.get((comm, "send"), ())})
        and not {one.seq for one in rows if one.exit_s is not None} <= sent
    }
    for (comm, _), rows in ends.items():
        if comm.rpartition(" ")[0] in differ:
            rows.sort(key=lambda one: (one.enter_s, one.seq))
            kept += (replace(one, seq=number) for number, one in enumerate(rows, start=1))
        else:
            kept += rows
    return tuple(kept)
