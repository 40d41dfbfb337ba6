from __future__ import annotations

import pytest

from orchestrator.policies.redundancy import (
    RedundancyFacts,
    RedundancyPlan,
    plan_redundancy,
    rank_bytes,
)
from workers.protocol import Held, HeldPart, Inventory
from workers.snapshot.placement import Mechanism, Preference

FIVE = ("e", "c", "a", "b", "d")


def _plan(
    nodes: tuple[str, ...],
    *,
    budget_bytes: int = 1 << 30,
    size_bytes: int = 100,
    tolerance: int = 1,
    preference: Preference = Preference.AUTO,
) -> RedundancyPlan:
    facts = RedundancyFacts(
        nodes=nodes,
        budgets_bytes=dict.fromkeys(nodes, budget_bytes),
        rank_bytes=size_bytes,
    )
    return plan_redundancy(facts, tolerance=tolerance, preference=preference)


@pytest.mark.parametrize("tolerance", [1, 2])
def test_copies_are_kept_on_as_many_other_nodes_as_may_be_lost(tolerance: int) -> None:
    """A node that holds nobody's copies leaves somebody without."""
    plan = _plan(FIVE, tolerance=tolerance)

    assert (plan.mechanism, plan.tolerance, plan.is_final) == (
        Mechanism.PARTNER_COPY,
        tolerance,
        True,
    )
    kept = [other for node in FIVE for other in plan.copies_of(node)]
    assert sorted(kept) == sorted(FIVE * tolerance)
    assert all(node not in plan.copies_of(node) for node in FIVE)


@pytest.mark.parametrize(
    ("tolerance", "budget_bytes", "mechanism"),
    [
        (1, 600, Mechanism.PARTNER_COPY),
        (1, 599, Mechanism.RING_PARITY),
        (2, 899, Mechanism.DOUBLE_PARITY),
    ],
)
def test_parity_is_taken_when_memory_has_no_room_for_copies(
    tolerance: int, budget_bytes: int, mechanism: Mechanism
) -> None:
    """Three slots of the own part and of each copy; people must be told why it is not a copy."""
    plan = _plan(FIVE, tolerance=tolerance, budget_bytes=budget_bytes)

    assert (plan.mechanism, plan.tolerance) == (mechanism, tolerance)
    assert plan.is_parity == (mechanism is not Mechanism.PARTNER_COPY)
    if plan.is_parity:
        assert plan.groups == (("a", "b", "c", "d", "e"),)
        assert plan.copies_of("a") == ()
        assert "partner copy for" in plan.reason
        assert "are free" in plan.reason


def test_before_the_first_snapshot_nothing_is_decided_that_could_be_wrong() -> None:
    """Copies that fill the memory would be in the way of the parities."""
    assert _plan(FIVE, size_bytes=0) == RedundancyPlan(
        reason="copies or parity: decided when the first snapshot shows its size", is_final=False
    )
    # Two nodes have no choice, and who asked for one has made it.
    assert _plan(("a", "b"), size_bytes=0).mechanism is Mechanism.PARTNER_COPY
    forced = _plan(FIVE, size_bytes=0, preference=Preference.PARITY)
    assert forced.mechanism is Mechanism.RING_PARITY


def test_parity_that_is_asked_for_is_a_copy_between_two_nodes() -> None:
    """After a loss there may be no more than two, and they can protect each other."""
    plan = _plan(("a", "b"), preference=Preference.PARITY)

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


def test_two_nodes_of_three_ranks_know_the_size_of_two_ranks() -> None:
    """The state is divided anew, and fewer ranks hold more each."""

    def part(step: int, rank: int, size_bytes: int) -> HeldPart:
        held = Held(
            slot=0,
            sequence=2,
            attempt=1,
            step=step,
            rank=rank,
            world_size=3,
            data_bytes=size_bytes - 10,
            record_bytes=10,
        )
        return HeldPart(arena=f"w{rank}.1", held=held)

    parts = (part(4, 0, 900), part(5, 0, 100), part(5, 1, 101))
    inventory = Inventory(node="a", host="", port=0, parts=parts)
    assert rank_bytes([inventory], 2) == 152
    assert rank_bytes([], 2) == 0
