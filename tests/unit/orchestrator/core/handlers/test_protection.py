"""The plan of protection: made when an attempt starts, revised once snapshots have a size."""

from dataclasses import replace
from functools import partial

import pytest

from orchestrator.core import RunRules, RunState, describe
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.policies import LayoutRules, Mechanism
from orchestrator.traffic import Topology
from tests.support.made import held_of
from tests.support.obedient_cluster import fold
from tests.support.run_events import granted_on, ready_on
from workers.protocol import PartRef
from workers.settings import SnapshotSettings

RULES = RunRules(
    run="test",
    min_workers=3,
    max_workers=3,
    total_steps=100,
    snapshot=SnapshotSettings(tolerance=1),
)
REPLICAS = replace(RULES, layout=LayoutRules(dp_replicate=3))
NODES = ("a", "b", "c")


_fold = partial(fold, rules=RULES)


def _started(
    rules: RunRules = RULES,
    *,
    racks: tuple[str, ...] = ("", "", ""),
    nodes: tuple[str, ...] = NODES,
) -> RunState:
    """Return a run whose first attempt forms on three nodes, or on ``nodes``."""
    state, _ = _fold(
        RunState(),
        ev.ControllerStarted(at_s=0.0, incarnation=1),
        *(ev.NodeJoined(at_s=0.0, node=n, rack=r) for n, r in zip(nodes, racks, strict=True)),
        *granted_on(nodes),
        *ready_on(nodes),
        rules=rules,
    )
    return state


def _measured(state_bytes: int, budget_bytes: int = 1 << 30) -> ev.MemoryMeasured:
    budgets = tuple((node, budget_bytes) for node in NODES)
    return ev.MemoryMeasured(at_s=2.0, budgets=budgets, state_bytes=state_bytes)


@pytest.mark.parametrize(
    ("budget_bytes", "mechanism"), [(1 << 30, Mechanism.PARTNER_COPY), (45, Mechanism.RING_PARITY)]
)
def test_the_first_snapshot_decides_between_copies_and_parity(
    budget_bytes: int, mechanism: Mechanism
) -> None:
    """Its size is not known before; what was decided stays until the next attempt."""
    state = _started()
    assert not state.attempt.plan.is_final

    state, (order,) = _fold(state, _measured(30, budget_bytes))
    assert isinstance(order, act.OrderKeepers)
    assert (order.attempt, order.nodes, order.plan.mechanism) == (1, NODES, mechanism)
    assert state.attempt.plan == order.plan

    _, again = _fold(state, _measured(3000, budget_bytes))
    assert again == []


@pytest.mark.parametrize(("budget_bytes", "has_room"), [(60, True), (59, False)])
def test_replicas_without_room_for_each_others_shares_keep_parities_once_that_is_known(
    budget_bytes: int, *, has_room: bool
) -> None:
    """The first attempt begins before any size is known; a whole run may be that one attempt."""
    state = _started(REPLICAS)
    told = state.attempt.plan
    assert told.guards is not None

    state, (order,) = _fold(state, _measured(30, budget_bytes), rules=REPLICAS)
    assert isinstance(order, act.OrderKeepers)
    assert (order.plan.guards == told.guards, order.plan.is_parity) == (has_room, not has_room)
    assert ("redundant copy of replicas needs 60 B" in order.plan.reason) == (not has_room)


def test_the_next_attempt_is_planned_by_what_is_known() -> None:
    """Its workers are told at its start; a lost node's memory is gone."""
    state, _ = _fold(_started(), _measured(30, 40))
    fault = ev.WorkerExited(at_s=3.0, worker="w0001", cause="crash", detail="")
    state, _ = _fold(state, ev.NodeLost(at_s=3.0, node="c", cause="gone"), fault)

    budgets = [node.budget_bytes for node in state.fleet.nodes.values()]
    assert budgets == [40, 40, 0]


def test_racks_that_nodes_share_are_told() -> None:
    """Two machines behind one switch are one loss."""
    rules = replace(RULES, snapshot=SnapshotSettings(tolerance=1, mechanism="copy"))
    assert _started(rules, racks=("r", "s", "t")).attempt.plan.shared_racks == ()
    assert _started(rules, racks=("r", "r", "r")).attempt.plan.shared_racks == ("r",)


def test_keepers_are_told_what_is_bad_while_the_attempt_trains() -> None:
    """A rank that found a damaged copy loads another; no other rank may be offered it."""
    bad = (PartRef(node="a", arena="w0.0", held=held_of(7, 0)).source,)
    formed = ev.WorkerFormed(at_s=2.0, attempt=1, worker="w0001", damaged=bad)
    _, (order,) = _fold(_started(), formed)

    assert isinstance(order, act.OrderKeepers)
    assert order.bad == bad


def test_a_restarted_controller_tells_keepers_again_what_its_journal_says() -> None:
    """It is unknown whether the order of the dead controller was sent."""
    state, _ = _fold(
        _started(),
        *(ev.WorkerFormed(at_s=1.5, attempt=1, worker=f"w{i:04d}") for i in (1, 2, 3)),
        _measured(30),
    )
    _, actions = _fold(
        state,
        ev.ControllerStarted(at_s=3.0, incarnation=2),
        ev.WorkersSurveyed(
            at_s=3.1,
            alive=tuple((f"w{i:04d}", n, 1) for i, n in enumerate(NODES, start=1)),
            reservations=tuple(enumerate(NODES, start=1)),
            pending_reservations=(),
        ),
    )
    (order,) = (action for action in actions if isinstance(action, act.OrderKeepers))
    assert order.plan == state.attempt.plan
    assert order.plan.is_final


def test_keepers_are_where_copies_meet_least_of_what_training_sends() -> None:
    """Each rack is in another zone than the next one, and the zones' link is thin."""
    nodes = ("a", "b", "c", "d")
    rules = replace(
        RULES,
        min_workers=4,
        max_workers=4,
        snapshot=SnapshotSettings(tolerance=1, mechanism="copy"),
    )
    zones = {"r1": "east", "r2": "west", "r3": "east", "r4": "west"}
    topology = Topology(racks={}, zones=zones, node_bytes_s=10.0, zone_bytes_s=1.0)
    racks = tuple(zones)

    plain = _started(rules, racks=racks, nodes=nodes).attempt.plan
    near = _started(replace(rules, topology=topology), racks=racks, nodes=nodes).attempt.plan
    assert plain.keepers == {"a": ("b",), "b": ("c",), "c": ("d",), "d": ("a",)}
    assert near.keepers == {"a": ("c",), "b": ("d",), "c": ("a",), "d": ("b",)}


def test_what_a_step_sends_is_known_from_then_on() -> None:
    sent = (("dp_shard", 3e6),)
    state, _ = _fold(_started(), ev.TrafficMeasured(at_s=2.0, attempt=1, sent=sent))

    assert state.sent == sent
    assert describe(state)["sent"] == {"dp_shard": 3e6}
