"""Load the state that an attempt resumes from; a damaged version gives way to the next older.

From the memory of keepers first, if the version is held there, then from storage. All ranks load
the same version: after each try they agree whether all of them could, and if one could not, all
try the next source, and then the next older version in storage, which rank 0 names. Nothing
damaged is deleted. Replicas read disjoint shares from storage and exchange them, where that is
faster than reading.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from ucp_core.checkpoint import (
    Checkpoint,
    checkpoint_name,
    find_committed,
    load,
    open_checkpoint,
)
from ucp_core.errors import CheckpointCorruptError, UcpError
from ucp_core.exchange import load_together
from ucp_core.storage import LocalStore, Store
from ucp_core.storage.base import join
from workers.parallel.state import HostBuffer, StateEntry
from workers.protocol import Assignment
from workers.snapshot.sources import MemorySources
from workers.train.agreement import all_agree
from workers.train.context import WorkerContext
from workers.train.sharing import GroupTransport
from workers.train.storing import CHECKPOINTS

__all__ = ["STORAGE", "Restored", "restore"]

#: A kind of source, beside those of ``workers.snapshot.sources``.
STORAGE: Final = "storage"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What was loaded.

    Attributes:
        step: Training goes on after this step; 0 if there was nothing to load.
        extra: The small named values of the checkpoint.
        skipped: ``(name, reason)`` of what this rank could not load: versions, or parts of one in
            memory that it then took from another holder.
        sources: ``(kind of source, bytes)`` of what was loaded.
    """

    step: int
    extra: dict[str, Any]
    skipped: tuple[tuple[str, str], ...]
    sources: tuple[tuple[str, int], ...] = ()


def restore(
    assignment: Assignment,
    entries: Callable[[], Sequence[StateEntry]],
    *,
    context: WorkerContext,
    buffer: HostBuffer,
    device: torch.device,
    replicas: dist.ProcessGroup | None = None,
) -> Restored:
    """Fill the state in place from the newest version that every rank can read.

    Every rank of the attempt calls it. Blocks for the slowest.

    Args:
        assignment: Says which version to begin with.
        entries: Called once there is something to load; returns what to fill.
        context: The worker: where its run directory and its keeper are.
        buffer: Host memory for what is on a device.
        device: Where collectives take their tensors.
        replicas: The ranks that hold the same state as this one, if there are others.
    """
    if not assignment.resume_step:
        return Restored(step=0, extra={}, skipped=())
    target = _Target(entries(), buffer, context.settings.checkpoint.threads)
    skipped: list[tuple[str, str]] = []
    if assignment.memory:
        restored = _from_memory(assignment, target, context, device, skipped)
        if restored is not None:
            return restored
    return _from_storage(assignment, target, context, device, replicas, skipped)


def _from_memory(
    assignment: Assignment,
    target: _Target,
    context: WorkerContext,
    device: torch.device,
    skipped: list[tuple[str, str]],
) -> Restored | None:
    """Load from keepers; return None, on every rank, if a rank could not."""
    sources = MemorySources(
        assignment.memory, node=context.node, keeper_directory=context.keeper_directory
    )
    reason, extra = "", {}
    try:
        extra = sources.load(target.fill_from)
    except UcpError as error:
        reason = _said(error)
    finally:
        sources.close()
    skipped += sources.skipped
    step = assignment.resume_step
    if all_agree(not reason, device):
        taken = tuple(sorted(sources.taken_bytes.items()))
        return Restored(step=step, extra=extra, skipped=tuple(skipped), sources=taken)
    skipped.append((f"step {step} in memory", reason or "another rank could not load it"))
    log.warning("memory_skipped", extra={"step": step, "reason": skipped[-1][1]})
    return None


def _from_storage(
    assignment: Assignment,
    target: _Target,
    context: WorkerContext,
    device: torch.device,
    replicas: dist.ProcessGroup | None,
    skipped: list[tuple[str, str]],
) -> Restored:
    store = context.store
    transport = None
    # What is on this machine, or mounted, comes faster from there than from a neighbour.
    if replicas is not None and store.request_bytes > LocalStore.request_bytes:
        transport = GroupTransport(replicas, device)
    checkpoints = join(context.directory, CHECKPOINTS)
    step, attempt = assignment.resume_step, assignment.resume_attempt
    bad: set[str] = set()
    while step > 0:
        name = checkpoint_name(step)
        checkpoint, reason = _opened(store, join(checkpoints, name), step=step, attempt=attempt)
        extra: dict[str, Any] = {}
        size_bytes = 0
        # Nobody may wait for the share of a rank that has nothing to load from.
        if transport is not None and not all_agree(not reason, device):
            reason = reason or "another rank could not open it"
        if checkpoint is not None and not reason:
            try:
                size_bytes = target.fill(checkpoint, transport)
                extra = checkpoint.extra
            except UcpError as error:
                reason = _said(error)
        if all_agree(not reason, device):
            sources = ((STORAGE, size_bytes),)
            return Restored(step=step, extra=extra, skipped=tuple(skipped), sources=sources)
        skipped.append((name, reason or "another rank could not load it"))
        log.warning("checkpoint_skipped", extra={"step": step, "reason": skipped[-1][1]})
        bad.add(name)
        step, attempt = _next_older(assignment, store, checkpoints, frozenset(bad), device)
    return Restored(step=0, extra={}, skipped=tuple(skipped))


def _opened(
    store: Store, directory: str, *, step: int, attempt: int
) -> tuple[Checkpoint | None, str]:
    """Return the checkpoint, or why it cannot be loaded."""
    try:
        checkpoint = open_checkpoint(store, directory)
    except UcpError as error:
        return None, _said(error)
    if (checkpoint.step, checkpoint.attempt) != (step, attempt):
        other = CheckpointCorruptError(
            f"{directory} holds step {checkpoint.step} of attempt {checkpoint.attempt}, expected "
            f"step {step} of attempt {attempt}"
        )
        return None, _said(other)
    return checkpoint, ""


def _said(error: UcpError) -> str:
    return f"{type(error).__name__}: {error}"


class _Target:
    """The state to fill.

    Args:
        need: Its tensors.
        buffer: Host memory for those on a device.
        threads: Readers.
    """

    def __init__(self, need: Sequence[StateEntry], buffer: HostBuffer, threads: int) -> None:
        self._on_device = [entry for entry in need if entry.tensor.is_cuda]
        self._staged = dict(
            zip(map(id, self._on_device), buffer.views(self._on_device), strict=True)
        )
        self._tensors = [
            entry.local_tensor(self._staged.get(id(entry), entry.tensor)) for entry in need
        ]
        self._threads = threads

    def fill(self, checkpoint: Checkpoint, transport: GroupTransport | None = None) -> int:
        """Load; return how many bytes were needed."""
        if transport is None:
            loaded = load(checkpoint, self._tensors, threads=self._threads)
        else:
            loaded = load_together(checkpoint, self._tensors, transport, threads=self._threads)
        for entry in self._on_device:
            entry.tensor.copy_(self._staged[id(entry)])
        return loaded.size_bytes

    def fill_from(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Load; return the small named values."""
        self.fill(checkpoint)
        return checkpoint.extra


def _next_older(
    assignment: Assignment,
    store: Store,
    checkpoints: str,
    exclude: frozenset[str],
    device: torch.device,
) -> tuple[int, int]:
    version = torch.zeros(2, dtype=torch.int64, device=device)
    if assignment.rank == 0:
        found = find_committed(store, checkpoints, lineage=assignment.lineage, exclude=exclude)
        if found is not None:
            version = torch.tensor([found.step, found.attempt], device=device)
    dist.broadcast(version, src=0)
    step, attempt = version.tolist()
    return step, attempt
