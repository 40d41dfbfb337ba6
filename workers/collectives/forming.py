"""Form, abort and leave an attempt's process groups.

The training thread calls ``form`` and ``leave`` in turn; any thread may ``abort`` any attempt at
any time. After an abort the transport may still use buffers and threads. gloo's destructor joins
those threads, which sleep until their operation fails: when the peer is gone or releases the group,
or at the timeout. So a helper thread drops the groups. Groups that are still referenced are kept
until the timeout has passed: otherwise the thread that drops the last reference would sleep.
"""

import gc
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from workers.collectives.attempt import Attempt, Leftovers
from workers.collectives.group import BACKENDS, RecordedGroup, build_group
from workers.collectives.places import Places
from workers.collectives.torch_names import clear_mesh_caches, is_registered, restart_group_count
from workers.collectives.waiting import helpers

#: Slack for gloo's threads to end after the timeout of an operation.
_LEFTOVER_SLACK_S: Final = 5.0


class _AcrossAttempts:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.current: Attempt | None = None
        self.aborted: set[int] = set()
        self.leftovers: list[tuple[float, Leftovers]] = []
        self.dropping: list[Leftovers] = []
        self.excepthook: Any = None
        self.frozen = False


_process = _AcrossAttempts()


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
    """Join ``attempt`` as ``rank``; return when every member has joined.

    Afterwards ``torch.distributed`` works as usual: every new group is recorded and has the
    timeout, and ``abort`` wakes its waits. Call ``leave`` before the next ``form``, even if
    ``form`` raised an error.

    Args:
        backend: "gloo" for CPU tensors, "nccl" for CUDA tensors. With NCCL, the group of all ranks
            also has gloo for CPU tensors.
        attempt: An attempt that this process has never formed.
        ring_path: File of the record ring; replaces an existing file.
        timeout_s: A collective fails by itself after this time. It is a last resort, because faults
            are usually found and aborted much sooner. An aborted group's memory is also kept for
            this time.

    Raises:
        AbortedError: ``abort`` was called for this attempt, earlier or while this waited.
        CollectiveError: The store or a member did not answer within ``timeout_s``.
    """
    assert backend in BACKENDS, f"backend {backend!r} is not in {sorted(BACKENDS)}"
    assert not dist.is_initialized(), "leave() the attempt before forming the next"
    now_s = time.monotonic()
    _process.leftovers = [one for one in _process.leftovers if one[0] > now_s]
    _register()
    if not _process.frozen:
        # Objects imported by now stay, so the collector can ignore them. A collection then takes 10
        # to 45 ms instead of 0.15 to 0.8 s, and every leave() needs one.
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
        # Attempt numbers only grow, so older ones are never requested again.
        _process.aborted = {number for number in _process.aborted if number >= attempt}
    store = current.connect(store_host, store_port, rank)
    restart_group_count()
    dist.init_process_group(
        BACKENDS[backend],
        store=dist.PrefixStore(f"attempt{attempt}", store),
        rank=rank,
        world_size=world_size,
        timeout=current.timeout,
    )


def abort(attempt: int) -> int:
    """Abort ``attempt`` in this process; return the number of blocked calls that it woke.

    Any thread may call this at any time and repeatedly. Threads that wait in a collective of the
    attempt, or in its ``form``, raise ``AbortedError`` within milliseconds. Every later call,
    including a later ``form`` of it, raises the same error. Other attempts are not affected. The
    number does not include waits in slices, which notice the abort themselves within 5 ms.
    """
    with _process.lock:
        _process.aborted.add(attempt)
        current = _process.current
    if current is None or current.number != attempt:
        return 0
    return current.abort()


def check() -> None:
    """Raise ``AbortedError`` if the attempt was aborted, or the failed collective that aborted it.

    Call this once the host has the result of a collective on a device, because an abort ends such
    collectives by force, with arbitrary results.
    """
    current = _process.current
    if current is not None and current.aborted.is_set():
        raise current.error("; the results of its collectives do not count", "check")


def is_within_collective() -> bool:
    """Return whether this process's device is within a collective now. Any thread may call this."""
    current = _process.current
    return current is not None and current.is_within_collective()


def locate(place: tuple[int, int, int], node: str) -> None:
    """Record this rank's machine and its place in the mesh (dp, pp, tp)."""
    assert _process.current is not None, "form() an attempt first"
    _process.current.ring.locate(place, node)


def span(op: str, *, step: int = 0, micro_batch: int = 0, tokens: int = 0) -> None:
    """Record that the training thread begins its own work, which ends the last; "" only ends it.

    Do nothing outside an attempt.

    Args:
        op: "data", "forward", "backward" or "optimizer".
        micro_batch: Number among this rank's micro-batches of the step, from 0.
        tokens: Number of tokens read by the work that now ends.
    """
    if _process.current is not None:
        _process.current.span(op, step=step, micro_batch=micro_batch, tokens=tokens)


def places() -> Places:
    """Return the places of the attempt's ranks. Only the training thread may call this."""
    assert _process.current is not None, "form() an attempt first"
    assert _process.current.places is not None, "form() has not returned"
    return _process.current.places


def set_timeout(timeout_s: float) -> None:
    """Set the timeout of later collectives of the attempt.

    Only the training thread may call this, between ``form`` and ``leave``.
    """
    assert _process.current is not None, "form() an attempt first"
    _process.current.set_timeout(timedelta(seconds=timeout_s))


def leave() -> None:
    """Leave the attempt: afterwards no group of it exists and ``form`` can be called again.

    First drop every reference to models, optimizers, meshes and exceptions of the attempt: they
    hold its groups, and with them sockets and threads. Call this in the thread that trained,
    because DTensor has a cache per thread. Do nothing outside an attempt.
    """
    with _process.lock:
        current, _process.current = _process.current, None
    if current is None:
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    # init_process_group wraps the hook each time.
    sys.excepthook = _process.excepthook
    clear_mesh_caches()
    leftovers = current.leave()
    # Cycles of modules and hooks hold groups, and with them sockets and threads.
    gc.collect()
    if any(each.are_referred_to for each in leftovers):
        # Objects that C++ held for a cycle, as autograd does for hooks, need a second collection.
        gc.collect()
    deadline_s = time.monotonic() + current.timeout.total_seconds() + _LEFTOVER_SLACK_S
    _process.dropping = [each for each in leftovers if not each.are_referred_to]
    _process.leftovers += [(deadline_s, each) for each in leftovers if each.are_referred_to]
    for each in _process.dropping:
        helpers.submit(each.drop)


def wait_for_leftovers(timeout_s: float) -> None:
    """Block until the memory of the attempt that was left is free, or for ``timeout_s``."""
    until_s = time.monotonic() + timeout_s
    for each in _process.dropping:
        each.wait(until_s - time.monotonic())
    _process.dropping = []


def _register() -> None:
    devices = {"gloo": ["cpu"], "nccl": ["cuda", "cpu"]}
    for backend, name in BACKENDS.items():
        if not is_registered(name):
            dist.Backend.register_backend(
                name, _create, extended_api=True, devices=devices[backend]
            )


def _create(options: Any, _backend_options: Any) -> RecordedGroup:
    current = _process.current
    assert current is not None, "process groups are made between form() and leave()"
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return build_group(current, options.store, options.group_rank, ranks)
