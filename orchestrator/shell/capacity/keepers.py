"""The keepers on the run's nodes: start, connect, check and end them."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from orchestrator.core import Bounds
from orchestrator.core import events as ev
from orchestrator.shell.capacity.actors import ActorPool, answer
from orchestrator.shell.capacity.node_view import NodeView
from orchestrator.shell.capacity.nodes import Nodes
from orchestrator.shell.capacity.probes import PROBE_S, accepts
from orchestrator.shell.clock import wall_time
from orchestrator.shell.inbox import Inbox
from orchestrator.shell.threads import Tasks
from workers.protocol import Ending
from workers.telemetry import holders, process_state

#: Period of calls to a keeper that is restarting.
RETRY_S = 0.1
#: A live keeper answers in 1 to 50 ms. One that takes longer is asked again.
MEET_S = 2.0
#: Period of checks that a keeper answers.
ASK_S = 5.0
#: How long a keeper may take to remove its files at the end. That takes milliseconds; a stuck
#: keeper must not delay the end.
CLEAR_S = 5.0
#: The ending of a process is known when it has freed its memory and its processor: a moment after
#: its connection ends, or later if processors are busy. The recovery waits at most this long, and
#: less for a process that may live.
_DEAD_S, _UNREACHABLE_S = 1.0, 0.1
#: Bounds for keepers to collect evidence, and to store it afterwards.
EVIDENCE_S = 0.5
STORE_S = 60.0


class Keepers:
    """Runs a keeper on each node that needs one.

    It calls ``on_keeper`` with the node each time a keeper has come up.
    """

    def __init__(
        self,
        inbox: Inbox,
        *,
        nodes: Nodes,
        pool: ActorPool,
        on_keeper: Callable[[str], None],
        bounds: Bounds,
    ) -> None:
        self._inbox = inbox
        self._nodes = nodes
        self._pool = pool
        self._on_keeper = on_keeper
        self._bounds = bounds
        self._restarts = Tasks()

    async def meet(self) -> None:
        """Connect to running keepers, for at most ``MEET_S``; then set ``Nodes.met``."""
        await self._nodes.seen.wait()
        nodes = list(self._nodes.views)
        found = await asyncio.gather(*map(self._pool.find, nodes))
        kept = [node for node, keeper in zip(nodes, found, strict=True) if keeper is not None]
        for node in kept:
            self._nodes.views[node].is_met = True
            self.start(node)
        greetings = [asyncio.create_task(self._nodes.views[node].greeted.wait()) for node in kept]
        if greetings:
            _, late = await asyncio.wait(greetings, timeout=MEET_S)
            for task in late:
                task.cancel()
        self._nodes.met.set()

    def start(self, node: str) -> None:
        """Start a keeper on ``node``, or connect to the running one."""
        view = self._nodes.views.get(node)
        if view is None or view.lost.is_set() or view.starting is not None:
            return
        if view.ending is not None:
            # Otherwise Ray would return the keeper that is ending.
            view.ending.add_done_callback(lambda _: self.start(node))
            return
        view.starting = asyncio.create_task(self._pool.start(node, node))
        view.care = asyncio.create_task(self._care(view, view.starting))
        view.tasks.append(view.care)

    def end(self, node: str) -> None:
        """End the keeper on ``node``; a later ``start`` waits for that."""
        view = self._nodes.views.get(node)
        if view is None or view.lost.is_set() or view.starting is None or view.care is None:
            return
        view.care.cancel()
        starting, view.starting, view.keeper = view.starting, None, None
        view.host, view.port, view.secret, view.keeper_pid = "", 0, b"", 0
        view.is_returning, view.is_met, view.greeted = False, False, asyncio.Event()
        view.ending = asyncio.create_task(self._end(view, starting))

    def restart(self, node: str) -> None:
        """Kill the keeper's process so that Ray restarts it."""
        view = self._nodes.views.get(node)
        if view is not None and view.keeper is not None and not view.lost.is_set():
            view.is_met = False
            _leave_out(view)
            self._restarts.spawn(self._pool.kill(view.keeper, restart=True))
            # A raylet that is not connected to a stopped process, as after a restart of the head,
            # cannot connect to it, and then does not kill it.
            self._restarts.spawn(self._pool.run_on(node, _KILL_STOPPED))

    async def kill_worker(self, node: str, worker: str) -> bool:
        """Have the keeper of ``node`` SIGKILL ``worker``; return whether it is known to be gone."""
        view = self._nodes.views.get(node)
        if view is None or view.keeper is None or view.is_dead:
            return view is not None and view.is_dead
        return bool(await answer(view.keeper.kill.remote(worker), PROBE_S))

    async def kill_node(self, node: str) -> None:
        """Have the keeper of ``node`` SIGKILL its raylet, which ends every process there."""
        view = self._nodes.views.get(node)
        if view is not None and view.keeper is not None:
            await answer(view.keeper.kill_node.remote(), PROBE_S)

    async def take_evidence(self, node: str, attempt: int) -> None:
        """Have the keeper of ``node`` collect evidence of ``attempt``; wait until it has."""
        view = self._nodes.views.get(node)
        if view is not None and view.keeper is not None and not view.is_dead:
            await answer(view.keeper.take_evidence.remote(attempt), EVIDENCE_S)

    async def store_evidence(self, node: str, attempt: int, folder: str) -> None:
        """Have the keeper store that evidence below ``folder`` of the run directory."""
        view = self._nodes.views.get(node)
        if view is not None and view.keeper is not None and not view.is_dead:
            await answer(view.keeper.store_evidence.remote(attempt, folder), STORE_S)

    async def ending(self, node: str, pid: int, *, is_dead: bool) -> Ending:
        """Return how a process on ``node`` ended; empty if its keeper does not answer in time.

        ``is_dead`` says whether Ray knows that it died; if not, the keeper waits only a moment.
        """
        view = self._nodes.views.get(node)
        if view is None or view.keeper is None or view.is_dead:
            return Ending("")
        wait_s = _DEAD_S if is_dead else _UNREACHABLE_S
        return await answer(view.keeper.ending.remote(pid, wait_s), wait_s + PROBE_S) or Ending("")

    async def close(self) -> None:
        """End every keeper of the run; those that can be reached leave nothing behind."""
        views = list(self._nodes.views.values())
        for view in views:
            for task in view.tasks:
                task.cancel()
            if view.ending is not None:
                await asyncio.wait([view.ending])
            if view.starting is not None:
                view.keeper = await view.starting
        await asyncio.gather(*map(self._close, views))

    async def _close(self, view: NodeView) -> None:
        keeper = view.keeper or await self._pool.find(view.node)
        if keeper is not None:
            if not view.lost.is_set():
                await answer(keeper.clear.remote(), CLEAR_S)
            await self._pool.kill(keeper)

    async def _end(self, view: NodeView, starting: asyncio.Future[Any]) -> None:
        keeper = await starting
        await answer(keeper.clear.remote(), CLEAR_S)
        await self._pool.kill(keeper)
        while await self._pool.find(view.node) is not None:  # noqa: ASYNC110  Ray does not notify
            await asyncio.sleep(RETRY_S)
        view.ending = None

    async def _care(self, view: NodeView, starting: asyncio.Future[Any]) -> None:
        view.keeper = await asyncio.shield(starting)
        await asyncio.gather(self._accompany(view), self._ask_often(view))

    async def _accompany(self, view: NodeView) -> None:
        """Keep a pending call on the keeper, and check the node if it fails."""
        while True:
            try:
                hello = await view.keeper.hello.remote()
            except ActorUnavailableError:
                # A call to a process that is still starting fails in the same way.
                await asyncio.sleep(RETRY_S)
                continue
            except RayError as error:
                cause = f"its keeper is unreachable: {type(error).__name__}"
                self._nodes.lost(view.node, cause)
                return
            self._greet(view, hello)
            try:
                await view.keeper.hold.remote()
            except RayError as error:
                if view.keeper_pid not in {0, hello["pid"]}:
                    continue  # It failed late: the next process has been greeted.
                # If the raylet answers, the machine lives, so training need not stop. Callers wait
                # until this is known.
                _leave_out(view)
                detail = type(error).__name__
                self._inbox.post(
                    ev.KeeperDied(at_s=self._inbox.at_s(), node=view.node, detail=detail)
                )
                view.is_returning = bool(await accepts(view.raylet_address))
                if await self._nodes.is_gone(view.node):
                    return

    def _greet(self, view: NodeView, hello: dict[str, Any]) -> None:
        """Note what a keeper's process says about itself, once."""
        if hello["pid"] == view.keeper_pid:
            return
        view.raylet_pid, view.keeper_pid = hello["raylet_pid"], hello["pid"]
        view.lease_s = hello["lease_s"]
        # The true value is larger by the time that the answer took.
        view.clock_ahead_s = max(0.0, hello["wall_time"] - wall_time())
        # After a restart the keeper listens elsewhere, with another secret.
        view.host, view.port = hello["host"], hello["port"]
        view.secret = hello["secret"]
        view.is_returning = False
        view.greeted.set()
        self._inbox.post(ev.KeeperReady(at_s=self._inbox.at_s(), node=view.node))
        self._on_keeper(view.node)

    async def _ask_often(self, view: NodeView) -> None:
        """Greet a keeper that was restarted, and report one that is silent.

        After the clock was set back, Ray ends calls to a process that died up to a minute late. A
        keeper that was stopped while the head restarted answers calls, but Ray delivers its reports
        to the controller that is gone.
        """
        num_reports, unheard_s = -1, 0.0
        while True:
            try:
                async with asyncio.timeout(MEET_S):
                    self._greet(view, await view.keeper.hello.remote())
            except TimeoutError:
                unheard_s += MEET_S
            except RayError:
                # The pending call fails, too, and handles it.
                unheard_s = 0.0
                await asyncio.sleep(ASK_S)
            else:
                await asyncio.sleep(ASK_S)
                unheard_s += ASK_S
            if view.num_reports != num_reports:
                num_reports, unheard_s = view.num_reports, 0.0
            # A keeper that is starting gets more time.
            is_there = (view.greeted.is_set() or view.is_met) and not view.is_returning
            bound_s = self._bounds.keeper_silent_s if is_there else self._bounds.keeper_return_s
            if unheard_s >= bound_s:
                at_s, unheard_s = self._inbox.at_s(), 0.0
                self._inbox.post(ev.KeeperSilent(at_s=at_s, node=view.node, silent_s=bound_s))


def _leave_out(view: NodeView) -> None:
    """Send no requests to a keeper, and its address to no peer, until it is greeted again."""
    view.secret, view.keeper_pid, view.is_returning = b"", 0, True


def _kill_stopped(directory: str) -> None:
    """SIGKILL the keeper of a node's directory if it is stopped."""
    for pid in holders(Path(directory)):
        if process_state(pid).letter == "T":
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


#: Made once, because Ray keeps every function that it exports until the controller ends.
_KILL_STOPPED = ray.remote(num_cpus=0, max_retries=0)(_kill_stopped)
