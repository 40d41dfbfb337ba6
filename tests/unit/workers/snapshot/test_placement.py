"""Which mechanism is chosen when, what it costs, and what the line says about it."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from workers.snapshot.groups import adjust_groups, shared_domains
from workers.snapshot.placement import (
    Cost,
    Mechanism,
    Node,
    PlacementRules,
    Protection,
    State,
    StateClass,
    changed_groups,
    cost,
    holdings,
    level,
    place,
    survives,
)

REPLICATED = State(name="model", kind=StateClass.REPLICATED, num_bytes=1200)
UNIQUE = State(name="optimizer", kind=StateClass.UNIQUE, num_bytes=600)
RULES = PlacementRules(num_slots=1)


def _nodes(count: int, headroom_bytes: int, link_bytes_per_s: float = 0.0) -> list[Node]:
    return [
        Node(name=f"n{index}", headroom_bytes=headroom_bytes, link_bytes_per_s=link_bytes_per_s)
        for index in range(count)
    ]


def _choice(nodes: list[Node], state: State, rules: PlacementRules = RULES) -> Protection:
    (chosen,) = place(nodes, [state], rules).protections
    return chosen


@pytest.mark.parametrize(
    ("state", "tolerance", "headroom_bytes", "mechanism", "memory_bytes"),
    [
        (REPLICATED, 1, 600, Mechanism.REDUNDANT_COPY, 600),
        (REPLICATED, 1, 599, Mechanism.REPLICA_PARITY, 400),
        (REPLICATED, 2, 900, Mechanism.REDUNDANT_COPY, 900),
        (REPLICATED, 2, 899, Mechanism.DOUBLE_PARITY, 600),
        (REPLICATED, 2, 599, Mechanism.REPLICA_PARITY, 400),
        (REPLICATED, 1, 399, Mechanism.NONE, 300),
        (UNIQUE, 1, 1200, Mechanism.PARTNER_COPY, 1200),
        (UNIQUE, 1, 1199, Mechanism.RING_PARITY, 800),
        (UNIQUE, 2, 1800, Mechanism.PARTNER_COPY, 1800),
        (UNIQUE, 2, 1799, Mechanism.DOUBLE_PARITY, 1200),
        (UNIQUE, 2, 1199, Mechanism.RING_PARITY, 800),
        (UNIQUE, 1, 799, Mechanism.NONE, 600),
    ],
)
def test_of_four_nodes_memory_decides_the_mechanism(
    state: State, tolerance: int, headroom_bytes: int, mechanism: Mechanism, memory_bytes: int
) -> None:
    """At the last byte; a copy is read faster than a parity is decoded, so it comes first."""
    rules = replace(RULES, tolerance=tolerance)
    chosen = _choice(_nodes(4, headroom_bytes), state, rules)
    assert (chosen.mechanism, chosen.costs["n0"].memory_bytes) == (mechanism, memory_bytes)
    if state.kind is StateClass.REPLICATED:
        assert {each.network_bytes for each in chosen.costs.values()} == {0}
    else:
        assert chosen.costs["n0"].network_bytes == 600 * chosen.tolerance


def test_the_line_names_what_did_not_fit() -> None:
    """Whoever wonders why a run survives one node and not two reads this and adds memory."""
    rules = replace(RULES, tolerance=2)
    chosen = _choice(_nodes(4, 1100), UNIQUE, rules)
    assert chosen.reason == (
        "optimizer: ring parity, survives 1 of 4 nodes, 800 B a node and version, 600 B sent; "
        "partner copy for 2 needs 1.758 KiB on n0, 1.074 KiB are free; "
        "double parity for 2 needs 1.172 KiB on n0, 1.074 KiB are free; "
        "partner copy for 1 needs 1.172 KiB on n0, 1.074 KiB are free"
    )


def test_a_size_that_is_not_known_is_not_said_to_be_nothing() -> None:
    """Before the first snapshot nobody knows it, and 0 B would be good news."""
    chosen = _choice(_nodes(4, 1100), replace(UNIQUE, num_bytes=0))
    assert chosen.reason == "optimizer: partner copy, survives 1 of 4 nodes"


def test_a_link_that_is_too_slow_is_named() -> None:
    """A copy that arrives after the next version was taken protects nothing for long."""
    refused = _choice(_nodes(4, 1 << 20, link_bytes_per_s=500.0), UNIQUE)
    assert refused.mechanism is Mechanism.NONE
    assert "partner copy for 1 keeps the link of n0 busy 1.2 s of 1 s" in refused.reason


def test_slow_device_copies_leave_replicas_to_a_parity_of_the_device() -> None:
    """Copies take 600 B off each device in a second, and of a parity made there only 400."""
    nodes = [replace(node, d2h_bytes_per_s=500.0) for node in _nodes(4, 1 << 20)]
    chosen = _choice(nodes, REPLICATED, replace(RULES, parity_on_device=True))
    assert (chosen.mechanism, chosen.costs["n0"].d2h_bytes) == (Mechanism.REPLICA_PARITY, 400)
    assert "redundant copy for 1 copies 1.2 s of 1 s on n0" in chosen.reason
    assert _choice(nodes, REPLICATED).tolerance == 0


def test_parity_on_the_device_copies_less_from_it() -> None:
    """Else every block that goes into a parity crosses the bus as well: S/(n-1) against 2S/n."""
    rules = replace(RULES, parity_on_device=True)
    on_host = _choice(_nodes(4, 599), REPLICATED)
    on_device = _choice(_nodes(4, 599), REPLICATED, rules)
    assert (on_host.costs["n0"].d2h_bytes, on_device.costs["n0"].d2h_bytes) == (600, 400)


def test_states_share_the_memory_in_their_order() -> None:
    """The second would otherwise promise what the first has taken."""
    placement = place(_nodes(4, 2000), [UNIQUE, REPLICATED], RULES)
    first, second = placement.protections
    assert (first.mechanism, second.mechanism) == (
        Mechanism.PARTNER_COPY,
        Mechanism.REDUNDANT_COPY,
    )
    placement = place(_nodes(4, 1700), [UNIQUE, REPLICATED], RULES)
    assert placement.protections[1].mechanism is Mechanism.REPLICA_PARITY
    assert cost(placement)["n3"] == Cost(network_bytes=600, memory_bytes=1600, d2h_bytes=1200)


def test_nodes_of_several_ranks_pay_for_all_of_them() -> None:
    """The partner of the node with two ranks keeps two parts."""
    nodes = [replace(node, num_ranks=1 + (node.name == "n1")) for node in _nodes(3, 1 << 20)]
    chosen = _choice(nodes, UNIQUE)
    memory = {name: each.memory_bytes for name, each in chosen.costs.items()}
    assert memory == {"n0": 1200, "n1": 1800, "n2": 1800}


def test_one_node_alone_says_that_it_is_not_protected() -> None:
    """A run on one machine is legal; its snapshots survive processes and not the node."""
    chosen = _choice(_nodes(1, 1 << 20), UNIQUE)
    assert chosen.mechanism is Mechanism.NONE
    assert chosen.reason.endswith("tolerance 1 needs 2 nodes")


def test_a_rack_that_cannot_be_kept_apart_is_named() -> None:
    """Three of four nodes in one rack: two groups of two cannot avoid a pair."""
    nodes = [replace(node, rack="b" if node.name == "n3" else "a") for node in _nodes(4, 9999)]
    assert place(nodes, [UNIQUE], RULES).shared_racks == ("a",)


def test_the_only_node_of_another_rack_keeps_what_both_others_have() -> None:
    """In a ring one of them would be copied inside its rack, and go with it."""
    nodes = [replace(node, rack="b" if node.name == "n2" else "a") for node in _nodes(3, 9999)]
    placement = place(nodes, [UNIQUE], RULES)
    (chosen,) = placement.protections
    assert chosen.keepers == {"n0": ("n2",), "n1": ("n2",), "n2": ("n0",)}
    memory = {name: each.memory_bytes // UNIQUE.num_bytes for name, each in chosen.costs.items()}
    assert memory == {"n0": 2, "n1": 1, "n2": 3}
    assert placement.shared_racks == ()


def test_who_holds_what_is_listed_in_the_order_of_the_stripes() -> None:
    """A keeper acts on this list; P of stripe i lies on node i, Q on the next."""
    rules = replace(RULES, tolerance=2)
    chosen = _choice(_nodes(4, 1799), UNIQUE, rules)
    first = [(one.node, one.parity, one.of) for one in holdings(chosen) if one.stripe == 3]
    assert first == [("n3", 0, ("n1", "n2")), ("n0", 1, ("n1", "n2"))]

    chosen = _choice(_nodes(3, 9999), UNIQUE)
    assert [(one.node, one.of) for one in holdings(chosen)] == [
        ("n1", ("n0",)), ("n2", ("n1",)), ("n0", ("n2",)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("group_max", "tolerance", "headroom_bytes", "num_lost", "share"),
    [
        (2, 1, 1200, 2, 0.933),
        (4, 1, 1199, 2, 0.800),
        (8, 1, 1199, 2, 0.533),
        (8, 2, 1799, 2, 1.0),
        (2, 1, 1200, 4, 0.615),
        (8, 2, 1799, 4, 0.431),
    ],
)
def test_random_losses_are_survived_as_often_as_combinatorics_say(
    group_max: int, tolerance: int, headroom_bytes: int, num_lost: int, share: float
) -> None:
    """Of 16 nodes: pairs, one parity of 4 and of 8, two of 8, as computed without this code."""
    rules = replace(RULES, tolerance=tolerance, group_max=group_max)
    placement = place(_nodes(16, headroom_bytes), [UNIQUE], rules)
    names = sorted(placement.protections[0].costs)
    outcomes = [survives(placement, lost) for lost in combinations(names, num_lost)]
    assert sum(outcomes) / len(outcomes) == pytest.approx(share, abs=5e-4)


def test_only_groups_that_changed_are_protected_anew() -> None:
    """Re-protection competes with training; what is whole is left alone."""
    nodes = _nodes(16, 1 << 20)
    before = place(nodes, [UNIQUE, REPLICATED], RULES)
    (group,) = [group for group in before.protections[0].groups if "n5" in group]
    left = [node for node in nodes if node.name != "n5"]
    after = place(left, [UNIQUE, REPLICATED], RULES, before)
    rest = tuple(name for name in group if name != "n5")
    assert changed_groups(before, after) == (("optimizer", rest), ("model", rest))
    assert level(after) == level(before)


def test_tolerance_is_not_given_up_for_staying_together() -> None:
    """The two that are left of a group have no memory for each other, as part of three they do."""
    nodes = _nodes(8, 900)
    rules = replace(RULES, group_max=4)
    before = place(nodes, [UNIQUE], rules)
    left = [node for node in nodes if node.name not in {"n0", "n2"}]
    (after,) = place(left, [UNIQUE], rules, before).protections
    assert (after.mechanism, after.tolerance) == (Mechanism.RING_PARITY, 1)
    assert sorted(map(len, after.groups)) == [3, 3]


def test_a_newcomer_of_a_rack_that_every_group_has_founds_one() -> None:
    """Forming all groups anew for it would cost every node its redundancy for a while."""
    before = (("a0", "b0", "c0"), ("a1", "b1", "c1"), ("a2", "b2", "c2"))
    nodes = {name for group in before for name in group} | {"a3"}
    domains = {name: name[0] for name in nodes}
    after = adjust_groups(before, domains, size_min=2, size_max=4)
    assert shared_domains(after, domains) == ()
    assert len(set(before) - set(after)) == 1
