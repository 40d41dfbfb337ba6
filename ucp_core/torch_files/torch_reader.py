"""Read what ``torch.save`` wrote, without torch and without reading any tensor.

A ``.pt`` file is a zip of uncompressed records: ``NAME/data.pkl``, a pickle that refers to
storages, and ``NAME/data/KEY`` for each storage. Two reads are enough: the directory at the end,
and the small records. A tensor becomes a ``TensorRef``, which says where its bytes are. Sources:
APPNOTE.TXT 6.3 (zip), and the files that torch 1.6 to 2.13 wrote.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ucp_core.errors import CheckpointCorruptError
from ucp_core.geometry import DTYPE_BYTES, Extent
from ucp_core.storage import Store, join
from ucp_core.torch_files import zip_reader
from ucp_core.torch_files.budget import current_budget
from ucp_core.torch_files.pickle_classes import Global
from ucp_core.torch_files.pickle_reader import PICKLE_BYTES_MAX, read_pickle
from ucp_core.torch_files.pickle_tensors import Storage, StorageRef, TensorRef, known_dtype

#: The small records at either end of a zip that holds one tensor.
EDGE_BYTES = 2048
#: Most templates to keep per file size; other files are parsed each time.
_TEMPLATES_MAX = 8


@dataclass(frozen=True, slots=True)
class TorchFile:
    """The content of a torch file."""

    tree: Any  #: Its value; tensors are ``TensorRef``, foreign objects ``Opaque``.
    #: The storages of the tree's tensors with torch's checksums, in order.
    extents: tuple[Extent, ...]


def read_torch_file(store: Store, directory: str, file: str) -> TorchFile:
    """Read the pickle of a torch file, but no tensor."""
    path = join(directory, file)

    def read(start: int, length: int) -> bytes:
        return store.read_range(path, start, length)

    return read_torch_part(read, store.size(path), file, where=path, offset_bytes=0)


def read_torch_part(
    read: zip_reader.Read, size: int, file: str, *, where: str, offset_bytes: int
) -> TorchFile:
    """Read a torch file with ``read(start, length)``, which counts from the start of its zip.

    Tensors refer to ``file`` and count from ``offset_bytes`` before the zip: torch DCP packs many
    into one file.
    """
    records = zip_reader.read_records(read, size, where=where)
    _, tree, storages = _read_tree(read, records, file, offset_bytes, where)
    found = (storage.extent for storage in storages if storage.num_bytes)
    extents = tuple(sorted(extent for extent in found if extent is not None))
    return TorchFile(tree, extents)


def _small_names(records: Mapping[str, zip_reader.Record], where: str) -> list[str]:
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
    # Checked before it is read.
    current_budget().draw(records[found[0]].num_bytes, where)
    return [name for name in (found[0], f"{prefix}byteorder") if name in records]


def _read_tree(
    read: zip_reader.Read,
    records: Mapping[str, zip_reader.Record],
    file: str,
    offset_bytes: int,
    where: str,
) -> tuple[list[str], Any, tuple[StorageRef, ...]]:
    """Return the names of the small records, the pickle's value, and its storages."""
    names = _small_names(records, where)
    data, *order = zip_reader.read_contents(read, records, names, where=where)
    if order not in ([], [b"little"]):
        raise CheckpointCorruptError(
            f"{where} was written on a big-endian machine: load and save it on a little-endian one",
            path=where,
        )
    prefix = names[0].removesuffix("data.pkl")
    storages = _Storages(records, prefix, file, offset_bytes, where)
    tree = read_pickle(data, where=where, persistent=storages.find)
    return names, tree, tuple(storages.known.values())


@dataclass(slots=True)
class _Storages:
    """Finds the records that a pickle refers to."""

    records: Mapping[str, zip_reader.Record]
    prefix: str
    file: str
    offset_bytes: int
    where: str
    known: dict[str, StorageRef] = field(default_factory=dict)  #: The storages referred to.

    def find(self, identity: Any) -> StorageRef:
        """Return the storage of a persistent id."""
        # ``('storage', class, key, device, number of elements)``
        kinds = [type(part) for part in identity] if type(identity) is tuple else []
        if kinds[1:] != [Global, str, str, int]:
            msg = "a persistent id is not that of a storage"
            raise TypeError(msg)
        _, kind, key, device, count = identity
        if key in self.known:
            return self.known[key]
        if not isinstance(kind.make, Storage):
            msg = f"{kind.name} is not a storage"
            raise TypeError(msg)
        record = self.records.get(f"{self.prefix}data/{key}")
        if record is None:
            raise CheckpointCorruptError(
                f"{self.where}: storage {key[:40]} (device {device[:20]}) has no record: "
                "the file is damaged, or was saved without its data",
                path=self.where,
            )
        dtype = kind.make.dtype
        itemsize = 1 if dtype is None else DTYPE_BYTES[known_dtype(dtype, self.where)]
        if count * itemsize != record.num_bytes:
            raise CheckpointCorruptError(
                f"{self.where}: storage {key[:40]} has {record.num_bytes} bytes, but its pickle "
                f"says {count * itemsize}: the file is damaged",
                path=self.where,
            )
        self.known[key] = storage = StorageRef(
            self.where,
            key,
            self.file,
            self.offset_bytes + record.offset_bytes,
            record.num_bytes,
            record.crc32,
            dtype,
        )
        return storage


class _Template(NamedTuple):
    """The common structure of files with one tensor each."""

    small_bytes: int  #: Where its small records begin.
    small: bytes  #: The small records.
    directory_bytes: int  #: Where its directory begins.
    #: The directory to the end of the file, without the checksums of other records.
    directory: bytes
    crcs: tuple[int, ...]  #: Positions of these checksums in the directory.
    crc: int  #: Position of the storage's checksum.
    start: int  #: Where the storage begins.
    num_bytes: int  #: Size of the storage.
    ref: TensorRef  #: The tensor; its offset counts from the storage.


class TensorFiles:
    """Reads many torch files that hold one tensor each, as torch DCP packs them.

    Layers and ranks repeat. A file that differs from a known one only in the tensor's bytes and
    checksum is not parsed again.
    """

    def __init__(self) -> None:
        self._known: dict[int, list[_Template]] = {}

    def read(
        self, read: zip_reader.Read, size: int, file: str, *, where: str, offset_bytes: int
    ) -> TensorRef:
        """Return the tensor of one file; for arguments and errors see ``read_torch_part``."""
        for template in self._known.get(size, ()):
            tail = read(template.directory_bytes, size - template.directory_bytes)
            if (
                read(template.small_bytes, len(template.small)) == template.small
                and _without(tail, template.crcs) == template.directory
            ):
                crc = int.from_bytes(tail[template.crc : template.crc + 4], "little")
                return _placed(template, crc, file, offset_bytes)
        records = zip_reader.read_records(read, size, where=where, tail_bytes=EDGE_BYTES)
        template = _template(read, records, size, where)
        known = self._known.setdefault(size, [])
        if len(known) < _TEMPLATES_MAX and len(template.small) <= EDGE_BYTES:
            known.append(template)
        tail = read(template.directory_bytes, size - template.directory_bytes)
        crc = int.from_bytes(tail[template.crc : template.crc + 4], "little")
        return _placed(template, crc, file, offset_bytes)


def _placed(template: _Template, crc: int, file: str, offset_bytes: int) -> TensorRef:
    start = offset_bytes + template.start
    extent = Extent(start, template.num_bytes, crc) if crc else None
    ref = template.ref
    return TensorRef(ref.dtype, ref.shape, ref.strides, file, start + ref.offset_bytes, extent)


def _without(data: bytes, crcs: tuple[int, ...]) -> bytes:
    """Return ``data`` without the four bytes at each place."""
    low = 0
    parts: list[bytes] = []
    for place in crcs:
        parts.append(data[low:place])
        low = place + 4
    return b"".join((*parts, data[low:]))


def _template(
    read: zip_reader.Read, records: Mapping[str, zip_reader.Record], size: int, where: str
) -> _Template:
    """Parse a file of one tensor."""
    names, tree, storages = _read_tree(read, records, "", 0, where)
    if type(tree) is not TensorRef:
        raise CheckpointCorruptError(
            f"{where} holds a {type(tree).__name__}, not one tensor", path=where
        )
    (storage,) = storages
    low = min(records[name].offset_bytes for name in names)
    high = max(records[name].offset_bytes + records[name].num_bytes for name in names)
    start = min(record.entry_bytes for record in records.values())
    others = [record for name, record in records.items() if name not in names]
    crcs = sorted(record.entry_bytes - start + zip_reader.ENTRY_CRC_BYTES for record in others)
    own = records[f"{names[0].removesuffix('data.pkl')}data/{storage.key}"]
    return _Template(
        small_bytes=low,
        small=read(low, high - low),
        directory_bytes=start,
        directory=_without(read(start, size - start), tuple(crcs)),
        crcs=tuple(crcs),
        crc=own.entry_bytes - start + zip_reader.ENTRY_CRC_BYTES,
        start=storage.offset_bytes,
        num_bytes=storage.num_bytes,
        ref=tree._replace(offset_bytes=tree.offset_bytes - storage.offset_bytes),
    )
