"""A committed checkpoint: open it, and load any boxes of it into memory."""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from ucp_core.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ChecksumMismatchError,
    StorageError,
    UcpError,
    UncoveredRegionError,
)
from ucp_core.geometry import (
    DTYPE_BYTES,
    Box,
    StateMap,
    TensorEntry,
    TensorKey,
    prove_entry,
)
from ucp_core.manifest import Kind, Manifest, from_bytes
from ucp_core.numerics import BLOCK_BYTES, WIDER, crc32
from ucp_core.reading import Part, plan, touched, verify_extents
from ucp_core.storage import Store, join, within

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

MANIFEST_NAME = "manifest.json"
#: With less memory, slabs would be smaller than the blocks that are read for them.
MEMORY_BYTES_MIN = 8 * BLOCK_BYTES
#: Folder of a destination in which an unfinished conversion or export keeps its work; some
#: storages keep it when it is empty.
UNFINISHED_NAME = ".tmp-convert"
#: In ``extra``: dtype and shape of the tensors without elements, by name and slot.
WITHOUT_ELEMENTS = "without_elements"
#: Prefix of the names of averages of weights.
AVERAGE: Final = "average/"
#: In ``extra``: names of tensors that are frozen, buffers, outside the model, or tied.
RELATIONS = "relations"
#: The role of the tensors that each key there lists.
_ROLES: Final = {"frozen": "frozen", "buffers": "buffer", "extra": "extra"}
#: The manifest of a checkpoint of 10 TB takes a quarter of this.
MANIFEST_BYTES_MAX = 1 << 30

#: Bound of the bytes that a gathered copy spans: scratch memory of one thread.
_SPAN_BYTES_MAX = 32 << 20
#: Bound of a copy that needs no scratch memory. Planning one takes as long as reading 0.2 MiB;
#: the shares of two threads still balance.
_DIRECT_BYTES_MAX = 8 << 20


def check_memory(memory_bytes: int) -> None:
    """Raise ``UcpError`` if a memory limit is too small."""
    if memory_bytes < MEMORY_BYTES_MIN:
        raise UcpError(
            f"memory_bytes={memory_bytes} is too small: give at least {MEMORY_BYTES_MIN}",
            memory_bytes=memory_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTensor:
    """A box of one logical tensor in this process's memory."""

    fqn: str  #: Fully qualified name of the parameter or buffer.
    slot: str  #: ``weight``, or the optimizer's name for its tensor.
    dtype: str  #: By safetensors' names: ``F32``, ``BF16``, ...
    shape: tuple[int, ...]  #: Shape of the whole tensor.
    box: Box  #: The elements held here; may be empty.
    data: memoryview  #: Their bytes, C-contiguous; writable for loading.
    replica: bool = False  #: Another rank saves these elements, so saving skips them.


def bytes_of(tensor: LocalTensor) -> memoryview:
    """Return the data of ``tensor`` as bytes; its size must be that of the box."""
    data = memoryview(tensor.data).cast("B")
    expected = tensor.box.num_elements * DTYPE_BYTES[tensor.dtype]
    assert len(data) == expected, (
        f"{tensor.fqn} ({tensor.slot}): data has {len(data)} bytes, box {tensor.box} of "
        f"{tensor.dtype} has {expected}"
    )
    return data


def parts_of(need: Sequence[LocalTensor]) -> list[Part]:
    """Return the parts that ``plan`` takes for tensors."""
    return [Part(TensorKey(t.fqn, t.slot), t.dtype, tuple(t.shape), t.box) for t in need]


def targets_of(need: Sequence[LocalTensor]) -> list[memoryview]:
    """Return the memory that ``execute`` fills for tensors."""
    return [memoryview(b"") if tensor.box.is_empty else bytes_of(tensor) for tensor in need]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The result of ``load``."""

    size_bytes: int  #: Bytes that were needed.
    read_bytes: int  #: Bytes that were read, also to verify.
    seconds: float  #: Time of planning and reading.


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint of any format: its place and its manifest."""

    store: Store = field(repr=False)
    directory: str
    manifest: Manifest = field(repr=False)
    #: The folder that was opened, which may hold the checkpoint under a tag; "" for
    #: ``directory``.
    given: str = field(default="", repr=False)

    @property
    def state_map(self) -> StateMap:
        """Return the tensors and the places of their boxes."""
        return self.manifest.state_map

    @property
    def manifest_path(self) -> str:
        """Return the path of the manifest; a foreign checkpoint has none."""
        return join(self.directory, MANIFEST_NAME)

    @property
    def step(self) -> int:
        """Return the step after which the state was taken."""
        return self.manifest.step

    @property
    def attempt(self) -> int:
        """Return the attempt that took it."""
        return self.manifest.attempt

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        """Return the optimizer's groups."""
        return self.manifest.param_groups

    @property
    def extra(self) -> dict[str, Any]:
        """Return the small named values; a universal checkpoint reads them from files."""
        if self.manifest.kind is not Kind.UNIVERSAL:
            return dict(self.manifest.extra)
        return _read_extra(self)


def open_checkpoint(store: Store, directory: str) -> Checkpoint:
    """Return the checkpoint in ``directory``, native or universal.

    Raises:
        CheckpointNotFoundError: Nothing is committed there.
        CheckpointCorruptError: The manifest is damaged or contradicts itself.
        UnsupportedVersionError: It was written in a newer format.
    """
    path = join(directory, MANIFEST_NAME)
    store = within(store, directory)
    try:
        # A damaged or malicious file must not fill the memory.
        num_bytes = store.size(path)
        if num_bytes > MANIFEST_BYTES_MAX:
            raise CheckpointCorruptError(
                f"{path} has {num_bytes} bytes, but a manifest has at most {MANIFEST_BYTES_MAX}",
                path=path,
            )
        data = store.read(path)
    except StorageError as error:
        if not error.facts.get("missing"):
            raise
        raise CheckpointNotFoundError(
            f"{directory} has no {MANIFEST_NAME}: nothing was committed there", path=path
        ) from error
    manifest = from_bytes(data, where=path)
    if manifest.kind is Kind.RANK_RECORD:
        raise CheckpointCorruptError(f"{path} is the record of a rank, not a manifest", path=path)
    # Most have none.
    if manifest.kind is Kind.DISTRIBUTED and manifest.extra.get(WITHOUT_ELEMENTS, {}) != {}:
        manifest = _with_empty(manifest, path)
    if manifest.kind is Kind.DISTRIBUTED and RELATIONS in manifest.extra:
        manifest = _with_relations(manifest, path)
    return Checkpoint(store=store, directory=directory, manifest=manifest)


def _with_empty(manifest: Manifest, path: str) -> Manifest:
    """Return the manifest with the tensors that have no elements: no rank has a box of these."""
    entries = dict(manifest.state_map.entries)
    try:
        for fqn, slots in manifest.extra[WITHOUT_ELEMENTS].items():
            for slot, (dtype, shape) in slots.items():
                key = TensorKey(fqn, slot)
                entry = TensorEntry(key=key, dtype=dtype, shape=tuple(shape), fragments=())
                prove_entry(entry)
                entries.setdefault(key, entry)
    except (AttributeError, KeyError, TypeError, ValueError, UncoveredRegionError) as error:
        raise CheckpointCorruptError(
            f"{path}: extra.{WITHOUT_ELEMENTS} must name dtypes and shapes without elements",
            path=path,
        ) from error
    state_map = replace(manifest.state_map, entries=dict(sorted(entries.items())))
    return replace(manifest, state_map=state_map)


def _with_relations(manifest: Manifest, path: str) -> Manifest:
    """Return the manifest with the roles and ties in its small values."""
    held = {key.fqn for key in manifest.state_map.entries}
    try:
        said = manifest.extra[RELATIONS]
        roles = {name: role for key, role in _ROLES.items() for name in said.get(key, ())}
        ties = dict(said.get("ties", {}))
        return replace(
            manifest,
            roles={name: role for name, role in roles.items() if name in held},
            ties={name: one for name, one in ties.items() if one in held and name not in held},
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(
            f"{path}: extra.{RELATIONS} must have lists of names ({', '.join(_ROLES)}) and ties",
            path=path,
        ) from error


@contextmanager
def reading(checkpoint: Checkpoint) -> Iterator[None]:
    """Keep ``collect_garbage``, in any process, from deleting ``checkpoint`` while a block runs.

    ``load``, ``convert`` and ``verify`` do so themselves; use it around several calls. It locks
    the manifest; the lock dies with the process. On storages without locks the collector leaves
    the data for a grace time.

    Raises:
        CheckpointNotFoundError: It was deleted since it was opened.
    """
    with ExitStack() as stack:
        if checkpoint.manifest.kind is not Kind.FOREIGN:
            path = checkpoint.manifest_path
            try:
                held = stack.enter_context(checkpoint.store.lock(path, shared=True))
            except StorageError as error:
                if not error.facts.get("missing"):
                    raise
                held = False
            if held is False:
                raise CheckpointNotFoundError(
                    f"{checkpoint.directory} was deleted since it was opened: newer checkpoints "
                    "took its place; use one of them, or keep more of them",
                    path=path,
                )
        yield


def load(
    checkpoint: Checkpoint,
    need: Sequence[LocalTensor],
    *,
    threads: int = 2,
    with_extents: bool = False,
    widen: bool = False,
    progress: Callable[[int], None] | None = None,
) -> LoadResult:
    """Fill the data of every tensor in ``need``, whatever layout saved the checkpoint.

    Every byte that has a checksum of its block is verified.

    Args:
        need: Boxes and writable memory; they may overlap.
        threads: Most readers; small loads use one.
        with_extents: Also verify bytes of foreign files, by reading whole records first.
        widen: Fill tensors of a wider floating dtype than the checkpoint has, such as float32 from
            bfloat16; every value stays the same.
        progress: Called with the size of every finished read, from any reader.

    Raises:
        UncoveredRegionError: The checkpoint does not hold a box that is needed.
        ChecksumMismatchError: Bytes are damaged; do not use ``need``, which is partly filled.
        CheckpointCorruptError: A tensor has another dtype or shape than needed.
        CheckpointNotFoundError: It was deleted since it was opened.
        StorageError: A file cannot be read.
    """
    if not need:
        return LoadResult(size_bytes=0, read_bytes=0, seconds=0.0)
    # numpy takes longer to import than opening a checkpoint takes.
    from ucp_core.reading import Source, execute, gap_bytes_max, run_gap_bytes_min

    begun = perf_counter()
    request_bytes = checkpoint.store.request_bytes
    held = [_as_held(checkpoint, tensor) for tensor in need] if widen else need
    reads = plan(
        parts_of(held),
        [checkpoint.state_map],
        span_bytes_max=_SPAN_BYTES_MAX,
        direct_bytes_max=max(request_bytes, _DIRECT_BYTES_MAX),
        gap_bytes_max=gap_bytes_max(checkpoint.store),
        run_gap_bytes_min=run_gap_bytes_min(checkpoint.store),
    )
    verified_bytes = 0
    source = Source(checkpoint.store, checkpoint.directory, checkpoint.state_map.block_bytes)
    with reading(checkpoint):
        if with_extents:
            only = touched(reads, checkpoint.state_map)
            where = checkpoint.store, checkpoint.directory
            verified_bytes = verify_extents(*where, checkpoint.state_map, only, threads=threads)
        execute(
            reads,
            [source],
            targets_of(held),
            threads=threads,
            batch_bytes=request_bytes,
            progress=progress,
        )
    for narrow, tensor in zip(held, need, strict=True):
        if narrow is not tensor:
            from ucp_core.numerics import cast

            bytes_of(tensor)[:] = cast(narrow.data, narrow.dtype, tensor.dtype)
    return LoadResult(
        size_bytes=reads.needed_bytes,
        read_bytes=reads.read_bytes + verified_bytes,
        seconds=perf_counter() - begun,
    )


def _as_held(checkpoint: Checkpoint, tensor: LocalTensor) -> LocalTensor:
    """Return the tensor in the checkpoint's dtype, at the end of its memory, if that is smaller."""
    entry = checkpoint.state_map.tensors.get(TensorKey(tensor.fqn, tensor.slot))
    if entry is None or tensor.box.is_empty or tensor.dtype not in WIDER.get(entry.dtype, ()):
        return tensor
    num_bytes = tensor.box.num_elements * DTYPE_BYTES[entry.dtype]
    return replace(tensor, dtype=entry.dtype, data=bytes_of(tensor)[-num_bytes:])


def _read_extra(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the small named values of a universal checkpoint, verified."""
    values: dict[str, Any] = {}
    for name, file in checkpoint.manifest.extra.items():
        path = join(checkpoint.directory, file)
        data = checkpoint.store.read(path)
        if crc32(data) != checkpoint.manifest.files[file].crc32:
            raise ChecksumMismatchError(f"{path} is damaged; use an older checkpoint", path=path)
        try:
            values[name] = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CheckpointCorruptError(f"{path} is not JSON: {error}", path=path) from error
    return values
