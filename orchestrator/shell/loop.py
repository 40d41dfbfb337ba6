"""One run in the shell: the inbox, the loop and the functions that perform actions.

It decides nothing. ``event -> journal -> machine.step -> actions -> effects -> events``. A worker's
death becomes an event within 30 ms. From there to the next attempt the run only waits for answers.
"""

import asyncio
import contextlib
import hmac
import logging
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from orchestrator import core
from orchestrator.config import RunConfig
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.errors import TokenError
from orchestrator.report import RunDocument, Seen, bounds_document, tell
from orchestrator.shell.actions import Actions
from orchestrator.shell.capacity import AutoscalerWatch, probe_links, told_nodes
from orchestrator.shell.clock import wall_time
from orchestrator.shell.connect import head_returns
from orchestrator.shell.evidence import KILL_S
from orchestrator.shell.guard import begin_guard
from orchestrator.shell.memory import loss_document
from orchestrator.shell.parts import Parts
from orchestrator.shell.reads import SURVEY_S, Reads
from orchestrator.shell.serve import (
    NUM_NODES,
    NUM_TOLD,
    Live,
    RunCollector,
    StatusPage,
    announce,
    withdraw,
)
from orchestrator.shell.storage import segment_sizes
from orchestrator.shell.threads import JOURNAL, RAY, STORAGE, LoopWatch, Tasks, in_thread
from ucp_core.errors import StorageError, SupersededError
from ucp_core.storage import RECENT_S
from workers.protocol import NodeReport
from workers.repeated import Repeated

log = logging.getLogger(__name__)

#: The page listens at this address if it is only for this machine.
LOOPBACK = "127.0.0.1"
#: Precision of deadlines in the state, and the longest time between two checks of them.
TICK_S = 0.1
TICK_S_MAX = 1.0
#: Period of questions to the autoscaler, which reports refusals every few seconds.
REFUSALS_POLL_S = 2.0


class Run:
    """The effects of one run; ``Controller`` documents the arguments."""

    def __init__(
        self, *, run_id: str, config: dict[str, Any], claim: int, token: str, controller: Any
    ) -> None:
        self._events: asyncio.Queue[ev.Event] = asyncio.Queue()
        self._heard: deque[ev.Event] = deque()
        self._config = RunConfig.model_validate(config)
        self._parts = Parts(
            run_id=run_id,
            config=self._config,
            claim=claim,
            token=token,
            controller=controller,
            post=self._events.put_nowait,
            on_keeper=self._on_keeper,
        )
        self._inbox = self._parts.inbox
        self._inbox.post(self._parts.begun.first)
        self._seq = self._parts.begun.seq
        self._is_restart = self._parts.begun.number > 1
        self._reads = Reads(self._parts, self._spawn)
        self._watch = LoopWatch()
        self._over = asyncio.Event()
        self._owner_failures = Repeated(log)
        self._outcome = self._url = ""
        self._background = Tasks()
        self._performers = self._all_performers()
        self._actions = Actions(self._parts, stop=self.request_stop, spawn=self._spawn)

    async def serve(self) -> None:
        """Lead the run until it is over and all its resources are released."""
        parts, config = self._parts, self._config
        live = Live(
            config=config,
            store=parts.store,
            path=parts.path,
            told=partial(self._tell, num_nodes=NUM_NODES),
            reports=parts.observer.reports,
            at_s=self._inbox.at_s,
        )
        page = StatusPage(
            host=LOOPBACK if config.is_page_local else ray.util.get_node_ip_address(),
            port=config.cluster.metrics_port,
            status=lambda: self._tell().status,
            losses=self._losses,
            metrics=RunCollector(
                run=config.run.name,
                run_id=parts.names.run_id,
                told=partial(self._tell, NUM_TOLD),
            ),
            live=live,
            act=self.perform,
            require=self.require_token,
        )
        if self._is_restart:
            asked = parts.state.fleet.reservations.items()
            await parts.capacity.adopt({n: (each.avoid, each.alternative) for n, each in asked})
        if parts.begun.is_resume:
            # A controller that was killed has left its workers behind.
            await parts.capacity.release_all()
            await parts.worker_pool.kill_strays()
        for background in (
            self._watch.watch_forever(),
            live.watch_forever(),
            self._furnish(page),
            self._watch_owner(),
            parts.nodes.watch_forever(),
            parts.keepers.meet(),
            parts.capacity.poll_forever(),
            parts.links.watch_forever(),
            self._hear_refusals(),
            parts.others.poll_forever(),
            parts.cadence.ask_forever(lambda: parts.state),
        ):
            self._spawn(background)
        while not self._over.is_set():
            await self._fold_next()
        await self._close(page)

    async def _hear_refusals(self) -> None:
        """Report the alternatives of capacity that the autoscaler cannot provide."""
        watch = AutoscalerWatch()
        while True:
            await asyncio.sleep(REFUSALS_POLL_S)
            fleet, capacity = self._parts.state.fleet, self._parts.capacity
            asked = {
                group: fleet.reservations[number].alternative
                for group, number in capacity.pending_groups().items()
                if number in fleet.reservations
                and fleet.offers[fleet.reservations[number].alternative].refused_s == math.inf
            }
            if not asked:
                continue
            with contextlib.suppress(RayError):  # Ray does not answer while its head is down
                for alternative, why in (await in_thread(RAY, watch.refused, asked)).items():
                    at_s = self._inbox.at_s()
                    self._inbox.post(
                        ev.CapacityRefused(at_s=at_s, alternative=alternative, why=why)
                    )

    async def _watch_owner(self) -> None:
        """End when a later claim on the run's directory counts.

        Trainers and keepers check the claim themselves before they commit or delete anything.
        """
        while await self._owns():  # noqa: ASYNC110  storage does not notify
            await asyncio.sleep(RECENT_S)
        self._over.set()

    async def _owns(self) -> bool:
        """Return whether this claim on the run directory counts, as far as it is known.

        End this process if a later controller of the same claim leads the run.
        """
        parts = self._parts
        try:
            await in_thread(STORAGE, parts.owner.require)
            sizes = await in_thread(STORAGE, segment_sizes, parts.store, parts.path)
            self._owner_failures.passed()
        except SupersededError as error:
            log.critical("this controller ends because the run continues elsewhere: %s", error)
            return False
        except StorageError as error:
            self._owner_failures.failed(
                "it is not known whether this controller still has the run", error
            )
        else:
            if len(sizes) > parts.begun.number:
                # Ray starts another controller when a raylet is gone, but the processes of that
                # raylet live on until they notice: a minute, if the clock was set back by one. All
                # that this process could release belongs to the later one by now.
                log.critical("this controller ends because a later one leads the run")
                os._exit(1)
        return True

    async def _losses(self) -> dict[str, Any]:
        document = loss_document(await self._parts.snapshots.inventories(), self._parts.state)
        return {**document, "directory": self._config.run.directory}

    async def _furnish(self, page: StatusPage) -> None:
        """Load, one after the other, the parts that the run does not need while it takes over."""
        parts, names = self._parts, self._parts.names
        if self._is_restart:
            await asyncio.sleep(SURVEY_S)
        parts.rendezvous.prepare()
        self._guard = await asyncio.to_thread(begin_guard, self._config.controller_stopped_s)
        is_first = not (self._is_restart or parts.begun.is_resume)
        last_port = 0 if is_first else await in_thread(STORAGE, parts.outputs.last_port)
        self._url = url = await page.start(last_port)
        parts.outputs.announce(url, head_returns=head_returns(os.environ))
        parts.loggers.start()
        await asyncio.to_thread(announce, names.run_id, run=self._config.run.name, url=url)

    def on_report(self, report: NodeReport) -> None:
        """Take a keeper's report. Call it on the loop."""
        parts = self._parts
        parts.observer.on_report(report)
        parts.nodes.on_report(report.node)
        parts.nodes.notices.on_keeper(report.node, report.notice)
        # All evidence comes in reports, and keepers report a stalled worker often.
        parts.observer.judge()
        parts.snapshots.on_report(report)
        if not parts.state.attempt.plan.is_final and parts.snapshots.holds_any:
            self._reads.measure_soon()
        at_s = self._inbox.at_s()
        if parts.protection.look(parts.state, at_s):
            self._inbox.post(ev.MemoryProtected(at_s=at_s, attempt=parts.state.attempt.number))
        if parts.protection.asks(parts.state, at_s):
            self._spawn(parts.protection.ask(parts.state))

    async def perform(self, name: str, token: str, what: Mapping[str, Any]) -> str:
        """Perform an action from the page. Raises ``TokenError`` and ``ActionError``."""
        self.require_token(token)
        return self._actions.perform(name, what)

    def require_token(self, token: str) -> None:
        """Raise ``TokenError`` unless the token is the run's. Call it from any thread."""
        if not hmac.compare_digest(token.encode(), self._parts.token.encode()):
            raise TokenError("that is not the token of the run")

    def request_stop(self, reason: str) -> None:
        """Stop at the next step boundary. Call it on the loop.

        Keepers store their snapshots at once, because the user may not wait for the end of a step.
        """
        self._inbox.post(ev.StopRequested(at_s=self._inbox.at_s(), reason=reason))
        if self._config.snapshot.every_steps:
            self._spawn(self._parts.snapshots.flush(self._parts.state.lineage))

    def note_fault(self, fault: str, target: str) -> None:
        """Journal that a fault is being injected now. Call it on the loop."""
        self._inbox.post(ev.FaultInjected(at_s=self._inbox.at_s(), fault=fault, target=target))

    async def status(self) -> dict[str, Any]:
        """Return the status document."""
        return self._tell().status

    async def share(self) -> dict[str, Any]:
        """Return the run's ``Share`` as plain values."""
        parts, now_s = self._parts, self._inbox.at_s()
        return asdict(core.own_share(parts.state, parts.rules, run=parts.names.run_id, now_s=now_s))

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._background.spawn(coroutine).add_done_callback(_finished)

    def _on_keeper(self, node: str) -> None:
        self._reads.on_keeper(node)

    async def _next_event(self) -> ev.Event:
        """Return the next event to fold; equal reports on several members are joined."""
        if self._heard:
            await asyncio.sleep(0)  # let the rest of the loop run between two events
        else:
            left_s = core.next_deadline_s(self._parts.state) - self._inbox.at_s()
            within_s = min(max(left_s, TICK_S), TICK_S_MAX)
            try:
                self._heard.append(await asyncio.wait_for(self._events.get(), within_s))
            except TimeoutError:
                return ev.Ticked(at_s=self._inbox.at_s())
        while not self._events.empty():
            self._heard.append(self._events.get_nowait())
        return core.take_alike(self._heard)

    async def _fold_next(self) -> None:
        parts, event = self._parts, await self._next_event()
        before = parts.state
        after, actions = core.step(before, event, rules=parts.rules)
        is_news = isinstance(event, ev.FaultInjected | ev.SaveRequested)
        if after is before and not actions and not is_news:
            return  # nothing changed, so a replay does not need it
        records = core.transition_records(event, actions, attempt=after.attempt.number)
        for record in records:
            record["seq"], record["wall_time"] = self._seq, wall_time()
            self._seq += 1
        if parts.store.appends:
            await in_thread(JOURNAL, parts.journal.append, records)
        else:
            parts.journal.append(records)  # to memory; it is sent from there
        parts.state = after
        for action in actions:
            self._performers[type(action)](action)
        parts.outputs.add(records)
        parts.evidence.follow(parts.outputs.stats)
        is_settled = after.phase is core.Phase.TRAINING and after.surveying_until_s == math.inf
        is_quiet = is_settled and not self._heard and self._events.empty()
        if parts.compaction.is_due(parts.journal.journal_bytes, is_quiet=is_quiet):
            self._spawn(parts.compaction.write(self._compacted()))

    def _compacted(self) -> bytes:
        """Return a document with the whole journal, compacted."""
        parts = self._parts
        return parts.compaction.prepare(parts.journal, parts.state, parts.outputs.stats)

    def _all_performers(self) -> dict[type, Callable[[Any], None]]:
        parts, reads, spawn = self._parts, self._reads, self._spawn
        workers, capacity, keepers = parts.workers, parts.capacity, parts.keepers
        return {
            act.RequestReservation: lambda a: spawn(
                capacity.request(a.reservation, a.avoid, a.alternative)
            ),
            act.ReleaseReservation: lambda a: spawn(capacity.release(a.reservation)),
            act.StartWorker: lambda a: workers.start(a.worker, a.node),
            act.KillWorker: lambda a: parts.evidence.then(KILL_S, partial(workers.kill, a.worker)),
            act.StartKeeper: lambda a: keepers.start(a.node),
            act.EndKeeper: lambda a: keepers.end(a.node),
            act.RestartKeeper: lambda a: keepers.restart(a.node),
            act.GiveUpNode: lambda a: parts.nodes.give_up(a.node),
            act.FenceAttempt: self._fence,
            act.CollectEvidence: parts.evidence.collect,
            act.YieldAttempt: lambda a: workers.yield_at_boundary(
                a.attempt, a.workers, durable=a.durable
            ),
            act.ReadCommitted: lambda a: spawn(reads.read_committed(a)),
            act.ProbeLinks: lambda a: spawn(probe_links(a, parts.nodes.views, parts.inbox)),
            act.StartAttempt: self._start_attempt,
            act.OrderKeepers: parts.orders.give,
            act.SetCadence: lambda a: spawn(parts.cadence.tell(a)),
            act.SurveyWorkers: lambda _: spawn(reads.survey()),
            act.ReportIncident: lambda _: None,  # its line in the journal is its only effect
            act.NoteRefused: lambda _: None,  # likewise
            act.FinishRun: self._finish,
        }

    def _finish(self, action: act.FinishRun) -> None:
        self._outcome = action.outcome
        self._over.set()

    def _fence(self, action: act.FenceAttempt) -> None:
        self._parts.observer.end(action.workers, self._parts.rules.bounds.fence_s / 2)
        self._parts.workers.fence(action.attempt, action.workers)

    def _start_attempt(self, action: act.StartAttempt) -> None:
        members = action.members
        workers = tuple(worker for worker, _, _ in members)
        self._parts.observer.begin(action.attempt, workers, action.resume_step, action.layout)
        self._parts.orders.give(
            act.OrderKeepers(
                attempt=action.attempt,
                lineage=action.lineage,
                nodes=tuple(node for _, node, _ in members),
                plan=action.plan,
                bad=action.bad,
            )
        )
        self._spawn(self._reads.find_and_enter(action))

    def _tell(self, num_told: int | None = None, num_nodes: int | None = None) -> RunDocument:
        parts, at_s = self._parts, self._inbox.at_s()
        described = core.describe(parts.state, num_told, num_nodes=num_nodes)
        views = parts.nodes.views
        return tell(
            described,
            parts.outputs.stats,
            self._config,
            seen=Seen(
                at_s=at_s,
                reports=parts.observer.reports,
                seen_at_s=parts.observer.seen_at_s,
                costs=parts.observer.costs,
                nodes=told_nodes(views, described, at_s, num_nodes or num_told),
                node_states=Counter(view.state for view in views.values()),
            ),
            url=self._url,
            step_s=parts.observer.step_s,
            redundancy=self._redundancy(),
            cadence=parts.cadence.document(parts.state),
            bounds_s=bounds_document(
                self._config, parts.observer.limits, lease_s=parts.nodes.longest_lease_s()
            ),
            controller_notice=parts.nodes.notices.own,
            logging=parts.loggers.document(),
            longest_pause_s=round(self._watch.longest_pause_s, 3),
        )

    def _redundancy(self) -> dict[str, Any]:
        document = self._parts.protection.redundancy(self._parts.state)
        trouble = self._parts.journal.trouble
        waits = f"nothing is decided until the journal can be written: {trouble}"
        return {**document, "problems": [*([waits] if trouble else []), *document["problems"]]}

    async def _close(self, page: StatusPage) -> None:
        parts = self._parts
        # If the run was already over when this incarnation began, its processes are not known yet.
        await parts.nodes.met.wait()
        for task in list(self._background):
            task.remove_done_callback(_finished)
            task.cancel()
        await parts.evidence.close()
        await parts.workers.close()
        if self._is_restart:
            await parts.worker_pool.kill_strays()
        # Only the owner of the directory may write there.
        owns = await self._owns()
        if owns and self._config.snapshot.every_steps and self._outcome != "completed":
            await parts.snapshots.flush(parts.state.lineage)
        await parts.keepers.close()
        await asyncio.to_thread(parts.loggers.close, self._outcome if owns else "")
        await parts.capacity.release_all()
        if owns:
            await parts.compaction.write(self._compacted())
            await in_thread(STORAGE, parts.outputs.close, self._config.run.directory)
        await asyncio.to_thread(withdraw, parts.names.run_id)
        await page.stop()


def _finished(task: asyncio.Task[Any]) -> None:
    """Report a background task that failed, which is a bug; let Ray restart the process."""
    if not task.cancelled() and task.exception() is not None:
        log.critical("this controller ends: a background task failed", exc_info=task.exception())
        os._exit(1)
