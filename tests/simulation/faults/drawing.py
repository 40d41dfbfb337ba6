"""Faults of the virtual cluster. Their rates are drawn from the seed too (swarm testing)."""

from collections.abc import Callable
from math import inf
from random import Random

from orchestrator.core import events as ev
from tests.simulation.faults import watching
from tests.simulation.violation import require
from tests.simulation.world import Orphans, SimCluster, SimNode, SimWorker
from workers.protocol import stored_source

#: A silent keeper is not to be reported more often than that.
_TOLD_MAX = 3


def _pick_worker(cluster: SimCluster) -> SimWorker | None:
    """Return a living worker, more likely one that trains."""
    workers = list(cluster.workers.values())
    training = [worker for worker in workers if worker.attempt]
    pool = training if training and cluster.chance(0.8) else workers
    return cluster.rng.choice(pool) if pool else None


def _pick_node(cluster: SimCluster) -> SimNode | None:
    nodes = [node for node in cluster.nodes.values() if node.alive and not node.cut_off]
    return cluster.rng.choice(nodes) if nodes else None


def crash(cluster: SimCluster) -> None:
    """A worker process dies."""
    worker = _pick_worker(cluster)
    if worker is not None:
        cluster.monitor.troubled.add(worker.node.name)
        cluster.die(worker, "crash")


def hang(cluster: SimCluster) -> None:
    """A worker stops answering; detection finds it, or finds only that nothing moves."""
    worker = _pick_worker(cluster)
    if worker is not None and not worker.hung:
        worker.hung, worker.hung_at_s = True, cluster.now_s
        # Someone who stops every process wants no verdict, and gets none.
        is_only = not any(each.hung_as in watching.SHOWN for each in cluster.workers.values())
        worker.hung_as = cluster.rng.choice(watching.SHOWN) if is_only else "waits"
        if cluster.chance(0.2):
            worker.hung_as = "waits"
        cluster.monitor.is_state_gone = True
        cluster.monitor.faulty.add(worker.name)
        cluster.monitor.troubled.add(worker.node.name)
        watching.watch(cluster)


def pause(cluster: SimCluster) -> None:
    """A worker works or sleeps for many steps, in Python or in C: none may be blamed for it."""
    worker = _pick_worker(cluster)
    if worker is not None:
        worker.busy_at_s = cluster.now_s
        worker.busy_until_s = cluster.now_s + 8 * cluster.rng.random()
        worker.busy_as = cluster.rng.choice(watching.PAUSES)
        watching.watch(cluster)


def misjudge(cluster: SimCluster) -> None:
    """Detection is wrong: it calls an attempt hung that is well, and may name a member."""
    newest = cluster.attempts.get(cluster.monitor.attempt)
    landed = (*cluster.storage.commits, *cluster.memory.landed_s)
    if newest is None or not any(attempt == newest.number for _, attempt in landed):
        # Three in a row without a commit between end a run, and would have a cause.
        return
    worker = cluster.workers.get(cluster.rng.choice(newest.members))
    guilty: tuple[str, ...] = ()
    if worker is not None and cluster.chance(0.5):
        guilty = (worker.name,)
        cluster.monitor.is_state_gone = True
        cluster.monitor.faulty.add(worker.name)
        cluster.monitor.troubled.add(worker.node.name)
    cluster.find(ev.HangFound, attempt=newest.number, guilty=guilty, evidence="a mistake")


def lose_node(cluster: SimCluster, node: SimNode | None = None) -> None:
    """A node goes with everything on it; it may return."""
    node = node or _pick_node(cluster)
    if node is None or not node.alive:
        return
    node.alive = False
    cluster.monitor.lost_nodes.add(node.name)
    cluster.memory.lose_node(node.name)
    cause = "preempted" if node.draining_until_s is not None else "node"
    for worker in list(node.workers.values()):
        cluster.die(worker, cause)
        if cluster.chance(0.5):
            cluster.post(
                ev.WorkerExited, 0.05, worker=worker.name, cause=cause, detail="its node died"
            )
    _forget_reservations(cluster, node)
    cluster.post(ev.NodeLost, 0.5 + cluster.rng.random(), node=node.name, cause="died")
    if cluster.chance(0.7):
        cluster.at(2.0 + 3 * cluster.rng.random(), return_node, cluster, node.room)


def cut_off(cluster: SimCluster) -> None:
    """The controller stops hearing from a node, while its workers train on."""
    node = _pick_node(cluster)
    if node is None or node.draining_until_s is not None:
        return
    node.cut_off = True
    cluster.monitor.lost_nodes.add(node.name)
    cluster.monitor.faulty.update(node.workers)
    cluster.monitor.is_state_gone = True
    cluster.at(0.5 + cluster.wire_s(), _miss, cluster, node)
    cluster.at(3.0 + 2 * cluster.rng.random(), heal_node, cluster, node)


def _miss(cluster: SimCluster, node: SimNode) -> None:
    """The controller counts a silence itself: it does not find one that is over."""
    if node.cut_off:
        cluster.find(ev.NodeLost, node=node.name, cause="silent")


def heal_node(cluster: SimCluster, node: SimNode) -> None:
    """The partition ends; workers there found their lease expired and ended themselves."""
    if not node.cut_off:
        return
    for worker in list(node.workers.values()):
        cluster.die(worker, "killed")
    _forget_reservations(cluster, node)
    cluster.memory.lose_node(node.name)
    node.cut_off = False
    node.keeper_back_s = min(node.keeper_back_s, cluster.now_s)
    # A controller that was away meanwhile has not missed it: Ray says what went.
    cluster.find(ev.NodeLost, node=node.name, cause="Ray declared it dead")
    cluster.post(ev.NodeJoined, node=node.name, rack=node.rack)
    cluster.place()


def cut_link(cluster: SimCluster) -> None:
    """Two nodes do not reach each other, in one way or both, while the controller reaches both."""
    pair = _pick_pair(cluster)
    if pair is not None:
        lose_ways(cluster, _ways(cluster, *pair))
        cluster.at(0.2 + 6 * cluster.rng.random(), mend_ways, cluster, pair)


def cut_all_links(cluster: SimCluster) -> None:
    """A node stops reaching all others, except for the controller."""
    node = _pick_node(cluster)
    if node is not None:
        others = [other for other in cluster.nodes if other != node.name]
        for other in others:
            lose_ways(cluster, _ways(cluster, node.name, other))
        away_s = 0.2 + 6 * cluster.rng.random()
        for other in others:
            cluster.at(away_s, mend_ways, cluster, (node.name, other))


def flap(cluster: SimCluster) -> None:
    """A link fails again and again."""
    pair = _pick_pair(cluster)
    if pair is not None:
        flap_pair(cluster, pair, 0.3 + 3 * cluster.rng.random(), cluster.rng.randint(2, 6))


def flap_pair(cluster: SimCluster, pair: tuple[str, str], period_s: float, num_times: int) -> None:
    """Cut a pair for half a period, and again after it."""
    lose_ways(cluster, _ways(cluster, *pair))
    cluster.at(period_s / 2, mend_ways, cluster, pair)
    if num_times > 1:
        cluster.at(period_s, flap_pair, cluster, pair, period_s, num_times - 1)


def reset_connections(cluster: SimCluster, period_s: float, until_s: float) -> None:
    """Break connections between members every ``period_s``; a probe finds every link whole."""
    attempt = cluster.attempts.get(cluster.monitor.attempt)
    names = attempt.members if attempt is not None else ()
    inside = [name for name in names if name in cluster.workers]
    if inside:
        cluster.shake(cluster.workers[cluster.rng.choice(inside)])
    if cluster.now_s < until_s:
        cluster.at(period_s, reset_connections, cluster, period_s, until_s)


def lose_ways(cluster: SimCluster, ways: list[tuple[str, str]]) -> None:
    """Lose every packet on these ways from now on."""
    cluster.lost_ways.update(dict.fromkeys(ways))
    cluster.monitor.unlinked.update(node for way in ways for node in way)
    cluster.monitor.is_state_gone = True


def mend_ways(cluster: SimCluster, pair: tuple[str, str]) -> None:
    """Lose nothing more between two nodes."""
    for way in (pair, pair[::-1]):
        cluster.lost_ways.pop(way, None)


def _pick_pair(cluster: SimCluster) -> tuple[str, str] | None:
    """Return two living nodes, more likely ones that train together."""
    newest = cluster.attempts.get(cluster.monitor.attempt)
    names = [node.name for node in cluster.nodes.values() if node.alive and not node.cut_off]
    training = [name for name in names if newest is not None and name in newest.nodes]
    pool = training if len(training) > 1 and cluster.chance(0.8) else names
    if len(pool) <= 1:
        return None
    one, other = cluster.rng.sample(pool, k=2)
    return one, other


def _ways(cluster: SimCluster, one: str, other: str) -> list[tuple[str, str]]:
    return [(one, other)] if cluster.chance(0.3) else [(one, other), (other, one)]


def return_node(cluster: SimCluster, room: int, rack: str = "") -> None:
    """A machine comes, or one that was lost is back, empty; to Ray it is another node."""
    name = f"n{len(cluster.nodes)}"
    kind = cluster.market.randrange(len(cluster.rules.capacity.usd_per_hour))
    cluster.nodes[name] = SimNode(name, room, rack, kind)
    cluster.post(ev.NodeJoined, node=name, rack=rack)
    cluster.place()


def drain(cluster: SimCluster) -> None:
    """The provider gives notice, may change it, and takes the node at the deadline."""
    node = _pick_node(cluster)
    if node is None or node.draining_until_s is not None:
        return
    taken = [node]
    if cluster.chance(0.15):
        # A job of Slurm is preempted, or a zone is short: everything goes at once.
        taken = [each for each in cluster.nodes.values() if each.alive]
    for each in taken:
        _give_notice(cluster, each)
    if cluster.chance(0.3):
        cluster.at(3 * cluster.rng.random(), _change_notice, cluster, node)


def _give_notice(cluster: SimCluster, node: SimNode) -> None:
    notice_s = 1.0 + 3 * cluster.rng.random()
    node.draining_until_s = cluster.now_s + notice_s
    cluster.at(cluster.wire_s(), cluster.read_notice, node)
    cluster.at(notice_s, _take, cluster, node, node.draining_until_s)


def _change_notice(cluster: SimCluster, node: SimNode) -> None:
    """The provider comes sooner or later than it said, or not at all."""
    if not node.alive or node.draining_until_s is None:
        return
    if cluster.chance(0.5):
        _give_notice(cluster, node)
    else:
        node.draining_until_s = None
        # Until the controller has read that, it asks for no reservation here.
        cluster.monitor.troubled.add(node.name)
        cluster.at(cluster.wire_s(), cluster.read_notice, node)
        cluster.place()


def _take(cluster: SimCluster, node: SimNode, deadline_s: float) -> None:
    # The provider may also leave it where it is.
    if node.draining_until_s == deadline_s and cluster.chance(0.9):
        lose_node(cluster, node)


def drain_controller(cluster: SimCluster) -> None:
    """The provider gives notice of the controller's machine, and may take it."""
    notice_s = 1.0 + 3 * cluster.rng.random()
    cluster.find(ev.ControllerDraining, deadline_s=cluster.now_s + notice_s)
    cluster.at(notice_s, _take_controller, cluster)


def _take_controller(cluster: SimCluster) -> None:
    if cluster.chance(0.8):
        kill_controller(cluster)


def new_node(cluster: SimCluster) -> None:
    """The autoscaler adds a node."""
    return_node(cluster, cluster.rng.randint(1, 2))


def raise_once(cluster: SimCluster) -> None:
    """One rank's training code raises at the next step, once."""
    newest = cluster.attempts.get(cluster.monitor.attempt)
    if newest is None or cluster.raises_once:
        return
    if newest.step + 1 not in cluster.raises_at:
        cluster.raises_at[newest.step + 1] = (cluster.rng.randrange(len(newest.members)),)
        cluster.raises_once.add(newest.step + 1)


def corrupt(cluster: SimCluster, rng: Random) -> None:
    """A worker that trains computes something wrong from now on; the next check shows it."""
    training = sorted((w for w in cluster.workers.values() if w.attempt), key=lambda w: w.name)
    if training:
        worker = rng.choice(training)
        worker.errs = True
        cluster.monitor.faulty.add(worker.name)
        cluster.monitor.troubled.add(worker.node.name)


def damage(cluster: SimCluster) -> None:
    """The newest version can no longer be loaded."""
    commits = cluster.storage.commits
    if commits:
        commits[next(reversed(commits))].damaged = True
        _strike_soon(cluster)


def flip_bits(cluster: SimCluster) -> None:
    """Bytes of the newest versions change where they lie, and nothing shows it."""
    rng = cluster.rng
    held = [
        part.source
        for one in cluster.memory.inventories(cluster.nodes.values(), cluster.now_s)
        for part in one.parts
    ]
    stored = [stored_source(*version) for version in cluster.storage.commits]
    newest = max((source[0] for source in held), default=0)
    for sources in ([s for s in held if s[0] == newest], held, stored[-1:]):
        if sources and cluster.chance(0.6):
            num = rng.choice((1, 1, 2, len(sources)))
            cluster.damaged.update(rng.sample(sources, k=min(num, len(sources))))
    _strike_soon(cluster)


def _strike_soon(cluster: SimCluster) -> None:
    """Damage shows only where something is loaded: end an attempt behind it, mostly."""
    if cluster.chance(0.7):
        cluster.at(0.1 * cluster.rng.random(), crash, cluster)


def kill_keeper(cluster: SimCluster) -> None:
    """A keeper's process dies; now and then it does not come back."""
    node = _pick_node(cluster)
    if node is not None and node.has_keeper:
        cluster.keeper_dies(node, returns=cluster.chance(0.9))


def stop_keeper(cluster: SimCluster) -> None:
    """A keeper hangs: it keeps its versions, and does not answer until it is started again."""
    node = _pick_node(cluster)
    if node is not None and node.has_keeper and node.keeper_back_s <= cluster.now_s:
        node.keeper_back_s = inf
        node.num_hangs += 1
        cluster.monitor.is_state_gone = True
        cluster.at(0.5, _miss_reports, cluster, node, node.num_hangs)
        silent_s = cluster.rules.bounds.keeper_silent_s
        cluster.at(silent_s, _miss_keeper, cluster, node, node.num_hangs, 0)


def _miss_reports(cluster: SimCluster, node: SimNode, hang: int) -> None:
    """The controller misses its reports before it misses an answer."""
    if node.alive and node.keeper_back_s == inf and node.num_hangs == hang:
        cluster.find(ev.KeeperSilent, node=node.name, silent_s=0.5)


def _miss_keeper(cluster: SimCluster, node: SimNode, hang: int, num_told: int) -> None:
    """The controller asks keepers itself, as long as one says nothing."""
    is_silent = node.alive and node.has_keeper and node.keeper_back_s == inf
    if is_silent and node.num_hangs == hang:
        silent_s = cluster.rules.bounds.keeper_silent_s
        is_heard = cluster.controller_up and not node.cut_off and cluster.monitor.outcome is None
        require(num_told < _TOLD_MAX, "L2", f"the keeper of {node.name} is left silent")
        if is_heard:
            cluster.find(ev.KeeperSilent, node=node.name, silent_s=silent_s)
        cluster.at(silent_s, _miss_keeper, cluster, node, hang, num_told + is_heard)


def cut_off_storage(cluster: SimCluster) -> None:
    """Storage does not answer for a while; often something fails meanwhile."""
    outage_s = 0.5 + 4.0 * cluster.rng.random()
    cluster.storage.back_s = max(cluster.storage.back_s, cluster.now_s + outage_s)
    _strike_soon(cluster)


def kill_controller(cluster: SimCluster) -> None:
    """The controller's process dies: what was on its way to it is lost."""
    if cluster.is_headless:
        return
    cluster.incarnation += 1
    cluster.inbox.clear()
    cluster.controller_up = False
    cluster.at(0.3 + 0.5 * cluster.rng.random(), _restart_controller, cluster, cluster.incarnation)


def _restart_controller(cluster: SimCluster, incarnation: int) -> None:
    if incarnation == cluster.incarnation:
        cluster.incarnation += 1
        cluster.controller_up = True
        cluster.num_incarnations += 1
        cluster.inbox.append(
            ev.ControllerStarted(at_s=cluster.now_s, incarnation=cluster.num_incarnations)
        )


def lose_head(cluster: SimCluster, rng: Random) -> None:
    """The head's machine goes, and the run resumes on a second cluster.

    The old trainers and keepers cannot be reached, and train on.
    """
    if cluster.is_headless or cluster.monitor.outcome is not None:
        return
    kill_controller(cluster)
    cluster.incarnation += 1
    cluster.is_headless = True
    attempt = cluster.attempts.get(cluster.monitor.attempt)
    for worker in cluster.workers.values():
        worker.alive = False
    # A fenced worker waits for an attempt that never starts.
    if attempt is not None and cluster.present(attempt) is not None and attempt.formed:
        Orphans(cluster, attempt, rng).train_on()
    cluster.at(0.1 + 4 * rng.random(), _begin_claim, cluster)


def _begin_claim(cluster: SimCluster) -> None:
    cluster.storage.claim_again()
    # Steps committed by now must not be lost.
    cluster.monitor.left(cluster, cluster.monitor.attempt)
    cluster.monitor.yielded = None
    cluster.is_headless = False
    cluster.begin_claim()


def end_everything(cluster: SimCluster) -> None:
    """The run is over: its processes, reservations and memory are given back."""
    cluster.incarnation += 1
    cluster.inbox.clear()
    cluster.controller_up = True
    for worker in cluster.workers.values():
        worker.alive = False
    cluster.workers.clear()
    for node in cluster.nodes.values():
        node.workers.clear()
        node.has_keeper = False
        cluster.memory.lose_node(node.name)
        _forget_reservations(cluster, node)
        cluster.post(ev.NodeJoined, node=node.name, rack=node.rack)
    cluster.give_back_all()


def _forget_reservations(cluster: SimCluster, node: SimNode) -> None:
    for reservation in node.reservations:
        cluster.granted.pop(reservation, None)
    node.reservations.clear()


Fault = Callable[[SimCluster], None]

FAULTS: tuple[Fault, ...] = (
    crash,
    hang,
    lose_node,
    cut_off,
    cut_link,
    cut_all_links,
    flap,
    drain,
    drain_controller,
    new_node,
    raise_once,
    damage,
    flip_bits,
    kill_keeper,
    stop_keeper,
    kill_controller,
    pause,
    misjudge,
)
