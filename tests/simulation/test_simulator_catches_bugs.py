"""The simulator is tested by breaking the machine on purpose.

Each bug is one that a hasty change could bring; each must be found within ``SEEDS`` histories,
and by the checker that is meant for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import pytest

from orchestrator.core import Compaction, Phase
from orchestrator.core import events as ev
from orchestrator.core.consequences import BoundReached, RecoveryAdvanced
from orchestrator.core.handlers import deadlines as on_time
from orchestrator.core.handlers import (
    demand,
    fleet,
    formation,
    planned,
    protection,
    recovery,
    resume,
    sharing,
    survey,
)
from orchestrator.core.handlers import fleet_events as on_fleet
from orchestrator.core.handlers import member_events as on_members
from orchestrator.core.network import links, reach, search
from orchestrator.core.phase_table import TABLE, row
from orchestrator.core.state import MutableRunState, Node, Pair, worker_number
from orchestrator.core.transition import Transition
from orchestrator.diagnosis import live
from orchestrator.diagnosis.slow import Lag
from orchestrator.policies import RedundancyPlan, Share, budgets, versions
from tests.simulation.faults import drawing
from tests.simulation.history import run_history
from tests.simulation.violation import Violation
from tests.simulation.world import Storage, Tiers

SEEDS = 1500
#: Memory protects every step, by a plan that is open until the first snapshot.
SNAPSHOTS = Tiers(snapshot_every=1, store_every=10, tolerance=1, mechanism="auto")


def _members_out(transition: Transition) -> None:
    """Take all members for gone, without having heard from them."""
    run = transition.run
    for number in run.attempt.members:
        if number in run.attempt.inside:
            fleet.leave(transition, [number])


def _first_lags(slower: Any, *_: Any, **__: Any) -> dict[int, Lag]:
    if not slower.get(0):
        return {}
    # As if it had been as slow in each step: the judge looks whether it was.
    slower[0].update(dict.fromkeys(slower[0], math.log(3.0)))
    return {0: Lag(3.0, min(slower[0]))}


def _start_before_the_fence_is_answered(transition: Transition, advanced: Any) -> None:
    _members_out(transition)
    recovery.read_once_all_left(transition, advanced)


def _do_not_wait_for_all_to_yield(transition: Transition) -> None:
    if transition.run.attempt.yielded_step >= 0:
        _members_out(transition)
    _ALL_LEFT(transition)


def _trust_reports(_transition: Transition) -> bool:
    return True


def _take_an_early_read_for_final(transition: Transition) -> bool:
    return transition.run.reads.seen or _KNOWN_IS_FINAL(transition)


def _take_parts_for_versions(version: Any) -> bool:
    return bool(version.parts)


def _forget_the_lineage(**_: Any) -> bool:
    return True


def _resume_where_the_attempt_began(transition: Transition) -> None:
    transition.run.committed = transition.run.attempt.committed_at_start
    _WAIT(transition)


def _forget_the_attempt_number(transition: Transition, event: Any) -> list[int]:
    numbers = map(worker_number, (event.worker, *event.others))
    return [number for number in numbers if number in transition.run.attempt.inside]


def _blame_who_reports_first(transition: Transition, event: ev.WorkerLeft) -> None:
    _WORKER_LEFT[transition.run.phase](transition, event)
    cause = transition.run.cause
    if event.how == ev.Leaving.PEER_LOST and cause is not None and cause.kind == "peer_lost":
        transition.run.cause = replace(cause, guilty=(event.worker,))


def _kill_who_lost_its_peers(transition: Transition, event: ev.WorkerLeft) -> None:
    found = fleet.find_worker(transition, event.worker)
    is_inside = found is not None and found[0] in transition.run.attempt.inside
    if found is not None and is_inside and event.how == ev.Leaving.PEER_LOST:
        fleet.kill_worker(transition, found[0], "lost its peers")
    _WORKER_LEFT[transition.run.phase](transition, event)


def _bind_two_workers_to_a_reservation(_transition: Transition, node: Node) -> list[int]:
    return list(node.reservations)


def _keep_reservations_of_lost_nodes(transition: Transition, numbers: Sequence[int]) -> None:
    fleet.drop_reservations(transition, numbers)


def _take_what_was_being_read(transition: Transition, *found: Any) -> None:
    number, was_seen = transition.run.reads.bad_from, transition.run.reads.seen
    _LEAVE_OUT(transition, *found)
    transition.run.reads.bad_from, transition.run.reads.seen = number, was_seen


def _regular_interval(tiers: Tiers) -> int:
    return gcd(tiers.snapshot_every, tiers.store_every)


def _always(*_: Any, **__: Any) -> bool:
    return True


def _never_look(*_: Any, **__: Any) -> None:
    """Do nothing where a bound, an event or a restart should have been handled."""


def _adopt_blindly(*_: Any) -> bool:
    return False


def _no_pairs(*_: Any, **__: Any) -> tuple[Pair, ...]:
    return ()


def _strike_the_ends(transition: Transition, event: ev.LinksProbed) -> None:
    for name in {end for way in event.lost for end in way}:
        fleet.strike(transition, fleet.find_node(transition, name))
    search.links_probed(transition, event)


def _wait_on(transition: Transition, *_: Any) -> None:
    transition.run.deadline_s = transition.now_s + 1.0


def _restart(transition: Transition, event: ev.RunResumed) -> None:
    transition.run = MutableRunState(incarnation=event.incarnation)
    formation.wait(transition)


def _forget_what_was_committed(transition: Transition, event: ev.RunResumed) -> None:
    _RUN_RESUMED(transition, event)
    formation.wait(transition)


def _take_it_for_the_end(*_: Any) -> list[bytes]:
    return []


def _no_nodes(_transition: Transition) -> dict[int, Node]:
    """Take no node for one that is taken soon."""
    return {}


def _hold_all_others_for_urgent(*arguments: Any, **named: Any) -> Share:
    return replace(_OWN_SHARE(*arguments, **named), priority=-9)


def _need_no_workers(*arguments: Any, **named: Any) -> Share:
    return replace(_OWN_SHARE(*arguments, **named), num_min=0)


@dataclass(frozen=True)
class Bug:
    """Where to put which function, which promises may tell, and in which histories to look.

    Histories before ``first_seed`` do not show the bug. ``single`` is the one fault of each
    history, if only one can show it.
    """

    place: Any
    name: Any
    function: Any
    promises: tuple[str, ...]
    first_seed: int = 0
    single: drawing.Fault | None = None


def _count_lost_peers(faults: Any, **named: Any) -> str:
    return _OVERSPENT(faults, **{**named, "num_unexplained": 0})


def _protect_nothing(*_: Any) -> RedundancyPlan:
    return RedundancyPlan()


BUGS = {
    "starts before the fence is answered": Bug(
        TABLE[RecoveryAdvanced],
        Phase.FENCING,
        _start_before_the_fence_is_answered,
        ("S1", "S3", "invariant", "L1"),
    ),
    "does not wait for all to yield": Bug(
        planned, "all_left", _do_not_wait_for_all_to_yield, ("S1", "invariant")
    ),
    "trusts reports and does not read": Bug(
        recovery, "_known_is_final", _trust_reports, ("S3", "S6", "L1", "S2")
    ),
    "takes an early read for final": Bug(
        recovery, "_known_is_final", _take_an_early_read_for_final, ("S3", "L3"), first_seed=1025
    ),
    "expects no last snapshots between the regular ones": Bug(
        Tiers, "commit_every", property(_regular_interval), ("S3", "L3"), first_seed=570
    ),
    "resumes where the attempt began": Bug(
        recovery, "wait", _resume_where_the_attempt_began, ("S3", "S6")
    ),
    "forgets the attempt number": Bug(
        on_members,
        "_members",
        _forget_the_attempt_number,
        ("S1", "S3", "invariant"),
        first_seed=175,
    ),
    "blames who reports first": Bug(TABLE, ev.WorkerLeft, row(_blame_who_reports_first), ("S5",)),
    "kills who lost its peers": Bug(TABLE, ev.WorkerLeft, row(_kill_who_lost_its_peers), ("S5",)),
    "binds two workers to a reservation": Bug(
        fleet, "free_reservations", _bind_two_workers_to_a_reservation, ("invariant", "S1")
    ),
    "keeps the reservations of lost nodes": Bug(
        demand, "release_reservations", _keep_reservations_of_lost_nodes, ("L1",)
    ),
    "has no bound for fencing": Bug(TABLE[BoundReached], Phase.FENCING, _wait_on, ("L1",)),
    "has no bound for forming": Bug(
        TABLE[BoundReached], Phase.FORMING, _wait_on, ("L1",), first_seed=810
    ),
    "has no bound for reading": Bug(TABLE[BoundReached], Phase.READING, _wait_on, ("L1",)),
    "has no bound for starting": Bug(on_time, "_look_at_workers", _never_look, ("L1",)),
    "ignores a hang": Bug(TABLE, ev.HangFound, row(_never_look), ("L1",)),
    "kills who is at work": Bug(TABLE, ev.MembersAtWork, row(_never_look), ("S5",)),
    "kills who is about to get ready": Bug(TABLE, ev.StartsAdvanced, row(_never_look), ("S5",)),
    "ignores a lost node": Bug(
        on_fleet, "lose_node", _never_look, ("L1", "S1", "S5"), first_seed=100
    ),
    "adopts blindly after a restart": Bug(survey, "_fences", _adopt_blindly, ("L1", "invariant")),
    "takes parts for versions": Bug(
        versions, "_is_whole", _take_parts_for_versions, ("S2", "S3", "L1", "L3")
    ),
    # A keeper has to be away while the run goes on without what it holds: 1 of 1500 histories.
    "takes fenced snapshots for history": Bug(
        versions, "counts", _forget_the_lineage, ("S3",), first_seed=3100
    ),
    "loads what is bad again": Bug(recovery, "leave_out", _never_look, ("S6",), first_seed=35),
    "loads what was read before it was known to be bad": Bug(
        recovery, "leave_out", _take_what_was_being_read, ("S6",), first_seed=490
    ),
    "forgets the history of a run that is resumed": Bug(
        TABLE, ev.RunResumed, row(_restart, over=_restart), ("S1", "S3", "L1")
    ),
    "does not read what a run that is resumed has committed": Bug(
        TABLE,
        ev.RunResumed,
        row(_forget_what_was_committed, over=_forget_what_was_committed),
        ("S3", "L3"),
        first_seed=570,
    ),
    "takes a stale state for that of a newer journal": Bug(
        Compaction, "behind", _take_it_for_the_end, ("L1",)
    ),
    "does not protect snapshots": Bug(
        protection, "plan", _protect_nothing, ("L3",), single=drawing.lose_node
    ),
    "leaves open how to protect snapshots": Bug(
        TABLE, ev.MemoryMeasured, row(_never_look), ("L3",), single=drawing.lose_node
    ),
    "lets a keeper be silent": Bug(
        TABLE, ev.KeeperSilent, row(_never_look), ("L2",), single=drawing.stop_keeper
    ),
    "gives up on connections that are reset": Bug(
        budgets, "overspent", _count_lost_peers, ("L1",), first_seed=150
    ),
    "takes lost links for whole": Bug(links, "apart", _no_pairs, ("L1",)),
    "does not look for lost links": Bug(search, "begin", _never_look, ("L1",), first_seed=440),
    "never probes a lost link again": Bug(search, "probe_due_links", _never_look, ("L1",)),
    "does not replace who is not reached": Bug(
        demand, "replace_unreached", _never_look, ("L1",), first_seed=140
    ),
    "begins where a node is about to be taken": Bug(
        reach, "due", _no_nodes, ("L3",), first_seed=205
    ),
    "strikes the ends of lost links": Bug(TABLE, ev.LinksProbed, row(_strike_the_ends), ("S5",)),
    "takes a run directory for its own for ever": Bug(
        Storage, "owns", _always, ("S2",), first_seed=245
    ),
    "ends keepers before others hold what they do": Bug(
        versions, "protects", _always, ("L3",), first_seed=430
    ),
    "gives workers to runs that are less urgent": Bug(
        sharing, "own_share", _hold_all_others_for_urgent, ("S5",), first_seed=1205
    ),
    "gives workers that it needs to train": Bug(
        sharing, "own_share", _need_no_workers, ("L1", "invariant"), first_seed=55
    ),
    "blames a healthy rank for being slow": Bug(live, "lagging", _first_lags, ("S5",)),
    "refuses a layout that lacked memory once": Bug(
        on_members, "_is_short_first", _never_look, ("L1",)
    ),
    "goes on from what a worker that errs has computed": Bug(
        on_members, "_go_back", _never_look, ("S6", "S3")
    ),
    "keeps a worker that errs": Bug(on_members, "_leave_node", _never_look, ("S5",)),
    "starts no worker processes": Bug(demand, "_staff", _never_look, ("L1",)),
}

_WORKER_LEFT = TABLE[ev.WorkerLeft]
_OVERSPENT = budgets.overspent
_OWN_SHARE = sharing.own_share
_ALL_LEFT = planned.all_left
_LEAVE_OUT = recovery.leave_out
_KNOWN_IS_FINAL = recovery._known_is_final
_WAIT = formation.wait
_RUN_RESUMED = resume.run_resumed


@pytest.mark.parametrize("name", sorted(BUGS))
def test_a_broken_machine_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulator that has never failed shows nothing."""
    bug = BUGS[name]
    if isinstance(bug.place, dict):
        monkeypatch.setitem(bug.place, bug.name, bug.function)
    else:
        monkeypatch.setattr(bug.place, bug.name, bug.function)
    with pytest.raises(Violation) as caught:
        _run_histories(bug)
    assert str(caught.value).startswith(bug.promises)


def _run_histories(bug: Bug) -> None:
    for seed in range(bug.first_seed, bug.first_seed + SEEDS):
        if bug.single is None:
            run_history(seed)
        else:
            run_history(seed, fault_limit=1, kinds=[bug.single], tiers=SNAPSHOTS)
