"""The node watcher: the cluster's machines, their drain notices and their keepers.

Ray's own verdict on a dead machine takes 14 to 62 s. This watcher looks at a node as soon as its
raylet hangs up, or a process on it is gone: a raylet that refuses connections is dead, and its node
is lost. So is one whose machine answers nothing for some seconds, while others do; if all are
silent at once, it is the controller's own machine that is cut off, and Ray decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.core import (
    Bounds,
    ControllerDraining,
    Event,
    KeeperDied,
    KeeperReady,
    KeeperSilent,
    LinksProbed,
    NodeDraining,
    NodeJoined,
    NodeLost,
    ProbeLinks,
)
from orchestrator.shell.clock import wall_time
from orchestrator.shell.names import RunNames
from orchestrator.shell.threads import RAY, in_thread
from workers.keeper import OPTIONS, Keeper, NoticeWatch, hung_up, silent
from workers.protocol import LEASE_S, Ending, Notice

log = logging.getLogger(__name__)

#: The node table and drain notices are read this often, 2.6 ms of processor time a read. Lost
#: nodes are found by their connections; a new one and a notice of 30 s can wait this long.
POLL_S = 2.0
#: A keeper that is being started again is called this often.
KEEPER_RETRY_S = 0.1
#: A keeper that lives answers a new controller in 1 to 50 ms.
MEET_S = 2.0
#: How often a keeper is asked whether it is there.
KEEPER_ASK_S = 5.0
#: To remove its files takes a keeper milliseconds; one that stands still must not hold up the end.
CLEAR_S = 5.0
#: A node that was declared lost and is there all the same is taken in again after this.
RETURN_S = 5.0
#: A probe between two nodes ends after 1.2 s, and a busy keeper takes a while to answer. Below
#: ``Bounds.probe_s``.
PROBED_S = 2.5
#: A raylet's port answers or refuses in microseconds, also across a data center.
PROBE_S = 0.5
#: A keeper has so long to say how a process ended: the recovery waits for it.
ENDING_S = 0.1
#: One that lives hangs up on who says nothing after two minutes, and is called again. So is one
#: that dies, in case its port outlived the connection.
RECALL_S = 0.05
#: A notice that names no time is followed when a replacement is there, and in a year at last.
FAR_S = 365 * 86400.0
#: Who says that a node goes: Ray, what its keeper asks, or what the controller asks on its own.
_RAY, _KEEPER, _CONTROLLER = "ray", "keeper", "controller"
#: So many other machines are asked whether it is this one that is cut off.
NUM_ASKED = 32


@dataclass(slots=True)
class NodeView:
    """What the watcher knows of one node and of its keeper.

    Attributes:
        node: Ray node id, hex.
        raylet_address: Where its raylet listens.
        rack: What it fails together with; "" if nothing is known.
        state: alive, draining or lost.
        notice: Who says that it goes; "" if nobody does.
        taken_s: When it goes, on the run's clock; infinity if nobody says when.
        raylet_pid: Process id of the raylet; 0 before the keeper said it.
        keeper_pid: Likewise of the keeper, and while it is being started again.
        clock_ahead_s: How far its clock is ahead of the controller's, at least; 0 if behind.
        lease_s: How long its trainers may go on without a controller.
        lost_s: When it was declared lost, on the run's clock.
        is_dead: Whether it is lost, and no process of it can be alive.
        is_returning: Whether its keeper died alone and is being started again.
        starting: Set while the keeper is being started, and after that; its result is the handle.
        keeper: Ray handle of the keeper.
        host: Where the keeper serves snapshots; "" if it keeps none.
        port: Its port.
        secret: What it asks for before it serves; b"" before it said so.
        tasks: Run until the node is lost.
        care: That of them that runs until the keeper is ended.
        ending: Set while the keeper is being ended.
        greeted: Set once the keeper has said who it is.
        lost: Set when it is.
    """

    node: str
    raylet_address: tuple[str, int]
    rack: str = ""
    state: str = "alive"
    notice: str = ""
    taken_s: float = math.inf
    raylet_pid: int = 0
    keeper_pid: int = 0
    clock_ahead_s: float = 0.0
    lease_s: float = LEASE_S
    lost_s: float = 0.0
    is_dead: bool = False
    is_returning: bool = False
    starting: asyncio.Future[Any] | None = None
    keeper: Any = None
    host: str = ""
    port: int = 0
    secret: bytes = field(default=b"", repr=False)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    care: asyncio.Task[None] | None = None
    ending: asyncio.Task[None] | None = None
    greeted: asyncio.Event = field(default_factory=asyncio.Event)
    lost: asyncio.Event = field(default_factory=asyncio.Event)


class _Said(NamedTuple):
    """What one source says of the end of a node, and what it means on the run's clock."""

    said: Hashable
    by_s: float
    what: str


def _first(known: Mapping[str, _Said]) -> _Said:
    """Return what ends first; infinity if nothing does."""
    return min(known.values(), key=lambda each: each.by_s, default=_Said(None, math.inf, ""))


def view_of(row: Mapping[str, Any], rack_label: str) -> NodeView:
    """Return what a row of Ray's node table says of a node; ``rack_label`` as for ``Nodes``."""
    return NodeView(
        node=row["NodeID"],
        raylet_address=(row["NodeManagerAddress"], row["NodeManagerPort"]),
        rack=row["Labels"].get(rack_label, ""),
    )


class Nodes:
    """Watches the cluster's nodes and their keepers.

    Args:
        names: The run's names.
        needs: What one worker may need; nodes with less in total than any are not looked at.
        rack_label: Ray's label of a node that says what it fails together with; "" if none does.
        boot: Keyword arguments of ``workers.keeper.actor.Keeper`` that are equal for all keepers.
        at_s: The run's clock.
        post: Where events go.
        on_keeper: Called with the node when a keeper is there, at first or again.
        bounds: Of the run's waits; those of keepers count.
    """

    def __init__(
        self,
        *,
        names: RunNames,
        needs: Sequence[Mapping[str, float]],
        rack_label: str,
        boot: dict[str, Any],
        at_s: Callable[[], float],
        post: Callable[[Event], None],
        on_keeper: Callable[[str], None],
        bounds: Bounds,
    ) -> None:
        self._names = names
        self._needs = needs
        self.rack_label = rack_label
        self._boot = boot
        self._at_s = at_s
        self._post = post
        self._on_keeper = on_keeper
        #: The controller's node, once it is watched.
        self._here = ""
        self._buried: set[str] = set()
        self._bounds = bounds
        #: Of nodes under notice, by who said it.
        self._notices: dict[str, dict[str, _Said]] = {}
        self._looks: set[asyncio.Task[Any]] = set()
        self.views: dict[str, NodeView] = {}
        self._met = asyncio.Event()

    async def met(self) -> None:
        """Wait until the controller has met the keepers that were running when it started.

        One that restarts in the middle of a recovery must not take unknown memory for no memory.
        """
        await self._met.wait()

    @property
    def own_notice(self) -> str:
        """Return what is known of the end of the controller's machine; "" if it stays."""
        return _first(self._notices.get(self._here, {})).what

    def is_draining(self, node: str) -> bool:
        """Return whether ``node`` was given notice. Ray forgets when the node dies; we do not."""
        return bool(self._notices.get(node))

    async def watch_forever(self, here: str, own: NoticeWatch) -> None:
        """Report joins, losses and notices until cancelled.

        Args:
            here: The node of the controller, which may have no keeper.
            own: What is known there of its end.
        """
        self._here = here
        while True:
            table, notices = await in_thread(RAY, _read_cluster)
            for row in table:
                self._compare(row)
            self._heed(notices)
            self._note_own(here, _CONTROLLER, own.notice())
            if not self._met.is_set():
                await self._meet()
            await asyncio.sleep(POLL_S)

    async def _meet(self) -> None:
        there = await in_thread(RAY, self._kept)
        for node in there:
            self.start_keeper(node)
        greetings = [asyncio.create_task(self.views[node].greeted.wait()) for node in there]
        if greetings:
            _, late = await asyncio.wait(greetings, timeout=MEET_S)
            for task in late:
                task.cancel()
        self._met.set()

    def lost(self, node: str, cause: str) -> None:
        """Report ``node`` as lost, once."""
        view = self.views.get(node)
        if view is not None and not view.lost.is_set():
            self.give_up(node)
            self._post(NodeLost(at_s=self._at_s(), node=node, cause=cause))

    def give_up(self, node: str) -> None:
        """Take ``node`` for lost."""
        view = self.views.get(node)
        if view is None or view.lost.is_set():
            return
        view.state, view.lost_s = "lost", self._at_s()
        view.lost.set()
        for task in view.tasks:
            task.cancel()

    def silent(self, node: str, cause: str) -> None:
        """Report ``node`` as lost after a silence, unless its keeper is restarting."""
        view = self.views.get(node)
        if view is not None and not view.is_returning:
            self.lost(node, cause)

    async def outlived(self, nodes: Iterable[str]) -> set[str]:
        """Return those of ``nodes`` that live although their keepers did not answer.

        Of a machine that is there the raylet takes connections.
        """
        views = [self.views[node] for node in nodes if node in self.views]
        there = await asyncio.gather(*(_accepts(view.raylet_address) for view in views))
        return {
            view.node
            for view, accepts in zip(views, there, strict=True)
            if accepts and view.greeted.is_set() and not view.lost.is_set()
        }

    async def probe(self, order: ProbeLinks) -> None:
        """Have keepers find out which nodes reach each other; report what those say that answer."""
        there = {
            view.node: (view.host, view.port) if view.port else view.raylet_address
            for view in self.views.values()
            if not view.lost.is_set()
        }
        # One for all of them: a keeper may as well try to reach itself.
        everybody = {node: there[node] for node in order.nodes if node in there}
        wanted = dict.fromkeys(everybody, everybody)
        for source, target in (way for pair in order.pairs for way in (pair, pair[::-1])):
            if source in there and target in there:
                wanted[source] = {**wanted.get(source, {}), target: there[target]}
        asked = [node for node in wanted if self.views[node].keeper is not None]
        answers = await asyncio.gather(
            *(_probed(self.views[node].keeper, wanted[node]) for node in asked)
        )
        said = dict(zip(asked, answers, strict=True))
        self._post(
            LinksProbed(
                at_s=self._at_s(),
                number=order.number,
                pairs=order.pairs,
                heard=tuple(node for node, lost in said.items() if lost is not None),
                lost=tuple((node, to) for node, lost in said.items() for to in sorted(lost or ())),
            )
        )

    async def kill_worker(self, node: str, worker: str) -> bool:
        """Have the keeper of ``node`` SIGKILL ``worker``; return whether it is known to be gone."""
        view = self.views.get(node)
        if view is None or view.keeper is None or view.is_dead:
            return view is not None and view.is_dead
        with contextlib.suppress(RayError, TimeoutError):
            return await asyncio.wait_for(_kill(view.keeper, worker), PROBE_S)
        return False

    async def ending(self, node: str, pid: int) -> Ending:
        """Return how a process on ``node`` ended, if its keeper says so at once."""
        view = self.views.get(node)
        if view is not None and view.keeper is not None and not view.is_dead:
            with contextlib.suppress(RayError, TimeoutError):
                return await asyncio.wait_for(_ending(view.keeper, pid), ENDING_S)
        return Ending("")

    async def end_keepers(self) -> None:
        """End every keeper of the run; those that can be reached leave nothing behind."""
        for view in self.views.values():
            for task in view.tasks:
                task.cancel()
            if view.ending is not None:
                await asyncio.wait([view.ending])
            if view.starting is not None:
                view.keeper = await view.starting
        for node in await in_thread(RAY, self._kept):
            view = self.views[node]
            view.keeper = view.keeper or await in_thread(RAY, self._find_keeper, node)
        there = [view for view in self.views.values() if not view.lost.is_set()]
        await asyncio.gather(*(_clear(view.keeper) for view in there if view.keeper is not None))
        for view in self.views.values():
            if view.keeper is not None:
                await in_thread(RAY, ray.kill, view.keeper, no_restart=True)

    def longest_lease_s(self) -> float:
        """Return the longest of any node that is there."""
        there = [view.lease_s for view in self.views.values() if not view.lost.is_set()]
        return max(there, default=LEASE_S)

    def _kept(self) -> list[str]:
        """Return the nodes on which a keeper of the run lives, as Ray says; this asks for each."""
        return [node for node in list(self.views) if self._find_keeper(node) is not None]

    def _find_keeper(self, node: str) -> Any:
        """Return a keeper that an earlier controller started; None if there is none."""
        with contextlib.suppress(ValueError):
            return ray.get_actor(self._names.keeper(node), namespace=self._names.namespace)
        return None

    def _compare(self, row: dict[str, Any]) -> None:
        node = row["NodeID"]
        if not row["Alive"]:
            if node not in self.views and node not in self._buried:
                # It may have gone while no controller looked.
                self._buried.add(node)
                self._post(NodeLost(at_s=self._at_s(), node=node, cause="Ray declared it dead"))
            self.lost(node, "Ray declared it dead")
            return
        view = self.views.get(node)
        if view is not None and view.lost.is_set() and self._at_s() - view.lost_s >= RETURN_S:
            self._spawn_look(self._look_again(view))
        if view is not None or not self._fits(row["Resources"]):
            return
        view = self.views[node] = view_of(row, self.rack_label)
        # Of one that is back the notice is told again: it was forgotten with the node.
        self._notices.pop(node, None)
        view.tasks.append(asyncio.get_running_loop().create_task(self._listen(view)))
        self._post(NodeJoined(at_s=self._at_s(), node=node, rack=view.rack))

    def start_keeper(self, node: str) -> None:
        """Start a keeper on ``node``, or meet the running one."""
        view = self.views.get(node)
        if view is None or view.lost.is_set() or view.starting is not None:
            return
        if view.ending is not None:
            # Ray would give us the one that ends.
            view.ending.add_done_callback(lambda _: self.start_keeper(node))
            return
        view.starting = asyncio.ensure_future(in_thread(RAY, self._create_keeper, node))
        view.care = asyncio.get_running_loop().create_task(self._care(view, view.starting))
        view.tasks.append(view.care)

    def _create_keeper(self, node: str) -> Any:
        options = {
            **OPTIONS,
            "name": self._names.keeper(node),
            "namespace": self._names.namespace,
            "lifetime": "detached",
            "get_if_exists": True,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        directory = self._names.shared_directory(node)
        return ray.remote(Keeper).options(**options).remote(directory=directory, **self._boot)

    async def _care(self, view: NodeView, starting: asyncio.Future[Any]) -> None:
        view.keeper = await asyncio.shield(starting)
        await asyncio.gather(self._accompany(view), self._ask_often(view))

    def end_keeper(self, node: str) -> None:
        """End the keeper on ``node`` for good; a later ``start_keeper`` waits for that."""
        view = self.views.get(node)
        if view is None or view.lost.is_set() or view.starting is None or view.care is None:
            return
        view.care.cancel()
        starting, view.starting, view.keeper = view.starting, None, None
        view.host, view.port, view.secret, view.keeper_pid = "", 0, b"", 0
        view.is_returning, view.greeted = False, asyncio.Event()
        view.ending = asyncio.get_running_loop().create_task(self._end_keeper(view, starting))

    async def _end_keeper(self, view: NodeView, starting: asyncio.Future[Any]) -> None:
        keeper = await starting
        await _clear(keeper)
        await in_thread(RAY, ray.kill, keeper, no_restart=True)
        while await in_thread(RAY, self._find_keeper, view.node) is not None:  # noqa: ASYNC110  Ray tells nobody
            await asyncio.sleep(KEEPER_RETRY_S)
        view.ending = None

    def restart_keeper(self, node: str) -> None:
        """End the keeper's process: Ray asks it to end, or has its raylet kill it."""
        view = self.views.get(node)
        if view is not None and view.keeper is not None and not view.lost.is_set():
            self._spawn_look(in_thread(RAY, ray.kill, view.keeper, no_restart=False))

    def _fits(self, total: dict[str, float]) -> bool:
        return any(
            all(total.get(name, 0.0) >= amount for name, amount in need.items())
            for need in self._needs
        )

    def _heed(self, deadlines_ms: Mapping[str, int]) -> None:
        """Take in Ray's notices: a deadline in ms since the epoch by node, 0 if there is none."""
        for node in {**deadlines_ms, **self._notices}:
            said = deadlines_ms.get(node)
            view = self.views.get(node)
            # A pod that must go tells Ray by its own clock. Nobody says whose it is: the later one
            # counts, so that the node is left too early at worst.
            ahead_s = view.clock_ahead_s if view is not None else 0.0
            left_s = said / 1000.0 - wall_time() - ahead_s if said else 0.0
            self._note(node, _RAY, said, left_s, "drained by Ray")

    def on_notice(self, node: str, notice: Notice | None) -> None:
        """Take in what a node itself knows of its end; None if it stays."""
        self._note_own(node, _KEEPER, notice)

    def _note_own(self, node: str, source: str, notice: Notice | None) -> None:
        left_s, what = (notice.left_s, notice.what) if notice else (math.inf, "")
        self._note(node, source, notice, left_s, what)

    def _note(self, node: str, source: str, said: Hashable, left_s: float, what: str) -> None:
        """Report the first end of a node if what a source says is new, changed or withdrawn.

        Of a node that has died nothing is told any more, and nothing is taken back.
        """
        view = self.views.get(node)
        if (view is None and node != self._here) or (view is not None and view.lost.is_set()):
            return
        known = self._notices.setdefault(node, {})
        if (known[source].said if source in known else None) == said:
            return
        was = _first(known)
        at_s = self._at_s()
        if said is None:
            del known[source]
        else:
            known[source] = _Said(said, at_s + min(max(0.0, left_s), FAR_S), what)
        now = _first(known)
        is_news = now.by_s != was.by_s
        if view is not None:
            view.state, view.notice = "draining" if known else "alive", now.what
            view.taken_s = now.by_s if now.by_s - at_s < FAR_S else math.inf
            if is_news:
                said = NodeDraining(at_s=at_s, node=node, deadline_s=now.by_s, notice=now.what)
                self._post(said)
        if node == self._here and is_news:
            log.critical("controller_draining", extra={"notice": now.what, "by_s": now.by_s})
            self._post(ControllerDraining(at_s=at_s, deadline_s=now.by_s, notice=now.what))

    async def is_gone(self, node: str) -> bool:
        """Return whether ``node`` is lost; ask its raylet's port if that is not known.

        A raylet that refuses connections is dead, and a node's processes end with their raylet.
        One that does not answer at all is not decided here.
        """
        view = self.views.get(node)
        if view is None:
            # A controller that was restarted has not seen any yet.
            return self._met.is_set()
        if view.lost.is_set():
            return True
        try:
            opened = asyncio.open_connection(*view.raylet_address)
            _, writer = await asyncio.wait_for(opened, PROBE_S)
        except ConnectionRefusedError:
            view.is_dead = True
            self.lost(node, "its raylet refuses connections")
        except (TimeoutError, OSError):
            pass
        else:
            writer.close()
        return view.lost.is_set()

    def look_around(self, host: str) -> str:
        """Find out of every node whether it is lost, without waiting.

        Returns the node with the address ``host``; "" if none or several have it.
        """
        there = [view for view in self.views.values() if not view.lost.is_set()]
        for view in there:
            self._spawn_look(self.is_gone(view.node))
        found = [view.node for view in there if host in {view.host, view.raylet_address[0]}]
        return found[0] if host and len(found) == 1 else ""

    def _spawn_look(self, look: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(look)
        self._looks.add(task)
        task.add_done_callback(self._looks.discard)

    async def _accompany(self, view: NodeView) -> None:
        """Keep a held call on the keeper; a failing one is a reason to look at the node."""
        while True:
            try:
                hello = await view.keeper.hello.remote()
            except ActorUnavailableError:
                # What is sent to a process that is only just starting fails like that.
                await asyncio.sleep(KEEPER_RETRY_S)
                continue
            except RayError as error:
                self.lost(view.node, f"its keeper is unreachable: {type(error).__name__}")
                return
            view.raylet_pid, view.keeper_pid = hello["raylet_pid"], hello["pid"]
            view.lease_s = hello["lease_s"]
            # Less than it is by the time that the answer took.
            view.clock_ahead_s = max(0.0, hello["wall_time"] - wall_time())
            # After a restart it listens elsewhere, and asks for another secret.
            view.host, view.port = hello["host"], hello["port"]
            view.secret = hello["secret"]
            view.is_returning = False
            view.greeted.set()
            self._post(KeeperReady(at_s=self._at_s(), node=view.node))
            self._on_keeper(view.node)
            try:
                await view.keeper.hold.remote()
            except RayError as error:
                # Until it is back nobody asks it, nor is told of it.
                view.secret, view.keeper_pid = b"", 0
                # Where the raylet answers the machine lives: training need not stop for this.
                # Whoever asks before that is known had better wait.
                view.is_returning = True
                detail = type(error).__name__
                self._post(KeeperDied(at_s=self._at_s(), node=view.node, detail=detail))
                view.is_returning = await _accepts(view.raylet_address)
                if await self.is_gone(view.node):
                    return

    async def _listen(self, view: NodeView) -> None:
        """Look at the node as soon as its raylet hangs up, or its machine answers nothing.

        A dead raylet hangs up at once; Ray takes up to a second to fail the calls of a process that
        it knows to be gone.
        """
        while True:
            if await hung_up(view.raylet_address):
                if await self.is_gone(view.node):
                    return
            elif await self._is_silent(view):
                self.lost(view.node, "its machine answers nothing")
                return
            await asyncio.sleep(RECALL_S)

    async def _is_silent(self, view: NodeView) -> bool:
        """Return whether a machine answers nothing, and not because this one is cut off."""
        here = ray.util.get_node_ip_address()
        names = list(self.views)
        at = names.index(view.node) if view.node in names else 0
        others = [self.views[name] for name in (*names[at + 1 :], *names[:at])]
        asked = {
            other.node: other.raylet_address
            for other in others
            if not other.lost.is_set() and other.raylet_address[0] != here
        }
        asked = dict(itertools.islice(asked.items(), NUM_ASKED))
        found = await silent({**asked, view.node: view.raylet_address})
        return view.node in found and (not asked or not found >= asked.keys())

    async def _ask_often(self, view: NodeView) -> None:
        """Report a keeper that takes calls and says nothing: Ray takes it for alive."""
        while True:
            is_there = view.greeted.is_set() and not view.is_returning
            bound_s = self._bounds.keeper_silent_s if is_there else self._bounds.keeper_return_s
            try:
                async with asyncio.timeout(bound_s):
                    await view.keeper.hello.remote()
            except TimeoutError:
                self._post(KeeperSilent(at_s=self._at_s(), node=view.node, silent_s=bound_s))
            except RayError:
                # The held call has failed as well.
                pass
            await asyncio.sleep(KEEPER_ASK_S)

    async def _look_again(self, view: NodeView) -> None:
        """Forget a lost node that answers again: it is then found as a new one."""
        if await _accepts(view.raylet_address):
            self.views.pop(view.node, None)


async def _accepts(address: tuple[str, int]) -> bool:
    """Return whether something listens there."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(*address), PROBE_S)
    except (TimeoutError, OSError):
        return False
    writer.close()
    return True


async def _clear(keeper: Any) -> None:
    with contextlib.suppress(RayError, TimeoutError):
        async with asyncio.timeout(CLEAR_S):
            await keeper.clear.remote()


async def _probed(keeper: Any, peers: dict[str, tuple[str, int]]) -> list[str] | None:
    """Return whom a keeper does not reach; None if it does not answer in time."""
    with contextlib.suppress(RayError, TimeoutError):
        async with asyncio.timeout(PROBED_S):
            lost: list[str] = await keeper.probe.remote(peers)
            return lost
    return None


async def _ending(keeper: Any, pid: int) -> Ending:
    found: Ending = await keeper.ending.remote(pid)
    return found


async def _kill(keeper: Any, worker: str) -> bool:
    is_gone: bool = await keeper.kill.remote(worker)
    return is_gone


def _read_cluster() -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return Ray's node table and the drain notices (node -> deadline in ms since the epoch)."""
    from ray._private.state import state as ray_state

    # In this order: the notice of a node that dies in between is not taken for withdrawn.
    notices = dict(ray_state.get_draining_nodes())
    return ray.nodes(), notices
