"""Keepers' reports on connections, joined: which worker sends to which, and how fast.

Both ends of a connection report the same addresses. This module reads no clock: times are passed as
``at_s``.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from workers.protocol import Flow, NodeReport

#: Keepers report all connections every few seconds; one that was not reported for this long is
#: gone.
FORGET_S: Final = 30.0
#: Reports on a connection are kept for this long, enough to see its current rate.
KEPT_S: Final = 10.0

#: Addresses of the two ends; before them the node if they are loopback addresses, otherwise "".
_Key: TypeAlias = tuple[str, tuple[str, int], tuple[str, int]]


class Transfer(NamedTuple):
    """The data that workers of one node sent to those of another in some period."""

    num_bytes: int  #: Bytes that arrived.
    busy_s: float  #: Time during which bytes were on their way, summed over connections.
    #: The part of ``busy_s`` in which the receiver had no room because it did not read.
    waited_s: float
    rtt_s: float  #: The longest round trip of its connections, smoothed.


@dataclass(slots=True)
class _End:
    node: str
    told: deque[tuple[float, Flow]] = field(default_factory=deque)

    @property
    def last(self) -> Flow:
        return self.told[-1][1]


class Flows:
    """The connections of a run's workers, as last reported by the nodes at their ends."""

    def __init__(self) -> None:
        self._ends: dict[_Key, _End] = {}
        self._waiting: set[_Key] = set()

    def observe(self, report: NodeReport, at_s: float) -> None:
        """Take a keeper's report, received at ``at_s``."""
        if report.flows is None:
            return
        # Each report lists the connections that still wait.
        self._waiting = {key for key in self._waiting if self._ends[key].node != report.node}
        for flow in report.flows:
            key = _key(report.node, flow)
            end = self._ends.get(key)
            if end is None or end.last.worker != flow.worker:
                end = self._ends[key] = _End(report.node)
            end.told.append((at_s, flow))
            while end.told[0][0] < at_s - KEPT_S:
                end.told.popleft()
            if flow.backoff:
                self._waiting.add(key)

    def forget(self, at_s: float) -> None:
        """Forget connections that have not been reported for long."""
        gone = [key for key, end in self._ends.items() if end.told[-1][0] < at_s - FORGET_S]
        for key in gone:
            del self._ends[key]
        self._waiting -= set(gone)

    def waiting(self) -> Iterator[tuple[str, str, Flow]]:
        """Yield sender, receiver and connection if the sender's kernel waits for an answer."""
        for key in sorted(self._waiting):
            end, other = self._ends[key], self._ends.get(_reverse(key))
            if other is not None:
                yield end.last.worker, other.last.worker, end.last

    def transfers(self, since_s: float) -> dict[tuple[str, str], Transfer]:
        """Return what nodes sent to each other since ``since_s``, by (sender, receiver)."""
        found: dict[tuple[str, str], list[Transfer]] = defaultdict(list)
        for key, end in self._ends.items():
            other = self._ends.get(_reverse(key))
            told = [flow for at_s, flow in end.told if at_s >= since_s]
            # Simulated nodes share a machine, so their transfers use no network.
            is_far = key[1][0] != key[2][0]
            if other is not None and is_far and other.node != end.node and len(told) > 1:
                first, last = told[0], told[-1]
                found[end.node, other.node].append(
                    Transfer(
                        last.acked_bytes - first.acked_bytes,
                        1e-6 * (last.busy_us - first.busy_us),
                        1e-6 * (last.by_receiver_us - first.by_receiver_us),
                        1e-6 * last.rtt_us,
                    )
                )
        return {
            pair: Transfer(
                sum(one.num_bytes for one in each),
                sum(one.busy_s for one in each),
                sum(one.waited_s for one in each),
                max(one.rtt_s for one in each),
            )
            for pair, each in found.items()
        }


def _key(node: str, flow: Flow) -> _Key:
    is_loopback = flow.here[0].startswith("127.") or flow.here[0] == "::1"
    return (node if is_loopback else "", flow.here, flow.there)


def _reverse(key: _Key) -> _Key:
    scope, here, there = key
    return (scope, there, here)
