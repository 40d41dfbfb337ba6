"""Read the progress records and record rings of a node's trainers for its keeper."""

import contextlib
import os
import shutil
import signal
import socket
import time
from pathlib import Path

from workers.keeper.endings import Endings
from workers.protocol import GONE, NOT_FORMED, NodeReport, WorkerPhase, WorkerReport
from workers.telemetry import (
    ProgressReader,
    ProgressView,
    RingReader,
    RingView,
    Subject,
    descendants,
    forget_stacks,
    last_ring_path,
    open_progress,
    process_state,
    read_progress,
    report_on,
    stacks_path,
)

PROGRESS_SUFFIX = ".progress"
RING_SUFFIX = ".ring"
#: Suffix of the empty file that remains of a dead worker after the keeper stops reporting it: a
#: later worker may inherit its memory, even after the keeper was restarted.
GONE_SUFFIX = ".gone"

#: Trainers stand still if none has moved for this long.
STILL_S = 0.3
#: Period of searches for new workers.
SCAN_S = 0.25
#: A directory that was listed this long after its last change is not listed again before the next
#: change: its time has a resolution of 10 ms.
SETTLED_S = 0.1
#: Time for which a dead worker is reported. By then its attempt was judged; a longer time would
#: cost memory, and time in every look and report.
FORGET_S = 60.0
#: Maximum time until a new child counts. A search takes 0.3 ms in a process of 30 threads.
_SEARCH_S = 1.0


class ChildrenTime:
    """Processor time of the living descendants of a worker: ``used_s`` at the last look."""

    def __init__(self) -> None:
        self.used_s = 0.0
        self._searched_s = float("-inf")
        self._pids: tuple[int, ...] = ()

    def look(self, pid: int) -> None:
        """Measure the descendants of the process ``pid``, in 10 us each."""
        now_s = time.monotonic()
        if now_s - self._searched_s >= _SEARCH_S:
            self._searched_s, self._pids = now_s, tuple(descendants(pid))
        self.used_s = sum(process_state(child).processor_s for child in self._pids)


def progress_path(directory: Path, worker: str) -> Path:
    """Return the path of the progress record of ``worker``."""
    return directory / (worker + PROGRESS_SUFFIX)


def dead_workers(directory: Path) -> frozenset[str]:
    """Return the workers of ``directory`` whose process is gone."""
    views = {path.stem: read_progress(path) for path in directory.glob("*" + PROGRESS_SUFFIX)}
    dead = {
        worker
        for worker, view in views.items()
        if view is not None and not _runs(view.pid, view.started_ticks)
    }
    return frozenset(dead.union(path.stem for path in directory.glob("*" + GONE_SUFFIX)))


def clear(directory: Path) -> None:
    """Remove the directory of a node whose run is over, and directories of lost nodes beside it.

    Simulated nodes share a machine, and a node that was killed removes nothing. A directory stays
    if a living process has a progress record there or listens at a socket there.
    """
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        for other in directory.parent.iterdir():
            if not _is_in_use(other):
                shutil.rmtree(other, ignore_errors=True)
        # The last node removes the parent.
        directory.parent.rmdir()


def _is_in_use(directory: Path) -> bool:
    paths = {path.stem for path in directory.glob("*" + PROGRESS_SUFFIX)}
    return bool(paths - dead_workers(directory)) or any(
        path.is_socket() and _is_bound(path) for path in directory.iterdir()
    )


def _is_bound(path: Path) -> bool:
    """Return whether a process listens at the socket, without disturbing it."""
    # No socket here has this type, so the connection fails with another error if it is bound.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        try:
            other.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


def ring_path(directory: Path, worker: str) -> Path:
    """Return the path of the record ring of ``worker``."""
    return directory / (worker + RING_SUFFIX)


class NodeWatch:
    """The trainers of one node, found by their progress records in ``directory``.

    Dead trainers are reported for ``forget_s``. ``num_ranks`` is the size of their largest group in
    the last report.
    """

    def __init__(self, *, node: str, directory: Path, forget_s: float = FORGET_S) -> None:
        self._node = node
        self._directory = directory
        self._forget_s = forget_s
        self._seq = 0
        self._places: list[tuple[int, WorkerPhase, int, int]] = []
        self._moved_s = time.monotonic()
        self._scanned_s = float("-inf")
        self._paths: list[Path] = []
        self._changed_ns = -1
        self._changed_s = self._listed_s = float("-inf")
        self._readers: dict[str, ProgressReader] = {}
        self._rings: dict[str, RingReader] = {}
        self._children: dict[str, ChildrenTime] = {}
        self._milestones: dict[str, tuple[int, bool, bool]] = {}
        self._gone_at_s: dict[str, float] = {}
        self.num_ranks = 0
        self.endings = Endings()

    def look(self) -> bool:
        """Return whether a trainer passed a milestone since the last look.

        Milestones are events that the controller waits for: a worker came, went, formed, or
        finished the first step of an attempt. Ordinary steps do not count, because a fast run would
        send a report per step.
        """
        milestones: dict[str, tuple[int, bool, bool]] = {}
        places: list[tuple[int, WorkerPhase, int, int]] = []
        self._open_new_records()
        for worker, reader in self._readers.items():
            view = reader.view()
            if view is not None:
                # At each look, because at first the record may not name its worker.
                self.endings.follow(view.pid)
                milestones[worker] = _milestone(view, self._milestones.get(worker))
                places.append((view.attempt, view.phase, view.step, view.micro_batch))
        if places != self._places:
            self._places, self._moved_s = places, time.monotonic()
        changed = milestones != self._milestones
        self._milestones = milestones
        return changed

    def still_s(self) -> float:
        """Return the time since a trainer of the node last moved."""
        return time.monotonic() - self._moved_s

    def is_stepping(self) -> bool:
        """Return whether all workers in an attempt have finished a step in it, and still move."""
        stepping = [stepped for attempt, _, stepped in self._milestones.values() if attempt]
        return bool(stepping) and all(stepping) and self.still_s() < STILL_S

    def _open_new_records(self) -> None:
        """Search for new workers. A worker id is used once, so its record stays open."""
        now_s = time.monotonic()
        if now_s - self._scanned_s < SCAN_S:
            return
        self._scanned_s = now_s
        self._list_records()

    def _list_records(self) -> None:
        """Open new progress records, if the directory may have changed."""
        now_s = time.monotonic()
        try:
            changed_ns = self._directory.stat().st_mtime_ns
        except FileNotFoundError:
            changed_ns = 0
        if changed_ns != self._changed_ns:
            self._changed_ns, self._changed_s = changed_ns, now_s
        elif self._listed_s - self._changed_s >= SETTLED_S:
            return
        paths = sorted(self._directory.glob("*" + PROGRESS_SUFFIX))
        for path in paths:
            reader = None if path.stem in self._readers else open_progress(path)
            if reader is not None:
                self._readers[path.stem] = reader
                self._rings[path.stem] = RingReader(path.with_suffix(RING_SUFFIX))
        # This comes last: if a file could not be opened, the next look tries again.
        self._paths, self._listed_s = paths, now_s

    @property
    def workers(self) -> tuple[str, ...]:
        """Return the trainers that were found here; some of them may be dead."""
        return tuple(self._readers)

    def pids(self) -> dict[str, int]:
        """Return the processes of the trainers that may be alive."""
        views = {worker: reader.view() for worker, reader in self._readers.items()}
        return {
            worker: view.pid
            for worker, view in views.items()
            if view is not None and worker not in self._gone_at_s
        }

    def kill(self, worker: str) -> None:
        """Send SIGKILL to ``worker``, unless its process id belongs to another process by now."""
        view = self._view(worker)
        if view is not None and process_state(view.pid).started_ticks == view.started_ticks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(view.pid, signal.SIGKILL)

    def subjects(self, attempt: int) -> tuple[Subject, ...]:
        """Return the workers that are, or were last, in ``attempt``, including dead ones."""
        self._list_records()
        found: list[Subject] = []
        for worker in self._readers:
            view = self._view(worker)
            last = self._rings[worker].look(now_ns=time.monotonic_ns()).attempt
            if view is not None and attempt in (view.attempt, last):
                pid = view.pid if _runs(view.pid, view.started_ticks) else 0
                found.append(Subject(worker, pid, stacks_path(self._directory, worker)))
        return tuple(found)

    def lives(self, worker: str) -> bool:
        """Return whether the keeper knows that the process of ``worker`` lives."""
        view = self._view(worker)
        return view is not None and _runs(view.pid, view.started_ticks)

    def report(self) -> NodeReport:
        """Return the state of every trainer of the node, including recently dead ones."""
        self._seq += 1
        self._list_records()
        now_ns = time.monotonic_ns()
        workers = tuple(self._report_on(path.stem, now_ns) for path in self._paths)
        self.num_ranks = max((len(g.ranks) for row in workers for g in row.groups), default=0)
        self._forget({row.worker for row in workers if row.pid and row.os_state in GONE})
        return NodeReport(node=self._node, seq=self._seq, workers=workers)

    def _forget(self, gone: set[str]) -> None:
        """Remove the files of workers that died long ago, except for an empty one."""
        now_s = time.monotonic()
        self._gone_at_s = {worker: self._gone_at_s.get(worker, now_s) for worker in gone}
        for worker, gone_at_s in self._gone_at_s.items():
            if now_s - gone_at_s >= self._forget_s:
                self._readers.pop(worker, None)
                self._rings.pop(worker, None)
                self._children.pop(worker, None)
                ring = ring_path(self._directory, worker)
                ring.unlink(missing_ok=True)
                last_ring_path(ring).unlink(missing_ok=True)
                forget_stacks(stacks_path(self._directory, worker))
                with contextlib.suppress(FileNotFoundError):
                    path = progress_path(self._directory, worker)
                    os.truncate(path.rename(path.with_suffix(GONE_SUFFIX)), 0)

    def _report_on(self, worker: str, now_ns: int) -> WorkerReport:
        view = self._view(worker)
        if view is None:
            return report_on(worker, None, RingView(0, ()), now_ns=now_ns)
        ring = self._rings[worker]
        seen = ring.look(now_ns=now_ns)
        children = self._children.setdefault(worker, ChildrenTime())
        if self.still_s() >= STILL_S:
            # While workers move, it does not matter whether their children do.
            children.look(view.pid)
        return report_on(
            worker,
            view,
            seen,
            now_ns=now_ns,
            children_s=children.used_s,
            digest=ring.digest(now_ns=now_ns),
        )

    def _view(self, worker: str) -> ProgressView | None:
        reader = self._readers.get(worker)
        return reader.view() if reader is not None else None


def _runs(pid: int, started_ticks: int) -> bool:
    found = process_state(pid)
    return found.letter not in GONE and found.started_ticks == started_ticks


def _milestone(view: ProgressView, last: tuple[int, bool, bool] | None) -> tuple[int, bool, bool]:
    """Return (attempt, has formed in it, has finished a step in it)."""
    same_attempt = last is not None and last[0] == view.attempt
    formed = view.phase not in NOT_FORMED or (same_attempt and last is not None and last[1])
    return (view.attempt, formed, formed and view.step_s > 0.0)
