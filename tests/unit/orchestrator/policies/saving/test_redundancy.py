from typing import Any, Literal

import pytest

from orchestrator.policies import (
    Mechanism,
    RedundancyFacts,
    RedundancyPlan,
    plan_redundancy,
    state_bytes,
)
from tests.support.made import held_of
from ucp_core.layout import ParallelLayout
from workers.protocol import Inventory, PartRef
from workers.settings import SnapshotSettings

FIVE = ("e", "c", "a", "b", "d")


def _plan(
    nodes: tuple[str, ...],
    *,
    budget_bytes: int = 1 << 30,
    size_bytes: int = 100,
    tolerance: int = 1,
    mechanism: Literal["auto", "copy", "parity"] = "auto",
) -> RedundancyPlan:
    facts = RedundancyFacts(
        nodes=nodes,
        budgets_bytes=dict.fromkeys(nodes, budget_bytes),
        rank_bytes=size_bytes,
    )
    return plan_redundancy(facts, SnapshotSettings(tolerance=tolerance, mechanism=mechanism))


def test_before_the_first_snapshot_nothing_is_decided_that_could_be_wrong() -> None:
    """Copies that fill the memory would be in the way of the parities."""
    assert _plan(FIVE, size_bytes=0) == RedundancyPlan(
        reason="copies or parity: decided when the first snapshot shows its size", is_final=False
    )
    # Two nodes have no choice, and who asked for one has made it.
    assert _plan(("a", "b"), size_bytes=0).mechanism is Mechanism.PARTNER_COPY
    forced = _plan(FIVE, size_bytes=0, mechanism="parity")
    assert forced.mechanism is Mechanism.RING_PARITY


def test_parity_that_is_asked_for_is_a_copy_between_two_nodes() -> None:
    """After a loss there may be no more than two, and they can protect each other."""
    plan = _plan(("a", "b"), mechanism="parity")

    assert plan.mechanism is Mechanism.PARTNER_COPY
    assert plan.copies_of("a") == ("b",)


def test_what_cannot_be_protected_is_said() -> None:
    """One node; a tolerance of nothing; memory for the own snapshots alone."""
    alone, unwanted, full = (
        _plan(("a", "a")),
        _plan(FIVE, tolerance=0),
        _plan(FIVE, budget_bytes=300),
    )
    for plan in (alone, unwanted, full):
        assert (plan.tolerance, plan.groups, plan.copies_of("a")) == (0, (), ())
    assert "tolerance 1 needs 2 nodes" in alone.reason
    assert "snapshot.tolerance: 0" in unwanted.reason
    assert "ring parity for 1 needs 375 B" in full.reason


HSDP = ParallelLayout(dp_replicate=2, dp_shard=2)


def _replicated(
    nodes: str,
    mechanism: Literal["auto", "copy", "parity"] = "auto",
    tolerance: int = 1,
    **facts: Any,
) -> Any:
    known = RedundancyFacts(
        nodes=tuple(nodes),
        **{"budgets_bytes": {}, "rank_bytes": 100, "layout": HSDP, **facts},
    )
    return plan_redundancy(known, SnapshotSettings(tolerance=tolerance, mechanism=mechanism))


def test_replicas_on_other_nodes_save_each_others_shares_and_keepers_copy_nothing() -> None:
    """Also before any size is known: workers are told when an attempt begins, and never later.

    Whether there is room for it is decided when the size is known.
    """
    for size_bytes in (0, 100):
        plan = _replicated("aabb", rank_bytes=size_bytes)
        assert (plan.mechanism, plan.tolerance) == (Mechanism.REDUNDANT_COPY, 1)
        assert plan.guards == ((2,), (3,), (0,), (1,))
        assert (plan.copies_of("a"), plan.is_final) == ((), bool(size_bytes))
        assert "0 B sent" in plan.reason


@pytest.mark.parametrize(
    ("nodes", "facts", "why"),
    [
        ("abab", {}, "fewer than 2 nodes"),
        ("aabb", {"budgets_bytes": {"b": 1199}}, "needs 1.172 KiB on a, 1.171 KiB are free"),
        ("aabb", {"told": Mechanism.NONE}, "not told"),
    ],
)
def test_replicas_that_cannot_save_for_each_other_are_copied_by_keepers(
    nodes: str, facts: dict[str, Any], why: str
) -> None:
    """Their own shares stay small; who reads the status learns why the network is used."""
    plan = _replicated(nodes, **facts)
    assert plan.guards is None
    assert why in plan.reason
    if "budgets_bytes" not in facts:
        assert plan.copies_of("a") == ("b",)


def test_what_workers_were_told_stays_so_while_they_train() -> None:
    """A controller that is restarted could find less memory, and would have them copied twice."""
    assert (
        _replicated("aabb", budgets_bytes={"b": 1}, told=Mechanism.REDUNDANT_COPY).guards
        is not None
    )


THREE = ParallelLayout(dp_replicate=3)
FOUR = ParallelLayout(dp_replicate=4)


def test_where_copies_of_replicas_have_no_room_a_parity_of_them_is_kept() -> None:
    """Half as much beside the own share; ranks are told whose shares they need."""
    roomy, full, fuller = (
        _replicated("cab", layout=THREE, budgets_bytes=dict.fromkeys("abc", bytes_))
        for bytes_ in (600, 599, 449)
    )
    assert roomy.mechanism is Mechanism.REDUNDANT_COPY
    assert (full.mechanism, full.tolerance) == (Mechanism.REPLICA_PARITY, 1)
    assert (full.guards, full.is_parity, full.is_final) == (None, True, True)
    assert full.groups == (("a", "b", "c"),)
    assert full.rank_groups == ((1, 2, 0),) * 3
    assert "150 B a node and version" in full.reason
    assert "redundant copy of replicas needs 600 B on c, 599 B are free" in full.reason
    assert fuller.tolerance == 0
    assert "parity over replicas needs 450 B" in fuller.reason


def test_ranks_of_a_lane_hold_the_same_state_in_a_group_of_nodes_that_do() -> None:
    """Two shards on each of three nodes; or on nodes of their own, which protect each other."""
    hsdp = ParallelLayout(dp_replicate=3, dp_shard=2)
    both = _replicated("aabbcc", "parity", layout=hsdp)
    assert (both.groups, both.rank_groups) == ((("a", "b", "c"),), ((0, 2, 4), (1, 3, 5)) * 3)
    apart = _replicated("abcdef", "parity", layout=hsdp)
    assert apart.groups == (("a", "c", "e"), ("b", "d", "f"))
    assert apart.rank_groups == ((0, 2, 4), (1, 3, 5)) * 3
    for nodes, layout in (("aabcbc", hsdp), ("abcd", HSDP)):
        plan = _replicated(nodes, "parity", layout=layout)
        assert (plan.mechanism, plan.rank_groups) == (Mechanism.RING_PARITY, None)
        assert "nodes have replicas of other shards, or they are fewer than 3" in plan.reason


def test_a_group_that_loses_nodes_keeps_parities_until_they_would_be_copies() -> None:
    """Two of four nodes are lost, one after the other; the request stays."""
    found = [
        _replicated("abcd"[:size], "parity", layout=ParallelLayout(dp_replicate=size))
        for size in (4, 3, 2)
    ]
    parity, copy = Mechanism.REPLICA_PARITY, Mechanism.REDUNDANT_COPY
    assert [plan.mechanism for plan in found] == [parity, parity, copy]
    assert [plan.tolerance for plan in found] == [1, 1, 1]
    assert found[-1].guards == ((1,), (0,))
    two = _replicated("abcd", "parity", layout=FOUR, tolerance=2)
    assert (two.mechanism, two.tolerance) == (Mechanism.DOUBLE_PARITY, 2)
    assert "parity over replicas survives 1 node" in two.reason


def test_workers_that_keep_copies_are_not_taken_to_keep_parities() -> None:
    """Their attempt goes on as it was told; the next one finds that there is no room."""
    full: dict[str, Any] = {"layout": THREE, "budgets_bytes": dict.fromkeys("abc", 599)}
    opened = _replicated("abc", told=Mechanism.REDUNDANT_COPY, is_open=True, **full)
    assert (opened.guards, opened.rank_groups) == (None, None)
    assert opened.mechanism is not Mechanism.REPLICA_PARITY
    told = _replicated("abc", told=Mechanism.REPLICA_PARITY, budgets_bytes={"a": 1}, layout=THREE)
    assert (told.mechanism, told.rank_groups) == (Mechanism.REPLICA_PARITY, ((0, 1, 2),) * 3)


def test_a_guard_in_another_rack_comes_first_and_a_shared_one_is_named() -> None:
    """Three replicas, two of them in a rack."""
    three = ParallelLayout(dp_replicate=3)
    plan = _replicated("abc", layout=three, racks={"a": "r", "b": "r", "c": "s"})
    assert plan.guards == ((), (2,), (0, 1))
    assert plan.shared_racks == ()
    assert _replicated("abc", layout=three, racks=dict.fromkeys("abc", "r")).shared_racks == ("r",)


def test_the_size_of_the_state_is_that_of_its_newest_version() -> None:
    """Ranks hold about the same each, and an older version may have had other tensors."""

    def part(step: int, rank: int, size_bytes: int) -> PartRef:
        held = held_of(step, rank, world_size=3, data_bytes=size_bytes - 10, record_bytes=10)
        return PartRef(node="a", arena=f"w{rank}.1", held=held)

    parts = (part(4, 0, 900), part(5, 0, 100), part(5, 1, 101))
    inventory = Inventory(node="a", parts=parts)
    assert state_bytes([inventory]) == 3 * 101
    assert state_bytes([]) == 0
