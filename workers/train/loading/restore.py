"""Load the state from which an attempt resumes, or report why it cannot be loaded.

The controller chose a version and its place: the keepers' memory, or storage. Either all ranks load
it, or none does. If a source is bad, the next source of the same data is used. If none is left,
every rank leaves the attempt and reports its bad sources. The controller then chooses from the
other versions. Nothing is deleted.

From distant storage, replicas read disjoint shares and exchange them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist

from ucp_core.errors import CheckpointCorruptError, UcpError
from ucp_core.geometry import TableTensor, TensorEntry, TensorKey
from ucp_core.native import (
    AVERAGE,
    RELATIONS,
    Checkpoint,
    LocalTensor,
    checkpoint_name,
    load,
    load_together,
    open_checkpoint,
)
from ucp_core.storage import LocalStore, Store, join
from workers.collectives import GroupError, settled
from workers.keeper import MemorySources
from workers.protocol import (
    CHECKPOINTS,
    LOCAL_MEMORY,
    PEER_MEMORY,
    Assignment,
    FoundBad,
    stored_source,
)
from workers.state import UNSTARTED, HostBuffer, StateEntry
from workers.train.context import WorkerContext
from workers.train.executor import all_agree

#: A kind of source, in addition to those of ``workers.keeper``.
STORAGE: Final = "storage"
#: Key that marks a final snapshot among a version's small named values.
LIVE_STATE: Final = "live_state"
#: The slot of a parameter itself; all others are the optimizer's.
WEIGHT: Final = "weight"
#: A model of another width differs in every tensor: name only the first.
MISFITS_TOLD: Final = 3
#: The kind of source that a final snapshot counts as, by place.
_LIVE_KINDS: Final = {LOCAL_MEMORY: "live state", PEER_MEMORY: "live state of peers"}

log = logging.getLogger(__name__)


class UnloadableSignal(BaseException):
    """A rank could not load the version, so all ranks leave; ``found`` is this rank's report."""

    def __init__(self, found: FoundBad) -> None:
        super().__init__("; ".join(found.reasons) or "another rank could not load the version")
        self.found = found


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A loaded version."""

    step: int  #: Training continues after this step; 0 if there was nothing to load.
    extra: dict[str, Any]  #: The small named values of the checkpoint.
    sources: tuple[tuple[str, int], ...] = ()  #: ``(kind of source, bytes)`` that were loaded.
    #: Bad sources that this rank found and replaced by others.
    found: FoundBad = field(default_factory=FoundBad)
    #: Parameters without optimizer state: frozen, or in no loss so far.
    without_state: frozenset[str] = frozenset()


def restore_state(
    assignment: Assignment,
    entries: Callable[[], Sequence[StateEntry]],
    *,
    names: Collection[str] | None = None,
    context: WorkerContext,
    buffer: HostBuffer,
    device: torch.device,
    replicas: dist.ProcessGroup | None = None,
) -> Restored:
    """Fill the state in place from the version from which the attempt resumes.

    Every rank of the attempt calls it. It waits for the slowest. If one rank cannot load the
    version, all raise ``UnloadableSignal``.

    Args:
        entries: Called only if there is something to load; returns the tensors to fill.
        names: Names of all weights of the whole model; None if the version may have others.
        replicas: The ranks that hold the same state as this one; None if there are no others.
    """
    if not assignment.resume_step:
        return Restored(step=0, extra={})
    threads, moved = context.settings.checkpoint.threads, context.progress.moved
    target = Target(entries(), buffer, threads, moved, names)
    if assignment.memory:
        return _from_memory(assignment, target, context, device)
    return _from_storage(assignment, target, context, device, replicas)


def _from_memory(
    assignment: Assignment, target: Target, context: WorkerContext, device: torch.device
) -> Restored:
    sources = MemorySources(
        assignment.memory, node=context.node, keeper_directory=context.keeper_directory
    )
    reasons: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    extra: dict[str, Any] = {}
    try:
        lines, extra = sources.load(target.fill_from)
    except UcpError as error:
        reasons = (_said(error),)
    finally:
        sources.close()
    found = FoundBad(
        damaged=tuple(sources.damaged),
        unread=tuple(sources.unread),
        misfits=lines,
        reasons=(*(f"{what}: {why}" for what, why in sources.skipped), *reasons, *lines),
    )
    _leave_unless_all(not reasons and not lines, found, device)
    kinds = _LIVE_KINDS if extra.get(LIVE_STATE) else {}
    taken = ((kinds.get(kind, kind), size) for kind, size in sources.taken_bytes.items())
    return Restored(
        step=assignment.resume_step,
        extra=extra,
        sources=tuple(sorted(taken)),
        found=found,
        without_state=target.without_state,
    )


def _from_storage(
    assignment: Assignment,
    target: Target,
    context: WorkerContext,
    device: torch.device,
    replicas: dist.ProcessGroup | None,
) -> Restored:
    store = context.store
    transport = None
    # A local or mounted file system is faster than a peer.
    if replicas is not None and store.request_bytes > LocalStore.request_bytes:
        transport = GroupTransport(replicas, device)
    extra: dict[str, Any] = {}
    size_bytes, found = 0, FoundBad()
    checkpoint = None
    try:
        checkpoint = _opened(store, join(context.directory, CHECKPOINTS), assignment)
    except UcpError as error:
        found = _found(assignment, error)
    if checkpoint is not None:
        # Before a byte is read: a version of another model is not damaged.
        lines = target.misfits(checkpoint)
        if lines:
            checkpoint, found = None, FoundBad(misfits=lines, reasons=lines)
    if transport is not None:
        # No rank may wait for the share of a rank that could not open the checkpoint.
        _leave_unless_all(checkpoint is not None, found, device)
    if checkpoint is not None:
        try:
            size_bytes = target.fill(checkpoint, transport)
            extra = checkpoint.extra
        except UcpError as error:
            found = _found(assignment, error)
    _leave_unless_all(not found.reasons, found, device)
    sources = ((STORAGE, size_bytes),)
    return Restored(
        step=assignment.resume_step,
        extra=extra,
        sources=sources,
        without_state=target.without_state,
    )


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
    """Return what an error says about the version in storage. Missing data counts as damaged."""
    source = (stored_source(assignment.resume_step, assignment.resume_attempt),)
    reasons = (f"{checkpoint_name(assignment.resume_step)}: {_said(error)}",)
    if "peer" in error.facts:
        # A peer failed, and reports the cause itself.
        return FoundBad(reasons=reasons)
    if isinstance(error, CheckpointCorruptError) or error.facts.get("missing"):
        return FoundBad(damaged=source, reasons=reasons)
    return FoundBad(unread=source, reasons=reasons)


def _leave_unless_all(
    loaded: bool,  # noqa: FBT001  as ``all_agree``
    found: FoundBad,
    device: torch.device,
) -> None:
    """Return if every rank has loaded so far; otherwise leave with this rank's findings."""
    try:
        agreed = all_agree(loaded, device)
    except (GroupError, dist.DistError):
        if loaded:
            raise
        # The others learned of the failure, left, and were fenced before this rank voted.
        agreed = False
    if not agreed:
        log.warning("the state is not loaded: %s", "; ".join(found.reasons) or "by another rank")
        raise UnloadableSignal(found)


def _said(error: UcpError) -> str:
    return f"{type(error).__name__}: {error}"


def without_optimizer_state(
    held: Iterable[TensorKey], *, unstarted: bool = False
) -> frozenset[str]:
    """Return the parameters of a version that have a weight but no optimizer state.

    An optimizer keeps no state for parameters without gradients: frozen ones and ones in no loss.
    If no parameter has optimizer state, and the optimizer is not ``unstarted``, another optimizer
    made the version. Then return none, so that the missing state is reported.
    """
    weights: set[str] = set()
    kept: set[str] = set()
    for key in held:
        (weights if key.slot == WEIGHT else kept).add(key.fqn)
    return frozenset(weights - kept) if kept or unstarted else frozenset()


def misfits(
    need: Iterable[LocalTensor],
    held: Mapping[TensorKey, TensorEntry | TableTensor],
    names: Collection[str] | None,
) -> tuple[str, ...]:
    """Return how a version differs from the state to fill, one line per tensor.

    Damaged data is not a misfit: only the manifest is compared. Returns at most ``MISFITS_TOLD``
    lines, and one that counts the others. Weights that are not in ``names`` are a misfit, unless
    that is None.
    """
    lines: list[str] = []
    for tensor in need:
        key = TensorKey(tensor.fqn, tensor.slot)
        entry = held.get(key)
        needed = f"{tensor.dtype}{list(tensor.shape)}"
        if entry is None:
            lines.append(f"it has no {key}, needed is {needed}")
        elif (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
            lines.append(f"{key} is {entry.dtype}{list(entry.shape)} in it, needed is {needed}")
    if names is not None:
        weights = [key for key, one in held.items() if key.slot == WEIGHT and 0 not in one.shape]
        weights = [key for key in weights if not key.fqn.startswith(AVERAGE)]
        others = sorted(key for key in weights if key.fqn not in names)
        lines += [f"it has {key}, which the model lacks" for key in others]
    if len(lines) > MISFITS_TOLD:
        lines[MISFITS_TOLD:] = [f"and {len(lines) - MISFITS_TOLD} more"]
    return tuple(lines)


class Target:
    """The state to fill."""

    def __init__(
        self,
        need: Sequence[StateEntry],
        buffer: HostBuffer,
        threads: int,
        moved: Callable[[int], None],
        names: Collection[str] | None = None,
    ) -> None:
        # Bytes are read into contiguous memory of the host.
        self._staged = buffer.staged(need)
        self._elsewhere = [entry for entry in need if id(entry) in self._staged]
        self._tensors = [
            entry.local_tensor(self._staged.get(id(entry), entry.tensor)) for entry in need
        ]
        self._names, self._threads = names, threads
        self._moved = moved
        #: Parameters without optimizer state in the last loaded version.
        self.without_state: frozenset[str] = frozenset()

    def fill(
        self,
        checkpoint: Checkpoint,
        transport: GroupTransport | None = None,
        *,
        widen: bool = False,
    ) -> int:
        """Load; return the number of bytes. ``widen`` accepts narrower floats too."""
        need = self._needed(checkpoint)
        if transport is None:
            loaded = load(
                checkpoint, need, threads=self._threads, progress=self._moved, widen=widen
            )
        else:
            loaded = load_together(checkpoint, need, transport, threads=self._threads)
        for entry in self._elsewhere:
            entry.tensor.copy_(self._staged[id(entry)])
        return loaded.size_bytes

    def misfits(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Return how the checkpoint differs from the state."""
        held, names = checkpoint.state_map.tensors, self._names
        if names is not None:
            # A model may drop parameters that never trained, such as a teacher.
            names = {*names, *checkpoint.extra.get(RELATIONS, {}).get("frozen", ())}
        return misfits(self._needed(checkpoint), held, names)

    def _needed(self, checkpoint: Checkpoint) -> list[LocalTensor]:
        unstarted = checkpoint.manifest.extra.get(UNSTARTED, False)
        self.without_state = without_optimizer_state(
            checkpoint.state_map.entries, unstarted=unstarted
        )
        return [
            one for one in self._tensors if one.slot == WEIGHT or one.fqn not in self.without_state
        ]

    def fill_from(self, checkpoint: Checkpoint) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Load if the checkpoint fits; return the misfits and the small named values."""
        lines = self.misfits(checkpoint)
        if not lines:
            self.fill(checkpoint)
        return lines, checkpoint.extra


class GroupTransport:
    """Let replicas load a checkpoint together: the transport of ``load_together``.

    All ranks of ``group`` need the same tensors, and each of them must load.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_gather(self, mine: memoryview, held: Sequence[memoryview]) -> None:
        """Fill ``held[r]`` with the ``mine`` of rank ``r``; raise if a rank is lost."""
        sent = torch.frombuffer(mine, dtype=torch.uint8)
        received = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in held]
        if self._device.type == "cpu":
            dist.all_gather(received, sent, group=self._group)
            return
        staged = torch.empty((self.size, len(mine)), dtype=torch.uint8, device=self._device)
        dist.all_gather_single(staged, sent.to(self._device), group=self._group)
        for row, buffer in zip(settled(staged), received, strict=True):
            buffer.copy_(row)
