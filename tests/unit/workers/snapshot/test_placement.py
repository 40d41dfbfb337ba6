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
    changed_groups,
    holdings,
    level,
    place,
    survives,
)

RANK_BYTES = 600
RULES = PlacementRules(num_slots=1)


def _nodes(count: int, headroom_bytes: int) -> list[Node]:
    return [Node(name=f"n{index}", headroom_bytes=headroom_bytes) for index in range(count)]


@pytest.mark.parametrize(
    ("tolerance", "headroom_bytes", "mechanism", "memory_bytes"),
    [
        (1, 1200, Mechanism.PARTNER_COPY, 1200),
        (1, 1199, Mechanism.RING_PARITY, 800),
        (2, 1800, Mechanism.PARTNER_COPY, 1800),
        (2, 1799, Mechanism.DOUBLE_PARITY, 1200),
        (2, 1199, Mechanism.RING_PARITY, 800),
        (1, 799, Mechanism.NONE, 600),
    ],
)
def test_of_four_nodes_memory_decides_the_mechanism(
    tolerance: int, headroom_bytes: int, mechanism: Mechanism, memory_bytes: int
) -> None:
    """At the last byte; a copy is read faster than a parity is decoded, so it comes first.

    The link has no say: for a tolerance, all of them send the same.
    """
    rules = replace(RULES, tolerance=tolerance)
    chosen = place(_nodes(4, headroom_bytes), RANK_BYTES, rules)
    assert chosen.mechanism is mechanism
    sent_bytes = RANK_BYTES * chosen.tolerance
    assert chosen.costs["n0"] == Cost(network_bytes=sent_bytes, memory_bytes=memory_bytes)


def test_the_line_names_what_did_not_fit() -> None:
    """Whoever wonders why a run survives one node and not two reads this and adds memory."""
    rules = replace(RULES, tolerance=2)
    chosen = place(_nodes(4, 1100), RANK_BYTES, rules)
    assert chosen.reason == (
        "snapshots: ring parity, survives 1 of 4 nodes, 800 B a node and version, 600 B sent; "
        "partner copy for 2 needs 1.758 KiB on n0, 1.074 KiB are free; "
        "double parity for 2 needs 1.172 KiB on n0, 1.074 KiB are free; "
        "partner copy for 1 needs 1.172 KiB on n0, 1.074 KiB are free"
    )


def test_a_size_that_is_not_known_is_not_said_to_be_nothing() -> None:
    """Before the first snapshot nobody knows it, and 0 B would be good news."""
    chosen = place(_nodes(4, 1100), 0, RULES)
    assert chosen.reason == "snapshots: partner copy, survives 1 of 4 nodes"


def test_nodes_of_several_ranks_pay_for_all_of_them() -> None:
    """The partner of the node with two ranks keeps two parts."""
    nodes = [replace(node, num_ranks=1 + (node.name == "n1")) for node in _nodes(3, 1 << 20)]
    chosen = place(nodes, RANK_BYTES, RULES)
    memory = {name: each.memory_bytes for name, each in chosen.costs.items()}
    assert memory == {"n0": 1200, "n1": 1800, "n2": 1800}


def test_one_node_alone_says_that_it_is_not_protected() -> None:
    """A run on one machine is legal; its snapshots survive processes and not the node."""
    chosen = place(_nodes(1, 1 << 20), RANK_BYTES, RULES)
    assert chosen.mechanism is Mechanism.NONE
    assert chosen.reason.endswith("tolerance 1 needs 2 nodes")


def test_a_rack_that_cannot_be_kept_apart_is_named() -> None:
    """Three of four nodes in one rack: two groups of two cannot avoid a pair."""
    nodes = [replace(node, rack="b" if node.name == "n3" else "a") for node in _nodes(4, 9999)]
    assert place(nodes, RANK_BYTES, RULES).shared_racks == ("a",)


def test_the_only_node_of_another_rack_keeps_what_both_others_have() -> None:
    """In a ring one of them would be copied inside its rack, and go with it."""
    nodes = [replace(node, rack="b" if node.name == "n2" else "a") for node in _nodes(3, 9999)]
    chosen = place(nodes, RANK_BYTES, RULES)
    assert chosen.keepers == {"n0": ("n2",), "n1": ("n2",), "n2": ("n0",)}
    memory = {name: each.memory_bytes // RANK_BYTES for name, each in chosen.costs.items()}
    assert memory == {"n0": 2, "n1": 1, "n2": 3}
    assert chosen.shared_racks == ()


def test_who_holds_what_is_listed_in_the_order_of_the_stripes() -> None:
    """A keeper acts on this list; P of stripe i lies on node i, Q on the next."""
    rules = replace(RULES, tolerance=2)
    chosen = place(_nodes(4, 1799), RANK_BYTES, rules)
    first = [(one.node, one.parity, one.of) for one in holdings(chosen) if one.stripe == 3]
    assert first == [("n3", 0, ("n1", "n2")), ("n0", 1, ("n1", "n2"))]

    chosen = place(_nodes(3, 9999), RANK_BYTES, RULES)
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
    placement = place(_nodes(16, headroom_bytes), RANK_BYTES, rules)
    names = sorted(placement.costs)
    outcomes = [survives(placement, lost) for lost in combinations(names, num_lost)]
    assert sum(outcomes) / len(outcomes) == pytest.approx(share, abs=5e-4)


def test_only_groups_that_changed_are_protected_anew() -> None:
    """Re-protection competes with training; what is whole is left alone."""
    nodes = _nodes(16, 1 << 20)
    before = place(nodes, RANK_BYTES, RULES)
    (group,) = [group for group in before.groups if "n5" in group]
    left = [node for node in nodes if node.name != "n5"]
    after = place(left, RANK_BYTES, RULES, before)
    rest = tuple(name for name in group if name != "n5")
    assert changed_groups(before, after) == (rest,)
    assert level(after) == level(before)


def test_tolerance_is_not_given_up_for_staying_together() -> None:
    """The two that are left of a group have no memory for each other, as part of three they do."""
    nodes = _nodes(8, 900)
    rules = replace(RULES, group_max=4)
    before = place(nodes, RANK_BYTES, rules)
    left = [node for node in nodes if node.name not in {"n0", "n2"}]
    after = place(left, RANK_BYTES, rules, before)
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
