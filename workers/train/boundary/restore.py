"""Load the state that an attempt resumes from, or find out why that is not possible.

The controller has chosen a version and said where it is: in the memory of keepers, or in
storage. All ranks load it or none does. A holder of a part that is bad gives way to the next
holder of the same part; where none is left, the attempt ends on every rank, and whoever found
something bad says what it was. The controller then chooses from what is left. Nothing is deleted.

Replicas read disjoint shares from storage and exchange them, where that is faster than reading.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
import torch.distributed as dist

from ucp_core.errors import CheckpointCorruptError, UcpError
from ucp_core.geometry import TensorEntry, TensorKey
from ucp_core.native import (
    Checkpoint,
    LocalTensor,
    checkpoint_name,
    load,
    load_together,
    open_checkpoint,
)
from ucp_core.storage import LocalStore, Store, join
from workers.collectives import GroupError
from workers.keeper import LOCAL_MEMORY, PEER_MEMORY, MemorySources
from workers.protocol import Assignment, FoundBad, stored_source
from workers.state import HostBuffer, StateEntry
from workers.train.agreement import all_agree
from workers.train.boundary.sharing import GroupTransport
from workers.train.boundary.store import CHECKPOINTS
from workers.train.context import WorkerContext

__all__ = [
    "LIVE_STATE",
    "STORAGE",
    "Restored",
    "UnloadableSignal",
    "bare",
    "misfits",
    "restore_state",
]

#: Kinds of sources, beside those of ``workers.keeper.sources``.
STORAGE: Final = "storage"
#: Marks, among the small named values, a version that ranks left with as their attempt ended early.
LIVE_STATE: Final = "live_state"
#: Slot of what a parameter is; every other is the optimizer's.
WEIGHT: Final = "weight"
#: A model of another width differs in every tensor.
MISFITS_TOLD: Final = 3
#: As which its bytes are counted, by where they are.
_LIVE_KINDS: Final = {LOCAL_MEMORY: "live state", PEER_MEMORY: "live state of peers"}

log = logging.getLogger(__name__)


class UnloadableSignal(BaseException):
    """A rank could not load the version, so all ranks leave; ``found`` is what this one found."""

    def __init__(self, found: FoundBad) -> None:
        super().__init__("; ".join(found.reasons) or "another rank could not load the version")
        self.found = found


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What was loaded.

    Attributes:
        step: Training goes on after this step; 0 if there was nothing to load.
        extra: The small named values of the checkpoint.
        sources: ``(kind of source, bytes)`` of what was loaded.
        found: What this rank found bad, and took from another holder.
        bare: Parameters of which the optimizer kept nothing: frozen, or in no loss so far.
    """

    step: int
    extra: dict[str, Any]
    sources: tuple[tuple[str, int], ...] = ()
    found: FoundBad = field(default_factory=FoundBad)
    bare: frozenset[str] = frozenset()


def restore_state(
    assignment: Assignment,
    entries: Callable[[], Sequence[StateEntry]],
    *,
    context: WorkerContext,
    buffer: HostBuffer,
    device: torch.device,
    replicas: dist.ProcessGroup | None = None,
) -> Restored:
    """Fill the state in place from the version that the attempt resumes from.

    Every rank of the attempt calls it. Blocks for the slowest.

    Args:
        assignment: Says which version, and where it is.
        entries: Called once there is something to load; returns what to fill.
        context: The worker: where its run directory and its keeper are.
        buffer: Host memory for what is on a device.
        device: Where collectives take their tensors.
        replicas: The ranks that hold the same state as this one, if there are others.

    Raises:
        UnloadableSignal: On every rank, if one could not load it.
    """
    if not assignment.resume_step:
        return Restored(step=0, extra={})
    target = _Target(entries(), buffer, context.settings.checkpoint.threads, context.page.moved)
    if assignment.memory:
        return _from_memory(assignment, target, context, device)
    return _from_storage(assignment, target, context, device, replicas)


def _from_memory(
    assignment: Assignment, target: _Target, context: WorkerContext, device: torch.device
) -> Restored:
    sources = MemorySources(
        assignment.memory, node=context.node, keeper_directory=context.keeper_directory
    )
    reasons: tuple[str, ...] = ()
    extra: dict[str, Any] = {}
    try:
        extra = sources.load(target.fill_from)
    except UcpError as error:
        reasons = (_said(error),)
    finally:
        sources.close()
    found = FoundBad(
        damaged=tuple(sources.damaged),
        unread=tuple(sources.unread),
        reasons=(*(f"{what}: {why}" for what, why in sources.skipped), *reasons),
    )
    _leave_unless_all(not reasons, found, device)
    kinds = _LIVE_KINDS if extra.get(LIVE_STATE) else {}
    taken = ((kinds.get(kind, kind), size) for kind, size in sources.taken_bytes.items())
    return Restored(
        step=assignment.resume_step,
        extra=extra,
        sources=tuple(sorted(taken)),
        found=found,
        bare=target.bare,
    )


def _from_storage(
    assignment: Assignment,
    target: _Target,
    context: WorkerContext,
    device: torch.device,
    replicas: dist.ProcessGroup | None,
) -> Restored:
    store = context.store
    transport = None
    # What is on this machine, or mounted, comes faster from there than from a neighbour.
    if replicas is not None and store.request_bytes > LocalStore.request_bytes:
        transport = GroupTransport(replicas, device)
    extra: dict[str, Any] = {}
    size_bytes, found = 0, FoundBad()
    checkpoint = None
    try:
        checkpoint = _opened(store, join(context.directory, CHECKPOINTS), assignment)
    except UcpError as error:
        found = _found(assignment, error)
    if transport is not None:
        # Nobody may wait for the share of a rank that has nothing to load from.
        _leave_unless_all(checkpoint is not None, found, device)
    if checkpoint is not None:
        try:
            size_bytes = target.fill(checkpoint, transport)
            extra = checkpoint.extra
        except UcpError as error:
            found = _found(assignment, error)
        if found.reasons or context.same_weights:
            lines = target.misfits(checkpoint, same_weights=context.same_weights)
            found = replace(found, misfits=lines, reasons=found.reasons or lines)
    _leave_unless_all(not found.reasons, found, device)
    sources = ((STORAGE, size_bytes),)
    return Restored(step=assignment.resume_step, extra=extra, sources=sources, bare=target.bare)


def _opened(store: Store, checkpoints: str, assignment: Assignment) -> Checkpoint:
    directory = join(checkpoints, checkpoint_name(assignment.resume_step))
    checkpoint = open_checkpoint(store, directory)
    found = (checkpoint.step, checkpoint.attempt)
    if found != (assignment.resume_step, assignment.resume_attempt):
        raise CheckpointCorruptError(
            f"{directory} holds step {found[0]} of attempt {found[1]}, expected step "
            f"{assignment.resume_step} of attempt {assignment.resume_attempt}"
        )
    return checkpoint


def _found(assignment: Assignment, error: UcpError) -> FoundBad:
    """Return what an error says of the version in storage: what is missing is as bad as damage."""
    source = (stored_source(assignment.resume_step, assignment.resume_attempt),)
    reasons = (f"{checkpoint_name(assignment.resume_step)}: {_said(error)}",)
    if "peer" in error.facts:
        # That rank says what it is; on the way from there nothing in storage is damaged.
        return FoundBad(reasons=reasons)
    if isinstance(error, CheckpointCorruptError) or error.facts.get("missing"):
        return FoundBad(damaged=source, reasons=reasons)
    return FoundBad(unread=source, reasons=reasons)


def _leave_unless_all(
    loaded: bool,  # noqa: FBT001  as ``all_agree``
    found: FoundBad,
    device: torch.device,
) -> None:
    """Return if every rank has loaded, so far; else leave, each with what it found."""
    try:
        agreed = all_agree(loaded, device)
    except (GroupError, dist.DistError):
        if loaded:
            raise
        # The others heard of it, left, and were fenced before this one heard of them.
        agreed = False
    if not agreed:
        log.warning("not_loaded", extra={"reasons": found.reasons})
        raise UnloadableSignal(found)


def _said(error: UcpError) -> str:
    return f"{type(error).__name__}: {error}"


def bare(held: Iterable[TensorKey]) -> frozenset[str]:
    """Return the parameters of which a version holds the weight, and nothing of the optimizer's.

    A frozen parameter is such a one, or one that was in no loss: an optimizer keeps nothing of
    what has no gradient. Where it kept nothing of any, another optimizer made the version, and
    what this one needs is missing.
    """
    weights: set[str] = set()
    kept: set[str] = set()
    for key in held:
        (weights if key.slot == WEIGHT else kept).add(key.fqn)
    return frozenset(weights - kept) if kept else frozenset()


def misfits(
    need: Iterable[LocalTensor],
    held: Mapping[TensorKey, TensorEntry],
    *,
    same_weights: bool,
) -> tuple[str, ...]:
    """Return a line for each way in which a version is not of the state that is needed.

    What is damaged fits: the manifest says what there was. At most ``MISFITS_TOLD`` lines, and
    one that counts the others.

    Args:
        need: What is to be loaded.
        held: What the version holds.
        same_weights: Whether the version may hold no other weights.
    """
    lines: list[str] = []
    keys: set[TensorKey] = set()
    for tensor in need:
        key = TensorKey(tensor.fqn, tensor.slot)
        keys.add(key)
        entry = held.get(key)
        needed = f"{tensor.dtype}{list(tensor.shape)}"
        if entry is None:
            lines.append(f"it has no {key}, needed is {needed}")
        elif (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
            lines.append(f"{key} is {entry.dtype}{list(entry.shape)} in it, needed is {needed}")
    if same_weights:
        others = sorted(key for key in held if key.slot == WEIGHT and key not in keys)
        lines += [f"it has {key}, which the model lacks" for key in others]
    if len(lines) > MISFITS_TOLD:
        lines[MISFITS_TOLD:] = [f"and {len(lines) - MISFITS_TOLD} more"]
    return tuple(lines)


class _Target:
    """The state to fill.

    Args:
        need: Its tensors.
        buffer: Host memory for those on a device.
        threads: Readers.
        moved: Called with the size of each read.

    Attributes:
        bare: Parameters without anything of the optimizer's in what was loaded last.
    """

    def __init__(
        self,
        need: Sequence[StateEntry],
        buffer: HostBuffer,
        threads: int,
        moved: Callable[[int], None],
    ) -> None:
        self._on_device = [entry for entry in need if entry.tensor.is_cuda]
        self._staged = dict(
            zip(map(id, self._on_device), buffer.views(self._on_device), strict=True)
        )
        self._tensors = [
            entry.local_tensor(self._staged.get(id(entry), entry.tensor)) for entry in need
        ]
        self._threads = threads
        self._moved = moved
        self.bare: frozenset[str] = frozenset()

    def fill(self, checkpoint: Checkpoint, transport: GroupTransport | None = None) -> int:
        """Load; return how many bytes were needed."""
        need = self._needed(checkpoint)
        if transport is None:
            loaded = load(checkpoint, need, threads=self._threads, progress=self._moved)
        else:
            loaded = load_together(checkpoint, need, transport, threads=self._threads)
        for entry in self._on_device:
            entry.tensor.copy_(self._staged[id(entry)])
        return loaded.size_bytes

    def misfits(self, checkpoint: Checkpoint, *, same_weights: bool) -> tuple[str, ...]:
        """Return how the state differs from what the checkpoint is of."""
        held = checkpoint.state_map.entries
        return misfits(self._needed(checkpoint), held, same_weights=same_weights)

    def _needed(self, checkpoint: Checkpoint) -> list[LocalTensor]:
        self.bare = bare(checkpoint.state_map.entries)
        return [one for one in self._tensors if one.slot == WEIGHT or one.fqn not in self.bare]

    def fill_from(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Load; return the small named values."""
        self.fill(checkpoint)
        return checkpoint.extra
