"""The run leaves the node of a slow worker at a step boundary, if that pays."""

from dataclasses import replace

import pytest

from orchestrator.core import Bounds, RunRules
from orchestrator.core import events as ev
from orchestrator.core.log.journal_lines import parse, transition_records
from orchestrator.diagnosis import Guilty, Suspicion
from orchestrator.fault_kinds import FaultKind
from orchestrator.policies import LayoutRules, SlowRules
from tests.support.obedient_cluster import Cluster
from ucp_core.layout import ParallelLayout

RULES = RunRules(
    run="r",
    min_workers=1,
    max_workers=4,
    total_steps=10_000,
    layout=LayoutRules(),
    bounds=Bounds(grace_s=5.0),
)
STEP_S = 0.5
SAID = "Rank 3 (w0004 on node n1) computes 3.00 times as long as ranks 0, 1, 2, from step 41 on."


class SlowCluster(Cluster):
    """Four workers on two nodes, of which the last gets slow."""

    def begin(
        self, times: float = 3.0, *, is_steady: bool = False, mates: tuple[str, ...] = ()
    ) -> None:
        """Train, then let ``w0004`` take ``times`` as long and be suspected."""
        self.start(4)
        self.train(40)
        self.slow_times = times
        self.step_s = self.slowed
        self.train(3)
        self.suspect(times, is_steady=is_steady, mates=mates)

    def slowed(self, layout: ParallelLayout) -> float:
        """Work is shared; with w0004 all wait for it."""
        members = {name for name, _, _ in self.started[-1].members}
        return STEP_S * 4 / layout.world_size * (self.slow_times if "w0004" in members else 1.0)

    def suspect(
        self,
        times: float,
        kind: FaultKind = FaultKind.SLOW_COMPUTE,
        *,
        is_steady: bool = False,
        worker: str = "w0004",
        rank: int = 3,
        mates: tuple[str, ...] = (),
        since_s: float | None = None,
        usual_step_s: float = STEP_S,
    ) -> None:
        since_s = self.at_s if since_s is None else since_s
        one = Suspicion(
            kind=kind, guilty=Guilty.of([rank], (), ["n1"]), worker=worker,
            confidence=0.9, since_s=since_s, times=times, is_steady=is_steady, evidence=SAID,
        )  # fmt: skip
        others = [
            replace(one, worker=each, guilty=Guilty.of([number], (), [f"n{number // 2}"]))
            for each in mates
            for number in [int(each[1:]) - 1]
        ]
        self.send(
            ev.Suspected(
                at_s=self.at_s,
                attempt=self.state.attempt.number,
                suspects=(one, *others) if times else (),
                usual_step_s=usual_step_s,
            )
        )

    @property
    def members(self) -> list[str]:
        return [name for name, _, _ in self.started[-1].members]


def cluster(rules: RunRules = RULES) -> SlowCluster:
    return SlowCluster(rules, step_s=lambda layout: STEP_S * 4 / layout.world_size)


def test_a_slow_worker_is_left_out_if_nothing_replaces_it() -> None:
    """Two workers of four are faster than four that wait for one."""
    run = cluster()
    run.begin()
    run.train(4)
    assert len(run.started) == 1, "it may be well again soon"
    run.train(20)
    assert run.layouts == ["dp_shard=4", "dp_shard=2"]
    (incident,) = run.incidents
    assert (incident.incident, incident.guilty) == ("slow", ("w0004",))
    assert incident.evidence.startswith(SAID)
    assert "wins" in incident.evidence
    assert incident.evidence.endswith("Nothing replaces it, and dp_shard=2 is faster without it.")
    assert run.started[1].resume_step == run.started[1].lineage[1][1] > 43, "nothing is lost"
    run.train(50)
    assert len(run.started) == 2


def test_a_slow_node_is_not_left_while_a_keeper_is_silent() -> None:
    """The next attempt could not read the step that members would leave at."""
    run = cluster()
    run.begin()
    run.send(ev.KeeperReady(at_s=run.at_s, node="n0"))
    run.send(ev.KeeperSilent(at_s=run.at_s, node="n0", silent_s=2.5))
    run.train(24)
    assert len(run.started) == 1
    run.send(ev.KeeperReady(at_s=run.at_s, node="n0"))
    run.train(10)
    assert run.layouts == ["dp_shard=4", "dp_shard=2"]


@pytest.mark.parametrize(
    ("mates", "num_steps"), [((), 13), (("w0003",), 9), (("w0002",), 13)], ids=str
)
def test_a_node_is_given_up_sooner_where_all_its_workers_are_slow(
    mates: tuple[str, ...], num_steps: int
) -> None:
    """Each of them was measured by itself. A slow worker of another node adds nothing."""
    run = cluster()
    run.begin(1.5, is_steady=True, mates=mates)
    run.train(num_steps - 1)
    assert not run.state.fleet.nodes[1].is_slow
    run.train(1)
    assert run.state.fleet.nodes[1].is_slow


def test_a_node_whose_card_is_slow_is_left_like_one_whose_worker_is() -> None:
    run = cluster()
    run.begin()
    run.suspect(3.0, FaultKind.SLOW_SENDER)
    run.train(24)

    assert run.layouts == ["dp_shard=4", "dp_shard=2"]
    assert [(one.incident, one.verdict) for one in run.incidents] == [("slow", "slow_sender")]


def replaced() -> SlowCluster:
    """Return a run that has left a slow node for another."""
    run = cluster()
    run.begin()
    run.train(8)
    assert run.state.fleet.nodes[1].is_slow
    asked = [n for n, one in run.state.fleet.reservations.items() if one.node < 0]
    assert [run.state.fleet.reservations[n].avoid for n in asked] == [("n1",)] * 2
    for number in asked:
        run.send(ev.ReservationGranted(at_s=run.at_s, reservation=number, node="n9"))
    for name in sorted(
        worker.name for worker in run.state.fleet.workers.values() if not worker.pid
    ):
        run.send(ev.WorkerReady(at_s=run.at_s, worker=name, node="n9", pid=7))
    return run


def test_a_replacement_takes_its_place() -> None:
    """It is asked for elsewhere while the run trains, as if the node were taken."""
    run = replaced()
    assert run.layouts == ["dp_shard=4", "dp_shard=4"]
    assert run.members[:2] == ["w0001", "w0002"]
    assert not {"w0003", "w0004"} & set(run.members)
    assert run.incidents[-1].guilty == ("w0004",)
    run.train(3)
    assert run.state.step_s == pytest.approx(STEP_S), "what was learned meanwhile is forgotten"


def test_a_conviction_that_follows_the_rank_to_another_node_is_withdrawn() -> None:
    """The rank gets the long samples: each node in turn would be left for it."""
    run = replaced()
    assert run.state.fleet.nodes[1].draining
    run.step_s = lambda _: 3.0 * STEP_S
    run.train(20)
    run.suspect(3.0, is_steady=True, worker=run.members[3])
    run.train(40)
    assert len(run.started) == 2, "the new node is not left"
    node = run.state.fleet.nodes[1]
    assert (node.draining, node.strikes) == (False, ())
    (told,) = run.state.attempt.suspects
    assert told.may_be_work
    assert told.evidence.endswith(
        "slow on node n1: its work takes longer, and both nodes are healthy."
    )


def test_another_rank_that_is_slow_on_the_new_node_is_convicted() -> None:
    run = replaced()
    run.step_s = lambda _: 3.0 * STEP_S
    run.train(20)
    run.suspect(3.0, is_steady=True, worker=run.members[2], rank=2)
    run.train(8)
    assert any(one.is_slow for one in run.state.fleet.nodes.values() if one.name == "n9")


@pytest.mark.parametrize(
    ("times", "rules"),
    [
        (1.3, RULES),
        (3.0, replace(RULES, min_workers=4)),
        (3.0, replace(RULES, total_steps=44)),
    ],
)
def test_the_run_waits_for_a_slow_worker_where_no_other_layout_is_faster(
    times: float, rules: RunRules
) -> None:
    """Half of the workers take twice as long."""
    run = cluster(rules)
    run.begin(times)
    run.train(min(100, run.rules.total_steps - run.state.attempt.step))
    assert len(run.started) == 1
    assert all(one.incident != "slow" for one in run.incidents)


def test_a_suspicion_that_ends_in_time_convicts_no_worker() -> None:
    run = cluster()
    run.begin()
    run.train(4)
    run.suspect(0.0)
    run.train(50)
    assert len(run.started) == 1


@pytest.mark.parametrize("is_granted", [False, True])
def test_a_conviction_is_withdrawn_if_the_worker_is_well_before_it_is_replaced(
    *, is_granted: bool
) -> None:
    run = cluster()
    run.begin()
    run.train(8)
    fleet = run.state.fleet
    assert fleet.nodes[1].is_slow
    asked = [n for n, one in fleet.reservations.items() if one.node < 0]
    if is_granted:
        for number in asked:
            run.send(ev.ReservationGranted(at_s=run.at_s, reservation=number, node="n9"))
    run.slow_times = 1.0
    run.suspect(0.0)

    node = run.state.fleet.nodes[1]
    assert (node.draining, node.strikes) == (False, ())
    assert set(run.state.fleet.reservations) == {1, 2, 3, 4}, "nothing is asked for any longer"
    run.train(40)
    assert run.layouts == ["dp_shard=4"]
    assert run.incidents == []
    assert run.state.step_s == pytest.approx(STEP_S, rel=0.05)


def test_one_that_is_slow_again_is_left_although_it_is_well_once_more() -> None:
    """A replacement that takes minutes would never come. One that was withdrawn does not count."""
    run = cluster(replace(RULES, slow=SlowRules(convictions_max=1)))
    run.begin()
    run.train(8)
    run.suspect(0.0)
    run.train(20)
    run.suspect(3.0)
    run.train(8)
    assert run.state.fleet.nodes[1].is_slow
    run.suspect(0.0)
    assert run.state.fleet.nodes[1].is_slow


def test_a_conviction_is_not_withdrawn_while_another_worker_of_the_node_is_slow() -> None:
    run = cluster()
    run.begin(mates=("w0003",))
    run.train(8)
    run.suspect(3.0, worker="w0003", rank=2)
    assert run.state.fleet.nodes[1].is_slow
    run.suspect(0.0)
    assert not run.state.fleet.nodes[1].is_slow


def test_a_conviction_outlives_the_attempt_whose_suspicions_end_with_it() -> None:
    """Nothing was seen of a worker that was well."""
    run = cluster()
    run.begin()
    run.train(8)
    run.send(ev.WorkerExited(at_s=run.at_s, worker="w0001", cause="crash", detail=""))
    assert len(run.started) == 2
    assert run.state.attempt.suspects == ()
    assert run.state.fleet.nodes[1].is_slow


def test_what_a_slow_worker_costs_is_known_within_a_few_steps() -> None:
    run = cluster()
    run.begin()
    run.train(3)
    assert run.state.step_s > 0.9 * 3.0 * STEP_S


def test_what_a_slow_worker_takes_is_not_learned_of_the_layout() -> None:
    run = cluster(replace(RULES, min_workers=4))
    run.start(4)
    run.train(20)
    run.suspect(3.0)
    known = run.state.steps
    run.step_s = lambda _: 1.5
    run.train(10)
    assert run.state.steps == known


@pytest.mark.parametrize("num_healthy", [3, 7])
def test_a_step_is_not_taken_for_shorter_than_the_healthy_ones_were(num_healthy: int) -> None:
    """A worker that takes 4 times as long makes a step 3 times as long: the rest is as fast."""
    run = cluster(replace(RULES, bounds=Bounds(grace_s=1.0)))
    run.start(4)
    run.train(num_healthy)
    run.slow_times, run.step_s, since_s = 3.0, run.slowed, run.at_s
    run.train(3)
    run.suspect(4.0, since_s=since_s)
    run.train(8)
    assert run.state.fleet.nodes[1].is_slow
    assert dict(run.state.steps)[ParallelLayout(dp_shard=4)] >= STEP_S


def test_one_that_is_slow_from_the_first_step_is_left_out() -> None:
    """Nothing shows how long the steps of the layout usually take."""
    run = cluster()
    run.slow_times, run.step_s = 3.0, run.slowed
    run.start(4)
    run.train(3)
    run.suspect(3.0, since_s=0.0, usual_step_s=3.0 * STEP_S)
    run.train(24)
    assert run.layouts == ["dp_shard=4", "dp_shard=2"]


def test_the_node_is_used_again_after_a_while() -> None:
    run = cluster()
    run.begin()
    run.train(30)
    assert run.state.fleet.nodes[1].is_slow
    run.tick(RULES.avoid.avoid_s)
    assert not run.state.fleet.nodes[1].draining


def test_a_hang_of_a_suspected_worker_is_reported_with_the_suspicion_first() -> None:
    run = cluster()
    run.begin()
    run.send(
        ev.HangFound(
            at_s=run.at_s, attempt=1, guilty=("w0004",), evidence="stopped: w0004 (rank 3)"
        )
    )
    run.send(ev.WorkerExited(at_s=run.at_s, worker="w0004", cause="killed", detail=""))
    assert [one.evidence for one in run.incidents] == [f"{SAID} stopped: w0004 (rank 3)"]


def test_a_suspicion_is_kept_in_the_journal() -> None:
    run = cluster()
    run.begin()
    (one,) = run.state.attempt.suspects
    event = ev.Suspected(at_s=1.0, attempt=1, suspects=(one,), usual_step_s=0.5)
    (record,) = transition_records(event, (), attempt=1)
    assert parse(record) == event
