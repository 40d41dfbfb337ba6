"""One run in the shell: the inbox, the loop and the performers of actions. It decides nothing.

``event -> journal -> machine.step -> actions -> effects -> events``. A worker's death becomes
an event within 30 ms; from there to the next attempt there is no wait but for the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import os
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any

import ray
from ray.exceptions import RayError

from orchestrator.config import RunConfig
from orchestrator.core import (
    ACTIVE,
    CapacityRefused,
    CommittedRead,
    Event,
    FaultInjected,
    MemoryMeasured,
    MemoryProtected,
    Phase,
    ReservationGranted,
    RunState,
    StopRequested,
    Ticked,
    WorkersSurveyed,
    WorkerStatus,
    adopted,
    describe,
    next_deadline_s,
    own_share,
    step,
    transition_records,
)
from orchestrator.core import actions as act
from orchestrator.errors import TokenError
from orchestrator.policies import bad_sources
from orchestrator.run_directory import CHECKPOINTS
from orchestrator.shell.capacity import AutoscalerWatch, Capacity, Nodes, Rendezvous, Workers
from orchestrator.shell.clock import wall_time
from orchestrator.shell.connect import head_returns
from orchestrator.shell.guard import begin_guard
from orchestrator.shell.loggers import Loggers
from orchestrator.shell.memory import CadenceWatch, ProtectionWatch, Snapshots, loss_document
from orchestrator.shell.names import RunNames
from orchestrator.shell.observer import Observer
from orchestrator.shell.others import Others
from orchestrator.shell.serve import (
    RunCollector,
    StatusPage,
    announce,
    bounds_document,
    cost_document,
    status_document,
    withdraw,
)
from orchestrator.shell.storage import (
    CompactionFile,
    JournalFile,
    RunOutputs,
    Sender,
    begin_incarnation,
    run_token,
    segment_path,
)
from orchestrator.shell.threads import JOURNAL, RAY, STORAGE, LoopWatch, in_thread
from ucp_core.errors import StorageError, SupersededError
from ucp_core.storage import RECENT_S, Owner, join, open_store
from workers.keeper import NoticeWatch, sources_of
from workers.protocol import Assignment, MemoryPart, NodeReport

log = logging.getLogger(__name__)

#: Where the page listens that is only for this machine.
LOOPBACK = "127.0.0.1"
#: Deadlines in the state are met this exactly, and looked at no less often than the second.
TICK_S = 0.1
TICK_S_MAX = 1.0
#: The autoscaler says every few seconds what it cannot have.
REFUSALS_POLL_S = 2.0
#: Keepers that come back together are asked, and told what to do, together.
MEASURE_S = 0.05
#: A survey of living workers waits this long for an answer; a living one took 1 to 50 ms, and
#: nothing is lost by going on with one that answers later.
SURVEY_S = 0.5


class Run:
    """The effects of one run. ``serve`` returns when the run is over.

    Args:
        run_id: The run's name in Ray.
        config: The resolved configuration as JSON.
        life: The life that starts or resumes the run under this configuration.
        token: Of this life.
        controller: Ray handle of the actor around this, given to the keepers.
    """

    def __init__(
        self, *, run_id: str, config: dict[str, Any], life: int, token: str, controller: Any
    ) -> None:
        self._config = RunConfig.model_validate(config)
        self._controller = controller
        self._names = RunNames(run_id)
        self._rules = self._config.rules()
        self._store, self._path = open_store(self._config.run.directory)
        self._owner = Owner(self._store, self._path, life)
        spool = self._names.spool(ray.get_runtime_context().get_actor_id() or "")
        begun = begin_incarnation(
            self._store, self._path, self._config, life=life, token=token, spool=spool
        )
        self._token = run_token(self._store, self._path)
        self._incarnation, self._is_resume = begun.number, begun.is_resume
        self._state, self._seq, self._clock = begun.state, begun.seq, begun.clock
        journal_path = segment_path(self._path, begun.number)
        sender = Sender(self._store, journal_path=journal_path, spool=spool)
        self._journal = JournalFile(
            self._store,
            self._path,
            incarnation=begun.number,
            before_bytes=begun.journal_bytes,
            sender=None if self._store.appends else sender,
        )
        self._compaction = CompactionFile(
            self._store, self._path, rules=self._rules, compacted_bytes=begun.compacted_bytes
        )
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._rendezvous = Rendezvous(ray.util.get_node_ip_address())
        self._watch = LoopWatch()
        self._over = asyncio.Event()
        self._outcome = ""
        self._measuring: asyncio.TimerHandle | None = None
        self._measured: tuple[tuple[tuple[str, int], ...], int] = ((), 0)
        self._background: set[asyncio.Task[Any]] = set()
        self._post(begun.first)
        self._record = RunOutputs(
            self._store,
            self._path,
            begun.stats,
            sender=sender,
            num_written=begun.num_incidents_written,
            samples_per_step=self._config.train.global_batch,
            tokens_per_step=self._config.tokens_per_step,
        )
        self._loggers = Loggers(self._config, store=self._store, path=self._path, owner=self._owner)
        self._build_parts()
        self._performers = self._all_performers()

    def _build_parts(self) -> None:
        at_s, post = self._clock.at_s, self._post
        self._capacity = Capacity(
            names=self._names,
            alternatives=self._config.alternatives(),
            on_granted=self._granted,
        )
        boot = {
            "run_url": self._config.run.directory,
            "settings": self._config.settings_json(),
        }
        life = self._owner.life
        self._nodes = Nodes(
            names=self._names,
            needs=[each.resources for each in self._config.alternatives()],
            rack_label=self._config.cluster.rack_label,
            boot={
                **boot,
                "controller": self._controller,
                "life": life,
                "notices": self._config.watched(),
            },
            at_s=at_s,
            post=post,
            on_keeper=self._on_keeper,
            bounds=self._rules.bounds,
        )
        snapshot = self._config.snapshot
        self._snapshots = Snapshots(
            nodes=self._nodes,
            store=self._store,
            checkpoints=join(self._path, CHECKPOINTS),
            total_steps=self._config.train.steps,
            life=life,
        )
        self._protection = ProtectionWatch(
            snapshots=self._snapshots,
            wanted=snapshot.tolerance if snapshot.every_steps else 0,
        )
        self._workers = Workers(
            names=self._names,
            at_s=at_s,
            post=post,
            nodes=self._nodes,
            boot={**boot, "on_cpu": "GPU" not in self._config.worker_resources()},
        )
        self._observer = Observer(
            post=post,
            at_s=at_s,
            on_formed=self._workers.note_formed,
            node_silent=self._nodes.silent,
            patience=self._config.patience,
            parallel=self._config.settings().parallel,
        )
        self._others = Others(names=self._names, at_s=at_s, post=post)
        self._cadence = CadenceWatch(
            workers=self._workers,
            at_s=at_s,
            post=post,
            rules=self._rules.cadence,
            snapshot=snapshot,
            checkpoint=self._config.checkpoint,
        )

    async def serve(self) -> None:
        """Be in charge until the run is over and everything is given back."""
        page = StatusPage(
            host=LOOPBACK if self._config.is_page_local else ray.util.get_node_ip_address(),
            port=self._config.cluster.metrics_port,
            status=self._status,
            losses=self._losses,
            metrics=RunCollector(
                run=self._config.run.name,
                status=self._status,
                stats=self._record.stats,
                samples_per_step=self._config.train.global_batch,
                tokens_per_step=self._config.tokens_per_step,
            ),
        )
        if self._incarnation > 1:
            await self._capacity.adopt()
        if self._is_resume:
            # Where the last controller was ended for good, nobody took its workers back.
            await self._capacity.release_all()
            await in_thread(RAY, self._workers.end_strays)
        self._spawn(self._watch.watch_forever())
        self._spawn(self._furnish(page))
        self._spawn(self._watch_owner())
        here = ray.get_runtime_context().get_node_id()
        own = NoticeWatch(sources_of(**self._config.watched()))
        self._spawn(self._nodes.watch_forever(here, own))
        self._spawn(self._capacity.poll_forever())
        self._spawn(self._hear_refusals())
        self._spawn(self._others.poll_forever())
        self._spawn(self._cadence.ask_forever(lambda: self._state))
        while not self._over.is_set():
            await self._fold_next()
        await self._close(page)

    async def _hear_refusals(self) -> None:
        """Report alternatives of capacity for which the autoscaler has no machine."""
        watch = AutoscalerWatch()
        while True:
            await asyncio.sleep(REFUSALS_POLL_S)
            reservations, offers = self._state.fleet.reservations, self._state.fleet.offers
            asked = {
                group: reservations[number].alternative
                for group, number in self._capacity.pending_groups().items()
                if number in reservations
                and offers[reservations[number].alternative].refused_s == math.inf
            }
            if not asked:
                continue
            with contextlib.suppress(RayError):  # nobody knows while the head is away
                for alternative, why in (await in_thread(RAY, watch.refused, asked)).items():
                    at_s = self._clock.at_s()
                    self._post(CapacityRefused(at_s=at_s, alternative=alternative, why=why))

    async def _watch_owner(self) -> None:
        """End this life of the run when a later one owns its directory.

        Its trainers and keepers look for themselves before they commit or delete anything.
        """
        while await self._owns():  # noqa: ASYNC110  storage tells nobody, it is asked
            await asyncio.sleep(RECENT_S)
        self._over.set()

    async def _owns(self) -> bool:
        """Return whether nothing shows that another life owns the run directory."""
        try:
            await in_thread(STORAGE, self._owner.require)
        except SupersededError as error:
            log.critical("superseded", extra={"why": str(error)})
            return False
        except StorageError as error:
            log.warning("owner_not_known", extra={"why": str(error)})
        return True

    async def _losses(self) -> dict[str, Any]:
        document = loss_document(await self._snapshots.inventories(), self._state)
        return {**document, "directory": self._config.run.directory}

    async def _furnish(self, page: StatusPage) -> None:
        """Load what the run can do without until it is in charge, one after the other."""
        if self._incarnation > 1:
            await asyncio.sleep(SURVEY_S)
        self._rendezvous.prepare()
        self._guard = await asyncio.to_thread(begin_guard, self._config.controller_stopped_s)
        url = await page.start()
        self._record.announce(url, head_returns=head_returns(os.environ))
        self._loggers.start()
        await asyncio.to_thread(announce, self._names.run_id, run=self._config.run.name, url=url)

    def on_report(self, report: NodeReport) -> None:
        """Take in a keeper's report. On the loop."""
        self._observer.on_report(report)
        self._nodes.on_notice(report.node, report.notice)
        # What proves anything comes in reports, and whoever stands still is reported often.
        self._observer.judge()
        self._snapshots.on_report(report)
        if not self._state.attempt.plan.is_final and self._snapshots.holds_any:
            self._measure_soon()
        at_s = self._clock.at_s()
        if self._protection.look(self._state, at_s):
            self._post(MemoryProtected(at_s=at_s, attempt=self._state.attempt.number))

    def require_token(self, token: str) -> None:
        """Raise ``TokenError`` unless it is the run's. From any thread."""
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            raise TokenError("that is not the token of the run")

    def request_stop(self, reason: str) -> None:
        """Stop at the next step boundary. On the loop.

        What memory holds is stored at once: a step may take longer than anybody waits for the end.
        """
        self._post(StopRequested(at_s=self._clock.at_s(), reason=reason))
        if self._config.snapshot.every_steps:
            self._spawn(self._snapshots.flush(self._state.lineage))

    def note_fault(self, fault: str, target: str) -> None:
        """Journal that a fault is being injected now. On the loop."""
        self._post(FaultInjected(at_s=self._clock.at_s(), fault=fault, target=target))

    async def status(self) -> dict[str, Any]:
        """Return the status document."""
        return self._status()

    async def share(self) -> dict[str, Any]:
        """Return the run's ``Share`` as plain values."""
        share = own_share(
            self._state, self._rules, run=self._names.run_id, now_s=self._clock.at_s()
        )
        return asdict(share)

    def _post(self, event: Event) -> None:
        self._inbox.put_nowait(event)

    def _granted(self, reservation: int, node: str) -> None:
        self._post(ReservationGranted(at_s=self._clock.at_s(), reservation=reservation, node=node))

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        """A background task that fails is a bug of ours: say so and let Ray restart the process."""
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.critical("background_task_failed", exc_info=task.exception())
            os._exit(1)

    async def _fold_next(self) -> None:
        left_s = next_deadline_s(self._state) - self._clock.at_s()
        try:
            event = await asyncio.wait_for(self._inbox.get(), min(max(left_s, TICK_S), TICK_S_MAX))
        except TimeoutError:
            event = Ticked(at_s=self._clock.at_s())
        before = self._state
        after, actions = step(before, event, rules=self._rules)
        if after is before and not actions and not isinstance(event, FaultInjected):
            return  # nothing changed, so a replay does not need it
        records = transition_records(event, actions, attempt=after.attempt.number)
        for record in records:
            record["seq"], record["wall_time"] = self._seq, wall_time()
            self._seq += 1
        if self._store.appends:
            await in_thread(JOURNAL, self._journal.append, records)
        else:
            self._journal.append(records)  # into memory, from where it is sent
        self._state = after
        for action in actions:
            self._perform(action)
        self._record.add(records)
        if self._compaction.is_due(self._journal.journal_bytes, is_quiet=self._is_quiet()):
            self._spawn(self._compaction.write(self._compacted()))

    def _is_quiet(self) -> bool:
        state = self._state
        is_settled = state.phase is Phase.RUNNING and state.surveying_until_s == math.inf
        return is_settled and self._inbox.empty()

    def _compacted(self) -> bytes:
        """Return the compacted journal up to its end, as a document."""
        return self._compaction.prepare(self._journal, self._state, self._record.stats)

    def _perform(self, action: act.Action) -> None:
        self._performers[type(action)](action)

    def _all_performers(self) -> dict[type, Callable[[Any], None]]:
        workers, capacity = self._workers, self._capacity
        return {
            act.RequestReservation: lambda a: self._spawn(
                capacity.request(a.reservation, a.avoid, a.alternative)
            ),
            act.ReleaseReservation: lambda a: self._spawn(capacity.release(a.reservation)),
            act.StartWorker: lambda a: workers.start(a.worker, a.node),
            act.KillWorker: lambda a: workers.kill(a.worker),
            act.StartKeeper: lambda a: self._nodes.start_keeper(a.node),
            act.EndKeeper: lambda a: self._nodes.end_keeper(a.node),
            act.RestartKeeper: lambda a: self._nodes.restart_keeper(a.node),
            act.GiveUpNode: lambda a: self._nodes.give_up(a.node),
            act.FenceAttempt: self._fence,
            act.YieldAttempt: lambda a: workers.yield_at_boundary(
                a.attempt, a.workers, durable=a.durable
            ),
            act.ReadCommitted: lambda a: self._spawn(self._read_committed(a)),
            act.ProbeLinks: lambda a: self._spawn(self._nodes.probe(a)),
            act.StartAttempt: self._start_attempt,
            act.OrderKeepers: self._snapshots.order,
            act.SetCadence: lambda a: self._spawn(self._cadence.tell(a)),
            act.SurveyWorkers: lambda _: self._spawn(self._survey()),
            act.ReportIncident: lambda _: None,  # its line in the journal is what it is for
            act.NoteRefused: lambda _: None,  # likewise
            act.FinishRun: self._finish,
        }

    def _finish(self, action: act.FinishRun) -> None:
        self._outcome = action.outcome
        self._over.set()

    def _fence(self, action: act.FenceAttempt) -> None:
        self._observer.end(action.workers, self._rules.bounds.fence_s / 2)
        self._workers.fence(action.attempt, action.workers)

    def _start_attempt(self, action: act.StartAttempt) -> None:
        members = tuple(worker for worker, _, _ in action.members)
        self._observer.begin(action.attempt, members, action.resume_step)
        self._snapshots.order(
            act.OrderKeepers(
                attempt=action.attempt,
                lineage=action.lineage,
                nodes=tuple(node for _, node, _ in action.members),
                plan=action.plan,
                bad=action.bad,
            )
        )
        self._spawn(self._find_and_enter(action))

    async def _find_and_enter(self, action: act.StartAttempt) -> None:
        """Start the members when it is known where their version is and where they meet."""
        version, unreached = (action.resume_step, action.resume_attempt), action.unreached
        memory = self._snapshots.known_parts(*version, unreached=unreached)
        if not memory and action.resume_step and self._config.snapshot.every_steps:
            memory = await self._snapshots.find_parts(*version, bad=action.bad, unreached=unreached)
        host, port = await self._rendezvous.open()
        # Who was fenced meanwhile has said so, and would refuse.
        if self._state.attempt.number == action.attempt and self._state.phase in ACTIVE:
            self._enter(action, memory, host, port)

    def _enter(
        self, action: act.StartAttempt, memory: tuple[MemoryPart, ...], host: str, port: int
    ) -> None:
        plan = action.plan
        for rank, (worker, _, reservation) in enumerate(action.members):
            assignment = Assignment(
                attempt=action.attempt,
                rank=rank,
                layout=action.layout,
                store_host=host,
                store_port=port,
                resume_step=action.resume_step,
                resume_attempt=action.resume_attempt,
                lineage=action.lineage,
                memory=memory,
                guards=plan.guards[rank] if plan.guards is not None else None,
                parity=plan.rank_groups[rank] if plan.rank_groups is not None else (),
                life=self._owner.life,
            )
            self._workers.enter(worker, assignment, self._capacity.gpu_ids(reservation))

    async def _read_committed(self, action: act.ReadCommitted) -> None:
        state = self._state
        # Members that left had all completed every version; before that, all that reported.
        newest_step = state.attempt.step if state.attempt.num_inside else state.attempt.left_step
        answer = await self._snapshots.read(
            action.lineage,
            enough_step=newest_step,
            stored_step=_stored_step(state),
            has_stored=state.stored > 0,
            bad=action.bad,
            unreached=action.unreached,
        )
        if answer is None:
            return  # the machine asks again
        self._measure()
        returning = await self._nodes.outlived(filter(self._may_bring_back, answer.unheard))
        found = answer.version
        self._post(
            CommittedRead(
                at_s=self._clock.at_s(),
                attempt=action.attempt,
                step=found.step if found else 0,
                committed_by=found.attempt if found else 0,
                skipped=answer.skipped,
                number=action.number,
                source=found.source if found else "",
                lost=answer.lost,
                returning=tuple(sorted(returning)),
                stored=answer.stored_step,
                damaged=answer.damaged,
            )
        )

    def _may_bring_back(self, node: str) -> bool:
        """Return whether a keeper that died alone will have memory again once it is back."""
        state, snapshot = self._state, self._config.snapshot
        lives = any(
            state.fleet.nodes[worker.node].name == node for worker in state.fleet.workers.values()
        )
        return bool(snapshot.every_steps) and lives

    def _on_keeper(self, node: str) -> None:
        self._snapshots.on_keeper(node)
        self._measure_soon()

    def _measure_soon(self) -> None:
        """Ask keepers for their memory and tell them again what to do."""
        if self._measuring is None:
            self._measuring = asyncio.get_running_loop().call_later(
                MEASURE_S, lambda: self._spawn(self._measure_all())
            )

    async def _measure_all(self) -> None:
        self._measuring = None
        # A controller that was restarted knows of no keeper what it holds.
        await self._snapshots.inventories()
        self._measure()
        if self._state.phase in ACTIVE:
            self._snapshots.order_again()

    def _measure(self) -> None:
        """Report the memory of keepers, if it has changed."""
        found = self._snapshots.measured()
        if found != self._measured:
            self._measured = found
            budgets, state_bytes = found
            self._post(
                MemoryMeasured(at_s=self._clock.at_s(), budgets=budgets, state_bytes=state_bytes)
            )

    async def _survey(self) -> None:
        state = self._state
        known = [
            # Who only starts does not answer, and is in no attempt.
            (
                worker.name,
                state.fleet.nodes[worker.node].name,
                0.0 if worker.status is WorkerStatus.STARTING else SURVEY_S,
            )
            for worker in state.fleet.workers.values()
        ]
        alive = await self._workers.survey(known)
        found = adopted(self._state, alive)
        self._observer.begin(self._state.attempt.number, found.members, self._state.attempt.step)
        for worker in found.inside:
            is_first = worker == found.members[0]
            self._workers.attend(worker, self._state.attempt.number, is_first=is_first)
        self._post(
            WorkersSurveyed(
                at_s=self._clock.at_s(),
                alive=tuple(alive),
                reservations=tuple(self._capacity.granted()),
                pending_reservations=tuple(self._capacity.pending()),
            )
        )

    def _status(self) -> dict[str, Any]:
        return status_document(
            described=describe(self._state),
            reports=self._observer.reports,
            seen_at_s=self._observer.seen_at_s,
            nodes=self._nodes.views,
            at_s=self._clock.at_s(),
            alternatives=self._config.alternative_names(),
            cost=cost_document(self._record.stats, self._config),
            directory=self._config.run.directory,
            redundancy=self._redundancy(),
            cadence=self._cadence.document(self._state),
            loaded=self._record.stats.loaded,
            passed_over=list(self._record.stats.passed_over),
            bounds_s=bounds_document(
                self._config, self._observer.limits, lease_s=self._nodes.longest_lease_s()
            ),
            controller_notice=self._nodes.own_notice,
            logging=self._loggers.document(),
            longest_pause_s=round(self._watch.longest_pause_s, 3),
        )

    def _redundancy(self) -> dict[str, Any]:
        document = self._protection.redundancy(self._state)
        trouble = self._journal.trouble
        waits = f"nothing is decided until the journal can be written: {trouble}"
        return {**document, "problems": [*([waits] if trouble else []), *document["problems"]]}

    async def _close(self, page: StatusPage) -> None:
        # If the run was over when this incarnation began, it knows none of the processes yet.
        await self._nodes.met()
        for task in list(self._background):
            task.remove_done_callback(self._finished)
            task.cancel()
        await self._workers.close()
        if self._incarnation > 1:
            await in_thread(RAY, self._workers.end_strays)
        # What the directory says is for its owner to write.
        owns = await self._owns()
        if owns and self._config.snapshot.every_steps and self._outcome != "completed":
            await self._snapshots.flush(self._state.lineage)
        await self._nodes.end_keepers()
        await asyncio.to_thread(self._loggers.close, self._outcome if owns else "")
        await self._capacity.release_all()
        if owns:
            await self._compaction.write(self._compacted())
            await in_thread(STORAGE, self._record.close)
        await asyncio.to_thread(withdraw, self._names.run_id)
        await page.stop()


def _stored_step(state: RunState) -> int:
    """Return the newest step that is known to be committed in storage, and not to be bad."""
    step = 0 if state.committed_in_memory else state.committed[0]
    return 0 if step in bad_sources.in_storage(state.bad) else step
