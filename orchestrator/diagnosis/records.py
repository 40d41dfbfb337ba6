"""The records that a diagnosis is made from: one an operation of a rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

#: A rank's own work; everything else is a call in a communicator.
SPANS: Final = frozenset({"data", "forward", "backward", "optimizer"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of a rank: a span of its own work, or a call in a communicator."""

    rank: int
    #: One of ``SPANS``, a collective, ``send`` or ``recv``; "" if only its number is known.
    op: str
    comm: str = ""  #: Name of the communicator, equal on all members; "" for a span.
    seq: int = 0  #: Number of the call in it, equal on all members.
    members: Sequence[int] = ()  #: Ranks of the communicator; of a transfer (sender, receiver).
    enter_s: float  #: When it was called, on ``clock``.
    exit_s: float | None  #: When it was over; None while it is in flight.
    #: Of a span that is over, its time without the rank's waits for others; None if only the
    #: calls in it say that.
    own_s: float | None = None
    is_ahead: bool = False  #: Whether it is in flight and the rank is known not to wait for it.
    is_reached: bool = True  #: Whether the device has reached it; True of a call on the host.
    size_bytes: int = 0  #: Payload of this rank; of a span the size of its input, 0 if unknown.
    dtype: str = ""
    #: Hash of all calls of the rank in the communicator up to this one, "" if unknown.
    history: str = ""
    step: int = 0
    place: tuple[int, int, int] | None = None  #: Its (dp, pp, tp) in the mesh; None if unknown.
    clock: str = ""  #: Times of different clocks are not compared.
    node: str = ""  #: Machine of the rank, "" if unknown.

    @property
    def is_span(self) -> bool:
        """Return whether it is the rank's own work."""
        return not self.comm

    @property
    def role(self) -> tuple[int, ...]:
        """Return (stage, tp place), in which ranks do equal work; the rank itself if unknown."""
        return (-1, self.rank) if self.place is None else self.place[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The records of a run, or of a stretch of it."""

    operations: tuple[Operation, ...]  #: In any order.
    #: For each rank that may have called what is not in them: why.
    unknown: Mapping[int, str] = field(default_factory=dict)
    #: When they were taken, on their clock. A call that waits no longer then than usual does not
    #: hang. None: they were taken because of a hang.
    now_s: float | None = None


def overlap(rows: Sequence[Operation]) -> tuple[Operation, Operation] | None:
    """Return two spans of a rank, of different steps, of which one begins amid the other.

    A rank does one step after the other: such times are no times of day, and no durations can be
    compared. None if there are none. Data may be read ahead. ``rows`` are by ``enter_s``.
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


def matched(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Return them with the k-th send of a channel numbered as the k-th receive.

    A communicator may number sends and receives of both directions together: then the two ends of
    one transfer have different numbers. Communicators in which they agree are left alone: the
    beginning of one end may be lost. A channel is named ``<communicator> <sender>><receiver>``.
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
