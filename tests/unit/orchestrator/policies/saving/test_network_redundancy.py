"""Which mechanism is chosen when, what it costs, and what the line says about it."""

from dataclasses import replace
from itertools import combinations

import pytest

from orchestrator.policies import (
    Mechanism,
    RedundancyFacts,
    RedundancyPlan,
    plan_redundancy,
)
from orchestrator.policies.saving.redundancy import version_bytes
from tests.support.placements import is_readable
from workers.settings import SnapshotSettings

RANK_BYTES = 600
RULES = SnapshotSettings(tolerance=1)


def _facts(count: int, headroom_bytes: int, rank_bytes: int = RANK_BYTES) -> RedundancyFacts:
    nodes = tuple(f"n{index}" for index in range(count))
    return RedundancyFacts(
        nodes=nodes,
        budgets_bytes=dict.fromkeys(nodes, headroom_bytes),
        rank_bytes=rank_bytes,
        num_buffers=1,
    )


def _memory_bytes(facts: RedundancyFacts, plan: RedundancyPlan) -> dict[str, int]:
    groups = plan.groups or (facts.nodes,)
    return version_bytes(facts, plan.mechanism, plan.tolerance, groups, plan.keepers)


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
def test_memory_decides_the_mechanism_on_four_nodes(
    tolerance: int, headroom_bytes: int, mechanism: Mechanism, memory_bytes: int
) -> None:
    """At the last byte; a copy is read faster than a parity is decoded, so it comes first.

    The link has no say: for a tolerance, all of them send the same.
    """
    rules = replace(RULES, tolerance=tolerance)
    facts = _facts(4, headroom_bytes)
    plan = plan_redundancy(facts, rules)
    assert plan.mechanism is mechanism
    assert _memory_bytes(facts, plan)["n0"] == memory_bytes
    sent = {0: "0 B", 1: "600 B", 2: "1.172 KiB"}[plan.tolerance]
    assert f", {sent} sent" in plan.reason


def test_the_line_names_what_did_not_fit() -> None:
    """A user who wonders why a run survives one node and not two reads this and adds memory."""
    rules = replace(RULES, tolerance=2)
    assert plan_redundancy(_facts(4, 1100), rules).reason == (
        "snapshots: ring parity, for the loss of 1 of 4 nodes, 800 B a node and version, "
        "600 B sent; "
        "partner copy for 2 needs 1.758 KiB on n0, 1.074 KiB are free; "
        "double parity for 2 needs 1.172 KiB on n0, 1.074 KiB are free; "
        "partner copy for 1 needs 1.172 KiB on n0, 1.074 KiB are free"
    )


def test_a_size_that_is_not_known_is_not_said_to_be_nothing() -> None:
    """Before the first snapshot it is unknown, and 0 B would be good news."""
    rules = replace(RULES, mechanism="copy")
    assert plan_redundancy(_facts(4, 1100, rank_bytes=0), rules).reason == (
        "snapshots: partner copy, for the loss of 1 of 4 nodes"
    )


def test_nodes_of_several_ranks_pay_for_all_of_them() -> None:
    """The partner of the node with two ranks keeps two parts."""
    facts = replace(_facts(3, 1 << 20), nodes=("n0", "n1", "n1", "n2"))
    plan = plan_redundancy(facts, RULES)
    assert _memory_bytes(facts, plan) == {"n0": 1200, "n1": 1800, "n2": 1800}
    assert "1.758 KiB a node and version, 1.172 KiB sent" in plan.reason


def test_a_rack_that_cannot_be_kept_apart_is_named() -> None:
    """Three of four nodes in one rack: two groups of two cannot avoid a pair."""
    facts = replace(_facts(4, 9999), racks={"n0": "a", "n1": "a", "n2": "a", "n3": "b"})
    assert plan_redundancy(facts, RULES).shared_racks == ("a",)


def test_the_only_node_of_another_rack_keeps_what_both_others_have() -> None:
    """In a ring one of them would be copied inside its rack, and go with it."""
    facts = replace(_facts(3, 9999), racks={"n0": "a", "n1": "a", "n2": "b"})
    plan = plan_redundancy(facts, RULES)
    assert plan.keepers == {"n0": ("n2",), "n1": ("n2",), "n2": ("n0",)}
    memory = {name: size // RANK_BYTES for name, size in _memory_bytes(facts, plan).items()}
    assert memory == {"n0": 2, "n1": 1, "n2": 3}
    assert plan.shared_racks == ()


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
    """For 16 nodes: pairs, one parity of 4 and of 8, two of 8, as computed without this code."""
    rules = replace(RULES, tolerance=tolerance)
    facts = replace(_facts(16, headroom_bytes), group_max=group_max)
    plan = plan_redundancy(facts, rules)
    outcomes = [
        is_readable(plan, facts.nodes, lost) for lost in combinations(facts.nodes, num_lost)
    ]
    assert sum(outcomes) / len(outcomes) == pytest.approx(share, abs=5e-4)


def test_copies_stay_in_a_zone_whose_links_training_does_not_fill() -> None:
    """Near keepers in other racks are taken; without a topology the next ones are."""
    nodes = ("a", "b", "c", "d")
    zones = {"a": "east", "b": "west", "c": "east", "d": "west"}
    facts = RedundancyFacts(
        nodes=nodes, budgets_bytes=dict.fromkeys(nodes, 1 << 30), rank_bytes=100
    )
    rules = SnapshotSettings(tolerance=1, mechanism="copy")

    assert plan_redundancy(facts, rules).keepers == {
        "a": ("b",), "b": ("c",), "c": ("d",), "d": ("a",),
    }  # fmt: skip
    known = replace(facts, met=lambda x, y: float(zones[x] != zones[y]))
    assert plan_redundancy(known, rules).keepers == {
        "a": ("c",), "b": ("d",), "c": ("a",), "d": ("b",),
    }  # fmt: skip
