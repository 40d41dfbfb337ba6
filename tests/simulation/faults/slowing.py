"""Workers that compute or load data slowly, and what only looks so, judged by production code.

Nodes that send slowly, and slow links, are told as keepers tell them. Digests are made of what is
true: stages differ, single micro-batches compile, and a machine may be loaded for a moment. Only
who is slow for long may be convicted.
"""

from dataclasses import dataclass, replace
from math import inf
from random import Random

from orchestrator.core import events as ev
from orchestrator.diagnosis import Guilty, Live, Suspicion, roles_of
from orchestrator.fault_kinds import FaultKind
from tests.simulation.checkers import SLOW_SEEN_S
from tests.simulation.faults import watching
from tests.simulation.world import SimAttempt, SimCluster, SimWorker
from workers.protocol import Digest, StepCost

_LOOK_S = 0.25
_FORWARD_S, _DATA_S = 0.1, 0.002
#: A step in so many compiles; one of a worker that does in most steps would be a slow worker.
_COMPILES, _COMPILES_APART = 0.01, 15


@dataclass
class _Watch:
    """The suspicions of an incarnation of the controller, in one attempt."""

    incarnation: int
    attempt: int
    live: Live
    step: int
    cards: tuple[Suspicion, ...] = ()


def slow_down(cluster: SimCluster, rng: Random) -> None:
    """Let a worker be slow for long or for a moment, or all those of a node for a moment."""
    training = sorted((w for w in cluster.workers.values() if w.attempt), key=lambda w: w.name)
    if not training:
        return
    worker = rng.choice(training)
    what = rng.choice(("compute", "compute", "data", "load", "card", "link"))
    times = rng.choice((1.3, 3.0, 4.0))
    if what == "link":
        _slow_link(cluster, rng)
        return
    until_s = cluster.now_s + (rng.choice((1.0, 60.0, 60.0)) if what != "load" else 1.5)
    for each in worker.node.workers.values() if what == "load" else (worker,):
        each.slow = (what, times, until_s)
        since_s, ended_s, before = cluster.monitor.slowed.get(each.name, (0.0, -inf, 1.0))
        if cluster.now_s > ended_s + SLOW_SEEN_S:
            since_s, before = cluster.now_s, 1.0
        # A conviction that the first time led to may be carried out in the second.
        cluster.monitor.slowed[each.name] = (since_s, until_s, max(times, before))
    if until_s - cluster.now_s > cluster.rules.slow.steady_s:
        cluster.monitor.troubled.add(worker.node.name)
    if not cluster.sees_costs:
        cluster.sees_costs = True
        cluster.at(_LOOK_S, _look, cluster, rng, None)


def _slow_link(cluster: SimCluster, rng: Random) -> None:
    """Let keepers find a link slow, and well again; no worker is to blame."""
    nodes = sorted({w.node.name for w in cluster.workers.values() if w.attempt})
    if len(nodes) > 1:
        sender, receiver = rng.sample(nodes, 2)
        _time(cluster, nodes, ((sender, receiver, 1e6),), rng.choice((0.2, 0.9)))
        cluster.at(rng.choice((1.0, 60.0)), _time, cluster, nodes, (), 1.0)


def _time(
    cluster: SimCluster, nodes: list[str], slow: tuple[tuple[str, str, float], ...], ratio: float
) -> None:
    attempt = cluster.monitor.attempt
    cluster.find(ev.LinksTimed, attempt=attempt, nodes=tuple(nodes), slow=slow, step_ratio=ratio)


def _slow_cards(
    cluster: SimCluster, newest: SimAttempt, members: list[SimWorker | None]
) -> tuple[Suspicion, ...]:
    return tuple(
        Suspicion(
            kind=FaultKind.SLOW_SENDER,
            guilty=Guilty.of([rank], (), [worker.node.name]),
            confidence=0.9,
            since_s=cluster.monitor.slowed[worker.name][0],
            evidence=f"Keepers found that {worker.node.name} sends slowly.",
            worker=worker.name,
            times=worker.slow[1],
        )
        for rank, worker in enumerate(members)
        if worker is not None and worker.attempt == newest.number
        if worker.slow[0] == "card" and cluster.now_s < worker.slow[2]
    )


def _look(cluster: SimCluster, rng: Random, watch: _Watch | None) -> None:
    newest = cluster.attempts.get(cluster.monitor.attempt)
    if cluster.monitor.outcome is not None or newest is None:
        cluster.sees_costs = False
        return
    if watch is None or (watch.incarnation, watch.attempt) != (cluster.incarnation, newest.number):
        live = Live(roles_of(newest.layout), newest.begun_step + 1)
        watch = _Watch(cluster.incarnation, newest.number, live, newest.step)
    members = [cluster.workers.get(name) for name in newest.members]
    for step in range(watch.step + 1, newest.step + 1):
        for rank, worker in enumerate(members):
            if worker is not None and worker.attempt == newest.number:
                cost = _cost(cluster, newest, worker, rank, step, rng)
                report = watching.report_of(worker, rank, newest, cluster.now_s)
                report = replace(report, step=step, digest=Digest(costs=(cost,)))
                watch.live.take(rank, report, worker.node.name, cluster.now_s)
    watch.step = newest.step
    if cluster.controller_up:
        _tell(cluster, newest, watch, members)
    cluster.at(_LOOK_S, _look, cluster, rng, watch)


def _tell(
    cluster: SimCluster, newest: SimAttempt, watch: _Watch, members: list[SimWorker | None]
) -> None:
    cards, watch.cards = watch.cards, _slow_cards(cluster, newest, members)
    if watch.live.look(cluster.now_s) or cards != watch.cards:
        cluster.find(
            ev.Suspected,
            attempt=newest.number,
            suspects=(*watch.live.suspicions, *watch.cards),
            usual_step_s=cluster.model.step_s(newest.layout),
        )


def _cost(
    cluster: SimCluster, newest: SimAttempt, worker: SimWorker, rank: int, step: int, rng: Random
) -> StepCost:
    what, times, until_s = worker.slow
    is_slow = cluster.now_s < until_s
    stage = newest.layout.coordinates(rank)["pp"]
    compute_s = _FORWARD_S * (1.0 + 0.3 * stage) * rng.lognormvariate(0.0, 0.02)
    if is_slow and what in {"compute", "load"}:
        compute_s *= times
    if rng.random() < _COMPILES:
        longer_s = 8.0 * rng.random()
        if step - worker.compiled not in range(1, _COMPILES_APART):
            worker.compiled = step
            compute_s += longer_s
    data_s = _DATA_S + (_FORWARD_S * (times - 1.0) if is_slow and what == "data" else 0.0)
    return StepCost(step, compute_s, data_s)
