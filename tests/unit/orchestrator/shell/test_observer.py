"""The observer knows what reports say now, and no more."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from orchestrator.core import events as ev
from orchestrator.detection import PATIENCE
from orchestrator.diagnosis import Guilty, Verdict
from orchestrator.fault_kinds import FaultKind
from orchestrator.shell import observer as observer_module
from orchestrator.shell.inbox import Inbox
from orchestrator.shell.observer import Observer
from tests.support.histories import ATTEMPT, calm, group, stop
from workers.protocol import Digest, Flow, NodeReport, StepCost, WorkerReport
from workers.settings import ParallelSettings


def _observer(at_s: Callable[[], float], post: Callable[[ev.Event], None]) -> Observer:
    return Observer(
        Inbox(at_s=at_s, post=post),
        on_formed=lambda *_: None,
        node_silent=lambda *_: None,
        patience=PATIENCE,
        parallel=ParallelSettings(),
    )


def _report(node: str, *workers: str) -> NodeReport:
    rows = tuple(calm(worker, rank) for rank, worker in enumerate(workers))
    return NodeReport(node=node, seq=1, workers=rows)


def test_workers_and_nodes_that_are_gone_are_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that loses one every minute for weeks would look through all of them each second."""
    now_s = [100.0]
    observer = _observer(lambda: now_s[0], lambda _: None)
    observer.begin(ATTEMPT, ("w0", "w1", "w2"), 0)
    observer.on_report(_report("n0", "w0", "w1"))
    observer.on_report(_report("n1", "w2"))
    assert set(observer.reports) == set(observer.seen_at_s) == {"w0", "w1", "w2"}

    observer.on_report(_report("n0", "w0"))
    assert set(observer.reports) == set(observer.seen_at_s) == {"w0", "w2"}

    monkeypatch.setattr(observer_module, "FORGET_S", 1.0)
    for _ in range(3):
        now_s[0] += 0.5
        observer.on_report(_report("n0", "w0"))
    observer.begin(ATTEMPT + 1, ("w0", "w2"), 7)
    assert set(observer.reports) == {"w0", "w2"}, "a member, though its node is silent"
    observer.begin(ATTEMPT + 2, ("w0",), 7)
    assert set(observer.reports) == set(observer.seen_at_s) == {"w0"}
    observer.on_report(_report("n1", "w2"))
    assert set(observer.reports) == {"w0", "w2"}, "it is back"


def test_a_keeper_is_silent_when_others_report() -> None:
    """The observer posts the silence once, and then the keeper's return."""
    now_s, posted = [100.0], list[ev.Event]()
    observer = _observer(lambda: now_s[0], posted.append)
    observer.begin(ATTEMPT, ("w0", "w1"), 0)

    def go_on(seconds: int, *nodes: str) -> list[tuple[str, str]]:
        posted.clear()
        for _ in range(seconds):
            now_s[0] += 1.0
            for node in nodes:
                observer.on_report(_report(node, f"w{node[1]}"))
            observer.judge()
        seen = (each for each in posted if isinstance(each, ev.KeeperSilent | ev.KeeperReady))
        return [(type(each).__name__, each.node) for each in seen]

    assert go_on(5, "n0", "n1") == []
    assert go_on(2, "n0") == []
    assert go_on(5, "n0") == [("KeeperSilent", "n1")]
    assert go_on(5, "n0", "n1") == [("KeeperReady", "n1")]
    now_s[0] += 60.0
    assert go_on(1, "n0", "n1") == [], "the controller was away"


def test_costs_are_known_between_two_digests_and_steps_by_percentile() -> None:
    """Most reports carry none, and a scrape comes at any time."""
    now_s = [100.0]
    observer = _observer(lambda: now_s[0], lambda _: None)
    observer.begin(ATTEMPT, ("w0",), 0)
    assert observer.step_s == {}

    told = Digest(costs=(StepCost(6, 0.5, 0.0), StepCost(7, 0.25, 0.125)))
    for step in range(7, 107):
        now_s[0] += 0.1
        took_s = 0.5 if step == 50 else 0.25
        row = replace(calm("w0", 0), step=step, step_s=took_s, digest=told if step == 7 else None)
        observer.on_report(NodeReport(node="n0", seq=step, workers=(row,)))

    assert observer.costs == {"w0": StepCost(7, 0.25, 0.125)}
    assert observer.step_s["p50"] == 0.25
    assert observer.step_s["p99"] in (0.25, 0.5)
    observer.on_report(_report("n0"))
    assert observer.costs == {}


def test_a_stall_is_reported_again_only_after_twice_the_time() -> None:
    """Each time keepers look at the network; a stall may last, and reports come ten a second."""
    now_s = [100.0]
    posted: list[ev.Event] = []
    observer = _observer(lambda: now_s[0], posted.append)
    observer.begin(ATTEMPT, ("w0", "w1"), 0)
    waiting = (group("world", (0, 1), 9, waiting_s=0.1),)
    rows = tuple(replace(calm(w, rank), groups=waiting) for rank, w in enumerate(("w0", "w1")))
    while not any(isinstance(event, ev.HangFound) for event in posted):
        now_s[0] += 0.1
        observer.on_report(NodeReport(node="n0", seq=1, workers=rows))
        observer.judge()
        assert now_s[0] < 200.0

    told = [event.waited_s for event in posted if isinstance(event, ev.AttemptStalled)]
    assert told
    assert all(later >= 2.0 * sooner for sooner, later in pairwise(told))


def test_a_dead_link_is_reported_however_long_steps_take() -> None:
    """With steps of a minute a stall would be noticed after two."""
    now_s = [100.0]
    posted: list[ev.Event] = []
    observer = _observer(lambda: now_s[0], posted.append)
    observer.begin(ATTEMPT, ("w0", "w1"), 0)
    ends = (("10.0.0.1", 5), ("10.0.0.2", 6))
    for half_s in range(30):
        now_s[0] += 0.5
        beats = {"step_s": 60.0, "phase_s": 0.5 * half_s}
        for rank, worker in enumerate(("w0", "w1")):
            here, there = ends if worker == "w0" else ends[::-1]
            held = {"in_flight": 5, "backoff": 2 + half_s // 4, "heard_ms": 1000 + 500 * half_s}
            flow = Flow(worker, here, there, 0, 0, 900, **(held if worker == "w0" else {}))
            row = replace(calm(worker, rank), **beats)  # type: ignore[arg-type]
            observer.on_report(NodeReport(node=worker, seq=1, workers=(row,), flows=(flow,)))
            observer.judge()

    told = [
        (event.at_s, event.waited_s) for event in posted if isinstance(event, ev.AttemptStalled)
    ]
    assert told[0] == (101.0, 1.5), "as soon as both ends are known"
    assert [waited_s for _, waited_s in told] == [1.5, 3.0, 6.0, 12.0]
    assert not any(isinstance(event, ev.HangFound) for event in posted), "nothing is proven"
    (said,) = (event for event in posted if isinstance(event, ev.Suspected))
    (one,) = said.suspects
    assert (one.kind, one.guilty) == (FaultKind.LINK_DEAD, Guilty(links=((0, 1),)))
    assert (said.at_s, one.since_s) == (101.0, 99.5)


def test_bytes_of_a_step_are_reported_once_known_and_when_they_change() -> None:
    posted: list[ev.Event] = []
    observer = _observer(lambda: 100.0, posted.append)
    observer.begin(ATTEMPT, ("w0", "w1"), 0)
    sent_bytes = 0
    for step in range(1, 200):
        sent_bytes += 1000 if step < 80 else 3000
        for rank, worker in enumerate(("w0", "w1")):
            shards = replace(group("dp_shard[0,1]", range(2), step), sent_bytes=sent_bytes)
            row = replace(calm(worker, rank), step=step, groups=(shards,))
            observer.on_report(NodeReport(node=worker, seq=1, workers=(row,)))

    said = [event.sent for event in posted if isinstance(event, ev.TrafficMeasured)]
    assert said == [(("dp_shard", 1000.0),), (("dp_shard", 2800.0),)]


def test_what_keepers_timed_is_suspected_beside_what_reports_tell() -> None:
    """A node whose card is slow can be left like one whose worker is; a link has no worker."""
    posted: list[ev.Event] = []
    observer = _observer(lambda: 100.0, posted.append)
    observer.begin(ATTEMPT, ("w0", "w1", "w2"), 0)
    link = Verdict(
        kind=FaultKind.SLOW_LINK, guilty=Guilty(links=((2, 1),)), confidence=0.9, since_s=None,
        evidence="slow",
    )  # fmt: skip
    sender = replace(link, kind=FaultKind.SLOW_SENDER, guilty=Guilty.of([1], (), ["n1"]))

    def suspect(
        found: list[Verdict], times: float, attempt: int = ATTEMPT, *, is_confirmed: bool = True
    ) -> None:
        observer.suspect_links(attempt, found, since_s=90.0, times=times, is_confirmed=is_confirmed)

    suspect([link, sender], 2.5, is_confirmed=False)
    suspect([link, sender], 2.5)
    suspect([link, sender], 2.4)
    suspect([], 1.0, ATTEMPT - 1)
    suspect([], 1.0)
    observer.end((), 0.0)
    suspect([link], 2.5)

    said = [event.suspects for event in posted if isinstance(event, ev.Suspected)]
    assert [[(one.kind, one.worker, one.times) for one in each] for each in said] == [
        [(FaultKind.SLOW_LINK, "", 2.5), (FaultKind.SLOW_SENDER, "", 2.5)],
        [(FaultKind.SLOW_LINK, "", 2.5), (FaultKind.SLOW_SENDER, "w1", 2.5)],
        [],
    ]


def test_a_change_of_the_workers_that_compute_in_a_fenced_attempt_is_reported() -> None:
    """Reports come ten a second, and most members leave in milliseconds."""
    now_s = [100.0]
    posted: list[ev.Event] = []
    observer = _observer(lambda: now_s[0], posted.append)
    observer.begin(ATTEMPT, ("w0", "w1"), 0)

    def report(*rows: WorkerReport, for_s: float) -> None:
        until_s = now_s[0] + for_s
        while now_s[0] < until_s:
            now_s[0] += 0.1
            observer.on_report(NodeReport(node="n0", seq=1, workers=rows))
            observer.judge()

    working, left = calm("w0", 0), replace(calm("w1", 1), attempt=0, rank=-1)
    report(working, calm("w1", 1), for_s=0.5)
    observer.end(("w0", "w1"), 1.0)
    posted.clear()
    report(working, left, for_s=0.8)
    assert not posted, "who leaves in time is not looked at"
    report(working, left, for_s=3.0)
    report(stop(working), left, for_s=3.0)
    told = [event for event in posted if isinstance(event, ev.MembersAtWork)]
    assert [event.workers for event in told] == [("w0",), ()]
    assert {event.attempt for event in told} == {ATTEMPT}


def test_processes_that_load_modules_are_told_and_those_that_wait_are_not() -> None:
    """An import that hangs uses no processor, and the threads of Ray beside it do."""
    now_s = [100.0]
    posted: list[ev.Event] = []
    observer = _observer(lambda: now_s[0], posted.append)
    observer.begin(ATTEMPT, ("w0",), 0)
    idle = replace(calm("w1", 1), attempt=0, rank=-1, trainer_s=1.0)

    for number in range(25):
        loading = replace(idle, worker="w2", trainer_s=1.0 + 0.1 * number)
        rows = (calm("w0", 0), replace(idle, processor_s=0.1 * number), loading)
        observer.on_report(NodeReport(node="n0", seq=number, workers=rows))
        observer.judge()
        now_s[0] += 1.0

    told = [event for event in posted if isinstance(event, ev.StartsAdvanced)]
    assert [(event.at_s, event.workers) for event in told] == [(110.0, ("w2",)), (120.0, ("w2",))]
