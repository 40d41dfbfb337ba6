"""Verdicts, and above all their absence, in small hand-written histories of four workers."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from orchestrator.detection import (
    Detector,
    Hang,
    Judgement,
    NodeSilent,
    Stalled,
    judge,
    limits_from,
)
from orchestrator.diagnosis import graph_of
from orchestrator.fault_kinds import FaultKind
from tests.support.histories import ATTEMPT, WORKERS, calm, group, stop, watch
from workers.protocol import WorkerPhase, WorkerReport
from workers.telemetry import OP_CODES, history_after

LIMITS = limits_from(0.2)
PAUSED_S = LIMITS.pause_s + 1.0
WORLD = (0, 1, 2, 3)
IN_OWN_CODE = [
    WorkerPhase.FORWARD,
    WorkerPhase.BACKWARD,
    WorkerPhase.REDUCING,
    WorkerPhase.UPDATING,
    WorkerPhase.SCRIPT,
]


def rows_with(**changed: WorkerReport) -> list[WorkerReport]:
    """Return four workers that wait in all-reduce 9 of the world, except those that are given."""
    waiting = {
        worker: replace(
            calm(worker, rank), groups=(group("world", WORLD, 9, waiting_s=2.0),), phase_s=2.0
        )
        for rank, worker in enumerate(WORKERS)
    }
    return list({**waiting, **changed}.values())


def absent(worker: str, rank: int, *, seq: int = 8) -> WorkerReport:
    """Return a worker that computes and has not called what the others wait in."""
    return replace(calm(worker, rank), groups=(group("world", WORLD, seq),))


def judged(
    state: Detector, at_s: float, *, collectives_fail_s: float = inf
) -> Hang | NodeSilent | None:
    """Return what is proven."""
    found = judge(
        state,
        at_s,
        attempt=ATTEMPT,
        members=WORKERS,
        limits=LIMITS,
        collectives_fail_s=collectives_fail_s,
    )
    return None if isinstance(found, Stalled) else found


def verdict_on(rows: list[WorkerReport], *, for_s: float) -> Hang:
    verdict = judged(*watch(rows, for_s=for_s))
    assert isinstance(verdict, Hang), verdict
    return verdict


def test_the_rank_that_all_others_wait_for_is_named() -> None:
    """It is not the only one that stands still; the others do, too."""
    verdict = verdict_on(rows_with(w2=absent("w2", 2)), for_s=PAUSED_S)

    assert (verdict.guilty, verdict.rule) == (("w2",), "missing")
    assert verdict.evidence == (
        "missing: Rank 2 did not call all_reduce number 9 of world, in which ranks 0, 1, 3 wait. "
        "Rank 2 (w2) beat 0.1 s ago, is in state S, and has used no processor time for 121.0 s "
        "(if it may pause this long, raise recovery.patience); no progress for 121.00 s"
    )


def test_a_device_that_has_not_reached_what_its_process_called_stands_still() -> None:
    """Its process waits for it, and looks as one that computes nothing."""
    behind = replace(group("world", WORLD, 8), num_ahead=3)
    stuck = replace(absent("w2", 2), groups=(behind,))
    verdict = verdict_on(rows_with(w2=stuck), for_s=PAUSED_S)

    assert (verdict.guilty, verdict.kind) == (("w2",), FaultKind.DEVICE_STUCK)
    assert "Rank 2 did not reach all_reduce number 9 of world" in verdict.evidence
    assert "and has a device that is 3 calls behind in world" in verdict.evidence

    rows = rows_with(w1=absent("w1", 1), w2=stuck)
    assert verdict_on(rows, for_s=PAUSED_S).kind is FaultKind.ABSENT, (
        "one of two is known to be away"
    )


def test_no_rank_is_named_before_the_limit() -> None:
    """A pause shorter than the bound happens: a download, a child that compiles, a checkpoint."""
    assert judged(*watch(rows_with(w2=absent("w2", 2)), for_s=119.0)) is None
    assert judged(*watch(rows_with(w2=stop(absent("w2", 2))), for_s=0.5)) is None


def test_a_process_that_the_kernel_holds_is_named_before_a_step_is_overdue() -> None:
    """It is proof by itself; every moment until the hang bound would be lost."""
    verdict = verdict_on(rows_with(w2=stop(absent("w2", 2))), for_s=0.75)

    assert (verdict.guilty, verdict.rule) == (("w2",), "stopped")


def test_a_stopped_process_is_named_soon_though_some_steps_were_slow() -> None:
    """How slow the slowest step is says nothing about a process that the kernel holds."""
    limits = limits_from(1.0, step_s_p50=0.2)
    stopped = rows_with(w2=stop(absent("w2", 2), for_s=0.75))
    hung = rows_with(w2=absent("w2", 2))
    gone = rows_with(w2=replace(absent("w2", 2), os_state="Z"))

    found = [
        judge(*watch(rows, for_s=0.75), attempt=ATTEMPT, members=WORKERS, limits=limits)
        for rows in (stopped, hung, gone)
    ]

    assert isinstance(found[0], Hang)
    assert (found[0].guilty, found[0].rule) == (("w2",), "stopped")
    assert found[1:] == [None, None], "what only looks slow needs a step to be overdue"


def test_a_process_that_is_held_for_a_moment_is_not_named() -> None:
    """A profiler stops what it looks at, and can do so when a step is slow for another reason."""
    held = replace(absent("w2", 2), os_state="T", beat_age_s=0.1)

    assert judged(*watch(rows_with(w2=held), for_s=0.75)) is None


def test_a_short_stop_is_forgiven() -> None:
    """Once the stopped process goes on, its earlier stop must not count towards the next one."""
    state, at_s = watch(rows_with(w2=stop(absent("w2", 2))), for_s=0.75)
    moved = [replace(row, step=8, groups=()) for row in rows_with()]
    state, at_s = watch(moved, for_s=0.25, state=state, from_s=at_s + 0.25)
    state, at_s = watch(
        rows_with(w2=stop(absent("w2", 2), for_s=0.3)), for_s=0.5, state=state, from_s=at_s + 0.25
    )

    assert judged(state, at_s) is None


def test_a_stopped_rank_is_named_though_it_is_inside_the_collective() -> None:
    """It has called what the others wait in, so by the ring alone no rank is missing."""
    inside = replace(calm("w2", 2), groups=(group("world", WORLD, 9, waiting_s=2.0),))

    verdict = verdict_on(rows_with(w2=stop(inside)), for_s=1.25)

    assert (verdict.guilty, verdict.rule) == (("w2",), "stopped")


def test_the_rank_next_to_a_stopped_one_is_not_named() -> None:
    """Measured on gloo: the neighbour of a stopped rank is one collective behind the others."""
    behind = replace(calm("w1", 1), groups=(group("world", WORLD, 8, waiting_s=2.0),))

    verdict = verdict_on(rows_with(w1=behind, w2=stop(absent("w2", 2, seq=7))), for_s=1.25)

    assert verdict.guilty == ("w2",)


def test_a_rank_behind_that_waits_is_not_named() -> None:
    """The same without a stopped process: rank 1 waits in an older collective for the network."""
    behind = replace(calm("w1", 1), groups=(group("world", WORLD, 8, waiting_s=2.0),))

    verdict = verdict_on(rows_with(w1=behind), for_s=4.0)

    assert not verdict.guilty
    assert verdict.guilty == ()


def test_a_chain_over_groups_leads_to_its_end() -> None:
    """w1 has not called what w0 waits in, but it waits for w3 in another group."""
    rows = [
        replace(calm("w0", 0), groups=(group("dp[0,1]", (0, 1), 5, waiting_s=2.0),)),
        replace(
            calm("w1", 1),
            groups=(group("dp[0,1]", (0, 1), 4), group("tp[1,3]", (1, 3), 6, waiting_s=2.0)),
        ),
        replace(calm("w2", 2), groups=(group("dp[2,3]", (2, 3), 5, waiting_s=2.0),)),
        replace(calm("w3", 3), groups=(group("dp[2,3]", (2, 3), 4), group("tp[1,3]", (1, 3), 5))),
    ]

    assert verdict_on(rows, for_s=PAUSED_S).guilty == ("w3",)


def test_a_circle_of_waiting_ranks_is_undecided() -> None:
    """Two ranks that call two groups in different order: a mistake of the program."""
    rows = [
        replace(
            calm("w0", 0),
            groups=(group("a", WORLD, 3, waiting_s=2.0), group("b", WORLD, 3)),
        ),
        *(
            replace(
                calm(worker, rank),
                groups=(group("a", WORLD, 2), group("b", WORLD, 4, waiting_s=2.0)),
            )
            for rank, worker in enumerate(WORKERS)
            if rank > 0
        ),
    ]

    verdict = verdict_on(rows, for_s=4.0)

    assert not verdict.guilty
    assert (verdict.kind, verdict.at_odds, verdict.is_program) == (FaultKind.DESYNC, (0,), True)
    assert (
        "in a circle: rank 0 waits in all_reduce number 3 of a; ranks 1, 2, 3 wait in all_reduce "
        "number 4 of b"
    ) in verdict.evidence


def test_a_rank_that_waits_in_what_the_others_left_called_it_otherwise() -> None:
    """Its size let the others go on. With the same hash it would be a device, or the network."""
    past, op = 77, OP_CODES["all_reduce"]
    later = [
        replace(
            group("world", WORLD, 9, waiting_s=2.0), dtype=1, history=history_after(past, op, 1, 64)
        )
        for _ in WORKERS
    ]
    rows = [replace(row, groups=(one,)) for row, one in zip(rows_with(), later, strict=True)]
    # This one went on to another group.
    left = replace(group("world", WORLD, 8), history=past)
    rows[3] = replace(rows[3], groups=(left, group("dp", (1, 3), 4, waiting_s=2.0)))

    def with_past(hash_: int) -> Hang:
        behind = replace(group("world", WORLD, 8, waiting_s=2.0), dtype=1, history=hash_)
        return verdict_on([replace(rows[0], groups=(behind,)), *rows[1:]], for_s=4.0)

    differs, stands = with_past(78), with_past(past)

    assert (differs.kind, differs.at_odds, differs.is_program) == (FaultKind.MISMATCH, (0,), True)
    told = (
        "Up to call number 8 of world, in which rank 0 waits, rank 0 and ranks 1, 2, 3 made "
        "different calls"
    )
    assert told in differs.evidence
    assert (stands.kind, stands.is_program, stands.guilty) == (FaultKind.UNDECIDED, False, ())
    assert (
        "Rank 0 waits in a call that all members have made, while others wait for a later one"
        in stands.evidence
    )


def test_all_inside_the_same_collective_is_undecided() -> None:
    """Every rank has called it, so the network holds them up; any name would be a guess."""
    verdict = verdict_on(rows_with(), for_s=4.0)

    assert verdict.guilty == ()
    assert "the network" in verdict.evidence
    assert judged(*watch(rows_with(), for_s=1.5)) is None


def test_the_network_may_be_looked_at_long_before_anything_is_proven() -> None:
    """A look disturbs no rank; only while a member computes there is nothing to look for."""
    for rows, for_s, is_stalled in (
        (rows_with(), 0.3, False),
        (rows_with(), 1.0, True),
        (rows_with(w2=absent("w2", 2)), 1.0, False),
    ):
        found = judge(*watch(rows, for_s=for_s), attempt=ATTEMPT, members=WORKERS, limits=LIMITS)
        assert isinstance(found, Stalled) == is_stalled


def test_different_operations_of_one_number_are_reported_without_blame() -> None:
    """The program is wrong on one side, and nothing says which."""
    other = replace(
        calm("w2", 2), groups=(group("world", WORLD, 9, waiting_s=2.0, op="broadcast"),)
    )

    verdict = verdict_on(rows_with(w2=other), for_s=4.0)

    assert not verdict.guilty
    assert verdict.is_program
    assert verdict.at_odds == (2,)
    assert (
        "Ranks 0, 1, 3 called all_reduce of 64 bytes; rank 2 called broadcast of 64 bytes, as "
        "number 9 of world" in verdict.evidence
    )

    places = {"w0": "train.py:55", "w1": "train.py:55", "w2": "train.py:57", "w3": "train.py:55"}
    rows = [replace(row, place=places[row.worker]) for row in rows_with(w2=other)]
    assert (
        "of 64 bytes at train.py:55; rank 2 called broadcast of 64 bytes at train.py:57"
        in verdict_on(rows, for_s=4.0).evidence
    )


def test_another_type_or_size_is_reported_and_so_are_calls_that_differed_before() -> None:
    """The message blames the program, and sends no user to look for a broken network."""
    at = replace(group("world", WORLD, 9, waiting_s=2.0), dtype=1, history=77)
    rows = [replace(row, groups=(at,)) for row in rows_with()]
    typed = replace(rows[2], groups=(replace(at, dtype=3),))
    shifted = replace(rows[2], groups=(replace(at, history=78),))

    larger = replace(rows[2], groups=(replace(at, size_bytes=128),))

    other_type, other_past, other_size = (
        verdict_on([*rows[:2], one, rows[3]], for_s=4.0) for one in (typed, shifted, larger)
    )

    assert (other_type.kind, other_type.is_program) == (FaultKind.MISMATCH, True)
    assert (
        "float32; rank 2 called all_reduce of 64 bytes float16, as number 9" in other_type.evidence
    )
    assert (other_past.kind, other_past.is_program) == (FaultKind.DESYNC, True)
    told = (
        "Up to call number 9 of world, in which ranks 0, 1, 2, 3 wait, ranks 0, 1, 3 and rank 2 "
        "made different calls"
    )
    assert told in other_past.evidence
    assert other_past.guilty == ()
    assert "float32; rank 2 called all_reduce of 128 bytes float32" in other_size.evidence


def test_the_two_ends_of_a_transfer_that_stands_still_are_no_mistake_of_the_program() -> None:
    """They record send and recv as the same number of the pair."""
    ends = [
        replace(calm(f"w{rank}", rank), groups=(group("pp 0>1", (0, 1), 5, waiting_s=2.0, op=op),))
        for rank, op in ((0, "send"), (1, "recv"))
    ]

    verdict = verdict_on([*ends, *rows_with()[2:]], for_s=4.0)

    assert not verdict.guilty
    assert not verdict.is_program


@pytest.mark.parametrize("letter", ["X", "Z"])
def test_a_process_that_is_gone_is_named(letter: str) -> None:
    """Ray usually says so first; a zombie of a parent that does not wait for it, it does not."""
    verdict = verdict_on(rows_with(w2=replace(absent("w2", 2), os_state=letter)), for_s=1.25)

    assert (verdict.guilty, verdict.rule) == (("w2",), "gone")


def test_a_silent_beat_is_named_while_another_beats() -> None:
    """A frozen container shows as asleep; only the beat tells it from a rank that waits."""
    frozen = replace(calm("w2", 2), groups=(group("world", WORLD, 9, waiting_s=2.0),), beat_age_s=2)

    verdict = verdict_on(rows_with(w2=frozen), for_s=1.25)

    assert (verdict.guilty, verdict.rule, verdict.maybe_well) == (("w2",), "silent", ())


def test_a_rank_that_sleeps_in_c_is_given_the_time_that_another_process_takes() -> None:
    """A read by h5py or from FUSE keeps the interpreter's lock, and it is as well as any."""
    state, at_s = Detector(), 100.0
    for tick in range(45):
        seconds = tick * 0.25
        held = replace(absent("w2", 2), beat_age_s=seconds, beater_runs=100 + tick)
        state, at_s = watch(rows_with(w2=held), for_s=0.0, state=state, from_s=at_s + 0.25)
        if seconds < LIMITS.held_s:
            assert judged(state, at_s) is None, seconds

    verdict = judged(state, at_s)
    assert isinstance(verdict, Hang)
    assert (verdict.guilty, verdict.rule, verdict.kind) == (
        ("w2",),
        "held",
        FaultKind.INTERPRETER_HELD,
    )
    assert verdict.maybe_well == ("w2",)


def test_a_beat_of_which_nothing_more_is_known_is_not_taken_for_frozen() -> None:
    """Some kernels do not tell how often a thread ran."""
    unknown = replace(absent("w2", 2), beat_age_s=2.0, beater_runs=0)

    assert judged(*watch(rows_with(w2=unknown), for_s=LIMITS.held_s - 0.5)) is None


def test_a_process_under_a_debugger_is_never_named() -> None:
    """py-spy, gdb and cuda-gdb hold it: somebody looks, and it goes on afterwards."""
    traced = replace(absent("w2", 2), os_state="t", beat_age_s=400.0)

    found = judged(*watch(rows_with(w2=traced), for_s=400.0, period_s=1.0), collectives_fail_s=300)
    assert found is None


def test_a_rank_whose_groups_did_not_fit_its_ring_is_not_named() -> None:
    """It may wait in one of them, as the others do: what is not recorded is not known."""
    unknown = replace(absent("w1", 1), num_dropped=72)
    sleeping = absent("w2", 2)

    verdict = verdict_on(rows_with(w1=unknown, w2=sleeping), for_s=PAUSED_S)
    assert verdict.guilty == ("w2",)

    alone = verdict_on(rows_with(w1=unknown), for_s=PAUSED_S)
    assert not alone.guilty
    assert "records are missing (rank 1: 72 groups did not fit its ring)" in alone.evidence
    assert judged(*watch(rows_with(w1=unknown), for_s=PAUSED_S - 2.0)) is None


def test_a_rank_whose_thread_idles_is_not_said_to_compute_for_a_thread_beside_it() -> None:
    """A prefetcher or a logger's thread spins, and the process has used a whole processor."""
    state, at_s = Detector(), 100.0
    for second in range(123):
        dead = replace(absent("w2", 2), processor_s=50.0 + second, trainer_s=7.0)
        state, at_s = watch(rows_with(w2=dead), for_s=0.0, state=state, from_s=at_s + 1.0)

    found = judged(state, at_s, collectives_fail_s=300.0)
    assert isinstance(found, Hang)
    assert found.guilty == ("w2",)
    assert "its training thread has used no processor time for" in found.evidence


def test_a_rank_whose_children_compute_computes() -> None:
    """Inductor compiles in processes of its own, and the thread that trains waits for them."""
    state, at_s = Detector(), 100.0
    for second in range(200):
        compiles = replace(absent("w2", 2), trainer_s=7.0, children_s=float(second))
        state, at_s = watch(rows_with(w2=compiles), for_s=0.0, state=state, from_s=at_s + 1.0)
        assert judged(state, at_s, collectives_fail_s=300.0) is None


def test_a_frozen_rank_that_is_alone_is_named_a_little_later() -> None:
    """No other rank beats, and a keeper that was held up with it would have said nothing."""
    frozen = replace(calm("w0", 0), beat_age_s=9.0)

    def found(for_s: float) -> Judgement:
        state, at_s = watch([frozen], for_s=for_s)
        return judge(state, at_s, attempt=ATTEMPT, members=("w0",), limits=LIMITS)

    assert not isinstance(found(2.75), Hang)
    verdict = found(3.25)
    assert isinstance(verdict, Hang)
    assert (verdict.guilty, verdict.rule) == (("w0",), "silent")


def test_all_beats_silent_names_no_rank() -> None:
    """A machine that stood still as a whole looks like this for a moment after it goes on."""
    rows = [replace(row, beat_age_s=9.0) for row in rows_with()]

    assert judged(*watch(rows, for_s=2.0)) is None


def test_all_stopped_names_no_rank() -> None:
    """A user that stops a whole job does not want it evicted."""
    rows = [stop(row) for row in rows_with()]

    assert judged(*watch(rows, for_s=60.0)) is None


def test_a_stopped_rank_is_not_named_until_the_others_were_seen_since() -> None:
    """A whole job is stopped node by node, and what the keeper of one saw comes late."""
    node_of = {"w2": "n1", "w3": "n1"}
    waiting = rows_with()
    before, at_s = watch(waiting, for_s=0.75, node_of=node_of)
    held, at_s = watch(
        [stop(row, for_s=0.57) for row in waiting[:2]], for_s=0.0, state=before, from_s=at_s + 0.58
    )

    def seen(rest: list[WorkerReport]) -> Hang | NodeSilent | None:
        return judged(*watch(rest, for_s=0.0, state=held, from_s=at_s, node_of=node_of))

    assert judged(held, at_s) is None
    assert seen([stop(row) for row in waiting[2:]]) is None
    verdict = seen(waiting[2:])
    assert isinstance(verdict, Hang)
    assert verdict.guilty == ("w0", "w1")


def test_a_rank_stuck_in_compute_is_named_when_no_chain_leads_to_it() -> None:
    """The others wait in a group that it is no member of."""
    rows = [
        replace(calm(w, r), groups=(group("dp[0,1,2]", (0, 1, 2), 5, waiting_s=4.0),))
        for r, w in enumerate(WORKERS[:3])
    ]

    verdict = verdict_on([*rows, calm("w3", 3)], for_s=PAUSED_S)

    assert (verdict.guilty, verdict.rule) == (("w3",), "stuck")


def test_a_rank_with_a_collective_started_ahead_can_be_named() -> None:
    """FSDP prefetches: the rank that computes has one in flight and waits for none."""
    ahead = replace(
        group("world", WORLD, 8), entered_seq=8, finished_seq=7, op="all_gather", waiting_s=0.0
    )

    verdict = verdict_on(rows_with(w2=replace(calm("w2", 2), groups=(ahead,))), for_s=PAUSED_S)

    assert verdict.guilty == ("w2",)


def test_a_gap_in_the_reports_blames_no_rank() -> None:
    """A laptop that slept an hour: every age is an hour, and no worker has done anything wrong."""
    state, at_s = watch(rows_with(w2=absent("w2", 2)), for_s=119.0)
    state, at_s = watch(rows_with(w2=absent("w2", 2)), for_s=2.0, state=state, from_s=at_s + 3600.0)

    assert judged(state, at_s) is None


def test_a_hang_that_lasts_beyond_a_gap_is_still_found() -> None:
    """The gap only restarts the count; without fresh reports there would be no verdict ever."""
    state, at_s = watch(rows_with(w2=absent("w2", 2)), for_s=119.0)
    state, at_s = watch(
        rows_with(w2=absent("w2", 2)), for_s=119.0, state=state, from_s=at_s + 3600.0
    )
    assert judged(state, at_s) is None
    state, at_s = watch(rows_with(w2=absent("w2", 2)), for_s=2.0, state=state, from_s=at_s + 0.25)

    verdict = judged(state, at_s)
    assert isinstance(verdict, Hang)
    assert verdict.guilty == ("w2",)


def test_old_reports_prove_nothing_now() -> None:
    """The controller was busy for long: what it knows is from before."""
    state, at_s = watch(rows_with(w2=absent("w2", 2)), for_s=2.75)

    assert judged(state, at_s + 2.5) is None


def test_a_silent_node_is_another_verdict() -> None:
    """Its workers may be healthy; the only fact is that they cannot be seen."""
    node_of = {"w2": "n1", "w3": "n1"}
    rows = rows_with(w2=absent("w2", 2))
    state, at_s = watch(rows, for_s=1.0, node_of=node_of)
    moving = [row for row in rows if row.worker in {"w0", "w1"}]

    state, at_s = watch(moving, for_s=1.25, state=state, from_s=at_s + 0.25)
    assert judged(state, at_s) is None
    state, at_s = watch(moving, for_s=0.75, state=state, from_s=at_s + 0.25)

    silent = judged(state, at_s)
    assert isinstance(silent, NodeSilent)
    assert (silent.node, silent.workers) == ("n1", ("w2", "w3"))


def test_a_silent_node_whose_workers_are_in_every_step_is_not_lost() -> None:
    """On a machine at 30 times its load a keeper was not heard for 2.3 s while training went on."""
    node_of = {"w2": "n1", "w3": "n1"}
    state, at_s = watch(rows_with(), for_s=1.0, node_of=node_of)
    for step in range(20, 32):
        moving = [
            replace(calm(worker, rank), step=step) for rank, worker in enumerate(("w0", "w1"))
        ]
        state, at_s = watch(moving, for_s=0.0, state=state, from_s=at_s + 0.25)
        assert judged(state, at_s) is None

    assert state.silent_s("n1") > LIMITS.node_silent_s


def test_a_node_with_all_members_is_not_lost_because_its_keeper_is_late() -> None:
    """A standby elsewhere reports, but it is in no step: it cannot tell whether they train."""
    node_of = dict.fromkeys(("w0", "w1", "w2", "w3"), "n1")
    state, at_s = watch(rows_with(), for_s=1.0, node_of=node_of)
    for _ in range(16):
        state, at_s = watch([calm("w9", -1)], for_s=0.0, state=state, from_s=at_s + 0.25)
        assert judged(state, at_s) is None

    assert state.silent_s("n1") > LIMITS.node_silent_s


def test_a_save_has_more_time_than_a_step() -> None:
    """Storage has a duration of its own; a slow write is not a hang."""
    saving = replace(absent("w2", 2), phase=WorkerPhase.SAVING)

    assert judged(*watch(rows_with(w2=saving), for_s=2.5)) is None
    assert verdict_on(rows_with(w2=saving), for_s=LIMITS.saving_s + 0.25).guilty == ("w2",)


@pytest.mark.parametrize("phase", [WorkerPhase.LOADING, WorkerPhase.SAVING])
def test_a_worker_that_reads_or_writes_on_is_not_hung(phase: WorkerPhase) -> None:
    """100 GB from a slow store take longer than any bound, and restarting takes as long."""
    state, at_s = Detector(), 100.0
    for number in range(60):
        moving = replace(absent("w2", 2), phase=phase, moved_bytes=number << 20)
        state, at_s = watch(rows_with(w2=moving), for_s=9.75, state=state, from_s=at_s + 0.25)
        assert judged(state, at_s) is None


def test_what_is_written_beside_training_does_not_hide_a_hang() -> None:
    """The state of the last step may be on its way to storage when this one hangs."""
    state, at_s = Detector(), 100.0
    for number in range(122):
        stuck = replace(absent("w2", 2), moved_bytes=number << 20)
        state, at_s = watch(rows_with(w2=stuck), for_s=0.0, state=state, from_s=at_s + 1.0)

    verdict = judged(state, at_s)
    assert isinstance(verdict, Hang)
    assert verdict.guilty == ("w2",)


def test_the_first_step_has_more_time() -> None:
    """Caches, allocators and connections are made in it, and no duration was seen yet."""
    first = replace(absent("w2", 2), step_s=0.0)

    assert judged(*watch(rows_with(w2=first), for_s=119.0)) is None
    assert verdict_on(rows_with(w2=first), for_s=PAUSED_S).guilty == ("w2",)


@pytest.mark.parametrize("phase", IN_OWN_CODE)
def test_a_pause_of_a_minute_is_no_fault_in_any_phase(phase: WorkerPhase) -> None:
    """Rank 0 draws samples of what the model writes by now, while the others wait for it."""
    pausing = replace(absent("w0", 0), phase=phase)

    assert judged(*watch(rows_with(w0=pausing), for_s=119.0)) is None
    assert verdict_on(rows_with(w0=pausing), for_s=PAUSED_S).guilty == ("w0",)


@pytest.mark.parametrize("phase", IN_OWN_CODE)
@pytest.mark.parametrize("share", [0.1, 1.0, 8.0])
def test_a_rank_that_computes_is_not_named_before_the_others_give_up(
    phase: WorkerPhase, share: float
) -> None:
    """A recompile, an evaluation: a tenth of a processor is what an overloaded machine leaves."""
    state, at_s = Detector(), 100.0
    for second in range(299):
        computing = replace(absent("w2", 2), phase=phase, processor_s=50.0 + share * second)
        rows = rows_with(w2=computing)
        state, at_s = watch(rows, for_s=0.0, state=state, from_s=at_s + 1.0)
        if second < 269:
            assert judged(state, at_s, collectives_fail_s=300.0) is None

    assert judged(state, at_s) is None
    found = judged(state, at_s, collectives_fail_s=300.0)
    assert isinstance(found, Hang)
    assert (found.guilty, found.rule, found.maybe_well) == (("w2",), "missing", ("w2",))
    assert "raise parallel.collective_timeout_s" in found.evidence


@pytest.mark.parametrize(
    ("phase", "share"),
    [(WorkerPhase.BACKWARD, 1.0), (WorkerPhase.FORWARD, 0.0), (WorkerPhase.SCRIPT, 0.5)],
    ids=["recompiles", "sleeps in the forward pass", "evaluates"],
)
def test_fifty_pauses_of_a_minute_blame_no_rank_and_hide_no_fault(
    phase: WorkerPhase, share: float
) -> None:
    """The others wait all the while. A rank that is stopped afterwards is named as soon as ever."""
    state, at_s, used_s = Detector(), 100.0, 0.0
    for step in range(1, 51):
        for second in range(60):
            used_s += share
            pausing = replace(absent("w2", 2), phase=phase, processor_s=used_s, phase_s=second)
            rows = [replace(row, step=step) for row in rows_with(w2=pausing)]
            state, at_s = watch(rows, for_s=0.0, state=state, from_s=at_s + 1.0)
            limits = limits_from(state.step_s_p99, step_s_p50=state.step_s_p50)
            assert (
                judge(
                    state,
                    at_s,
                    attempt=ATTEMPT,
                    members=WORKERS,
                    limits=limits,
                    collectives_fail_s=300.0,
                )
                is None
            )
        done = [replace(row, step=step, step_s=60.0) for row in rows_with()]
        usual = [replace(calm(w, r), step=step + 1, step_s=0.2) for r, w in enumerate(WORKERS)]
        for rows in (done, usual):
            state, at_s = watch(rows, for_s=0.0, state=state, from_s=at_s + 0.2)
    stopped = [replace(row, step=51) for row in rows_with(w2=stop(absent("w2", 2)))]
    state, at_s = watch(stopped, for_s=1.0, state=state, from_s=at_s + 0.1, period_s=0.1)

    found = judged(state, at_s)
    assert isinstance(found, Hang)
    assert (found.guilty, found.rule) == (("w2",), "stopped")


def test_what_ray_and_the_beat_use_is_no_computing() -> None:
    """A hundredth of a processor, and more at once now and then."""
    state, at_s = Detector(), 100.0
    for second in range(123):
        waiting = replace(absent("w2", 2), processor_s=0.01 * second + 0.04 * (second % 10 == 0))
        state, at_s = watch(rows_with(w2=waiting), for_s=0.0, state=state, from_s=at_s + 1.0)

    found = judged(state, at_s)
    assert isinstance(found, Hang)
    assert found.guilty == ("w2",)


def test_a_rank_that_pauses_after_long_computing_has_its_time_from_then_on() -> None:
    """It has just shown that it lives."""
    state, at_s = Detector(), 100.0
    for second in range(100):
        computing = replace(absent("w2", 2), processor_s=float(second))
        state, at_s = watch(rows_with(w2=computing), for_s=0.0, state=state, from_s=at_s + 1.0)
    pausing = rows_with(w2=replace(absent("w2", 2), processor_s=99.0))
    state, at_s = watch(pausing, for_s=117.0, state=state, from_s=at_s + 1.0, period_s=1.0)
    assert judged(state, at_s) is None
    state, at_s = watch(pausing, for_s=3.0, state=state, from_s=at_s + 1.0, period_s=1.0)

    found = judged(state, at_s)
    assert isinstance(found, Hang)
    assert found.guilty == ("w2",)


@pytest.mark.parametrize(
    "shown",
    [{"os_state": "R"}, {"os_state": "D"}, {"processor_s": 1.0}],
    ids=["runs", "waits for a page", "computes in another thread"],
)
@pytest.mark.parametrize("is_inside", [True, False])
def test_a_late_beat_of_a_rank_that_works_is_no_fault(
    shown: dict[str, Any],
    is_inside: bool,  # noqa: FBT001
) -> None:
    """A garbage collection keeps the interpreter, and a page from the disk keeps the thread."""
    at = rows_with()[2] if is_inside else absent("w2", 2)
    state, at_s = watch(rows_with(w2=at), for_s=0.0)
    for second in range(1, 61):
        late = replace(at, beat_age_s=float(second), **shown)
        late = replace(late, processor_s=second * late.processor_s)
        state, at_s = watch(rows_with(w2=late), for_s=0.0, state=state, from_s=at_s + 1.0)
        assert judged(state, at_s) is None


def test_a_network_is_not_waited_for_as_long_as_a_pause() -> None:
    """All have called it, also where connections were made only now."""
    first = [replace(row, step_s=0.0) for row in rows_with()]

    assert judged(*watch(first, for_s=29.0)) is None
    assert not verdict_on(first, for_s=LIMITS.saving_s + 0.25).guilty


def test_a_script_has_no_more_time_than_the_collectives_of_the_others() -> None:
    """The wait for it fails then, and a rank that hangs for good would never be named."""
    hung = replace(absent("w1", 1), phase=WorkerPhase.SCRIPT)
    state, at_s = watch(rows_with(w1=hung), for_s=56.0)

    verdict = judged(state, at_s, collectives_fail_s=60.0)
    assert isinstance(verdict, Hang)
    assert (verdict.guilty, verdict.rule) == (("w1",), "missing")
    assert "raise parallel.collective_timeout_s" in verdict.evidence
    assert judged(state, at_s, collectives_fail_s=90.0) is None


def test_all_may_compute_for_long_while_no_rank_waits() -> None:
    """An epoch begins, and every rank reads its data again."""
    reading = [calm(worker, rank) for rank, worker in enumerate(WORKERS)]

    assert judged(*watch(reading, for_s=60.0)) is None
    assert not verdict_on(reading, for_s=LIMITS.forming_s + 0.25).guilty


def test_a_worker_stopped_in_its_first_step_is_named_by_the_hang_limit() -> None:
    """The kernel's word needs no patience for warm-up."""
    first = stop(replace(absent("w2", 2), step_s=0.0))

    assert verdict_on(rows_with(w2=first), for_s=1.25).guilty == ("w2",)


def test_a_member_that_never_came_is_named() -> None:
    """The others form and have no group yet, so no ring says anything."""
    rows = [
        replace(calm(worker, rank), phase=WorkerPhase.FORMING, step_s=0.0)
        for rank, worker in enumerate(WORKERS)
    ]
    rows[1] = replace(rows[1], attempt=ATTEMPT - 1, phase=WorkerPhase.BACKWARD)

    assert judged(*watch(rows, for_s=20.0)) is None
    verdict = verdict_on(rows, for_s=LIMITS.forming_s + 0.25)
    assert (verdict.guilty, verdict.kind) == (("w1",), FaultKind.ABSENT)
    assert "Rank 1 did not come. Rank 1 (w1) beat 0.1 s ago" in verdict.evidence


def test_members_that_all_form_wait_for_the_network() -> None:
    """No group exists yet, so there is no call to tell."""
    rows = [replace(row, phase=WorkerPhase.FORMING, groups=()) for row in rows_with()]

    verdict = verdict_on(rows, for_s=LIMITS.forming_s + 0.25)

    assert (verdict.guilty, verdict.kind) == ((), FaultKind.UNDECIDED)
    assert "Ranks 0, 1, 2, 3 wait. All members have called what they wait in" in verdict.evidence


def test_one_progressing_member_means_no_hang() -> None:
    """A slow rank that goes on is a straggler; the ones that wait for it prove nothing."""
    state, at_s = Detector(), 100.0
    for micro_batch in range(40):
        slow = replace(absent("w2", 2), micro_batch=micro_batch)
        state, at_s = watch(rows_with(w2=slow), for_s=0.0, state=state, from_s=at_s + 0.25)

    assert judged(state, at_s) is None


@pytest.mark.timeout(60)
def test_a_large_group_is_not_looked_through_for_each_of_its_ranks() -> None:
    """That would take minutes here, and most of a controller's time with 2,000 ranks."""
    ranks = range(20_000)
    rows: dict[int, WorkerReport] = {
        rank: replace(calm(f"w{rank}", rank), groups=(group("world", ranks, 9, waiting_s=2.0),))
        for rank in ranks
    }
    rows[7] = replace(calm("w7", 7), groups=(group("world", ranks, 8),))

    assert graph_of(rows, ranks).sinks == {7}
