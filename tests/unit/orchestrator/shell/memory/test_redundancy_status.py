"""For how long fewer node losses are survived than asked for, as the controller counts it."""

from typing import Any

import pytest

from orchestrator.core import Phase, RunState
from orchestrator.core.state import Node, freeze, thaw
from orchestrator.policies.saving.reduced import ALERT_S
from orchestrator.shell.memory.redundancy_status import ASK_EVERY_S, LOOK_S, ProtectionWatch
from orchestrator.shell.memory.snapshots import Snapshots
from tests.support.keeper_handles import LINEAGE, Handle, Handles, with_keepers
from tests.support.made import held_of
from ucp_core.storage import MemoryStore
from workers.protocol import Inventory, NodeReport, PartRef


def _at(phase: Phase, step: int) -> RunState:
    run = thaw(RunState())
    run.phase, run.attempt.step = phase, step
    return freeze(run)


def _reduced_for_s(states: list[RunState]) -> float | None:
    """Return what the status says after a look at each, when keepers hold nothing."""

    async def act(snapshots: Snapshots, _: dict[str, Handle]) -> Any:
        watch = ProtectionWatch(snapshots=snapshots, tolerance=1)
        for number, state in enumerate(states):
            watch.look(state, number * LOOK_S)
        return watch.redundancy(states[-1])["reduced_for_s"]

    found: float | None = with_keepers(MemoryStore(), act)
    return found


@pytest.mark.parametrize("phase", [Phase.FENCING, Phase.READING, Phase.WAITING])
def test_a_recovery_does_not_make_redundancy_whole(phase: Phase) -> None:
    """With a fault every 50 s, or while the run waited for a machine, it was never reported."""
    num_looks = round(ALERT_S / LOOK_S) + 1
    states = [_at(Phase.TRAINING, 5)] * num_looks
    states[num_looks // 2] = _at(phase, 5)

    assert _reduced_for_s(states) == ALERT_S
    assert _reduced_for_s([_at(phase, 5)] * num_looks) == ALERT_S


def test_reports_of_different_moments_do_not_show_too_little_protection() -> None:
    """With short steps reports had no version in common, and the status asked for more nodes."""
    run = thaw(_at(Phase.TRAINING, 7))
    run.attempt.number, run.lineage = 1, LINEAGE
    state = freeze(run)

    async def act(snapshots: Snapshots, handles: Handles) -> list[tuple[bool, int]]:
        for node, step in (("aa", 6), ("bb", 7)):
            held = [PartRef(node=node, arena=f"w{rank}", held=held_of(7, rank)) for rank in (0, 1)]
            handles[node]._inventory = Inventory(node=node, parts=tuple(held))
            other = PartRef(node=node, arena="w", held=held_of(step, step - 6))
            report = Inventory(node=node, parts=(other,))
            snapshots.on_report(NodeReport(node=node, seq=1, workers=(), inventory=report))
        watch = ProtectionWatch(snapshots=snapshots, tolerance=1)
        found = []
        for at_s in (0.0, ASK_EVERY_S - 1.0, ASK_EVERY_S):
            watch.look(state, at_s)
            asks = watch.asks(state, at_s)
            if asks:
                await watch.ask(state)
            found.append((asks, watch.redundancy(state)["node_losses_survived"]))
        handles["bb"].is_silent = True
        await watch.ask(state)
        return [*found, (False, watch.redundancy(state)["node_losses_survived"])]

    assert with_keepers(MemoryStore(), act) == [(True, 1), (False, 1), (True, 1), (False, 0)]


def test_before_the_first_step_there_is_nothing_to_protect() -> None:
    """A cluster that comes up slowly would begin with an alert."""
    states = [_at(Phase.WAITING, 0), _at(Phase.FORMING, 0), _at(Phase.TRAINING, 0)]

    assert _reduced_for_s(states) == 0.0


def test_it_is_said_once_that_a_node_which_was_left_is_not_needed() -> None:
    """Each time that it is said is an entry of the journal."""
    run = thaw(RunState())
    run.phase, run.attempt.number, run.attempt.step = Phase.TRAINING, 1, 7
    for number, name in enumerate(("aa", "bb", "cc")):
        run.fleet.nodes = run.fleet.nodes.set(number, Node(name=name))
    run.attempt.placed, run.lineage = ((0, (1,)), (1, (2,))), ((1, 0),)
    used = freeze(run)
    run = thaw(used)
    run.fleet.emptied = (2,)
    left = freeze(run)
    run = thaw(left)
    run.fleet.nodes = run.fleet.nodes.set(2, Node(name="cc", alive=False))
    lost = freeze(run)

    async def act(snapshots: Snapshots, handles: Handles) -> list[bool]:
        for node in handles:
            held = await handles[node].held.remote()
            snapshots.on_report(NodeReport(node=node, seq=1, workers=(), inventory=held))
        watch = ProtectionWatch(snapshots=snapshots, tolerance=0)
        careful = ProtectionWatch(snapshots=snapshots, tolerance=1)
        looks = enumerate([used, lost, left, left])
        return [watch.look(state, at_s) for at_s, state in looks] + [careful.look(left, 0.0)]

    assert with_keepers(MemoryStore(), act) == [False, False, True, False, False]
