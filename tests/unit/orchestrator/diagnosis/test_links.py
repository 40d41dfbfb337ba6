"""Dead and slow links from what keepers say of connections."""

from itertools import permutations
from typing import Any

import pytest

from orchestrator.diagnosis import Flows, Guilty, Transfer, dead
from orchestrator.diagnosis.links import rounds, slow, suspects, to_time
from orchestrator.fault_kinds import FaultKind
from workers.protocol import Flow, NodeReport

NODES = ("a", "b", "c", "d")
RANKS = {node: (rank,) for rank, node in enumerate(NODES)}
WORKERS = {"w0": 0, "w1": 1}


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
    (found,) = dead(_joined(HELD), WORKERS, 5.0)

    assert (found.kind, found.guilty) == (FaultKind.LINK_DEAD, Guilty(links=((0, 1),)))
    assert found.since_s == 3.8
    assert "Data from rank 0 (w0) to rank 1 (w1)" in found.evidence


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

    assert not dead(flows, WORKERS, 5.0), why


def test_a_connection_that_was_closed_or_answers_again_is_dead_no_longer() -> None:
    for later in ((), (HELD._replace(backoff=0, acked_bytes=9),)):
        flows = _joined(HELD)
        flows.observe(NodeReport(node="a", seq=2, workers=()), 1.5)
        assert dead(flows, WORKERS, 5.0), "a report without a look says nothing"
        flows.observe(NodeReport(node="a", seq=3, workers=(), flows=later), 2.0)
        assert not dead(flows, WORKERS, 5.0)


def test_a_machine_that_talks_to_itself_is_taken_for_no_other() -> None:
    """127.0.0.1 and a port are at both ends of connections on every machine."""
    flows = _joined(
        HELD._replace(here=("127.0.0.1", 1), there=("127.0.0.1", 2)),
        _flow("w1", "127.0.0.1", "127.0.0.1")._replace(here=("127.0.0.1", 2)),
    )

    assert not dead(flows, WORKERS, 5.0)


def test_transfers_are_reported_by_node_and_only_if_recent() -> None:
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
    assert suspects(idle, 5.0) == [], "it holds no rank up"


@pytest.mark.parametrize("num_nodes", [2, 3, 4])
def test_those_that_are_suspected_are_timed_with_others(num_nodes: int) -> None:
    nodes = to_time([("c", "d")], ("c", "d", "a", "b", "e")[: max(num_nodes, 2)])

    assert nodes == ["c", "d", "a", "b"][:num_nodes]
    planned = rounds(nodes)
    assert len(planned) <= 6
    pairs = [pair for each in planned for pair in each]
    assert sorted(pairs) == sorted(permutations(nodes, 2))
    for each in planned:
        ends = [node for pair in each for node in pair]
        assert len(ends) == len(set(ends)), "answers would wait behind what is sent"


def _rates(kind: FaultKind, num_nodes: int) -> dict[tuple[str, str], float]:
    """Return rates where b sends or hears slowly, or b sends slowly to c."""
    rates = dict.fromkeys(permutations(NODES[:num_nodes], 2), 100000000.0)
    for pair in rates:
        ends = {FaultKind.SLOW_SENDER: pair[0] == "b", FaultKind.SLOW_RECEIVER: pair[1] == "b"}
        if ends.get(kind, pair == ("b", "c")):
            rates[pair] = 1e7
    return rates


SEEN = {
    FaultKind.SLOW_LINK: [("b", "c")],
    FaultKind.SLOW_SENDER: [("b", "c"), ("a", "b")],
    FaultKind.SLOW_RECEIVER: [("a", "b")],
}


@pytest.mark.parametrize("num_nodes", [3, 4])
@pytest.mark.parametrize("kind", SEEN)
def test_link_sender_and_receiver_are_told_apart(kind: FaultKind, num_nodes: int) -> None:
    (found,) = slow(_rates(kind, num_nodes), SEEN[kind], RANKS, {})

    assert found.kind is kind
    assert found.guilty.links == (((1, 2),) if kind is FaultKind.SLOW_LINK else ())
    assert found.guilty.nodes == (() if kind is FaultKind.SLOW_LINK else ("b",))
    assert "10 MB/s" in found.evidence


#: Measured between four machines, MB/s, while they trained; c sent to b over 100 Mbit/s, then c
#: sent all over 100 Mbit/s. Answers wait behind what is sent.
MEASURED = [
    (
        FaultKind.SLOW_LINK,
        "cb",
        "ab 362 bc 26 cd 427 da 325 ac 277 bd 398 ca 375 db 291 ad 293 ba 384 cb 6.1 dc 294",
    ),
    (
        FaultKind.SLOW_LINK,
        "cb",
        "ad 56 bc 3.2 da 71 cb 3.6 ac 50 db 49 ca 91 bd 44 ab 60 cd 27 ba 53 dc 50",
    ),
    (
        FaultKind.SLOW_SENDER,
        "cb dc",
        "ab 43 bc 23 cd 9.2 ac 35 bd 878 ca 10.3 db 131 ad 427 ba 821 cb 4.8 dc 20.5",
    ),
    (
        FaultKind.SLOW_RECEIVER,
        "ad dc",
        "ab 120 ac 115 ad 10 ba 119 bc 121 bd 10 ca 118 cb 120 cd 10 da 119 db 117 dc 9.2",
    ),
    (
        FaultKind.SLOW_SENDER,
        "dc",
        "ab 90 ac 85 ad 60 ba 86 bc 95 bd 70 ca 88 cb 84 cd 50 da 9.1 db 8.7 dc 0.75",
    ),
]


@pytest.mark.parametrize(("kind", "found", "text"), MEASURED)
def test_what_was_measured(kind: FaultKind, found: str, text: str) -> None:
    words = text.split()
    rates = {(w[0], w[1]): 1e6 * float(r) for w, r in zip(words[::2], words[1::2], strict=True)}

    assert [one.kind for one in slow(rates, [(w[0], w[1]) for w in found.split()], RANKS, {})] == [
        kind
    ]


def test_what_was_suspected_and_is_as_fast_as_others_is_not_slow() -> None:
    rates = _rates(FaultKind.SLOW_LINK, 4)

    assert slow(rates, [("a", "b")], RANKS, {}) == []
    assert slow({}, [("a", "b")], RANKS, {}) == []


def test_a_node_may_be_slow_both_ways_and_two_nodes_cannot_be_told_apart() -> None:
    rates = {pair: 1e7 if "b" in pair else 1e8 for pair in permutations(NODES, 2)}
    (both,) = slow(rates, [("a", "b"), ("b", "c")], RANKS, {})
    assert (both.kind, [each.kind for each in both.alternatives]) == (
        FaultKind.SLOW_SENDER,
        [FaultKind.SLOW_RECEIVER],
    )

    (found,) = slow({("a", "b"): 1e7, ("b", "a"): 1e8}, [("a", "b")], RANKS, {})
    assert (found.kind, found.guilty.links) == (FaultKind.SLOW_LINK, ((0, 1),))
    assert [each.kind for each in found.alternatives] == [
        FaultKind.SLOW_SENDER,
        FaultKind.SLOW_RECEIVER,
    ]
    assert slow({("a", "b"): 8e7, ("b", "a"): 1e8}, [("a", "b")], RANKS, {}) == []


def test_a_link_that_training_fills_is_not_compared_with_idle_ones() -> None:
    """Keepers' traffic gets one part in four of the card beside three connections of training."""
    full = dict.fromkeys(permutations(NODES, 2), 100000000.0)
    rates = full | {pair: 2.5e7 for pair in full if pair[0] == "a"}
    trained = {("a", "b"): 7e7}

    (blamed,) = slow(rates, [("a", "b")], RANKS, {})
    assert blamed.guilty.nodes == ("a",), "without what training sends"
    assert slow(rates, [("a", "b")], RANKS, trained) == []
    truly = full | {("a", "b"): 2e6}
    (found,) = slow(truly, [("a", "b")], RANKS, {("a", "b"): 8e6})
    assert found.kind is FaultKind.SLOW_LINK
