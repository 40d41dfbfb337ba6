"""Runs a function as several real processes with a store between them."""

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support.forking import forking

#: Guards against a hang; some seconds on an idle machine.
JOIN_S_MAX = 240.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """The instructions of a process: its rank and the address of the others."""

    rank: int  #: Its number among the processes.
    port: int  #: Port of the store on this machine.
    directory: Path  #: Where pages and rings are kept.

    @property
    def ring_path(self) -> Path:
        """Return this process's record ring."""
        return self.directory / f"w{self.rank}.ring"

    @property
    def progress_path(self) -> Path:
        """Return this process's progress page."""
        return self.directory / f"w{self.rank}.progress"

    def formation(self, attempt: int, world_size: int, timeout_s: float = 120.0) -> dict[str, Any]:
        """Return the arguments of ``collectives.form`` for this process."""
        return {
            "backend": "gloo",
            "store_host": "127.0.0.1",
            "store_port": self.port,
            "attempt": attempt,
            "rank": self.rank,
            "world_size": world_size,
            "ring_path": self.ring_path,
            "timeout_s": timeout_s,
        }


class Ranks:
    """Running processes. ``results`` waits for what each of them returned."""

    def __init__(
        self,
        function: Callable[[Place], Any],
        num_ranks: int,
        directory: Path,
        store: dist.TCPStore,
    ) -> None:
        context = forking()
        self.store = store
        self.places = [
            Place(rank=rank, port=store.port, directory=directory) for rank in range(num_ranks)
        ]
        self._answers = [context.Pipe(duplex=False) for _ in self.places]
        self._processes = [
            context.Process(target=_main, args=(function, place, answer[1]), daemon=True)
            for place, answer in zip(self.places, self._answers, strict=True)
        ]
        for process, answer in zip(self._processes, self._answers, strict=True):
            process.start()
            answer[1].close()

    def pid(self, rank: int) -> int:
        """Return the process id of ``rank``."""
        pid = self._processes[rank].pid
        assert pid is not None
        return pid

    def results(self, limit_s: float = JOIN_S_MAX) -> list[Any]:
        """Return what each process returned, None for a killed one; raise what one raised."""
        until_s = time.monotonic() + limit_s
        ranks = {answer: rank for rank, (answer, _) in enumerate(self._answers)}
        found: dict[int, Any] = {}
        while ranks:
            # As they come: a rank that raises may be what all others wait for.
            ready = wait(list(ranks), max(0.0, until_s - time.monotonic()))
            assert ready, f"ranks {sorted(ranks.values())} do not end"
            for answer in ready:
                assert isinstance(answer, Connection)
                rank = ranks.pop(answer)
                try:
                    good, value = answer.recv()
                except EOFError:
                    good, value = True, None
                assert good, f"rank {rank} raised:\n{value}"
                found[rank] = value
        return [found[rank] for rank in sorted(found)]

    def end(self) -> None:
        """Kill what still runs."""
        for process in self._processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def running(function: Callable[[Place], Any], num_ranks: int, directory: Path) -> Iterator[Ranks]:
    """Run ``function`` in ``num_ranks`` processes; none is left behind."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = Ranks(function, num_ranks, directory, store)
    try:
        yield ranks
    finally:
        ranks.end()


def until(condition: Callable[[], bool], what: str, *, limit_s: float = 120.0) -> None:
    """Return when ``condition`` holds; fail when it does not within ``limit_s``."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, f"{what} did not happen within {limit_s} s"
        time.sleep(0.002)


def _main(function: Callable[[Place], Any], place: Place, answer: Any) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        answer.send((True, function(place)))
    except BaseException:  # noqa: BLE001 - told to the parent, which fails the test
        answer.send((False, traceback.format_exc()))
