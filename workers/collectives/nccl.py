"""Set up NCCL for groups that outlive the failure of a member: creation, abort, device times.

torch 2.13 is made for processes that end when a collective fails. Here the watchdog must not end
this process, a communicator can be aborted during creation, and all communicators of a process are
aborted at the same time. Based on torch's ``ProcessGroupNCCL.cpp`` and ``NCCLUtils.cpp``.
"""

import functools
import logging
import math
import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from workers.collectives.waiting import helpers

log = logging.getLogger(__name__)

#: Actions that torch's watchdog must not take.
ENVIRONMENT: Final = {
    # By default (3) a collective that failed or timed out ends the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # The watchdog signals a failure to all ranks by a key of the store outside every attempt's
    # prefix. Each process that reads the key ends, in this attempt and all later ones.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # A monitor ends a process whose watchdog makes no progress, which happens while an abort waits
    # for the driver.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # After a failure the watchdog sleeps four times this (60 s by default). Meanwhile it holds a
    # lock that releasing the group needs.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # ``workers.process`` ends a process whose device failed, and can report the reason.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # ``connect`` creates communicators at once; torch then warns each time that unbatched sends and
    # receives of a group are serialised.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}

#: Bound on the sum of NCCL's channels of all ranks on one GPU.
_CHANNELS_MAX: Final = 8


def prepare(timeout: timedelta) -> None:
    """Set the variables that torch reads when it creates its first NCCL group in this process.

    ``timeout`` bounds the creation of a communicator. torch reads it once; later calls do not
    change it.
    """
    os.environ.update(ENVIRONMENT)
    # NCCL would connect ranks when a call first needs it: the host waits in that call for the
    # others, which may never come. With this setting it connects them while the communicator is
    # created, which an abort ends. Only the first exchange of a pair still connects: ``exchange``
    # does that.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = str(math.ceil(timeout.total_seconds()))


def share_device(worker: str, share: float) -> None:
    """Set the variables that NCCL reads once per process, if several ranks share a GPU.

    NCCL 2.30 has a switch for this. In older versions, ranks may share a GPU only if they seem to
    be on different hosts. Then they exchange data through the network, also with other GPUs.

    Args:
        worker: A name that differs from every other rank's.
        share: The part of the GPU that this rank has. Many channels of many ranks would not fit on
            the GPU at the same time, and would wait for each other forever.
    """
    has_switch = torch.cuda.nccl.version() >= (2, 30)
    apart = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if has_switch else {"NCCL_HOSTID": worker}
    limits = {"NCCL_MAX_CTAS": str(max(1, round(_CHANNELS_MAX * share))), "NCCL_NVLS_ENABLE": "0"}
    for name, value in {**apart, **limits}.items():
        os.environ.setdefault(name, value)


def options(timeout: timedelta, ranks: Iterable[int]) -> Any:
    """Return the options of a group of ``ranks`` whose communicator does not block while created.

    Creating a blocking communicator waits inside NCCL for the members, with no time limit and no
    way to stop it.
    """
    found = dist.ProcessGroupNCCL.Options()
    found._timeout = timeout  # noqa: SLF001 - as torch's own init does
    found.config.blocking = 0
    found.global_ranks_in_group = list(ranks)
    return found


def connect(backend: Any, device: torch.device) -> None:
    """Create the communicator of a group; return when all members have joined.

    This blocks up to the bound that ``prepare`` set, even if the communicator is aborted, because
    torch holds its lock for that time. So call it where no other thread must wait for it.
    """
    backend.eager_connect_single_device(device)
    # The first collective waits until the communicator is ready. It only has to be enqueued.
    backend.allreduce([torch.zeros(1, device=device)])


def exchange(group: Any, received: torch.Tensor, sent: torch.Tensor) -> None:
    """Exchange an element with each member, which connects the pairs; block as ``connect`` does."""
    options = dist.AllToAllOptions()
    # The exchange runs in the current stream, so that the memory can be reused at once.
    options.asyncOp = False
    sizes = [1] * len(sent)
    group.alltoall_base(received, sent, sizes, sizes, options)


def abort_together(backends: Iterable[Any]) -> None:
    """Start to abort all communicators of NCCL ``backends`` in parallel; do not wait for them.

    An abort can wait until the device is idle, and the device until another communicator is aborted
    (pytorch#119797). torch's own ``_abort_process_group`` encloses the aborts in an NCCL group, but
    ``abort`` does its work in a separate thread, and NCCL's groups are per thread. With one thread
    for each communicator, no abort waits for another. An abort ends within the group's timeout.
    """
    for backend in backends:
        helpers.submit(functools.partial(_abort, backend))


def _abort(backend: Any) -> None:
    try:
        backend.abort()
    except RuntimeError as error:
        # Kernels that still run then fail, or the process is killed as hung.
        log.warning("a group of NCCL could not be aborted: %s", error)


def is_recording_graph() -> bool:
    """Return whether this thread captures a CUDA graph, which runs later."""
    # Without a device the second call fails.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Start:
    """The position in a stream at which the device reaches a collective.

    NCCL's kernel waits for this position. The host calls long before the device reaches it.
    """

    __slots__ = ("_event",)

    def __init__(self, *, timed: bool = False) -> None:
        self._event: Any = torch.cuda.Event(enable_timing=timed)
        self._event.record()

    def is_reached(self) -> bool:
        """Return whether the device has reached the position."""
        return bool(self._event.query())


class Timed(Start):
    """A position in the stream whose time the device records."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(timed=True)

    def since(self, other: Any) -> float:
        """Return the seconds from another position to this one; the device has reached both."""
        return float(other._event.elapsed_time(self._event)) / 1000  # noqa: SLF001 - its own class
