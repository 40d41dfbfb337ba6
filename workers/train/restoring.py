"""Load the state that an attempt resumes from; a damaged version gives way to the next older.

All ranks load the same version: after each try they agree whether all of them could, and if
one could not, rank 0 names the next. Nothing damaged is deleted. Replicas read disjoint shares
of it and exchange them, where that is faster than reading.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
from workers.train.sharing import GroupTransport
from workers.train.storing import CHECKPOINTS

__all__ = ["Restored", "restore"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What was loaded.

    Attributes:
        step: Training goes on after this step; 0 if there was nothing to load.
        extra: The small named values of the checkpoint.
        skipped: ``(name, reason)`` of the versions that this rank could not load.
        size_bytes: Bytes that were loaded.
    """

    step: int
    extra: dict[str, Any]
    skipped: tuple[tuple[str, str], ...]
    size_bytes: int = 0


def restore(
    assignment: Assignment,
    entries: Callable[[], Sequence[StateEntry]],
    *,
    store: Store,
    directory: str,
    buffer: HostBuffer,
    threads: int,
    device: torch.device,
    replicas: dist.ProcessGroup | None = None,
) -> Restored:
    """Fill the state in place from the newest version that every rank can read.

    Every rank of the attempt calls it. Blocks for the slowest.

    Args:
        assignment: Says which version to begin with.
        entries: Called once there is something to load; returns what to fill.
        store: Where the run directory is.
        directory: Its path.
        buffer: Host memory for what is on a device.
        threads: Readers.
        device: Where collectives take their tensors.
        replicas: The ranks that hold the same state as this one, if there are others.
    """
    transport = None
    # What is on this machine, or mounted, comes faster from there than from a neighbour.
    if replicas is not None and store.request_bytes > LocalStore.request_bytes:
        transport = GroupTransport(replicas, device)
    checkpoints = join(directory, CHECKPOINTS)
    step, attempt = assignment.resume_step, assignment.resume_attempt
    need: Sequence[StateEntry] = ()
    skipped: list[tuple[str, str]] = []
    while step > 0:
        need = need or entries()
        name = checkpoint_name(step)
        checkpoint, reason = _opened(store, join(checkpoints, name), step=step, attempt=attempt)
        extra: dict[str, Any] = {}
        size_bytes = 0
        # Nobody may wait for the share of a rank that has nothing to load from.
        if transport is not None and not _all_agree(not reason, device):
            reason = reason or "another rank could not open it"
        if checkpoint is not None and not reason:
            try:
                size_bytes = _fill(checkpoint, need, buffer, threads, transport)
                extra = checkpoint.extra
            except UcpError as error:
                reason = _said(error)
        if _all_agree(not reason, device):
            return Restored(step=step, extra=extra, skipped=tuple(skipped), size_bytes=size_bytes)
        skipped.append((name, reason or "another rank could not load it"))
        log.warning("checkpoint_skipped", extra={"step": step, "reason": skipped[-1][1]})
        exclude = frozenset(bad for bad, _ in skipped)
        step, attempt = _next_older(assignment, store, checkpoints, exclude, device)
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


def _fill(
    checkpoint: Checkpoint,
    need: Sequence[StateEntry],
    buffer: HostBuffer,
    threads: int,
    transport: GroupTransport | None,
) -> int:
    on_device = [entry for entry in need if entry.tensor.is_cuda]
    staged = dict(zip(map(id, on_device), buffer.views(on_device), strict=True))
    hosts = [staged.get(id(entry), entry.tensor) for entry in need]
    tensors = [entry.local_tensor(host) for entry, host in zip(need, hosts, strict=True)]
    if transport is None:
        loaded = load(checkpoint, tensors, threads=threads)
    else:
        loaded = load_together(checkpoint, tensors, transport, threads=threads)
    for entry in on_device:
        entry.tensor.copy_(staged[id(entry)])
    return loaded.size_bytes


def _all_agree(agreed: bool, device: torch.device) -> bool:  # noqa: FBT001  what it is about
    vote = torch.tensor([int(agreed)], device=device)
    dist.all_reduce(vote, op=dist.ReduceOp.MIN)
    return bool(vote.item())


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
