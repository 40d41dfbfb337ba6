"""Run the batches of a conversion: in this thread, in threads, or in processes.

Each way gives batches to ``ItemWorker`` objects and passes every result to ``take`` in the caller's
thread. ``orchestrator.driver.convert`` does the same on a Ray cluster.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from itertools import islice
from typing import Protocol

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
    with ExitStack() as workers:

        def begin() -> None:
            _begin(job, batches)
            workers.callback(_own.worker.close)

        pool = ThreadPoolExecutor(threads, "ucp-convert", begin)
        for _ in _done(pool, take, range(len(batches)), threads):
            pass


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
            processes, get_context("fork"), _begin_child, (job, batches, in_child)
        )
        try:
            for number in _done(pool, take, sorted(left), processes):
                left.remove(number)
        except BrokenProcessPool as error:
            processes //= 2
            if not processes:
                raise UcpError(
                    "the worker processes were killed, perhaps for lack of memory: give less "
                    "--memory or fewer --processes; the same command continues from here"
                ) from error


#: State that a thread or a forked process keeps between batches.
_own = threading.local()


def _begin(job: Job, batches: Sequence[Batch]) -> None:
    _own.worker, _own.batches = ItemWorker(job), batches


def _begin_child(job: Job, batches: Sequence[Batch], in_child: Callable[[], None]) -> None:
    # The terminal interrupts the parent, too, which ends its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    in_child()
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _begin(job, batches)


def _do(number: int) -> list[Result]:
    results: list[Result] = _own.batches[number].do(_own.worker)
    return results


def _exit_with_parent() -> None:
    """End this process when its parent dies: it would otherwise wait for work forever."""
    from multiprocessing import connection, parent_process

    parent = parent_process()
    assert parent is not None, "only children come here"
    connection.wait([parent.sentinel])
    os._exit(1)


def _done(
    pool: Executor, take: Callable[[Result], None], numbers: Iterable[int], workers: int
) -> Iterator[int]:
    """Do batches, take their results and yield their numbers; then shut the pool down.

    Only a few batches are in the pool at a time.
    """
    waiting = iter(numbers)
    under_way: dict[Future[list[Result]], int] = {}
    try:
        while True:
            for number in islice(waiting, _BATCHES_EACH * workers - len(under_way)):
                under_way[pool.submit(_do, number)] = number
            if not under_way:
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                for result in future.result():
                    take(result)
                yield under_way.pop(future)
    finally:
        pool.shutdown(cancel_futures=True)
