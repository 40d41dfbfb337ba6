"""Run the batches of a conversion: in this thread, in threads, or in processes.

Each way gives batches to ``ItemWorker`` objects and passes every result to ``take`` in the caller's
thread. ``orchestrator.driver.convert`` does the same on a Ray cluster.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import closing
from itertools import islice
from typing import ClassVar, Protocol

from ucp_core.conversion.work_items import ItemWorker, Job, Result
from ucp_core.errors import UcpError

#: Batches per worker: the current one, and one so that it never waits for the next.
_BATCHES_EACH = 2


class Batch(Protocol):
    """Items that one worker does together, on any machine; a batch can be pickled."""

    def do(self, worker: ItemWorker) -> list[Result]:
        """Do the items."""


def do_batch(job: Job, batch: Batch) -> list[Result]:
    """Do one batch, as a task on any machine does."""
    with closing(ItemWorker(job)) as worker:
        return batch.do(worker)


def run_here(job: Job, batches: Sequence[Batch], take: Callable[[Result], None]) -> None:
    """Do all batches in this thread."""
    with closing(ItemWorker(job)) as worker:
        for batch in batches:
            for result in batch.do(worker):
                take(result)


def run_threads(
    job: Job, batches: Sequence[Batch], take: Callable[[Result], None], threads: int
) -> None:
    """Do all batches in threads."""
    local = threading.local()
    workers: list[ItemWorker] = []

    def begin() -> None:
        local.worker = ItemWorker(job)
        workers.append(local.worker)

    def do(number: int) -> list[Result]:
        return batches[number].do(local.worker)

    pool = ThreadPoolExecutor(threads, "ucp-convert", begin)
    try:
        for _, results in _results(pool, do, range(len(batches)), threads):
            for result in results:
                take(result)
    finally:
        pool.shutdown(cancel_futures=True)
        for worker in workers:
            worker.close()


def may_fork() -> bool:
    """Return whether this process may fork: it has no other thread whose locks would stay held."""
    return hasattr(os, "fork") and threading.active_count() == 1


def run_processes(
    job: Job,
    batches: Sequence[Batch],
    take: Callable[[Result], None],
    processes: int,
    *,
    in_child: Callable[[], None],
) -> None:
    """Do all batches in forked processes; see ``may_fork``.

    If the kernel kills a process, half as many start again and do the rest.

    Args:
        in_child: Each child calls it first.

    Raises:
        UcpError: The last process was killed as well.
    """
    # 20 ms that conversions in one process need not pay.
    from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
    from multiprocessing import get_context

    left = set(range(len(batches)))
    while left:
        pool = ProcessPoolExecutor(
            processes, get_context("fork"), _Child.begin, (job, batches, in_child)
        )
        try:
            for number, results in _results(pool, _Child.do, sorted(left), processes):
                for result in results:
                    take(result)
                left.remove(number)
        except BrokenProcessPool as error:
            processes //= 2
            if not processes:
                raise UcpError(
                    "the worker processes were killed, perhaps for lack of memory: give less "
                    "--memory or fewer --processes; the same command continues from here"
                ) from error
        finally:
            pool.shutdown(cancel_futures=True)


class _Child:
    """The state that a forked process keeps between batches."""

    worker: ClassVar[ItemWorker]
    batches: ClassVar[Sequence[Batch]]

    @classmethod
    def begin(cls, job: Job, batches: Sequence[Batch], in_child: Callable[[], None]) -> None:
        # The terminal interrupts the parent, too, which ends its children.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        in_child()
        threading.Thread(target=_exit_with_parent, daemon=True).start()
        cls.worker, cls.batches = ItemWorker(job), batches

    @classmethod
    def do(cls, number: int) -> list[Result]:
        return cls.batches[number].do(cls.worker)


def _exit_with_parent() -> None:
    """End this process when its parent dies: it would otherwise wait for work forever."""
    from multiprocessing import connection, parent_process

    parent = parent_process()
    assert parent is not None, "only children come here"
    connection.wait([parent.sentinel])
    os._exit(1)


def _results(
    pool: Executor, do: Callable[[int], list[Result]], numbers: Iterable[int], workers: int
) -> Iterator[tuple[int, list[Result]]]:
    """Yield what each batch found, as they finish; only a few are in the pool at a time."""
    waiting = iter(numbers)
    under_way: dict[Future[list[Result]], int] = {}
    while True:
        for number in islice(waiting, _BATCHES_EACH * workers - len(under_way)):
            under_way[pool.submit(do, number)] = number
        if not under_way:
            return
        for future in wait(under_way, return_when=FIRST_COMPLETED).done:
            yield under_way.pop(future), future.result()
