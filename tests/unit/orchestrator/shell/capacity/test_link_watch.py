"""When keepers time transfers, and what is posted of that."""

import asyncio
from collections.abc import Sequence
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.core import events as ev
from orchestrator.diagnosis import Flows, Guilty, Verdict
from orchestrator.fault_kinds import FaultKind
from orchestrator.shell.capacity.link_watch import LinkWatch
from orchestrator.shell.capacity.node_view import NodeView
from orchestrator.shell.inbox import Inbox
from workers.protocol import Flow, NodeReport, Peer

NODES = ("a", "b", "c")
ATTEMPT = 7


class _Lab:
    """Three nodes in a ring; what a sends to b takes ten times as long, from some time on."""

    def __init__(self) -> None:
        self.at_s = 100.0
        self.posted: list[ev.Event] = []
        self.timed: list[tuple[str, str]] = []
        self.slow: set[tuple[str, str]] = set()
        self.is_slow_once = False
        self.training: tuple[str, ...] = NODES
        self._sent = dict.fromkeys(NODES, (0, 0))
        self._flows = Flows()
        views = {
            node: NodeView(node, ("", 0), port=1, secret=b"s", keeper=self._as(node))
            for node in NODES
        }
        self.suspected: list[tuple[float, tuple[Verdict, ...], float, float]] = []
        self.confirmed: list[bool] = []
        self.is_sending = True
        self.watch = LinkWatch(
            self._flows,
            Inbox(at_s=lambda: self.at_s, post=self.posted.append),
            suspect=self._suspect,
            views=views,
            attempt=lambda: (ATTEMPT, self.training),
        )

    def _suspect(
        self,
        attempt: int,
        found: Sequence[Verdict],
        *,
        since_s: float,
        times: float,
        is_confirmed: bool,
    ) -> None:
        assert attempt == ATTEMPT
        self.confirmed.append(is_confirmed)
        self.suspected.append((self.at_s, tuple(found), since_s, times))

    def _as(self, source: str) -> Any:
        async def rate_to(peer: Peer) -> float:
            self.timed.append((source, peer.node))
            is_first = (source, peer.node) not in self.timed[:-1]
            is_slow = (source, peer.node) in self.slow and (is_first or not self.is_slow_once)
            return 1e6 if is_slow else 1e8

        return SimpleNamespace(rate_to=SimpleNamespace(remote=rate_to))

    def pass_s(self, seconds: int) -> None:
        for _ in range(seconds):
            self.at_s += 1.0
            for at, node in enumerate(NODES):
                target = NODES[(at + 1) % 3]
                sent, busy_us = self._sent[node]
                if self.is_sending:
                    busy_us += 800_000 if (node, target) in self.slow else 80_000
                    sent += 10 << 20
                self._sent[node] = (sent, busy_us)
                ends = ((node, 1), (target, 2))
                mine = Flow(f"w{node}", *ends, sent, 0, 0, busy_us=busy_us)
                its = Flow(f"w{target}", *ends[::-1], 0, sent, 0)
                for where, flow in ((node, mine), (target, its)):
                    report = NodeReport(node=where, seq=1, workers=(), flows=(flow,))
                    self._flows.observe(report, self.at_s)
            asyncio.run(self.watch.look())

    @property
    def told(self) -> list[ev.LinksTimed]:
        return [event for event in self.posted if isinstance(event, ev.LinksTimed)]


def test_an_even_network_is_not_timed() -> None:
    lab = _Lab()
    lab.pass_s(30)

    assert not lab.timed
    assert not lab.posted


def test_a_slow_link_is_timed_and_told_within_ten_seconds() -> None:
    lab = _Lab()
    lab.pass_s(10)
    lab.slow = {("a", "b")}
    lab.pass_s(6)

    (told,) = lab.told
    assert sorted(lab.timed) == sorted(2 * [*permutations(NODES, 2)]), "what is slow is timed twice"
    assert (told.attempt, told.nodes, told.slow) == (ATTEMPT, NODES, (("a", "b", 1e6),))
    ((_, (one,), since_s, times),) = lab.suspected
    assert (one.kind, one.guilty) == (FaultKind.SLOW_LINK, Guilty(links=((0, 1),)))
    assert since_s == 111.0
    assert 1.5 < times == pytest.approx(1.0 / told.step_ratio)


def test_a_slow_receiver_is_reported_with_its_rates() -> None:
    lab = _Lab()
    lab.pass_s(10)
    lab.slow = {("a", "b"), ("c", "b")}
    lab.pass_s(6)

    (told,) = lab.told
    assert told.slow == (("", "b", 1e6),)
    ((_, (one,), _, _),) = lab.suspected
    assert (one.kind, one.guilty) == (FaultKind.SLOW_RECEIVER, Guilty.of([1], (), ["b"]))


def test_a_transfer_that_was_slow_once_is_not_told() -> None:
    """The keeper had to wait for a processor."""
    lab = _Lab()
    lab.pass_s(10)
    lab.slow, lab.is_slow_once = {("a", "b")}, True
    lab.pass_s(6)

    (told,) = lab.told
    assert not told.slow
    assert [found for _, found, _, _ in lab.suspected] == [()]


def test_it_is_timed_the_less_often_the_longer_it_lasts() -> None:
    lab = _Lab()
    lab.slow = {("a", "b")}
    lab.pass_s(100)

    gaps = [later.at_s - sooner.at_s for sooner, later in zip(lab.told, lab.told[1:], strict=False)]
    assert gaps == [10.0, 20.0, 40.0]
    assert lab.confirmed == [False, True, True, True]


def test_a_link_is_suspected_no_longer_once_it_was_seen_to_be_fast_again() -> None:
    """While nothing is sent nothing is seen: an evaluation heals no link."""
    lab = _Lab()
    lab.slow = {("a", "b")}
    lab.pass_s(8)
    lab.is_sending = False
    lab.pass_s(20)
    assert [len(found) for _, found, _, _ in lab.suspected] == [1]

    lab.is_sending, lab.slow = True, set()
    lab.pass_s(20)
    assert [len(found) for _, found, _, _ in lab.suspected] == [1, 0]


def test_no_transfer_is_timed_without_training() -> None:
    lab = _Lab()
    lab.training = ()
    lab.slow = {("a", "b")}
    lab.pass_s(10)

    assert not lab.timed
