"""A run directory with a journal as long as wanted, written by the parts that write real ones."""

import asyncio
from collections import deque
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from orchestrator.config import RunConfig, load
from orchestrator.core import Phase, step, transition_records
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.shell.storage.compaction import CompactionFile
from orchestrator.shell.storage.incarnation import Incarnation, begin_incarnation
from orchestrator.shell.storage.journal import JournalFile, segment_path
from orchestrator.shell.storage.sender import Sender
from ucp_core.storage import open_store

NUM_WORKERS = 4
COMMIT_EVERY = 10


def config_at(directory: Path | str, *overrides: str) -> RunConfig:
    """Return the settings of a run of four workers in ``directory``."""
    text = f"run: {{directory: {directory}}}\nworkers: {{max: {NUM_WORKERS}}}\n"
    return load(text + "train: {steps: 100000000}\n", overrides)


@dataclass
class Journaled:
    """An incarnation of a controller in a cluster where everything is answered at once.

    Args:
        config: Config of the run.
        claim: Number of the claim that begins under it.
        fault_every: Steps after which a worker crashes.
        spool: Where lines wait for a store that does not append.
    """

    config: RunConfig
    claim: int = 1
    fault_every: int = 300
    spool: str = ""

    def __post_init__(self) -> None:
        self.store, self.path = open_store(self.config.run.directory)
        self.rules = self.config.rules()
        begun = self.begin()
        self.state, self.stats, self.seq = begun.state, begun.stats, begun.seq
        self.sender: Sender | None = None
        if not self.store.appends:
            path = segment_path(self.path, begun.number)
            self.sender = Sender(
                self.store, journal_path=path, spool=self.spool, piece_s=0.5, pause_s=0.01
            )
        self.journal = JournalFile(
            self.store,
            self.path,
            incarnation=begun.number,
            before_bytes=begun.journal_bytes,
            sender=self.sender,
        )
        self.compaction = CompactionFile(
            self.store, self.path, rules=self.rules, compacted_bytes=begun.compacted_bytes
        )
        self.at_s = begun.first.at_s
        self.number = begun.number
        self.is_compacting = True
        self._fold(begun.first)

    def begin(self) -> Incarnation:
        """Begin the next incarnation, as a controller does."""
        return begin_incarnation(
            self.store,
            self.path,
            self.config,
            claim_number=self.claim,
            token=f"of-claim-{self.claim}",
            spool=self.spool,
        )

    def grow(self, num_records: int) -> None:
        """Train until the journal has so many records, with a crash from time to time."""
        for number in count(1):
            if self.seq >= num_records:
                return
            self.at_s += 1.0
            self._fold(self._next(number))

    def _next(self, number: int) -> ev.Event:
        at_s, state = self.at_s, self.state
        if state.phase is not Phase.TRAINING:
            return ev.Ticked(at_s=at_s)
        if number % self.fault_every == 0:
            worker = state.fleet.workers[state.attempt.members[-1]].name
            return ev.WorkerExited(at_s=at_s, worker=worker, cause="crash", detail="9")
        if number % COMMIT_EVERY == 0:
            return ev.CheckpointCommitted(
                at_s=at_s, attempt=state.attempt.number, step=state.attempt.step
            )
        # No two steps take equally long.
        step_s = 0.1 + number % 997 / 1000
        return ev.StepCompleted(
            at_s=at_s, attempt=state.attempt.number, step=state.attempt.step + 8, step_s=step_s
        )

    def compact(self) -> None:
        """Compact the journal now."""
        document = self.compaction.prepare(self.journal, self.state, self.stats)
        asyncio.run(self.compaction.write(document))

    def _fold(self, event: ev.Event) -> None:
        inbox = deque([event])
        while inbox:
            for action in self._fold_one(inbox.popleft()):
                inbox += self._answers(action)

    def _fold_one(self, event: ev.Event) -> tuple[act.Action, ...]:
        self.state, actions = step(self.state, event, rules=self.rules)
        records = transition_records(event, actions, attempt=self.state.attempt.number)
        for record in records:
            record["seq"], record["wall_time"] = self.seq, 1.7e9 + self.at_s
            self.seq += 1
        self.journal.append(records)
        for record in records:
            self.stats.add(record)
        if self.is_compacting and self.compaction.is_due(self.journal.journal_bytes, is_quiet=True):
            self.compact()
        return actions

    def _answers(self, action: act.Action) -> list[ev.Event]:
        at_s, attempt = self.at_s, self.state.attempt.number
        match action:
            case act.RequestReservation(reservation=reservation):
                return [
                    ev.ReservationGranted(
                        at_s=at_s, reservation=reservation, node=f"n{reservation % NUM_WORKERS}"
                    )
                ]
            case act.StartWorker(worker=worker, node=node):
                return [ev.WorkerReady(at_s=at_s, worker=worker, node=node, pid=self.seq)]
            case act.KillWorker(worker=worker):
                return [ev.WorkerExited(at_s=at_s, worker=worker, cause="killed", detail="")]
            case act.FenceAttempt(workers=workers):
                return [self._left(worker, ev.Leaving.PEER_LOST) for worker in workers]
            case act.YieldAttempt(workers=workers):
                return [self._left(worker, ev.Leaving.YIELDED) for worker in workers]
            case act.ReadCommitted(number=number):
                known = self.state.attempt.step or self.state.committed[0] or self.state.stored
                return [
                    ev.CommittedRead(
                        at_s=at_s,
                        attempt=attempt,
                        step=known,
                        committed_by=self.state.lineage[-1][0]
                        if known and self.state.lineage
                        else 0,
                        skipped=(),
                        number=number,
                    )
                ]
            case act.StartAttempt():
                return [
                    ev.WorkerFormed(at_s=at_s, attempt=action.attempt, worker=w)
                    for w, _, _ in action.members
                ]
            case act.SurveyWorkers():
                return [self._surveyed()]
            case _:
                return []

    def _left(self, worker: str, how: ev.Leaving) -> ev.Event:
        state = self.state
        return ev.WorkerLeft(
            at_s=self.at_s,
            attempt=state.attempt.number,
            worker=worker,
            how=how,
            step=state.attempt.step,
            detail="",
        )

    def _surveyed(self) -> ev.Event:
        state = self.state
        return ev.WorkersSurveyed(
            at_s=self.at_s,
            alive=tuple(
                (
                    worker.name,
                    state.fleet.nodes[worker.node].name,
                    state.attempt.number if number in state.attempt.inside else 0,
                )
                for number, worker in state.fleet.workers.items()
            ),
            reservations=tuple(
                (n, state.fleet.nodes[s.node].name) for n, s in state.fleet.reservations.items()
            ),
            pending_reservations=(),
        )
