"""Real training processes without Ray: each runs attempts one after the other, as asked by pipe.

A process is a worker: it keeps its caches and buffers from attempt to attempt, and a thread of
it answers while the training thread is stuck, so an attempt can be fenced or asked to yield.
"""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from tests.support.forking import forking
from ucp_core.layout import ParallelLayout
from ucp_core.storage import open_store
from workers import collectives
from workers.protocol import Assignment, Formed, Outcome, Pace, PartRef
from workers.settings import Settings
from workers.telemetry import ProgressRecord
from workers.train import run_attempt
from workers.train.loop import WorkerContext

#: Guards against a hang: workers that share a processor with others may need long for an attempt.
ANSWER_S_MAX = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Run an attempt; ``node`` is the node's name and where its keeper is, if it has one."""

    assignment: Assignment
    settings: Settings
    directory: str
    node: tuple[str, Path | None] = ("", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """How an attempt ended in a process, and what the process holds afterwards."""

    outcome: Outcome
    formed: bool
    sources: tuple[tuple[str, int], ...]
    skipped: tuple[str, ...]
    num_fds: int
    num_threads: int


class Trainer:
    """The parent's handle of one worker process."""

    def __init__(
        self, worker: str, directory: Path, begin: Callable[[], object] | None = None
    ) -> None:
        context = forking()
        self._pipe, theirs = context.Pipe()
        self._heard = context.Semaphore(0)
        # No daemon: a script's data loader may have processes.
        self.process = context.Process(
            target=_serve, args=(theirs, self._heard, worker, str(directory), begin), daemon=False
        )
        self.process.start()
        theirs.close()

    def order(self, order: Order) -> None:
        self._pipe.send(("run", order))

    def fence(self, attempt: int) -> None:
        self._pipe.send(("fence", attempt))

    def yield_at_boundary(self, attempt: int, *, durable: bool = True) -> None:
        """Ask it to leave, and return when it knows."""
        self._pipe.send(("yield durably" if durable else "yield", attempt))
        assert self._heard.acquire(timeout=ANSWER_S_MAX), "the worker does not listen"

    def keep_pace(self, attempt: int, pace: Pace) -> None:
        self._pipe.send(("pace", (attempt, pace)))

    def has_left(self) -> bool:
        return self._pipe.poll()

    def left(self) -> Left:
        assert self._pipe.poll(ANSWER_S_MAX), "the worker did not leave its attempt"
        answer = self._pipe.recv()
        assert isinstance(answer, Left)
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


@dataclass(slots=True)
class Run:
    """Trainers on one run directory; ``attempt`` starts the next attempt on some of them.

    They take turns on ``nodes``, each a name and where its keeper is. ``begin_with`` is what
    new ones call first.
    """

    directory: Path
    nodes: Sequence[tuple[str, Path | None]] = (("", None),)
    trainers: list[Trainer] = field(default_factory=list)
    lineage: tuple[tuple[int, int], ...] = ()
    store: Any = None
    begin_with: Callable[[], object] | None = None

    def __enter__(self) -> Self:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self

    def __exit__(self, *_: object) -> None:
        for trainer in self.trainers:
            trainer.close()

    def begin(
        self,
        settings: Settings,
        *,
        num_workers: int,
        resume: tuple[int, int] = (0, 0),
        layout: ParallelLayout | None = None,
        members: Sequence[int] | None = None,
        memory: tuple[PartRef, ...] = (),
        guards: Sequence[tuple[int, ...]] | None = None,
        parity: Sequence[tuple[int, ...]] | None = None,
    ) -> list[Trainer]:
        """Start the next attempt; ``resume`` is ``(step, attempt)`` of what to load.

        ``guards`` are, by rank, the ranks whose shares it saves; ``parity`` those with whom it
        keeps parities.
        """
        while len(self.trainers) < num_workers:
            worker = f"w{len(self.trainers):04d}"
            self.trainers.append(Trainer(worker, self.directory, self.begin_with))
        attempt = len(self.lineage) + 1
        self.lineage = (*self.lineage, (attempt, resume[0]))
        numbers = members or range(num_workers)
        chosen = [self.trainers[number] for number in numbers]
        for rank, (number, trainer) in enumerate(zip(numbers, chosen, strict=True)):
            assignment = Assignment(
                attempt=attempt,
                rank=rank,
                layout=layout or ParallelLayout(dp_shard=num_workers),
                store_host="127.0.0.1",
                store_port=self.store.port,
                resume_step=resume[0],
                resume_attempt=resume[1],
                lineage=self.lineage,
                memory=memory,
                guards=guards[rank] if guards is not None else None,
                parity=parity[rank] if parity is not None else (),
            )
            trainer.order(
                Order(
                    assignment=assignment,
                    settings=settings,
                    directory=str(self.directory),
                    node=self.nodes[number % len(self.nodes)],
                )
            )
        return chosen

    def train(self, settings: Settings, **how: Any) -> list[Left]:
        """Run an attempt to its end and return how every rank left."""
        return [trainer.left() for trainer in self.begin(settings, **how)]


class _Worker:
    """The child's side."""

    def __init__(self, pipe: Connection, heard: Semaphore, worker: str, directory: str) -> None:
        self._pipe = pipe
        self._heard = heard
        self._worker = worker
        self._ring = f"{directory}/{worker}.ring"
        self._page = ProgressRecord.create(f"{directory}/{worker}.progress", worker=worker)
        self._fenced: set[int] = set()
        self._yielding: set[int] = set()
        self._durably: set[int] = set()
        self._paces: dict[int, Pace] = {}
        self._formed: Formed | None = None
        self._orders: list[Order] = []
        self._news = threading.Semaphore(0)

    def listen(self) -> None:
        while True:
            try:
                kind, value = self._pipe.recv()
            except EOFError:
                os._exit(0)
            if kind == "run":
                self._orders.append(value)
                self._news.release()
            elif kind == "pace":
                attempt, self._paces[attempt] = value
            elif kind == "fence":
                self._fenced.add(value)
                collectives.abort(value)
            else:
                if kind == "yield durably":
                    self._durably.add(value)
                self._yielding.add(value)
                self._heard.release()

    def train_forever(self) -> None:
        while True:
            self._news.acquire()
            outcome = self._run(self._orders.pop(0))
            self._pipe.send(
                Left(
                    outcome=outcome,
                    formed=self._formed is not None,
                    sources=self._formed.sources if self._formed is not None else (),
                    skipped=self._formed.found.reasons if self._formed is not None else (),
                    num_fds=_num_entries("/proc/self/fd"),
                    num_threads=_num_entries("/proc/self/task"),
                )
            )

    def _run(self, order: Order) -> Outcome:
        store, directory = open_store(order.directory)
        self._formed = None
        node, keeper_directory = order.node
        context = WorkerContext(
            worker=self._worker,
            settings=order.settings,
            store=store,
            directory=directory,
            progress=self._page,
            ring_path=self._ring,
            fenced=self._fenced.__contains__,
            yield_requested=self._yielding.__contains__,
            yield_durable=self._durably.__contains__,
            node=node,
            keeper_directory=keeper_directory,
            on_formed=self._note_formed,
            pace=lambda attempt: self._paces.get(attempt, Pace()),
        )
        return run_attempt(order.assignment, context)

    def _note_formed(self, formed: Formed) -> None:
        self._formed = formed


def _num_entries(directory: str) -> int:
    return sum(1 for _ in Path(directory).iterdir())


def _serve(
    pipe: Connection,
    heard: Semaphore,
    worker: str,
    directory: str,
    begin: Callable[[], object] | None,
) -> None:
    torch.set_num_threads(1)
    if begin is not None:
        begin()
    child = _Worker(pipe, heard, worker, directory)
    threading.Thread(target=child.listen, daemon=True).start()
    child.train_forever()
