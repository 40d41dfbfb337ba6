"""The run's worker processes: start, assign, fence and kill them, and report how they end.

Every worker is a detached actor, so it outlives the controller and can be found again by name. The
controller keeps one call per worker that never returns: it fails when the process ends, 30 ms after
a crash and about 1.5 s after the loss of a machine. Another call per attempt returns how the worker
left.
"""

import asyncio
import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import ActorDiedError, RayError

from orchestrator.core import events as ev
from orchestrator.shell.capacity.actors import ActorPool, answer
from orchestrator.shell.capacity.keepers import Keepers
from orchestrator.shell.capacity.node_view import NodeView
from orchestrator.shell.capacity.nodes import Nodes
from orchestrator.shell.inbox import Inbox
from orchestrator.shell.threads import Tasks
from ucp_core.native import checkpoint_name
from ucp_core.storage import join
from workers import protocol
from workers.errors import MisfitError

_HOW = {
    protocol.Completed: ev.Leaving.COMPLETED,
    protocol.Yielded: ev.Leaving.YIELDED,
    protocol.Fenced: ev.Leaving.FENCED,
    protocol.Superseded: ev.Leaving.FENCED,
    protocol.PeerLost: ev.Leaving.PEER_LOST,
    protocol.Unloadable: ev.Leaving.UNLOADABLE,
}

#: A killed process whose node does not answer counts as gone after this. Its attempt number fences
#: it, so a longer wait gains nothing.
KILL_CONFIRM_S = 0.5
#: Period of repeated kills, until the node confirms one or the worker must have ended itself.
KILL_AGAIN_S = 1.0
#: Phrases in Ray's error about a dead actor.
_IN_START = "error raised in its creation task"
_SHORT_OF_MEMORY = "running low on memory"
#: A worker answers in 1 to 50 ms, also while it trains.
PACE_S = 2.0
ALIVE_S = 0.15
#: Longest time in which Ray kills a stopped keeper; until then it is not reported again.
RESTARTED_S = 2.0


@dataclass(slots=True)
class _Member:
    handle: Any
    node: str
    pid: int = 0
    killed: bool = False
    ending: bool = False
    gone: bool = False
    attended: set[int] = field(default_factory=set)


class Workers:
    """Owns the run's workers, and turns what happens to them into events."""

    def __init__(self, inbox: Inbox, *, nodes: Nodes, keepers: Keepers, pool: ActorPool) -> None:
        self._inbox = inbox
        self._nodes = nodes
        self._keepers = keepers
        self._pool = pool
        self._members: dict[str, _Member] = {}
        self._tasks = Tasks()
        #: Kills of workers on nodes that may still live, until they are confirmed.
        self._killing: dict[asyncio.Task[Any], str] = {}
        self._asked: set[str] = set()  #: Silent nodes whose workers were asked.

    def start(self, worker: str, node: str) -> None:
        """Start ``worker`` on ``node``; ``WorkerReady`` or ``WorkerExited`` follows.

        It first waits for killed workers that may still use the node's devices.
        """
        member = self._members[worker] = _Member(handle=None, node=node)
        self._tasks.spawn(self._start(worker, member))

    def kill(self, worker: str) -> None:
        """SIGKILL ``worker``; ``WorkerExited`` follows even if its node does not answer."""
        member = self._members.get(worker)
        if member is None or member.handle is None:
            why = "it was already gone" if member is None else "it was not started yet"
            self._exited(worker, "killed", why)
            return
        member.killed = True
        self._tasks.spawn(self._kill(worker, member))

    def enter(self, worker: str, assignment: protocol.Assignment, gpu_ids: tuple[int, ...]) -> None:
        """Assign ``worker``; ``WorkerLeft`` or ``WorkerRaised`` follows when it leaves."""
        member = self._members.get(worker)
        if member is None:
            return  # Its WorkerExited is on the way.
        member.handle.enter.remote(assignment, gpu_ids)
        self.attend(worker, assignment.attempt, is_first=assignment.rank == 0)

    def attend(self, worker: str, attempt: int, *, is_first: bool = False) -> None:
        """Keep the call that returns how ``worker`` left ``attempt``, one per attempt.

        Also get the notes of the first rank; each becomes a ``NotFiniteFound``.
        """
        member = self._members.get(worker)
        if member is None or attempt in member.attended:
            return
        member.attended.add(attempt)
        hearing = self._tasks.spawn(self._hear(member.handle, attempt)) if is_first else None
        self._tasks.spawn(self._attend(worker, member.handle.attend.remote(attempt), hearing))

    def fence(self, attempt: int, workers: Iterable[str]) -> None:
        """Abort ``attempt`` in ``workers``; an event follows for every live one.

        A worker that is not inside answers, too, and refuses to enter from then on.
        """
        for worker in workers:
            if worker in self._members:
                self._members[worker].handle.fence.remote(attempt)
                self.attend(worker, attempt)

    def yield_at_boundary(self, attempt: int, workers: Iterable[str], *, durable: bool) -> None:
        """Ask ``workers`` to leave ``attempt`` at the next step boundary.

        With ``durable`` its state is in storage by then, otherwise at least in keepers' memory.
        """
        for worker in workers:
            if worker in self._members:
                self._members[worker].handle.yield_at_boundary.remote(attempt, durable)

    async def survey(self, workers: Iterable[tuple[str, str, float]]) -> list[tuple[str, str, int]]:
        """After a controller restart, reconnect to ``workers`` (name, node, seconds to wait).

        Return (worker, node, attempt) of each live one. The attempt is 0 for a worker in none, and
        ``UNKNOWN_ATTEMPT`` for one that does not answer in time.
        """
        asked = (self._ask(worker, node, timeout_s) for worker, node, timeout_s in workers)
        return sorted(found for found in await asyncio.gather(*asked) if found is not None)

    async def keep_pace(
        self, worker: str, attempt: int, pace: protocol.Pace
    ) -> protocol.SaveCosts | None:
        """Send rank 0 of ``attempt`` the save intervals; return the costs of its saves.

        Return None if it does not answer, or is not in that attempt.
        """
        member = self._members.get(worker)
        if member is None:
            return None
        return await answer(member.handle.keep_pace.remote(attempt, pace), PACE_S)

    def node_silent(self, node: str, silent_s: float, cause: str) -> None:
        """Report the keeper of a silent node as awaited if a worker there answers.

        Otherwise the node is lost. Nothing is reported while the keeper is restarting.
        """
        view = self._nodes.views.get(node)
        if view is not None and not view.is_returning and node not in self._asked:
            self._asked.add(node)
            self._tasks.spawn(self._ask_silent(view, silent_s, cause))

    async def _ask_silent(self, view: NodeView, silent_s: float, cause: str) -> None:
        node = view.node
        there = [each.handle for each in self._members.values() if each.node == node]
        asked = (answer(each.hello.remote(), ALIVE_S) for each in there if each is not None)
        is_alive = any(await asyncio.gather(*asked))
        # The keeper may have died meanwhile; then it is restarting.
        if is_alive and not view.is_returning:
            at_s = self._inbox.at_s()
            self._inbox.post(
                ev.KeeperSilent(at_s=at_s, node=node, silent_s=silent_s, is_awaited=True)
            )
            await asyncio.sleep(RESTARTED_S)
        elif not view.is_returning:
            self._nodes.lost(node, cause)
        self._asked.discard(node)

    async def close(self) -> None:
        """Stop listening; SIGKILL every worker, also those that are still starting."""
        for task in self._tasks:
            task.cancel()
        handles = [member.handle for member in self._members.values()]
        kills = [self._pool.kill(handle) for handle in handles if handle is not None]
        await asyncio.gather(self._pool.close(), *kills)

    async def _start(self, worker: str, member: _Member) -> None:
        killing = [task for task, node in self._killing.items() if node == member.node]
        if killing:
            await asyncio.wait(killing)
        if member.gone:
            return
        handle = await self._pool.start(worker, member.node, worker=worker)
        if self._members.get(worker) is not member:  # It was killed meanwhile.
            await self._pool.kill(handle)
            return
        member.handle = handle
        await self._accompany(worker, member)

    async def _accompany(self, worker: str, member: _Member) -> None:
        try:
            if not member.pid:
                hello = await member.handle.hello.remote()
                self._ready(worker, member, hello["pid"])
            await member.handle.hold.remote()
        except RayError as error:
            self._ended(worker, error)

    def _ready(self, worker: str, member: _Member, pid: int) -> None:
        member.pid = pid
        at_s = self._inbox.at_s()
        self._inbox.post(ev.WorkerReady(at_s=at_s, worker=worker, node=member.node, pid=pid))

    async def _hear(self, handle: Any, attempt: int) -> None:
        """Post the notes of the first rank until it has left the attempt."""
        num_heard = 0
        with contextlib.suppress(RayError):  # Its end is on the way.
            while notes := await handle.notes.remote(attempt, num_heard):
                for number, note in enumerate(notes, start=num_heard + 1):
                    self._inbox.post(
                        ev.NotFiniteFound(
                            at_s=self._inbox.at_s(),
                            attempt=attempt,
                            step=note.step,
                            number=number,
                            evidence=note.text,
                            ranks=note.ranks,
                        )
                    )
                num_heard += len(notes)

    async def _attend(self, worker: str, held: Any, hearing: asyncio.Task[None] | None) -> None:
        try:
            outcome = await held
            if hearing is not None:
                # Its last notes must come before its end, which may be the end of the run.
                await hearing
        except RayError as error:
            self._ended(worker, error)
            return
        unreached = ""
        if isinstance(outcome, protocol.PeerLost):
            # The survivor's transport often knows first; Ray needs 1.5 s to notice a lost machine.
            unreached = self._nodes.look_around(outcome.unreached)
        self._inbox.post(_left(self._inbox.at_s(), worker, outcome, unreached))

    def note_formed(self, worker: str, attempt: int, at_s: float) -> None:
        """Post ``WorkerFormed`` with what ``worker`` reports."""
        if worker in self._members:
            handle = self._members[worker].handle
            self._tasks.spawn(self._note_formed(worker, handle, attempt, at_s))

    async def _note_formed(self, worker: str, handle: Any, attempt: int, at_s: float) -> None:
        try:
            formed: protocol.Formed | None = await handle.formed.remote(attempt)
        except RayError:
            return  # Its end is on the way.
        if formed is not None:
            self._inbox.post(
                ev.WorkerFormed(
                    at_s=at_s,
                    attempt=attempt,
                    worker=worker,
                    load_s=formed.load_s,
                    sources=formed.sources,
                    damaged=formed.found.damaged,
                    skipped=formed.found.reasons,
                )
            )

    async def _kill(self, worker: str, member: _Member) -> None:
        await self._end(worker, member)
        await asyncio.sleep(KILL_CONFIRM_S)
        if not member.gone:
            self._exited(worker, "killed", "its node does not confirm the kill")

    async def _end(self, worker: str, member: _Member) -> None:
        """Kill a process once, then repeat that in the background until it is known to be gone."""
        if not await self._kill_once(worker, member):
            killing = self._tasks.spawn(self._kill_again(worker, member))
            self._killing[killing] = member.node
            killing.add_done_callback(self._killing.pop)

    async def _kill_again(self, worker: str, member: _Member) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(protocol.LEASE_S):
                while not await self._kill_once(worker, member):  # noqa: ASYNC110  it is asked
                    await asyncio.sleep(KILL_AGAIN_S)

    async def _kill_once(self, worker: str, member: _Member) -> bool:
        # This comes first, because Ray calls an actor dead as soon as it has asked it to exit.
        is_gone = await self._keepers.kill_worker(member.node, worker)
        await self._pool.kill(member.handle)
        return is_gone

    async def _ask(self, worker: str, node: str, timeout_s: float) -> tuple[str, str, int] | None:
        handle = await self._pool.find(worker)
        if handle is None:
            return None
        member = self._members[worker] = _Member(handle=handle, node=node)
        try:
            async with asyncio.timeout(timeout_s):
                hello = await handle.hello.remote()
        except TimeoutError:
            # It is still starting, or stuck. It is alive, and may be ready later.
            self._tasks.spawn(self._accompany(worker, member))
            return (worker, node, ev.UNKNOWN_ATTEMPT)
        except ActorDiedError:
            self._members.pop(worker, None)
            return None
        except RayError:
            # It is unreachable but may be alive: keep it, so that it can be killed.
            return None
        # It may have become ready while no controller ran.
        self._ready(worker, member, hello["pid"])
        self._tasks.spawn(self._accompany(worker, member))
        return (worker, node, hello["attempt"])

    def _ended(self, worker: str, error: RayError) -> None:
        member = self._members.get(worker)
        if member is None or member.gone:
            return
        if not member.ending:
            member.ending = True
            self._tasks.spawn(self._find_cause(worker, member, error))

    async def _find_cause(self, worker: str, member: _Member, error: RayError) -> None:
        """Find out why ``worker`` is gone, and whether its whole node is; report it."""
        is_node = not member.killed and await self._nodes.is_gone(member.node)
        if is_node:
            self._exited(worker, "node", "its node is lost")
            return
        found = await self._how(member, error)
        if not isinstance(error, ActorDiedError):
            # An unreachable process may live: kill it, so that "exited" is true.
            await self._end(worker, member)
        self._exited(worker, self._cause(member, found), found.text)

    def _cause(self, member: _Member, found: protocol.Ending) -> str:
        if member.killed:
            return "killed"
        if self._nodes.notices.is_draining(member.node):
            return "preempted"
        return "out_of_memory" if found.is_out_of_memory else "crash"

    async def _how(self, member: _Member, error: RayError) -> protocol.Ending:
        """Return how a process ended; Ray reports neither a signal nor an exit code.

        Ray calls a dead process unavailable if it learns of the death more than a second late, so
        ask its keeper then, too.
        """
        told, is_dead = str(error), isinstance(error, ActorDiedError)
        pid = member.pid or int(next(iter(re.findall(r"pid[:=] ?(\d+)", told)), 0))
        if _IN_START in told:
            lines = [line for line in told.splitlines() if line.strip()]
            raised = [line for line in lines if not line.startswith((" ", "The actor", "\t"))]
            return protocol.Ending(f"process {pid} raised at start: {(raised or lines)[-1]}")
        if _SHORT_OF_MEMORY in told:
            text = f"Ray ended process {pid}: its node was running low on memory"
            return protocol.Ending(text, is_out_of_memory=True)
        if pid:
            found = await self._keepers.ending(member.node, pid, is_dead=is_dead)
            if found.text:
                return found
        return protocol.Ending(f"process {pid} died" if is_dead else _first_line(error))

    def _exited(self, worker: str, cause: str, detail: str) -> None:
        member = self._members.get(worker)
        if member is not None:
            if member.gone:
                return
            member.gone = True
            # Tasks that wait for it keep its handle; keeping one for every past worker would leak.
            del self._members[worker]
        self._inbox.post(
            ev.WorkerExited(at_s=self._inbox.at_s(), worker=worker, cause=cause, detail=detail)
        )


def _left(at_s: float, worker: str, outcome: protocol.Outcome, unreached: str) -> ev.Event:
    if isinstance(outcome, protocol.Raised):
        return ev.WorkerRaised(
            at_s=at_s,
            attempt=outcome.attempt,
            worker=worker,
            step=outcome.step,
            error=outcome.error,
            traceback=outcome.traceback,
            refuses=outcome.refuses,
            ranks=outcome.ranks,
            sound_step=outcome.sound_step,
        )
    if isinstance(outcome, protocol.Unloadable) and outcome.found.misfits:
        name = join(protocol.CHECKPOINTS, checkpoint_name(outcome.step))
        error = f"{MisfitError.__name__}: {MisfitError.of(name, outcome.found.misfits)}"
        return ev.WorkerRaised(
            at_s=at_s,
            attempt=outcome.attempt,
            worker=worker,
            step=outcome.step + 1,
            error=error,
            traceback=error,
        )
    found = outcome.found if isinstance(outcome, protocol.Unloadable) else protocol.FoundBad()
    detail = found.reasons[0] if found.reasons else ""
    if isinstance(outcome, protocol.Completed):
        detail = outcome.ended
    elif isinstance(outcome, protocol.PeerLost):
        detail = outcome.detail
    return ev.WorkerLeft(
        at_s=at_s,
        attempt=outcome.attempt,
        worker=worker,
        how=_HOW[type(outcome)],
        step=outcome.step,
        detail=detail,
        told=outcome.why if isinstance(outcome, protocol.Yielded) else "",
        unreached=unreached,
        damaged=found.damaged,
        unread=found.unread,
        skipped=found.reasons,
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
