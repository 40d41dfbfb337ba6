"""Reads what ``torch.save`` wrote, without torch and without reading any tensor.

A ``.pt`` file is a zip of uncompressed records: ``NAME/data.pkl``, a pickle that refers to the
storages, and ``NAME/data/KEY`` for each of them. Two reads suffice: the directory at the end, and
the small records. Tensors become ``TensorRef``: where their bytes are. Sources: APPNOTE.TXT 6.3
(zip), and the files that torch 1.6 to 2.13 wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucp_core.converters import _zip
from ucp_core.converters._stand_ins import Allow, Global, Opaque, plain
from ucp_core.converters._tensors import Storage, StorageRef, TensorRef, known_dtype
from ucp_core.converters._unpickle import PICKLE_BYTES_MAX, read_pickle
from ucp_core.errors import CheckpointCorruptError
from ucp_core.statemap import DTYPE_BYTES, Extent
from ucp_core.storage.base import join

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucp_core.storage.base import Store

__all__ = [
    "Global",
    "Opaque",
    "TensorRef",
    "TorchFile",
    "plain",
    "read_pickle",
    "read_torch_file",
    "read_torch_part",
]

#: The small records at either end of a zip that holds one tensor.
EDGE_BYTES = 2048
#: ``('storage', class, key, device, number of elements)``.
_STORAGE_FIELDS = 5


@dataclass(frozen=True, slots=True)
class TorchFile:
    """What a torch file holds.

    Attributes:
        tree: Its value; tensors are ``TensorRef``, foreign objects ``Opaque``.
        extents: The storages that tensors of the tree lie in, with torch's checksums, in order.
    """

    tree: Any
    extents: tuple[Extent, ...]


def read_torch_file(
    store: Store,
    directory: str,
    file: str,
    *,
    offset_bytes: int = 0,
    num_bytes: int | None = None,
    allow: Allow = frozenset(),
) -> TorchFile:
    """Read the pickle of a torch file; no tensor is read.

    Args:
        store: Where the file is.
        directory: In it.
        file: Name in the directory.
        offset_bytes: Where the zip begins: above 0 where files are packed into one (DCP).
        num_bytes: Its size; None: to the end of the file.
        allow: More classes, as for ``read_pickle``.

    Raises:
        CheckpointCorruptError: Truncated, damaged, not a torch file, or of a torch before 1.6.
        ForeignClassError: The pickle needs a class, or has a kind of tensor, that is not known.
        StorageError: The file cannot be read.
    """
    path = join(directory, file)
    size = store.size(path) - offset_bytes if num_bytes is None else num_bytes

    def read(start: int, length: int) -> bytes:
        return store.read_range(path, offset_bytes + start, length)

    return read_torch_part(read, size, file, where=path, offset_bytes=offset_bytes, allow=allow)


def read_torch_part(
    read: _zip.Read,
    size: int,
    file: str,
    *,
    where: str,
    offset_bytes: int = 0,
    allow: Allow = frozenset(),
    tail_bytes: int = _zip.TAIL_BYTES,
) -> TorchFile:
    """Read a torch file by ``read(start, length)``, which counts from the start of its zip.

    Tensors refer to ``file`` and count from ``offset_bytes`` before the zip.
    """
    records = _zip.read_records(read, size, where=where, tail_bytes=tail_bytes)
    names = _small_names(records, where)
    contents = dict(zip(names, _zip.read_contents(read, records, names, where=where), strict=True))
    return _tree(records, contents, file, offset_bytes, where, allow)


def _small_names(records: Mapping[str, _zip.Record], where: str) -> list[str]:
    """Return the names of the pickle and of the byte order's record, if there is one."""
    found = [name for name in records if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(found) != 1:
        raise CheckpointCorruptError(
            f"{where} is a zip file with {len(found)} records named */data.pkl, so not what "
            "torch.save writes",
            path=where,
        )
    prefix = found[0].removesuffix("data.pkl")
    if f"{prefix}constants.pkl" in records:
        raise CheckpointCorruptError(
            f"{where} is a TorchScript program, not a checkpoint: save the state_dict with "
            "torch.save",
            path=where,
        )
    if records[found[0]].num_bytes > PICKLE_BYTES_MAX:
        raise CheckpointCorruptError(
            f"{where}: its pickle has {records[found[0]].num_bytes} bytes: not a checkpoint",
            path=where,
        )
    return [name for name in (found[0], f"{prefix}byteorder") if name in records]


def _tree(
    records: Mapping[str, _zip.Record],
    contents: Mapping[str, bytes],
    file: str,
    offset_bytes: int,
    where: str,
    allow: Allow,
) -> TorchFile:
    tree, storages = _read_tree(records, contents, file, offset_bytes, where, allow)
    found = (storage.extent for storage in storages if storage.num_bytes)
    return TorchFile(tree, tuple(sorted(extent for extent in found if extent is not None)))


def _read_tree(
    records: Mapping[str, _zip.Record],
    contents: Mapping[str, bytes],
    file: str,
    offset_bytes: int,
    where: str,
    allow: Allow,
) -> tuple[Any, tuple[StorageRef, ...]]:
    pickled, order = next(iter(contents)), [*contents.values()][1:]
    if order not in ([], [b"little"]):
        raise CheckpointCorruptError(
            f"{where} was written on a big-endian machine: load and save it on a little-endian one",
            path=where,
        )
    prefix = pickled.removesuffix("data.pkl")
    storages = _Storages(records, prefix, file, offset_bytes, where)
    tree = read_pickle(contents[pickled], where=where, allow=allow, persistent=storages.find)
    return tree, storages.known()


class _Storages:
    """Finds the records that a pickle refers to."""

    def __init__(
        self,
        records: Mapping[str, _zip.Record],
        prefix: str,
        file: str,
        offset_bytes: int,
        where: str,
    ) -> None:
        self._records = records
        self._prefix = prefix
        self._file = file
        self._offset_bytes = offset_bytes
        self._where = where
        self._known: dict[str, StorageRef] = {}

    def known(self) -> tuple[StorageRef, ...]:
        """Return the storages that were referred to."""
        return tuple(self._known.values())

    def find(self, identity: Any) -> StorageRef:
        """Return the storage of a persistent id."""
        if type(identity) is not tuple or len(identity) != _STORAGE_FIELDS:
            msg = "a persistent id is not that of a storage"
            raise TypeError(msg)
        _, kind, key, device, count = identity
        if not all(map(_is_of, (key, count, kind, device), (str, int, Global, str))):
            msg = "a persistent id is not that of a storage"
            raise TypeError(msg)
        if key in self._known:
            return self._known[key]
        if not isinstance(kind.make, Storage):
            msg = f"{kind.name} is not a storage"
            raise TypeError(msg)
        record = self._records.get(f"{self._prefix}data/{key}")
        if record is None:
            raise CheckpointCorruptError(
                f"{self._where}: storage {key[:40]} (device {device[:20]}) has no record: "
                "the file is damaged, or was saved without its data",
                path=self._where,
            )
        dtype = kind.make.dtype
        itemsize = 1 if dtype is None else DTYPE_BYTES[known_dtype(dtype, self._where)]
        if count * itemsize != record.num_bytes:
            raise CheckpointCorruptError(
                f"{self._where}: storage {key[:40]} has {record.num_bytes} bytes, its pickle says "
                f"{count * itemsize}: the file is damaged",
                path=self._where,
            )
        self._known[key] = storage = StorageRef(
            self._where,
            key,
            self._file,
            self._offset_bytes + record.offset_bytes,
            record.num_bytes,
            record.crc32,
            dtype,
        )
        return storage


def _is_of(value: Any, kind: type[Any]) -> bool:
    return type(value) is kind


class TensorFiles:
    """Reads many torch files that hold one tensor each, as torch DCP packs them.

    Layers repeat, so do their pickles: one that is known byte for byte is not read again.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, ...], tuple[TensorRef, int, str]] = {}

    def read(
        self, read: _zip.Read, size: int, file: str, *, where: str, offset_bytes: int
    ) -> TensorRef:
        """Return the tensor of one file; arguments and errors as of ``read_torch_part``."""
        records = _zip.read_records(read, size, where=where, tail_bytes=EDGE_BYTES)
        names = _small_names(records, where)
        contents = _zip.read_contents(read, records, names, where=where)
        identity = tuple(contents)
        if identity not in self._known:
            by_name = dict(zip(names, contents, strict=True))
            self._known[identity] = _single(records, by_name, where)
        ref, num_bytes, key = self._known[identity]
        record = records.get(f"{names[0].removesuffix('data.pkl')}data/{key}")
        if record is None or record.num_bytes != num_bytes:
            raise CheckpointCorruptError(
                f"{where}: storage {key} has not the {num_bytes} bytes that its pickle says: the "
                "file is damaged",
                path=where,
            )
        start = offset_bytes + record.offset_bytes
        extent = None
        if record.crc32 is not None:
            extent = Extent(start, record.num_bytes, record.crc32)
        return ref._replace(file=file, offset_bytes=start + ref.offset_bytes, extent=extent)


def _single(
    records: Mapping[str, _zip.Record], contents: Mapping[str, bytes], where: str
) -> tuple[TensorRef, int, str]:
    """Return the tensor, counted from the start of its storage, and that storage."""
    tree, storages = _read_tree(records, contents, "", 0, where, frozenset())
    if type(tree) is not TensorRef:
        raise CheckpointCorruptError(
            f"{where} holds a {type(tree).__name__}, not one tensor", path=where
        )
    (storage,) = storages
    offset = tree.offset_bytes - storage.offset_bytes
    return tree._replace(offset_bytes=offset), storage.num_bytes, storage.key
