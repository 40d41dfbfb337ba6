"""Checkpoints for a script that stays as it is: plain torch, without Ray and without a session.

    from everstep import checkpoint

    step = 0
    if checkpoint.newest("ckpt"):
        step = checkpoint.load("ckpt", model=model, optimizer=optimizer).step
    ...
        if step % 100 == 0:
            checkpoint.async_save("ckpt", step, model=model, optimizer=optimizer)

It accepts plain torch models and optimizers: FSDP2 and every other DTensor, tensor and pipeline
parallelism, DDP, or one process. Every rank calls it, and none waits for another: each writes its
part, and the last one commits all of them at once. A job that is killed during a save leaves the
version before it. Any number of ranks under any layout can load a checkpoint, and so can ``ucp``
and ``run.init_from``.

- Names are the ones of ``torch.distributed.checkpoint.state_dict``.
- Ranks that hold the same elements of a DTensor, or the same model in ``DistributedDataParallel``,
  each save a share of it. Each rank that has a plain tensor writes it; the commit keeps the lowest
  rank's copy, and refuses weights that differ. So pass the model that DDP returned, not the module
  inside it.
- ``extra`` has small values by name: numbers, texts, tensors, collections of these, and objects
  with ``state_dict`` and ``load_state_dict``. If ranks have different values under one name, also
  within a dictionary, the lowest rank's value counts. So use different names for values that differ
  between ranks.
- A later job that saves to the same folder takes it over: an earlier one that still runs can no
  longer commit. If the later job loaded a step with its optimizer, checkpoints after that step no
  longer count.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import nn, optim

import ucp_core
from everstep.torch_names import default_store
from ucp_core.errors import CheckpointNotFoundError, UcpError
from ucp_core.manifest import Kind
from ucp_core.native import (
    WITHOUT_ELEMENTS,
    Checkpoint,
    Found,
    LocalTensor,
    RankSaver,
    checkpoint_name,
    collect_garbage,
    find_committed,
    last_attempt,
)
from ucp_core.numerics import BLOCK_BYTES
from ucp_core.storage import Owner, Store, claim, claims, join, next_claim, open_store
from workers.errors import CheckpointError, WorkerError
from workers.niceness import be_nice
from workers.state import HostBuffer, PlainState, Stateful, decode, encode, make_optimizer_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucp_core.lineage import Lineage
    from workers.train import Start

__all__ = ["CheckpointError", "Loaded", "async_save", "load", "newest", "save", "wait"]

#: The name in ``extra`` of a checkpoint under which the script's values are stored.
_OWN: Final = "script"
#: Limit for these values: each rank writes them, as text.
_OWN_BYTES_MAX: Final = 16 << 20
#: Niceness of the thread that writes beside training.
_NICENESS: Final = 19
#: Longest pause of an asynchronous save between its copy and its write.
_PAUSE_S_MAX: Final = 1.0
#: More threads of one process read no faster.
_THREADS_MAX: Final = 4

Model = nn.Module | Sequence[nn.Module]
Optimizer = optim.Optimizer | Sequence[optim.Optimizer] | None
Path = str | os.PathLike[str]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The result of ``load``, besides model and optimizer."""

    step: int  #: The step after which it was saved; 0 if the checkpoint does not name one.
    path: str  #: The checkpoint.
    extra: dict[str, Any]  #: The script's own values.


@dataclass(slots=True, kw_only=True)
class _SaveFolder:
    """A folder of checkpoints that this job saves to."""

    store: Store
    path: str
    owner: Owner  #: Its claim; the claim's number is the attempt.
    lineage: Lineage
    saved: set[int] = field(default_factory=set)  #: Steps that this process saved.


class _Saves:
    """The saves of this process, one at a time."""

    buffer = HostBuffer()
    writer = ThreadPoolExecutor(1, "everstep-checkpoint", partial(be_nice, _NICENESS))
    under_way: Future[None] | None = None
    folders: dict[str, _SaveFolder] = {}  # noqa: RUF012  one for the process
    #: By folder: the step from which training continues.
    resumed: dict[str, int] = {}  # noqa: RUF012
    claimed, loaded = Counter[str](), Counter[str]()


def save(
    path: Path,
    step: int,
    *,
    model: Model,
    optimizer: Optimizer = None,
    extra: Mapping[str, Any] | None = None,
    keep: int = 0,
    alone: bool = False,
) -> None:
    """Write the state after ``step`` to the folder or URL ``path``; every rank calls it.

    It returns when this rank's part is written. The checkpoint counts once all parts are. Saving a
    step again does nothing, unless the first save failed, it was deleted, or ``load`` went back.

    Args:
        path: The folder or URL; each step gets a folder in it.
        step: Names the version; the newest has the highest.
        model: The model, or the parts of it on this rank, such as pipeline stages.
        optimizer: The optimizer, or several; with several parts, one for each.
        extra: Small values by name; see above.
        keep: Number of checkpoints to keep; 0 keeps all.
        alone: Save from this process only, which holds the whole state.

    Raises:
        CheckpointError: Something cannot be saved, or this write or the last one failed.
    """
    wait()
    with _said(f"cannot save step {step} to {os.fspath(path)}"):
        rank, world_size = _place(is_alone=alone)
        host = _Saves.buffer.on_host
        write = _captured(path, step, rank, world_size, _pairs(model, optimizer), extra, keep, host)
        write()


def async_save(
    path: Path,
    step: int,
    *,
    model: Model,
    optimizer: Optimizer = None,
    extra: Mapping[str, Any] | None = None,
    keep: int = 0,
    alone: bool = False,
) -> None:
    """Copy the state to memory, and write it while training continues; otherwise as ``save``.

    The write begins after a pause as long as the copy, in which other ranks of the machine copy.
    It first waits until the previous save is written. If a write fails, the next call of this
    module raises the error. The process ends only when its last save is written.
    """
    wait()
    begun_s = time.monotonic()
    with _said(f"cannot save step {step} to {os.fspath(path)}"):
        rank, world_size = _place(is_alone=alone)
        copy = _Saves.buffer.capture
        write = _captured(path, step, rank, world_size, _pairs(model, optimizer), extra, keep, copy)
    said = f"has not saved step {step} to {os.fspath(path)}"
    # Ranks that share processors still copy, and training continues when the last one has.
    pause_s = min(time.monotonic() - begun_s, _PAUSE_S_MAX)
    _Saves.under_way = _Saves.writer.submit(_in_background, said, write, pause_s)


def wait() -> None:
    """Wait until the last ``async_save`` is written.

    Raises:
        CheckpointError: It failed.
    """
    under_way, _Saves.under_way = _Saves.under_way, None
    if under_way is not None:
        under_way.result()


def newest(path: Path) -> str | None:
    """Return the newest checkpoint in a folder or URL; None if none is committed there.

    A damaged one is skipped with a warning. ``load(path)`` opens the same checkpoint on all ranks.

    Raises:
        CheckpointError: The last ``async_save`` failed.
        StorageError: The storage could not list the checkpoints.
    """
    wait()
    found = _find(*open_store(os.fspath(path)))
    return None if found is None else join(os.fspath(path), checkpoint_name(found.step))


def load(
    path: Path,
    *,
    model: Model,
    optimizer: Optimizer = None,
    extra: Mapping[str, Any] | None = None,
    rename: Mapping[str, str] | None = None,
    missing: Sequence[str] = (),
    rows: Sequence[str] = (),
) -> Loaded:
    """Fill model and optimizer in place; every rank calls it, and reads its part.

    Args:
        path: A folder of ``save``, for its newest checkpoint, or one checkpoint of everstep,
            DeepSpeed, Megatron, torch DCP or Hugging Face.
        model: As in ``save``, under any layout. Weights may be narrower floats in the checkpoint.
        optimizer: As in ``save``. Its state is created if it has none yet, and gradients are
            dropped. None to load weights only.
        extra: Objects with ``load_state_dict`` get the state that was saved under their names.
        rename: The model's names by the checkpoint's names: ``{"transformer.*": "model.*"}``.
        missing: Names, with ``*``, of parameters that may keep their values.
        rows: Names, with ``*``, of parameters that may have another number of rows.

    Raises:
        CheckpointError: It cannot be opened, does not fit, or is damaged. The model may then be
            partly filled.
    """
    from ucp_core.torch_files import collector_paused
    from workers.train import Start

    wait()
    with _said(f"cannot load {os.fspath(path)}"), collector_paused():
        checkpoint, folder = _opened(os.fspath(path))
        start = Start(
            init_from=checkpoint.given or checkpoint.directory,
            init_rename=rename or {},
            init_missing=missing,
            init_rows=rows,
            said="",
            key="",
            weights_alone="load it without optimizer",
            only_finite=checkpoint.manifest.kind is Kind.FOREIGN,
            opened=checkpoint,
        )
        for one, optimizers in _pairs(model, optimizer):
            _fill(start, checkpoint, one, optimizers)
        values = decode(checkpoint.extra.get(_OWN, {}))
        for name, stateful in (extra or {}).items():
            if isinstance(stateful, Stateful):
                if name not in values:
                    raise CheckpointError(f"{checkpoint.directory} has no {name} in its extra")
                stateful.load_state_dict(values[name])
    if optimizer is not None:
        # Training continues from there: later versions belong to the past.
        _Saves.resumed[folder] = checkpoint.step
        if _Saves.folders.pop(folder, None) is not None:
            _Saves.claimed[folder] += 1
    return Loaded(step=checkpoint.step, path=checkpoint.directory, extra=values)


def _captured(
    path: Path,
    step: int,
    rank: int,
    world_size: int,
    pairs: _Pairs,
    extra: Mapping[str, Any] | None,
    keep: int,
    on_host: Callable[..., Sequence[LocalTensor]],
) -> Callable[[], None]:
    """Return a function that writes this rank's part of the current state."""
    folder = _claimed(os.fspath(path))
    where = join(folder.path, checkpoint_name(step))
    if step in folder.saved and folder.store.exists(where):
        return lambda: None
    states = [PlainState(*each, rank, is_alone=world_size == 1) for each in pairs]
    names = Counter(chain.from_iterable(state.shards for state in states))
    if max(names.values(), default=0) > 1:
        raise CheckpointError(f"two parts of the model have a {names.most_common(1)[0][0]}")
    tensors = on_host(list(chain.from_iterable(state.training.saved() for state in states)))
    groups = list(chain.from_iterable(state.training.param_groups() for state in states))
    values = _small_values(states, extra or {})

    def write() -> None:
        saver = RankSaver(
            tensors,
            attempt=folder.owner.claim,
            rank=rank,
            world_size=world_size,
            source={"writer": "everstep.checkpoint"},
            block_bytes=BLOCK_BYTES,
            require_owner=folder.owner.require,
            uncoordinated=world_size > 1,
            roles=dict(chain.from_iterable(state.roles.items() for state in states)),
            ties=dict(chain.from_iterable(state.ties.items() for state in states)),
            threads=_threads(),
        )
        saver.save(
            folder.store,
            where,
            step=step,
            data=[tensors[index].data for index in saver.order],
            extra=values,
            param_groups=groups,
            fsync=False,
        )
        folder.saved.add(step)
        if keep and rank == 0:
            collect_garbage(
                folder.store,
                folder.path,
                keep=keep,
                lineage=folder.lineage,
                require_owner=folder.owner.require,
            )

    return write


def _in_background(said: str, write: Callable[[], None], pause_s: float) -> None:
    time.sleep(pause_s)
    try:
        with _said(said):
            write()
    except CheckpointError as error:
        # The process may end before it calls this module again.
        log.error("%s", error)  # noqa: TRY400  the message is complete
        raise


def _small_values(states: Sequence[PlainState], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything but tensors and groups, as JSON."""
    values = {
        name: encode(one.state_dict() if isinstance(one, Stateful) else one, f"extra[{name!r}]")
        for name, one in own.items()
    }
    sizes = {name: len(json.dumps(value)) for name, value in values.items()}
    if sum(sizes.values()) > _OWN_BYTES_MAX:
        raise CheckpointError(
            f"extra has more than {_OWN_BYTES_MAX >> 20} MiB, most of it in "
            f"{max(sizes, key=sizes.__getitem__)!r}: put large tensors into the model"
        )
    numbers: dict[str, Any] = {}
    empty: dict[str, Any] = {}
    for state in states:
        empty |= state.without_elements()
        for slot, by_name in state.scalars().items():
            numbers[slot] = {**numbers.get(slot, {}), **by_name}
    return {_OWN: values, "optimizer": numbers, WITHOUT_ELEMENTS: empty}


def _claimed(path: str) -> _SaveFolder:
    """Return the folder; this job takes it over with its first save there."""
    store, folder = open_store(path)
    if folder in _Saves.folders:
        return _Saves.folders[folder]

    def propose() -> str:
        number = next_claim(store, folder)
        if number == 1:
            # Checkpoints without claims may be there: those of a run, or copies.
            number += last_attempt(store, folder, store.list(folder))
        return f"{number} {_Saves.resumed.get(folder, 0)} {secrets.token_hex(8)}"

    agreed = _agreed(f"claim {_Saves.claimed[folder]} {folder}", propose)
    number, resume = map(int, agreed.split()[:2])
    found = _find(store, folder)
    if found is not None and found.step > resume:
        log.warning(
            "%s has step %s, which no longer counts: this job saves there, and continues from "
            "step %s",
            path,
            found.step,
            resume,
        )
    lineage = (*_lineage(store, folder), (number, resume))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    record = {"token": agreed.split()[2], "host": socket.gethostname(), "since": now}
    claim(store, folder, number, record | {"resume": resume})
    owner = Owner(store, folder, number)
    made = _SaveFolder(store=store, path=folder, owner=owner, lineage=lineage)
    return _Saves.folders.setdefault(folder, made)


def _lineage(store: Store, folder: str) -> Lineage:
    """Return the attempt and the resume step of every job that saved to a folder."""
    records = claims(store, folder).items()
    return [(number, one["resume"]) for number, one in records if type(one.get("resume")) is int]


def _find(store: Store, folder: str) -> Found | None:
    """Return the newest checkpoint in a folder; warn of damaged ones."""
    found = find_committed(store, folder, lineage=_lineage(store, folder))
    reasons = dict(found.skipped) if found is not None else {}
    for name in map(checkpoint_name, found.damaged if found is not None else ()):
        log.warning("skipped the damaged checkpoint %s: %s", join(folder, name), reasons[name])
    return found


def _opened(path: str) -> tuple[Checkpoint, str]:
    """Return the checkpoint for a path, the same on all ranks, and its folder."""
    store, folder = open_store(path)
    found = _find(store, folder)
    if found is None:
        if claims(store, folder):
            raise CheckpointNotFoundError(f"nothing is committed in {path}", path=path)
        return ucp_core.open(path), folder.rpartition("/")[0]
    name = f"{checkpoint_name(found.step)} {found.attempt}"
    # An earlier job may commit between the reads of two ranks.
    _Saves.loaded[folder] += 1
    agreed = _agreed(f"load {_Saves.loaded[folder]} {folder}", lambda: name)
    if agreed == name:
        return found.checkpoint, folder
    log.warning("%s: this rank found %s and loads %s, as another rank does", path, name, agreed)
    checkpoint = ucp_core.open(join(path, agreed.split()[0]))
    if f"{checkpoint_name(checkpoint.step)} {checkpoint.attempt}" != agreed:
        raise CheckpointError(f"{checkpoint.directory} was replaced while ranks loaded it")
    return checkpoint, folder


def _agreed(what: str, propose: Callable[[], str]) -> str:
    """Return the proposal of the first rank that calls this; no rank waits for another."""
    if _place(is_alone=not dist.is_initialized())[1] == 1:
        return propose()
    store, key = default_store(), f"everstep.checkpoint {what}"
    if store.check([key]):
        return store.get(key).decode()
    return store.compare_set(key, "", propose()).decode()


def _fill(
    start: Start, checkpoint: Checkpoint, model: nn.Module, optimizers: Sequence[optim.Optimizer]
) -> None:
    """Fill a model, or a part of it, and its optimizers."""
    from workers.train import Needed, Target, load_initial, refuse_uncounted

    own = checkpoint.extra.get("optimizer")
    slots = {key.slot for key in checkpoint.state_map.entries} - {"weight"}
    if isinstance(own, dict) and checkpoint.manifest.kind is not Kind.FOREIGN:
        slots |= own.keys()
    # An optimizer that keeps no state, or has done no step, has only groups.
    is_all = bool(optimizers) and (bool(slots) or not checkpoint.param_groups)
    if is_all:
        make_optimizer_state(model, optimizers)
        start = replace(start, init_state="all")
    rank = dist.get_rank() if dist.is_initialized() else 0
    state = PlainState(model, optimizers, rank, is_alone=False)
    if is_all and slots - state.slots:
        raise CheckpointError(
            f"{start.init_from} is of another optimizer: it has "
            f"{', '.join(sorted(slots - state.slots))}, which "
            f"{', '.join(type(one).__name__ for one in optimizers)} does not keep; make the "
            f"optimizer that saved it, or {start.weights_alone}"
        )
    needed = {
        name: Needed(
            dtype=shard.local.dtype,
            shape=shard.shape,
            is_optional=0 in shard.shape or name not in state.parameters,
        )
        for name, shard in state.shards.items()
    }
    with torch.no_grad():
        initial = load_initial(
            start,
            needed,
            state.training.entries,
            model=state.module,
            load=lambda source, need: Target(need, HostBuffer(), _threads(), lambda _: None).fill(
                source, widen=True
            ),
            everywhere=lambda agreed: agreed,
            tell=rank == 0,
        )
    if is_all:
        parts = {name: shard.local for name, shard in state.shards.items()}
        refuse_uncounted(start, initial, parts, state, state.scalars().keys())
        state.set_optimizer(initial.scalars, initial.without_state)
    elif optimizers:
        for optimizer in optimizers:
            optimizer.state.clear()
    if optimizers:
        state.set_groups(initial.param_groups)


def _threads() -> int:
    """Return this rank's share of the machine's processors."""
    local_size = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    return max(1, min(_THREADS_MAX, (os.cpu_count() or 1) // local_size))


_Pairs = list[tuple[nn.Module, Sequence[optim.Optimizer]]]


def _pairs(model: Model, optimizer: Optimizer) -> _Pairs:
    optimizers = [optimizer] if isinstance(optimizer, optim.Optimizer) else list(optimizer or ())
    if isinstance(model, nn.Module):
        return [(model, optimizers)]
    if optimizers and len(optimizers) != len(model):
        raise CheckpointError(
            f"{len(model)} parts of a model have {len(optimizers)} optimizers: give each its own"
        )
    return [(one, optimizers[number : number + 1]) for number, one in enumerate(model)]


def _place(*, is_alone: bool) -> tuple[int, int]:
    """Return this process's rank among those that save, and their number."""
    if is_alone:
        return 0, 1
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    started = int(os.environ.get("WORLD_SIZE") or 1)
    if started > 1:
        raise CheckpointError(
            f"WORLD_SIZE is {started}, and torch.distributed is not initialised: call "
            "torch.distributed.init_process_group() first, or save from one process with alone=True"
        )
    return 0, 1


@contextmanager
def _said(what: str) -> Iterator[None]:
    """Name the rank and the action in errors."""
    try:
        yield
    except (UcpError, WorkerError) as error:
        rank = dist.get_rank() if dist.is_initialized() else 0
        raise CheckpointError(f"rank {rank} {what}: {error}", rank=rank) from error
