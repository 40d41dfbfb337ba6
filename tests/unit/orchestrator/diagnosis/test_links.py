"""Dead and slow links from what keepers say of connections."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from orchestrator.diagnosis import Flows, Kind, Transfer, dead
from orchestrator.diagnosis.links import rounds, slow, suspects, to_time
from workers.protocol import Flow, NodeReport

NODES = ("a", "b", "c", "d")
RANKS = {node: (rank,) for rank, node in enumerate(NODES)}
WORKERS = ("w0", "w1")


def _flow(worker: str, here: str, there: str, *, acked_bytes: int = 0, **more: int) -> Flow:
    """Return a connection; both ends have the same port."""
    return Flow(worker, (here, 1), (there, 1), acked_bytes, 0, 0, **more)


def _joined(sender: Flow, receiver: Flow | None = None) -> Flows:
    flows = Flows()
    flows.observe(NodeReport(node="a", seq=1, workers=(), flows=(sender,)), 1.0)
    other = receiver or _flow("w1", sender.there[0], sender.here[0])
    flows.observe(NodeReport(node="b", seq=1, workers=(), flows=(other,)), 1.0)
    return flows


HELD = _flow("w0", "10.0.0.1", "10.0.0.2", in_flight=3, backoff=2, heard_ms=1200)


def test_a_connection_whose_packets_are_repeated_in_vain_is_dead() -> None:
    (found,) = dead(_joined(HELD), WORKERS)

    assert (found.ends, found.unheard_s) == (("w0", "w1"), 1.2)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"in_flight": 0}, "a receiver that is frozen has no room, and its kernel says so"),
        ({"backoff": 1}, "a packet may be lost"),
        ({"heard_ms": 900}, "an answer came a moment ago"),
        ({"worker": "w9"}, "it belongs to no member"),
        ({"there": ("10.0.0.9", 1)}, "who is at the other end is not known"),
    ],
)
def test_what_is_no_dead_link(change: dict[str, Any], why: str) -> None:
    flows = _joined(HELD._replace(**change), _flow("w1", "10.0.0.2", "10.0.0.1"))

    assert not dead(flows, WORKERS), why


def test_a_connection_that_was_closed_or_answers_again_is_dead_no_longer() -> None:
    for later in ((), (HELD._replace(backoff=0, acked_bytes=9),)):
        flows = _joined(HELD)
        flows.observe(NodeReport(node="a", seq=2, workers=()), 1.5)
        assert dead(flows, WORKERS), "a report without a look says nothing"
        flows.observe(NodeReport(node="a", seq=3, workers=(), flows=later), 2.0)
        assert not dead(flows, WORKERS)


def test_a_machine_that_talks_to_itself_is_taken_for_no_other() -> None:
    """127.0.0.1 and a port are at both ends of connections on every machine."""
    flows = _joined(
        HELD._replace(here=("127.0.0.1", 1), there=("127.0.0.1", 2)),
        _flow("w1", "127.0.0.1", "127.0.0.1")._replace(here=("127.0.0.1", 2)),
    )

    assert not dead(flows, WORKERS)


def test_transfers_are_told_by_node_and_only_of_late() -> None:
    first = _flow("w0", "10.0.0.1", "10.0.0.2", acked_bytes=1000, busy_us=100)
    flows = _joined(first)
    for at_s, acked_bytes in ((5.0, 3000), (6.0, 4000)):
        flow = first._replace(acked_bytes=acked_bytes, busy_us=acked_bytes, rtt_us=70)
        flows.observe(NodeReport(node="a", seq=1, workers=(), flows=(flow,)), at_s)

    assert flows.transfers(4.0) == {("a", "b"): Transfer(1000, 1e-3, 0.0, 7e-5)}
    assert flows.transfers(0.0)["a", "b"].num_bytes == 3000
    flows.forget(40.0)
    assert not flows.transfers(0.0)


RING = {
    (node, NODES[(at + 1) % 4]): Transfer(50 << 20, 0.5, 0.0, 1e-4) for at, node in enumerate(NODES)
}


def test_a_link_that_is_busy_for_longer_is_suspected() -> None:
    transfers = {
        **RING,
        ("b", "c"): Transfer(50 << 20, 4.5, 0.1, 1e-2),
        ("c", "d"): Transfer(50 << 20, 4.0, 3.6, 1e-4),
    }

    assert suspects(RING, 5.0) == []
    assert suspects(transfers, 5.0) == [("b", "c")], "that of c waits for d to read"
    few = {pair: one._replace(num_bytes=1000) for pair, one in transfers.items()}
    assert suspects(few, 5.0) == [], "such small messages take as long as the way"
    idle = {pair: one._replace(busy_s=one.busy_s / 20) for pair, one in transfers.items()}
    assert suspects(idle, 5.0) == [], "it holds nobody up"


def test_those_that_are_suspected_are_timed_with_others() -> None:
    nodes = to_time([("c", "d")], (*NODES, "e"))

    assert nodes == ["c", "d", "a", "b"]
    planned = rounds(nodes)
    assert len(planned) == 3
    assert {pair for each in planned for pair in each} == set(permutations(nodes, 2))
    for each in planned:
        assert sorted(a for a, _ in each) == sorted(b for _, b in each) == sorted(nodes)


@pytest.mark.parametrize("num_nodes", [3, 4])
@pytest.mark.parametrize("kind", [Kind.SLOW_LINK, Kind.SLOW_SENDER, Kind.SLOW_RECEIVER])
def test_link_sender_and_receiver_are_told_apart(kind: Kind, num_nodes: int) -> None:
    nodes = NODES[:num_nodes]
    rates = dict.fromkeys(permutations(nodes, 2), 100000000.0)
    assert slow(rates, RANKS) == []
    for pair in rates:
        ends = {Kind.SLOW_SENDER: pair[0] == "b", Kind.SLOW_RECEIVER: pair[1] == "b"}
        if ends.get(kind, pair == ("b", "c")):
            rates[pair] = 1e7

    (found,) = slow(rates, RANKS)

    assert found.kind is kind
    assert found.guilty.links == (((1, 2),) if kind is Kind.SLOW_LINK else ())
    assert found.guilty.nodes == (() if kind is Kind.SLOW_LINK else ("b",))
    assert "10 MB/s" in found.evidence


def test_a_node_may_be_slow_both_ways_and_of_two_nodes_nobody_is_told_apart() -> None:
    rates = {pair: 1e7 if "b" in pair else 1e8 for pair in permutations(NODES, 2)}
    assert [one.kind for one in slow(rates, RANKS)] == [Kind.SLOW_SENDER, Kind.SLOW_RECEIVER]

    (found,) = slow({("a", "b"): 1e7, ("b", "a"): 1e8}, RANKS)
    assert (found.kind, found.guilty.links) == (Kind.SLOW_LINK, ((0, 1),))
    assert [kind for kind, _ in found.alternatives] == [Kind.SLOW_SENDER, Kind.SLOW_RECEIVER]
    assert slow({("a", "b"): 8e7, ("b", "a"): 1e8}, RANKS) == []
