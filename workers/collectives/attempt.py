"""Forming, aborting and leaving an attempt's process groups.

``form`` and ``leave`` are called by the training thread, in turn; ``abort`` by anybody, at any
time, for any attempt. After an abort the transport may still hold buffers and threads. gloo's
destructor joins those threads, which sleep until their operation fails: at once when the peer that
they wait for is gone or lets go of the group too, or else at the timeout. So a helper thread drops
the groups. Those that somebody still refers to go to a graveyard until the timeout has passed, or
whoever forgets them last would sleep in the destructor.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import _collective_utils, _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from workers.collectives.errors import AbortedError, CollectiveError
from workers.collectives.group import RecordedGroup
from workers.collectives.work import StreamWork, Waiter, helpers
from workers.records import RecordRing

#: torch knows the recorded groups by these names.
BACKENDS: Final = {"gloo": "everstep_gloo", "nccl": "everstep_nccl"}

#: How often a device's works are looked at; the resolution of their exit times.
_SETTLE_S: Final = 0.05
#: Past its timeout a dead operation has failed in gloo; some slack for its threads to end.
_GRAVE_SLACK_S: Final = 5.0

_T = TypeVar("_T")


class Attempt:
    """The process groups of one attempt in this process.

    Attributes:
        number: The fencing token.
        backend_name: What torch calls the backend.
        world_size: Members of the attempt.
        aborted: Set once, by ``abort``.
        ring: Where the groups record.
    """

    def __init__(
        self, number: int, *, backend: str, world_size: int, timeout_s: float, ring_path: str
    ) -> None:
        self.number = number
        self.backend = backend
        self.backend_name = BACKENDS[backend]
        self.world_size = world_size
        self.timeout = timedelta(seconds=timeout_s)
        self.aborted = threading.Event()
        self.ring = RecordRing(ring_path, attempt=number, num_ranks=world_size)
        self._lock = threading.Lock()
        self._waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()
        self._groups: list[RecordedGroup] = []
        self._buried: list[Any] = []
        self._on_device: deque[StreamWork] = deque()
        self._left = threading.Event()
        if backend == "nccl":
            threading.Thread(target=self._settle, daemon=True, name="settle").start()

    def abort(self) -> int:
        """Wake everybody who waits in this attempt; return how many waits it found."""
        with self._lock:
            self.aborted.set()
            waiters = list(self._waiters)
            groups = list(self._groups)
        for waiter in waiters:
            waiter.wake()
        for group in groups:
            group.abort_device()
        return len(waiters)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later collectives, and of groups that are made later."""
        with self._lock:
            self.timeout = timeout
            groups = list(self._groups)
        for group in groups:
            group.set_timeout(timeout)

    def waiter(self) -> Waiter:
        """Return an event that ``abort`` wakes; awake already if it has been called."""
        waiter = Waiter()
        with self._lock:
            self._waiters.add(waiter)
            if self.aborted.is_set():
                waiter.wake()
        return waiter

    def bury(self, what: Any) -> None:
        """Keep ``what`` alive until the transport has let go of it."""
        self._buried.append(what)

    def launched(self, work: StreamWork) -> StreamWork:
        """Note a work whose end on the device is still to be recorded."""
        self._on_device.append(work)
        return work

    def interruptible(self, doing: str, build: Callable[[], _T]) -> _T:
        """Return ``build()``, run where an abort need not wait for it.

        Raises:
            AbortedError: The attempt was aborted first; the call goes on and its result is
                dropped when the timeout of the groups ends it.
            CollectiveError: It failed, as when a member did not come.
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
        self.bury(built)
        raise AbortedError(
            f"attempt {self.number} was aborted while {doing}", attempt=self.number, op="form"
        )

    def build(self, store: dist.Store, rank: int, ranks: tuple[int, ...]) -> RecordedGroup:
        """Return a recorded group of ``ranks``, once all of them have come."""
        kinds = dist.ProcessGroup.BackendType
        inner = dist.ProcessGroup(store, rank, len(ranks))
        gloo = self.interruptible(
            f"waiting for ranks {_some(ranks)}",
            lambda: dist.ProcessGroupGloo(store, rank, len(ranks), self.timeout),
        )
        backends: dict[str, Any] = {"cpu": (kinds.GLOO, gloo)}
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.timeout  # noqa: SLF001 - as torch's own init does
            device_store = dist.PrefixStore("cuda", store)
            nccl = dist.ProcessGroupNCCL(device_store, rank, len(ranks), options)
            backends = {"cuda": (kinds.NCCL, nccl), **backends}
        for device, (kind, backend) in backends.items():
            inner._register_backend(torch.device(device), kind, backend)  # noqa: SLF001
        inner._set_default_backend(next(iter(backends.values()))[0])  # noqa: SLF001
        group = RecordedGroup(self, inner, backends, ranks=ranks, rank=rank)
        with self._lock:
            self._groups.append(group)
        return group

    def leave(self) -> list[Remains]:
        """Close the records and let go of the groups; return what an abort left in flight."""
        self._left.set()
        self.ring.close()
        with self._lock:
            groups, self._groups = self._groups, []
        in_flight = self.aborted.is_set() or self.ring.num_in_flight() > 0
        # Whoever still holds a group of this attempt can do nothing with it any more.
        self.aborted.set()
        remains = [Remains(group.release(), of=group) for group in groups]
        remains.append(Remains(self._buried))
        self._buried = []
        return remains if in_flight else []

    def _settle(self) -> None:
        while not self._left.wait(_SETTLE_S):
            while self._on_device and self._on_device[0].settle():
                self._on_device.popleft()


class Remains:
    """What is left of a group that the transport may still be at work for.

    Args:
        held: The last references to it, but for those of the group itself.
        of: The group, if there is one.
    """

    def __init__(self, held: list[Any], *, of: RecordedGroup | None = None) -> None:
        self._held = held
        self._group = weakref.ref(of) if of is not None else lambda: None

    @property
    def are_referred_to(self) -> bool:
        """Return whether somebody still has the group, which holds them too."""
        return self._group() is not None

    def drop(self) -> None:
        """Let go of them, which may take until the timeout; torch releases the GIL for it."""
        self._held.clear()


class _Process:
    """What outlives an attempt."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.current: Attempt | None = None
        self.aborted: set[int] = set()
        self.graves: list[tuple[float, Remains]] = []
        self.excepthook: Any = None
        self.frozen = False


_process = _Process()


def form(
    *,
    backend: str,
    store_host: str,
    store_port: int,
    attempt: int,
    rank: int,
    world_size: int,
    ring_path: str | os.PathLike[str],
    timeout_s: float,
) -> None:
    """Join ``attempt`` as ``rank``; return when every member has come.

    Afterwards ``torch.distributed`` is initialised and works as usual: every group made from
    now on is recorded, has the timeout, and is woken by ``abort``. Call ``leave`` before the
    next ``form``, also after ``form`` raised.

    Args:
        backend: "gloo" for CPU tensors, "nccl" for CUDA tensors (and gloo for CPU ones).
        store_host: Where the rendezvous store listens.
        store_port: Its port.
        attempt: The attempt; not one that was formed or aborted here before.
        rank: This process's rank.
        world_size: Number of members.
        ring_path: Where to record; what is there is replaced.
        timeout_s: After this a collective fails by itself: a backstop, since whoever finds a
            fault aborts much sooner. It also bounds how long an aborted group's memory is kept.

    Raises:
        AbortedError: ``abort`` was called for this attempt, before or meanwhile.
        CollectiveError: The store or a member did not answer within ``timeout_s``.
    """
    assert backend in BACKENDS, f"backend {backend!r} is none of {sorted(BACKENDS)}"
    assert not dist.is_initialized(), "leave() the attempt before forming the next"
    _empty_graves()
    _register()
    if not _process.frozen:
        # What was imported by now stays for good. A collection then takes 10 to 45 ms instead
        # of 0.15 to 0.8 s, and every leave() needs one.
        gc.freeze()
        _process.frozen = True
    current = Attempt(
        attempt,
        backend=backend,
        world_size=world_size,
        timeout_s=timeout_s,
        ring_path=os.fspath(ring_path),
    )
    with _process.lock:
        _process.current = current
        _process.excepthook = sys.excepthook
        if attempt in _process.aborted:
            current.abort()
        # Attempts only grow, so what is older will not be asked for again.
        _process.aborted = {number for number in _process.aborted if number >= attempt}
    # A client per attempt: a connection that an old one left in mid-request cannot disturb it.
    store = current.interruptible(
        f"connecting to the store at {store_host}:{store_port}",
        lambda: dist.TCPStore(
            store_host, store_port, timeout=current.timeout, wait_for_workers=False
        ),
    )
    _count_groups_anew()
    dist.init_process_group(
        current.backend_name,
        store=dist.PrefixStore(f"attempt{attempt}", store),
        rank=rank,
        world_size=world_size,
        timeout=current.timeout,
    )


def abort(attempt: int) -> int:
    """Abort ``attempt`` in this process; return how many blocked calls were woken at once.

    From any thread, at any time, any number of times. Whoever waits in a collective of the
    attempt, or in its ``form``, raises ``AbortedError`` within milliseconds, and so does every
    later call. If the attempt has not begun here, its ``form`` will raise. No other attempt is
    touched. Waits in slices are not counted: they end by themselves within 5 ms.
    """
    with _process.lock:
        _process.aborted.add(attempt)
        current = _process.current
    if current is None or current.number != attempt:
        return 0
    return current.abort()


def check() -> None:
    """Raise if the attempt was aborted.

    To be called once the host has what a collective on a device has left: an abort ends those by
    force, and what they leave then is anything. Before the device is let go, ``abort`` says so.

    Raises:
        AbortedError: It was.
    """
    current = _process.current
    if current is not None and current.aborted.is_set():
        raise AbortedError(
            f"attempt {current.number} was aborted; what its collectives have left counts for "
            "nothing",
            attempt=current.number,
            op="check",
        )


def set_timeout(timeout_s: float) -> None:
    """Have later collectives of the attempt fail by themselves after ``timeout_s``.

    Called by the thread that trains, between ``form`` and ``leave``.
    """
    assert _process.current is not None, "form() an attempt first"
    _process.current.set_timeout(timedelta(seconds=timeout_s))


def leave() -> None:
    """Leave the attempt: afterwards no group of it exists and ``form`` can be called again.

    Before this, drop every reference to models, optimizers, meshes and exceptions of the
    attempt: they hold its groups, and with them sockets and threads. Call it in the thread
    that trained, because DTensor keeps a cache per thread. Does nothing outside an attempt.
    """
    with _process.lock:
        current, _process.current = _process.current, None
    if current is None:
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    # init_process_group puts a hook around the last one, each time anew.
    sys.excepthook = _process.excepthook
    _clear_caches()
    remains = current.leave()
    # Cycles of modules and hooks hold groups, and with them sockets and threads.
    gc.collect()
    if any(each.are_referred_to for each in remains):
        # So may what C++ held for a cycle, as autograd does for hooks: only the next one sees it.
        gc.collect()
    deadline_s = time.monotonic() + current.timeout.total_seconds() + _GRAVE_SLACK_S
    for each in remains:
        if each.are_referred_to:
            _process.graves.append((deadline_s, each))
        else:
            helpers.submit(each.drop)


def _count_groups_anew() -> None:
    """Have torch name the next groups here as in a process that has made none.

    It names them by their number, and forgets only those of a world that stood. One that was
    aborted while it formed is counted still, but not in a process that is new: the two would look
    for each other under different names until the timeout, each time.
    """
    distributed_c10d._world.group_count = 0  # noqa: SLF001 - no public way


def _register() -> None:
    devices = {"gloo": ["cpu"], "nccl": ["cuda", "cpu"]}
    for backend, name in BACKENDS.items():
        if name.upper() not in dist.Backend._plugins:  # noqa: SLF001 - no public way to ask
            dist.Backend.register_backend(
                name, _create, extended_api=True, devices=devices[backend]
            )


def _create(options: Any, _backend_options: Any) -> RecordedGroup:
    current = _process.current
    assert current is not None, "process groups are made between form() and leave()"
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return current.build(options.store, options.group_rank, ranks)


def _empty_graves() -> None:
    now_s = time.monotonic()
    _process.graves = [grave for grave in _process.graves if grave[0] > now_s]


def _clear_caches() -> None:
    """Drop DTensor's four caches of meshes.

    A mesh equals another of the same shape whatever groups it has (torch 2.13), so a cached
    plan would call groups of the old attempt; and the caches keep those groups alive.
    """
    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()  # noqa: SLF001
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()


def _some(ranks: tuple[int, ...]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"{ranks[0]} to {ranks[-1]}"  # noqa: PLR2004
