from dataclasses import replace
from itertools import combinations, permutations
from math import inf

import pytest

from orchestrator.core import Phase, RunRules, RunState, describe, next_deadline_s, step
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.core.actions import ReadCommitted, YieldAttempt
from tests.support.run_events import granted_on, ready_on
from workers.settings import SnapshotSettings

NODES = ("a", "b", "c", "d")
RULES = RunRules(run="test", min_workers=2, max_workers=4, total_steps=100_000)


class _Run:
    """A run of four nodes with one worker each, in a world where some pairs are cut."""

    def __init__(self, rules: RunRules = RULES, *, trains: bool = True, racks: str = "") -> None:
        self.state, self.rules, self.at_s = RunState(), rules, 0.0
        self.cut: set[tuple[str, str]] = set()
        self.silent: set[str] = set()
        self.answers = True
        self.names = {node: f"w{number:04d}" for number, node in enumerate(NODES, start=1)}
        self.actions: list[act.Action] = []
        self.fold(ev.ControllerStarted(at_s=0.0, incarnation=1))
        for node, rack in zip(NODES, racks, strict=False):
            self.fold(ev.NodeJoined(at_s=0.0, node=node, rack=rack))
        for event in (*granted_on(NODES), *ready_on(NODES, at_s=self.at_s)):
            self.fold(event)
        if trains:
            self.train()

    def fold(self, event: ev.Event) -> None:
        self.state, actions = step(self.state, event, rules=self.rules)
        self.actions += actions
        for action in actions:
            if isinstance(action, act.ProbeLinks) and self.answers:
                self.fold(self.answer(action))

    def answer(self, order: act.ProbeLinks) -> ev.LinksProbed:
        pairs = {*combinations(order.nodes, 2), *order.pairs}
        ways = [way for one, other in sorted(pairs) for way in ((one, other), (other, one))]
        asked = {node for pair in pairs for node in pair} - self.silent
        return ev.LinksProbed(
            at_s=self.at_s,
            number=order.number,
            pairs=order.pairs,
            heard=tuple(sorted(asked)),
            lost=tuple(way for way in ways if way in self.cut and way[0] in asked),
        )

    def train(self, *, commits: bool = True) -> None:
        """Take the next step."""
        self.at_s += 1.0
        number, done = self.state.attempt.number, self.state.attempt.step + 1
        for node in self.members():
            worker = self.names[node]
            self.fold(ev.WorkerFormed(at_s=self.at_s, attempt=number, worker=worker))
        self.fold(ev.StepCompleted(at_s=self.at_s, attempt=number, step=done, step_s=0.2))
        if commits:
            self.fold(ev.CheckpointCommitted(at_s=self.at_s, attempt=number, step=done))

    def leave(self, how: ev.Leaving = ev.Leaving.FENCED, unreached: str = "") -> None:
        number = self.state.attempt.number
        for node in self.members():
            self.fold(
                ev.WorkerLeft(
                    at_s=self.at_s,
                    attempt=number,
                    worker=self.names[node],
                    how=how,
                    step=self.state.attempt.step,
                    detail="",
                    unreached=unreached if node != unreached else "",
                )
            )
        while self.state.phase is Phase.READING and not self.state.network.is_searching:
            self.fold(ev.Ticked(at_s=self.at_s))
            self.read()

    def read(self) -> None:
        step_, attempt = self.state.committed
        self.fold(
            ev.CommittedRead(
                at_s=self.at_s,
                attempt=self.state.attempt.number,
                step=step_,
                committed_by=attempt,
                skipped=(),
                number=self.state.reads.num,
            )
        )

    def hang(self) -> None:
        """Let every member wait for every other."""
        self.at_s += 3.0
        hang = ev.HangFound(
            at_s=self.at_s, attempt=self.state.attempt.number, guilty=(), evidence="in a circle"
        )
        self.fold(hang)
        self.leave()

    def wait(self, until_s: float) -> None:
        """Let time pass, and members leave as asked."""
        while (due_s := next_deadline_s(self.state)) <= until_s:
            self.at_s = max(due_s, self.at_s)
            self.fold(ev.Ticked(at_s=self.at_s))
            if self.state.phase is Phase.YIELDING:
                self.leave(ev.Leaving.YIELDED)
            elif self.state.phase is Phase.READING and not self.state.network.is_searching:
                self.read()
        self.at_s = until_s

    def members(self) -> list[str]:
        nodes = self.state.fleet.nodes
        return [nodes[number].name for number in self.state.attempt.nodes]

    def cut_pair(self, one: str, other: str) -> None:
        self.cut |= {(one, other), (other, one)}

    def where(self) -> tuple[Phase, int]:
        return self.state.phase, self.state.attempt.number

    def incidents(self) -> list[act.ReportIncident]:
        return [each for each in self.actions if isinstance(each, act.ReportIncident)]


def test_a_cut_pair_costs_one_of_its_nodes_and_blames_neither() -> None:
    """Both are healthy: the link is named, and three of four train."""
    run = _Run()
    run.cut_pair("b", "d")
    run.hang()

    assert (run.state.phase, run.members()) == (Phase.FORMING, ["a", "b", "c"])
    (incident,) = run.incidents()
    assert (incident.incident, incident.guilty) == ("link", ())
    assert incident.evidence.startswith("no connection between nodes b and d (")
    assert "in a circle" in incident.evidence
    assert not any(isinstance(action, act.KillWorker) for action in run.actions)
    assert not any(node.strikes for node in run.state.fleet.nodes.values())
    # A member would wait for what the node behind the link holds until the load fails.
    reads = [action for action in run.actions if isinstance(action, ReadCommitted)]
    assert [read.unreached for read in reads] == [(), ("d",)]


def test_the_run_is_whole_again_soon_after_the_link_is() -> None:
    """No event says that it heals: keepers are asked again."""
    run = _Run()
    run.cut_pair("b", "d")
    run.hang()
    run.train()
    cut_s = run.at_s
    run.wait(cut_s + 180.0)
    assert len(run.members()) == 3
    run.cut.clear()
    run.wait(cut_s + 240.0)

    assert (run.state.phase, run.members()) == (Phase.FORMING, ["a", "b", "c", "d"])
    assert sum(isinstance(action, YieldAttempt) for action in run.actions) == 1


def test_no_number_of_lost_links_ends_a_run() -> None:
    """L1: today the third undecided hang in a row did."""
    run = _Run()
    for _ in range(40):
        run.cut_pair("b", "d")
        run.hang()
        assert (run.state.phase, len(run.members())) == (Phase.FORMING, 3), run.state.reason
        run.train(commits=False)
        run.cut.clear()
        while len(run.members()) < len(NODES):
            run.wait(next_deadline_s(run.state))
        run.train(commits=False)

    assert run.state.num_stuck == run.state.num_undecided == 0
    assert not run.state.faults


@pytest.mark.parametrize("same", [True, False])
def test_a_program_hangs_after_the_same_step_and_a_network_after_any(*, same: bool) -> None:
    """A link may flap so fast that it is whole whenever it is looked at."""
    run = _Run()
    for number in range(6):
        for _ in range(1 if same else 1 + number % 2):
            run.train(commits=False)
        run.hang()
        if run.state.phase is Phase.FAILED:
            break
        while run.state.phase is not Phase.FORMING:
            run.wait(next_deadline_s(run.state))

    assert (run.state.outcome, number) == (("failed", 4) if same else (None, 5))


def _lose_peers(run: _Run, *, until_s: float = inf) -> int:
    """Reset connections of every attempt before it commits; return how many attempts that ended."""
    number = 0
    while run.state.phase is not Phase.FAILED and run.at_s < until_s:
        number += 1
        run.train(commits=False)
        run.leave(ev.Leaving.PEER_LOST)
        while run.state.phase is Phase.WAITING:
            run.wait(next_deadline_s(run.state))
    return number


def test_connections_that_are_reset_for_half_an_hour_end_no_run() -> None:
    """L1: every probe finds the network whole, and the thirteenth in a row ended it."""
    run = _Run()
    assert _lose_peers(run, until_s=1800.0) > RULES.budgets.stuck_max
    assert (run.state.phase, run.members()) == (Phase.FORMING, list(NODES)), run.state.reason
    assert not run.state.faults

    run.train()
    run.leave(ev.Leaving.PEER_LOST)
    assert (run.state.num_stuck, run.state.num_unexplained) == (0, 0)


def test_a_program_that_loses_its_peers_for_ever_ends() -> None:
    """Ranks that call different collectives fail as in a bad network does."""
    run = _Run()
    run.leave(ev.Leaving.PEER_LOST)
    number = _lose_peers(run)

    assert number == RULES.budgets.unexplained_max + 1
    assert 3600.0 < run.at_s < 2 * 3600.0
    assert "without a new committed step" in run.state.reason


def test_a_program_that_never_got_through_a_step_is_given_up_within_minutes() -> None:
    """Ranks whose collectives do not match are what a first try of a script looks like."""
    run = _Run(trains=False)
    number = 0
    while run.state.phase is not Phase.FAILED:
        number += 1
        run.leave(ev.Leaving.PEER_LOST)
        while run.state.phase is Phase.WAITING:
            run.wait(next_deadline_s(run.state))

    assert number == RULES.budgets.stuck_max + 1
    assert run.at_s < 180.0


def test_the_status_says_that_the_run_waits_for_the_network() -> None:
    """Nothing else tells why a run with all its workers stands still."""
    run = _Run()
    run.leave(ev.Leaving.PEER_LOST)
    for _ in range(3):
        run.train(commits=False)
        run.leave(ev.Leaving.PEER_LOST)

    assert run.state.phase is Phase.WAITING
    assert "3 attempts in a row lost a peer" in describe(run.state)["waits_for"]
    run.wait(next_deadline_s(run.state))
    assert not describe(run.state)["waits_for"]


def test_a_group_that_does_not_form_is_looked_at_and_left_alone_if_all_reach_each_other() -> None:
    """A large model may take minutes to load; only a lost link ends the attempt."""
    run = _Run()
    run.hang()
    began_s = run.at_s
    run.wait(began_s + 60.0)
    looks = [action for action in run.actions if isinstance(action, act.ProbeLinks)]
    assert run.where() == (Phase.FORMING, 2)
    assert 4 <= len(looks) <= 8

    run.cut_pair("a", "c")
    run.actions.clear()
    while run.state.phase is Phase.FORMING and run.at_s < began_s + 130.0:
        run.wait(next_deadline_s(run.state))
    assert any(isinstance(action, act.FenceAttempt) for action in run.actions)
    run.leave()
    assert (run.state.phase, run.members()) == (Phase.FORMING, ["a", "b", "d"])


def test_what_the_transport_says_twice_counts_though_a_probe_finds_nothing() -> None:
    """A filter may stop some ports only."""
    run = _Run()
    for _ in range(2):
        assert len(run.members()) == 4
        run.at_s += 1.0
        run.leave(ev.Leaving.PEER_LOST, unreached="b")

    first, second = run.incidents()
    assert (first.incident, second.incident) == ("peer_lost", "link")
    assert "node b has no connection with 3 others" in second.evidence
    assert run.members() == ["a", "c", "d"]


def test_keepers_that_do_not_answer_delay_no_start() -> None:
    """One of the two ends says enough; where none does, the bound ends the wait."""
    run = _Run()
    run.silent = {"b"}
    run.cut_pair("b", "d")
    run.hang()
    assert run.members() == ["a", "b", "c"]


def test_a_lone_answer_that_never_comes_is_given_up_at_its_bound() -> None:
    """The run then goes on as if nothing had been found."""
    run = _Run()
    run.answers = False
    run.hang()
    assert run.where() == (Phase.READING, 1)
    run.wait(run.at_s + RULES.bounds.probe_s)

    assert run.where() == (Phase.FORMING, 2)
    assert [incident.incident for incident in run.incidents()] == ["undecided"]


def test_a_run_that_needs_a_link_uses_it_before_its_pause_is_over() -> None:
    """L1: with less than the minimum no worker trains at all."""
    rules = RunRules(run="test", min_workers=4, max_workers=4, total_steps=1000)
    run = _Run(rules)
    run.cut_pair("b", "d")
    run.hang()
    assert run.state.phase is Phase.WAITING
    run.cut.clear()
    run.wait(run.at_s + 3.0)

    assert (run.state.phase, len(run.members())) == (Phase.FORMING, 4)


def test_a_stall_is_searched_before_anything_is_proven_and_ends_only_for_a_lost_link() -> None:
    """With steps of ten seconds nothing is proven for a minute and a half."""
    run = _Run()
    run.fold(ev.AttemptStalled(at_s=run.at_s, attempt=1, waited_s=0.6))
    assert run.where() == (Phase.TRAINING, 1)

    run.cut_pair("b", "d")
    run.fold(ev.AttemptStalled(at_s=run.at_s, attempt=1, waited_s=1.2))
    assert run.where() == (Phase.FENCING, 1)
    run.leave()
    assert (run.where(), run.members()) == ((Phase.FORMING, 2), ["a", "b", "c"])
    assert [incident.incident for incident in run.incidents()] == ["link"]
    assert sum(isinstance(action, act.ProbeLinks) for action in run.actions) == 2


def test_a_hang_after_a_look_that_found_nothing_is_searched_again() -> None:
    """The link may have been lost since."""
    run = _Run()
    run.fold(ev.AttemptStalled(at_s=run.at_s, attempt=1, waited_s=0.6))
    run.cut_pair("b", "d")
    run.hang()

    assert run.members() == ["a", "b", "c"]


def test_a_node_that_is_lost_and_comes_back_is_used_the_later_each_time() -> None:
    """Each use of a node whose own link flaps costs all others a recovery."""
    run, pauses_s = _Run(), []
    for _ in range(4):
        run.at_s += 20.0
        run.fold(ev.NodeLost(at_s=run.at_s, node="d", cause="silent"))
        run.leave()
        run.train()
        back_s = run.at_s
        run.fold(ev.NodeJoined(at_s=run.at_s, node="d"))
        reservation = next(n for n, each in run.state.fleet.reservations.items() if each.node < 0)
        run.fold(ev.ReservationGranted(at_s=run.at_s, reservation=reservation, node="d"))
        worker = next(w.name for w in run.state.fleet.workers.values() if not w.pid)
        run.fold(ev.WorkerReady(at_s=run.at_s, worker=worker, node="d", pid=9))
        run.names["d"] = worker
        while len(run.members()) < len(NODES):
            run.wait(next_deadline_s(run.state))
        pauses_s.append(run.at_s - back_s)
        run.train()

    assert [round(pause_s) for pause_s in pauses_s] == [5, 10, 20, 40]
    assert not any(node.strikes for node in run.state.fleet.nodes.values())


def test_a_state_that_cannot_be_read_for_a_lost_link_is_no_fault_of_its_holder() -> None:
    """Its holder need not be a member; what it holds can be had again when the link is whole."""
    run = _Run()
    run.hang()
    run.cut_pair("a", "d")
    source = (1, 1, "d", "w0004.1", 0, 2)
    for node in run.members():
        run.fold(
            ev.WorkerLeft(
                at_s=run.at_s,
                attempt=2,
                worker=run.names[node],
                how=ev.Leaving.UNLOADABLE,
                step=1,
                detail="silent" if node == "a" else "",
                unread=(source,) if node == "a" else (),
            )
        )
    run.read()

    assert run.incidents()[-1].incident == "link"
    assert (run.where(), run.members()) == ((Phase.FORMING, 3), ["a", "b", "c"])


def test_an_attempt_numbers_its_nodes_rack_by_rack() -> None:
    assert _Run().members() == ["a", "b", "c", "d"]
    run = _Run(racks="ABAB")
    assert run.members() == ["a", "b", "d", "c"], "a ring that crosses twice, and two that stay"

    run.fold(ev.NodeLost(at_s=run.at_s, node="c", cause="silent"))
    run.leave()
    assert run.members() == ["a", "b", "d"], "survivors keep a good order"


def _timed(run: _Run, *slow: tuple[str, str], ratio: float = 0.3) -> None:
    number = run.state.attempt.number
    links = tuple((sender, receiver, 1e6) for sender, receiver in slow)
    run.fold(
        ev.LinksTimed(at_s=run.at_s, attempt=number, nodes=NODES, slow=links, step_ratio=ratio)
    )
    run.wait(run.at_s + 30.0)


def test_members_change_places_once_when_no_rank_need_send_over_a_slow_link() -> None:
    """In the ring a rank sends to the one before it."""
    run = _Run()
    run.at_s += 60.0
    _timed(run, ("b", "a"))

    assert run.state.attempt.number == 2
    ring = run.members()
    assert ring[ring.index("b") - 1] != "a", ring
    (incident,) = run.incidents()
    assert (incident.incident, incident.verdict) == ("move", "slow_link")
    assert "slow link (b to a)" in incident.evidence
    run.train()
    _timed(run, ("b", "a"))
    assert run.state.attempt.number == 2, "it is no longer in the ring"

    _timed(run)
    assert not run.state.network.slow


@pytest.mark.parametrize("slow", list(permutations("abc", 2)))
def test_copies_keep_off_a_slow_link_from_the_next_attempt_on(slow: tuple[str, str]) -> None:
    """The first choice of keepers must not leave the slow link to the last node."""
    run = _Run(replace(RULES, snapshot=SnapshotSettings(tolerance=1)))
    budgets = tuple((node, 1 << 30) for node in NODES)
    run.fold(ev.MemoryMeasured(at_s=run.at_s, budgets=budgets, state_bytes=4 << 20))
    _timed(run, slow, ratio=1.0)
    run.fold(ev.NodeLost(at_s=run.at_s, node="d", cause="silent"))
    run.leave()

    keepers = run.state.attempt.plan.keepers
    assert sorted(keeper for (keeper,) in keepers.values()) == ["a", "b", "c"]
    assert keepers[slow[0]] != (slow[1],)


@pytest.mark.parametrize(
    ("slow", "ratio", "total_steps", "why"),
    [
        (("d", "b"), 0.3, 100_000, "no rank sends over it"),
        (("b", "a"), 0.3, 4, "the run is nearly over"),
        (("b", "a"), 1.0, 100_000, "a step would take as long"),
        (("b", "x"), 0.3, 100_000, "that node is not here"),
    ],
)
def test_members_stay_where_another_order_would_win_nothing(
    slow: tuple[str, str], ratio: float, total_steps: int, why: str
) -> None:
    run = _Run(replace(RULES, total_steps=total_steps))
    run.at_s += 60.0
    _timed(run, slow, ratio=ratio)

    assert run.where() == (Phase.TRAINING, 1), why
