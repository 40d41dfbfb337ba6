from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.errors import ConfigError
from orchestrator.policies import (
    LayoutRules,
    LossFacts,
    StoredVersion,
    WorkerPlace,
    complete,
    plan_recovery,
)
from orchestrator.policies.versions import newest_stored, protection, protects
from tests.support.made import held_of
from workers.protocol import Covered, Held, Inventory, Member, PartRef

LINEAGE = ((1, 0),)


def _held(step: int, rank: int, *, attempt: int = 1, world_size: int = 2) -> Held:
    return held_of(
        step, rank, attempt=attempt, world_size=world_size, data_bytes=100 + rank, record_bytes=10
    )


def _inventory(node: str, own: Sequence[Held], copies: Sequence[Held] = ()) -> Inventory:
    parts = [PartRef(node=node, arena=f"w{held.rank:04d}.0", held=held) for held in own]
    parts += [PartRef(node=node, arena=f"other/w{held.rank:04d}.0", held=held) for held in copies]
    return Inventory(node=node, parts=tuple(parts))


#: Two nodes with a rank each; both copied step 8 of the other, only step 9 is not copied yet.
PAIR = (
    _inventory("aa", [_held(8, 0), _held(9, 0)], [_held(8, 1)]),
    _inventory("bb", [_held(8, 1), _held(9, 1)], [_held(8, 0)]),
)
FACTS = LossFacts(
    step=9,
    num_members=2,
    reservations={"aa": 1, "bb": 1},
    workers=(
        WorkerPlace(worker="w0000", node="aa"),
        WorkerPlace(worker="w0001", node="bb"),
        WorkerPlace(worker="w0002", node="aa"),
    ),
    held=tuple(complete(PAIR, LINEAGE)),
    stored=StoredVersion(step=5, attempt=1, part_bytes=(100, 101)),
    min_workers=1,
    max_workers=2,
    layout=LayoutRules(),
)


def test_parts_of_different_sizes_are_no_version() -> None:
    """A damaged header may say anything; to load half a state would be worse than none."""
    odd = [_inventory("aa", [_held(9, 0), _held(9, 1, world_size=3)])]

    assert complete(odd, LINEAGE) == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"tolerance": 2}, False),
        ({"nodes": {"aa"}}, False),
        ({"attempt": 2}, False),
        ({"total_steps": 8}, False),
    ],
)
def test_a_keeper_is_needless_once_the_nodes_of_the_attempt_can_do_without(
    changed: dict[str, Any], *, expected: bool
) -> None:
    """Its version of an older attempt must not go before a newer one is as safe."""
    older = _inventory("cc", [_held(7, 0), _held(7, 1)], [_held(8, 1)])
    asked = {"attempt": 1, "nodes": {"aa", "bb"}, "tolerance": 1, "total_steps": 100, **changed}

    assert protects((*PAIR, older), LINEAGE, **asked) is expected


def test_losing_a_process_costs_nothing_that_its_node_holds() -> None:
    """The keeper outlives the trainer, and a standby of the same node takes its reservation."""
    plan = plan_recovery(FACTS, ["worker:w0000"])

    assert (plan.step, plan.source, plan.lost_steps) == (9, "memory", 0)
    assert plan.bytes_by_source == {"local memory": 201}
    assert (plan.workers_before, plan.workers_after) == (2, 2)
    assert plan.lost_workers == ("w0000",)


def test_losing_a_node_goes_back_to_what_was_copied() -> None:
    """The newest version is gone with the node; the one before is on the other one."""
    plan = plan_recovery(FACTS, ["b"])

    assert (plan.step, plan.source, plan.lost_steps) == (8, "memory", 1)
    assert [(part.rank, part.source, part.node) for part in plan.parts] == [
        (0, "local memory", "aa"),
        (1, "local memory", "aa"),
    ]
    assert plan.lost_nodes == ("bb",)
    assert plan.lost_workers == ("w0001",)
    assert (plan.workers_after, plan.layout_after) == (1, "1 worker")


def test_what_another_node_holds_comes_over_the_network() -> None:
    """A third node has room for the lost one's work and nothing of the state."""
    facts = replace(
        FACTS,
        reservations={"aa": 1, "bb": 1, "cc": 1},
        workers=(*FACTS.workers, WorkerPlace(worker="w0003", node="cc")),
    )
    plan = plan_recovery(facts, ["bb"])

    assert plan.workers_after == 2
    assert [(part.rank, part.source, part.node, part.size_bytes) for part in plan.parts] == [
        (0, "local memory", "aa", 100),
        (1, "peer memory", "aa", 101),
    ]


def test_what_no_memory_has_is_computed_from_parities() -> None:
    """With two of them, two nodes may go; the answer names what is computed, and how much."""
    members = tuple(Member(rank=rank, data_bytes=100 + rank, record_bytes=10) for rank in range(4))
    group = [
        Inventory(
            node=node * 2,
            parts=(PartRef(node=node * 2, arena="w.0", held=_held(9, rank, world_size=4)),),
            parities=(
                PartRef(
                    node=node * 2,
                    arena="parity/0.1",
                    held=_held(9, -1 - rank, world_size=4),
                    covered=Covered(tolerance=2, place=rank, members=members),
                ),
            ),
        )
        for rank, node in enumerate("abcd")
    ]
    facts = replace(
        FACTS,
        num_members=4,
        reservations={one.node: 1 for one in group},
        workers=tuple(
            WorkerPlace(worker=f"w{rank:04d}", node=one.node) for rank, one in enumerate(group)
        ),
        held=tuple(complete(group, LINEAGE)),
        max_workers=4,
    )
    plan = plan_recovery(facts, ["bb", "dd"])

    assert protection(group, LINEAGE).node_losses_survived == 2
    assert protection(group[1:], LINEAGE).node_losses_survived == 1
    assert (plan.step, plan.source, plan.lost_steps) == (9, "memory", 0)
    assert plan.bytes_by_source == {"local memory": 202, "parity": 204}
    assert [(part.rank, part.size_bytes) for part in plan.parts if part.source == "parity"] == [
        (1, 101),
        (3, 103),
    ]
    assert plan_recovery(facts, ["aa", "bb", "dd"]).source == "storage"


def test_shares_add_up_when_the_number_of_workers_changes() -> None:
    """Bytes that are counted twice, or not at all, would make the answer a guess."""
    held = tuple(complete([_inventory("aa", [_held(9, 0), _held(9, 1)])], LINEAGE))
    places = tuple(WorkerPlace(worker=f"w{n:04d}", node="abc"[n % 3] * 2) for n in range(3))
    facts = replace(
        FACTS, reservations={"aa": 1, "bb": 1, "cc": 1}, workers=places, held=held, max_workers=3
    )
    plan = plan_recovery(facts, [])

    assert plan.workers_after == 3
    assert [(part.rank, part.source, part.size_bytes) for part in plan.parts] == [
        (0, "local memory", 66),
        (0, "peer memory", 34),
        (1, "peer memory", 101),
    ]


def test_losing_everything_goes_back_to_storage_and_waits() -> None:
    """The answer has to be honest where it hurts."""
    plan = plan_recovery(FACTS, ["aa", "bb"])

    assert (plan.step, plan.source, plan.lost_steps) == (5, "storage", 4)
    assert plan.bytes_by_source == {"storage": 201}
    assert (plan.workers_after, plan.layout_after) == (0, "")


@pytest.mark.parametrize(
    ("lose", "said"),
    [
        (["x"], "is not a node"),
        ([""], "is not a node"),
        (["worker:w0009"], "w0009 is not in the run"),
    ],
)
def test_a_node_outside_of_the_run_cannot_be_lost(lose: list[str], said: str) -> None:
    """A typing error would otherwise be answered with good news."""
    with pytest.raises(ConfigError, match=said):
        plan_recovery(FACTS, lose)


def test_a_beginning_that_fits_two_nodes_is_refused() -> None:
    """Ids are long and alike."""
    facts = replace(FACTS, reservations={"aa": 1, "ab": 1})

    with pytest.raises(ConfigError, match="beginning of 2 nodes"):
        plan_recovery(facts, ["a"])


@pytest.mark.parametrize(
    ("known", "read", "damaged", "expected"),
    [
        (0, 0, [], 0),
        (0, 20, [], 20),
        (20, 0, [], 20),
        (20, 10, [], 20),
        (20, 30, [40], 30),
        (20, 10, [20], 10),
        (20, 10, [30], 20),
        (20, 0, [20], 1),
    ],
    ids=["nothing", "first", "gone", "older", "newer", "damaged", "not_that", "all_damaged"],
)
def test_a_run_falls_behind_what_was_stored_only_where_that_is_damaged(
    known: int, read: int, damaged: list[int], expected: int
) -> None:
    """A missing version was taken away, and a damaged one may be repaired: neither is step 0."""
    assert newest_stored(known, read, damaged) == expected


def test_a_plan_uses_nodes_that_leave_only_where_the_run_would_stand_still() -> None:
    """Whatever ends an attempt has it leave them at once, and not when their time has come."""
    facts = replace(
        FACTS,
        reservations={"aa": 1, "bb": 1, "cc": 1},
        workers=tuple(WorkerPlace(worker=f"w{node}", node=node) for node in ("aa", "bb", "cc")),
        max_workers=3,
        leaving=frozenset({"aa"}),
    )

    assert plan_recovery(facts, ["cc"]).workers_after == 1
    assert plan_recovery(replace(facts, min_workers=2), ["cc"]).workers_after == 2
    assert plan_recovery(replace(facts, min_workers=2), ["bb", "cc"]).workers_after == 0
