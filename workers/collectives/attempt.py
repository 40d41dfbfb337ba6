"""Hold one attempt of this process: its groups, and the objects that must outlive it."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, Protocol, TypeVar

import torch.distributed as dist

from workers.collectives import nccl
from workers.collectives.device_spans import DeviceSpans
from workers.collectives.errors import AbortedError, CollectiveError
from workers.collectives.places import Places
from workers.collectives.waiting import Waiter, helpers
from workers.telemetry import RecordRing

#: Period of polling the works on a device; their recorded times are only this precise.
_SETTLE_S: Final = 0.05
#: Period of checking whether the device has caught up: far shorter than the work enqueued for it.
_AHEAD_LOOK_S: Final = 0.0002

_T = TypeVar("_T")


class _GroupCalls(Protocol):
    """The calls of an attempt to its groups."""

    def described(self) -> str: ...

    def on_device(self) -> Any: ...

    def set_timeout(self, timeout: timedelta) -> None: ...

    def release(self) -> list[Any]: ...


class _OnDevice(Protocol):
    def is_reached(self) -> bool: ...

    def has_begun(self) -> bool: ...

    def failure(self) -> BaseException | None: ...

    def give_up(self) -> None: ...

    def settle(self, error: BaseException | None) -> bool: ...


class Attempt:
    """The process groups of one attempt in this process.

    Attributes:
        number: The fencing token.
        aborted: Set once, by ``abort`` or ``fail``.
        places: The places of the ranks; None until this rank is connected to the store.
        device_spans: Times the rank's own work on its device; None if it computes on the host.
        ahead_max: Maximum number of collectives called that the device has not reached; 0 for no
            maximum. If the device's queue is full, the next call blocks in the driver and holds the
            interpreter; each queued collective also keeps its outputs. No measurement on a GPU has
            shown yet what a bound costs.
    """

    def __init__(
        self, number: int, *, backend: str, world_size: int, timeout_s: float, ring_path: str
    ) -> None:
        self.number = number
        self.backend = backend
        self.world_size = world_size
        self.timeout = timedelta(seconds=timeout_s)
        self.aborted = threading.Event()
        self.ring = RecordRing(ring_path, attempt=number, num_ranks=world_size)
        self.places: Places | None = None
        self.device_spans = DeviceSpans(self.ring) if backend == "nccl" else None
        self.ahead_max = 0
        self._ahead: deque[nccl.Start] = deque()
        #: The address from which this machine reaches the store.
        self.address = ""
        self._lock = threading.Lock()
        self._waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()
        self._groups: list[_GroupCalls] = []
        self._kept: list[Any] = []
        self._on_device: dict[int, deque[_OnDevice]] = {}
        self._looking = threading.Lock()
        self._failure: CollectiveError | None = None
        self._left = threading.Event()
        if backend == "nccl":
            nccl.prepare(self.timeout)
            threading.Thread(target=self._settle, daemon=True, name="settle").start()

    def connect(self, store_host: str, store_port: int, rank: int) -> dist.Store:
        """Return a client of the rendezvous store, and start to publish this rank's waits."""
        # Each attempt has its own client, because an old connection may have stopped in the middle
        # of a request.
        store = self.interruptible(
            f"connecting to the store at {store_host}:{store_port}",
            lambda: dist.TCPStore(
                store_host, store_port, timeout=self.timeout, wait_for_workers=False
            ),
        )
        self.address = _own_address(store_host, store_port)
        self.ring.assign(rank, on_device=self.backend == "nccl")
        self.places = Places(
            dist.PrefixStore(f"places{self.number}", store),
            self.ring,
            rank=rank,
            world_size=self.world_size,
            is_over=self.aborted.is_set,
        )
        return store

    def abort(self) -> int:
        """Wake every thread that waits in this attempt, and return the number of waits.

        Work on a device ends soon afterwards, but this does not wait for it.
        """
        with self._lock:
            is_first = not self.aborted.is_set()
            self.aborted.set()
            waiters = list(self._waiters)
            groups = list(self._groups)
        for waiter in waiters:
            waiter.wake()
        if is_first:
            backends = (group.on_device() for group in groups)
            nccl.abort_together(backend for backend in backends if backend is not None)
        return len(waiters)

    def fail(self, error: CollectiveError) -> None:
        """Abort the attempt because a collective failed on the device. Its peers wait for it."""
        with self._lock:
            if not self.aborted.is_set():
                self._failure = error
        self.abort()

    def error(self, described: str, op: str) -> CollectiveError | AbortedError:
        """Return the error to raise in an aborted attempt: the failure that caused it, if any."""
        if self._failure is not None:
            return CollectiveError(str(self._failure), **self._failure.facts)
        return AbortedError(
            f"attempt {self.number} was aborted{described}", attempt=self.number, op=op
        )

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later collectives, and of groups created later."""
        with self._lock:
            self.timeout = timeout
            groups = list(self._groups)
        for group in groups:
            group.set_timeout(timeout)

    def waiter(self) -> Waiter:
        """Return an event that ``abort`` sets. It is already set if ``abort`` was called."""
        waiter = Waiter()
        with self._lock:
            self._waiters.add(waiter)
            if self.aborted.is_set():
                waiter.wake()
        return waiter

    def keep_alive(self, what: Any) -> None:
        """Keep ``what`` alive while the transport may use it."""
        self._kept.append(what)

    def span(self, op: str, *, step: int, micro_batch: int, tokens: int = 0) -> None:
        """Record that the training thread starts its own work; "" ends it."""
        record = self.ring.span if self.device_spans is None else self.device_spans.span
        record(op, step=step, micro_batch=micro_batch, tokens=tokens)

    def note_call(self) -> None:
        """Count a call of a collective on a device, or a wait for one."""
        if self.device_spans is not None:
            self.device_spans.num_calls += 1

    def let_catch_up(self, op: str) -> None:
        """Wait until the device is at most ``ahead_max`` collectives behind."""
        while self.ahead_max and len(self._ahead) >= self.ahead_max:
            if self._ahead[0].is_reached():
                self._ahead.popleft()
            elif self.aborted.wait(_AHEAD_LOOK_S):
                raise self.error(f"; {op} was not started", op)

    def start(self) -> nccl.Start:
        """Return the position at which the device reaches the next collective."""
        start = nccl.Start()
        if self.ahead_max:
            self._ahead.append(start)
        return start

    def note_launched(self, group: int, work: _OnDevice) -> None:
        """Note a group's work whose start and end on the device are not recorded yet."""
        self._on_device.setdefault(group, deque()).append(work)

    def note_begun(self, group: int) -> None:
        """Note that the newest work of a group has started, so that older work can be dropped."""
        # Other works may have been settled in the meantime.
        with contextlib.suppress(IndexError):
            self._on_device[group][-2].give_up()

    def add(self, group: _GroupCalls) -> None:
        """Add a group. If the attempt was aborted, abort the group's work on a device."""
        with self._lock:
            self._groups.append(group)
            is_late = self.aborted.is_set()
        if is_late and (backend := group.on_device()) is not None:
            nccl.abort_together([backend])

    def made_before(self, group: _GroupCalls) -> list[_GroupCalls]:
        """Return the groups of this attempt that were created before ``group``."""
        with self._lock:
            return list(itertools.takewhile(lambda one: one is not group, self._groups))

    def interruptible(self, doing: str, build: Callable[[], _T]) -> _T:
        """Return ``build()``, called in a thread for which an abort does not wait.

        After an abort the call continues until its timeout, and its result is dropped. Its own
        errors become ``CollectiveError``.
        """
        waiter = self.waiter()
        built: list[_T] = []
        failures: list[Exception] = []

        def run() -> None:
            try:
                built.append(build())
            except Exception as error:  # noqa: BLE001 - raised again by the caller below
                failures.append(error)
            waiter.set()

        helpers.submit(run)
        waiter.wait(None)
        if built and not self.aborted.is_set():
            return built.pop()
        if failures and not self.aborted.is_set():
            raise CollectiveError(
                f"{doing} failed in attempt {self.number}: {failures[0]}",
                attempt=self.number,
                op="form",
                group="",
                seq=0,
            ) from failures[0]
        self.keep_alive(built)
        raise self.error(f" while {doing}", "form")

    def leave(self) -> list[Leftovers]:
        """Close the records and release the groups; return what the transport may still use."""
        self._left.set()
        self.look_at_devices()
        if self.places is not None:
            self.places.close()
        self.ring.close()
        with self._lock:
            groups, self._groups = self._groups, []
        in_flight = self.aborted.is_set() or self.ring.num_in_flight() > 0
        # A group of this attempt that still has references is unusable.
        self.aborted.set()
        leftovers = [Leftovers(group.release(), of=group) for group in groups]
        leftovers.append(Leftovers(self._kept))
        self._kept = []
        return leftovers if in_flight else []

    def _settle(self) -> None:
        while not self._left.wait(_SETTLE_S):
            self.look_at_devices()

    def look_at_devices(self) -> None:
        """Record which collectives the device has reached and finished since the last look.

        A device runs each group's collectives in the order of their calls, but one group's may wait
        forever while others continue.
        """
        if not self._looking.acquire(blocking=False):
            # Another thread is polling, perhaps for long, because a third one may hold the driver.
            return
        try:
            for queue in list(self._on_device.values()):
                # The first collective that was not reached delays the later ones.
                works = list(queue)
                all(work.is_reached() for work in works)
                failures = (work.failure() for work in reversed(works[-2:]))
                error = next((one for one in failures if one is not None), None)
                while queue and queue[0].settle(error):
                    queue.popleft()
        finally:
            self._looking.release()

    def is_within_collective(self) -> bool:
        """Return whether the device has reached a collective that has not ended."""
        self.look_at_devices()
        oldest = (work for queue in list(self._on_device.values()) for work in list(queue)[:1])
        return any(work.has_begun() for work in oldest)


class Leftovers:
    """The parts of a released group (``of``, if any) that the transport may still use.

    ``held`` has the last references to it, besides the group's own.
    """

    def __init__(self, held: list[Any], *, of: _GroupCalls | None = None) -> None:
        self._held = held
        self._dropped = threading.Event()
        self._group = weakref.ref(of) if of is not None else lambda: None

    @property
    def are_referred_to(self) -> bool:
        """Return whether the group, which holds the same objects, is still referenced."""
        return self._group() is not None

    def drop(self) -> None:
        """Drop the references, without the GIL; this may take until the timeout."""
        self._held.clear()
        self._dropped.set()

    def wait(self, timeout_s: float) -> None:
        """Block until the references are dropped, or for ``timeout_s``."""
        self._dropped.wait(timeout_s)


def _own_address(host: str, port: int) -> str:
    """Return the address from which this machine reaches another one."""
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as unconnected:
        unconnected.connect(place)  # This sends nothing.
        return str(unconnected.getsockname()[0])
