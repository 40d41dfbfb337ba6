"""Parses, prints and merges the documents that define checkpoints. Pure.

``SPEC.md`` is normative. Three kinds share one form: the manifest of a universal checkpoint, the
manifest of a native distributed one, and the record that each rank writes.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from ucp_core.errors import (
    CheckpointCorruptError,
    ChecksumMismatchError,
    UcpError,
    UnsupportedVersionError,
)
from ucp_core.geometry import Box, Fragment, StateMap, TensorEntry, TensorKey, copies_differ
from ucp_core.manifest.validation import FORMATS, load_json, validate
from ucp_core.numerics import combine_blocks, crc32, shortened

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

VERSION = 1
#: Larger documents are read as columns, with numpy. It takes 0.1 s to import, so ``ucp inspect``
#: opens smaller manifests without it; programs that load tensors have it, as do those that read the
#: records of ranks.
_MANIFEST_COLUMNS_BYTES_MIN = 256 << 10
_RECORD_COLUMNS_BYTES_MIN = 8 << 10
#: Members of objects that stand for a value that JSON lacks (``workers.state.registered``).
_ONE_VALUE = frozenset({"as", "base64", "float", "items", "tuple"})
#: Most entries of a document that cannot be read as columns. That many take 10 s and 250 MB.
_ENTRIES_MAX = 1 << 20

__all__ = [
    "VERSION",
    "FileEntry",
    "Item",
    "Kind",
    "Manifest",
    "from_bytes",
    "merge",
    "parse",
    "to_bytes",
    "to_json",
    "validate",
]


class Kind(StrEnum):
    """The kind of a document, as its ``format`` names it."""

    UNIVERSAL = "everstep-universal"
    DISTRIBUTED = "everstep-distributed"
    RANK_RECORD = "everstep-rank-record"
    #: Another framework's checkpoint, described in memory only.
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """The size of a checkpoint's file, and the crc32 of all its bytes."""

    num_bytes: int
    crc32: int


class Item(NamedTuple):
    """The policy for one item of a foreign checkpoint."""

    policy: str  #: ``reshard``, ``replicate``, ``reseed`` or ``drop``.
    note: str  #: Why, for people.


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A parsed manifest or rank record."""

    kind: Kind
    step: int  #: The optimizer step after which the state was taken.
    attempt: int  #: The attempt that saved the state (fencing token).
    #: All tensors with their fragments; in a rank record, only that rank's fragments.
    state_map: StateMap
    files: Mapping[str, FileEntry]  #: Every data file by its name in the directory.
    #: The optimizer's groups: ``params`` (fqns) and hyper-parameters.
    param_groups: Sequence[Mapping[str, Any]] = ()
    #: Small named values as JSON; in a universal manifest, the file of each value.
    extra: Mapping[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)  #: Any JSON about the writer.
    world_size: int = 0  #: Ranks that saved; 0 in a universal manifest.
    rank: int = -1  #: The rank of a record; -1 in a manifest.
    #: Whether, in a record, other ranks may have saved the same boxes, and their own values in
    #: ``extra``.
    uncoordinated: bool = False
    ties: Mapping[str, str] = field(default_factory=dict)  #: Alias to the fqn that has an entry.
    #: Role by fqn: ``frozen``, ``buffer`` or ``extra``. Trained parameters have none.
    roles: Mapping[str, str] = field(default_factory=dict)
    #: The policies for everything else in a foreign checkpoint.
    items: Mapping[str, Item] = field(default_factory=dict)
    #: Pattern by which ranks sharded a tensor, in the text form of ``RULES.md``. Only universal
    #: manifests of sharded sources have patterns.
    patterns: Mapping[TensorKey, Any] = field(default_factory=dict)


def parse(document: Any, *, where: str = "manifest") -> Manifest:
    """Return the manifest that ``document`` describes.

    Raises:
        UnsupportedVersionError: The format is newer.
        CheckpointCorruptError: The document has problems. The error lists all of them, also in
            ``facts["problems"]``.
    """
    if isinstance(document, dict) and document.get("format") in FORMATS:
        version = document.get("version")
        if isinstance(version, int) and version > VERSION:
            raise UnsupportedVersionError(
                f"{where} has format version {version}, but this program reads up to {VERSION}: "
                "update everstep",
                version=version,
            )
    problems = validate(document)
    if problems:
        lines = shortened(problems, 8, "; ")
        raise CheckpointCorruptError(
            f"{where} is not valid: {lines}", where=where, problems=tuple(problems)
        )
    kind = Kind(document["format"])
    entries: dict[TensorKey, TensorEntry] = {}
    for fqn, tensor in document["tensors"].items():
        for slot, value in tensor["slots"].items():
            entry = _entry(TensorKey(fqn, slot), tensor, value, kind)
            entries[entry.key] = entry
    return _manifest(document, entries)


def _manifest(document: dict[str, Any], entries: Mapping[TensorKey, TensorEntry]) -> Manifest:
    """Return the manifest of a valid document and its entries."""
    kind = Kind(document["format"])
    return Manifest(
        kind=kind,
        step=document["step"],
        attempt=document["attempt"],
        state_map=StateMap(entries=entries, block_bytes=document["block_bytes"]),
        files={
            name: FileEntry(num_bytes=value["nbytes"], crc32=value["crc32"])
            for name, value in document["files"].items()
        },
        param_groups=document["param_groups"],
        extra=document["extra"],
        source=document["source"],
        world_size=0 if kind is Kind.UNIVERSAL else document["world_size"],
        rank=document["rank"] if kind is Kind.RANK_RECORD else -1,
        uncoordinated=kind is Kind.RANK_RECORD and document.get("uncoordinated") is True,
        ties={a: fqn for fqn, t in document["tensors"].items() for a in t.get("ties", ())},
        roles={fqn: t["role"] for fqn, t in document["tensors"].items() if "role" in t},
        items={
            name: Item(value["policy"], value.get("note", ""))
            for name, value in document.get("items", {}).items()
        },
        patterns=_patterns(document["tensors"]) if kind is Kind.UNIVERSAL else {},
    )


def _patterns(tensors: dict[str, Any]) -> dict[TensorKey, Any]:
    """Return the pattern of every slot; slots of the tensor's shape inherit the tensor's."""
    found: dict[TensorKey, Any] = {}
    for fqn, tensor in tensors.items():
        for slot, value in tensor["slots"].items():
            usual = None if "shape" in value else tensor.get("pattern")
            pattern = value.get("pattern", usual)
            if pattern is not None:
                found[TensorKey(fqn, slot)] = pattern
    return found


def _entry(
    key: TensorKey, tensor: dict[str, Any], value: dict[str, Any], kind: Kind
) -> TensorEntry:
    shape = tuple(value.get("shape", tensor["shape"]))
    if kind is not Kind.UNIVERSAL:
        fragments = [_fragment(_box(item["box"]), item) for item in value["fragments"]]
        fragments.sort(key=lambda fragment: fragment.box)
    else:
        fragments = [_fragment(Box.full(shape), value)._replace(replica=False)]
    return TensorEntry(key=key, dtype=value["dtype"], shape=shape, fragments=tuple(fragments))


def _box(bounds: list[list[int]]) -> Box:
    return Box(tuple([b[0] for b in bounds]), tuple([b[1] for b in bounds]))


def _fragment(box: Box, item: dict[str, Any]) -> Fragment:
    return Fragment(
        box,
        item["file"],
        item["offset"],
        item["nbytes"],
        item["crc32"],
        tuple(item.get("blocks") or (item["crc32"],)),
        item.get("replica", False),
    )


def to_json(manifest: Manifest) -> dict[str, Any]:
    """Return the document that ``parse`` reads back to an equal manifest.

    Raises:
        UcpError: A tie or a role names a tensor that has no entry.
    """
    assert manifest.kind is not Kind.FOREIGN, "a foreign checkpoint has no document"
    tensors: dict[str, dict[str, Any]] = {}
    patterns = manifest.patterns if manifest.kind is Kind.UNIVERSAL else {}
    for key, entry in sorted(manifest.state_map.entries.items()):
        shape = list(entry.shape)
        tensor = tensors.setdefault(key.fqn, {"shape": shape, "slots": {}})
        value: dict[str, Any] = {"dtype": entry.dtype}
        usual = patterns.get(TensorKey(key.fqn, "weight")) if patterns else None
        if shape != tensor["shape"]:
            value["shape"] = shape
        if usual is not None:
            tensor["pattern"] = usual
        if patterns and patterns.get(key) != (None if "shape" in value else usual):
            value["pattern"] = patterns.get(key)
        if manifest.kind is Kind.UNIVERSAL:
            value |= _location(entry.fragments[0])
        else:
            value["fragments"] = [
                {"box": [list(b) for b in zip(*fragment.box, strict=True)]} | _location(fragment)
                for fragment in entry.fragments
            ]
        tensor["slots"][key.slot] = value
    _add_relations(tensors, manifest)
    document: dict[str, Any] = {
        "format": str(manifest.kind),
        "version": VERSION,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "block_bytes": manifest.state_map.block_bytes,
        "tensors": tensors,
        "param_groups": list(manifest.param_groups),
        "extra": dict(manifest.extra),
        "files": {
            name: {"nbytes": entry.num_bytes, "crc32": entry.crc32}
            for name, entry in sorted(manifest.files.items())
        },
        "source": dict(manifest.source),
    }
    if manifest.kind is not Kind.UNIVERSAL:
        document["world_size"] = manifest.world_size
    if manifest.kind is Kind.RANK_RECORD:
        document["rank"] = manifest.rank
        if manifest.uncoordinated:
            document["uncoordinated"] = True
    if manifest.items:
        document["items"] = {name: item._asdict() for name, item in sorted(manifest.items.items())}
    return document


def _add_relations(tensors: dict[str, dict[str, Any]], manifest: Manifest) -> None:
    """Add ties and roles to their tensors."""
    missing = sorted({*manifest.ties.values(), *manifest.roles} - set(tensors))
    if missing:
        raise UcpError(
            f"{missing[0]} is tied or has a role, but the checkpoint has no such tensor",
            fqn=missing[0],
        )
    for alias, fqn in sorted(manifest.ties.items()):
        tensors[fqn].setdefault("ties", []).append(alias)
    for fqn, role in manifest.roles.items():
        tensors[fqn]["role"] = role


def _location(fragment: Fragment) -> dict[str, Any]:
    value: dict[str, Any] = {
        "file": fragment.file,
        "offset": fragment.offset_bytes,
        "nbytes": fragment.num_bytes,
        "crc32": fragment.crc32,
    }
    if len(fragment.blocks) > 1:
        value["blocks"] = list(fragment.blocks)
    if fragment.replica:
        value["replica"] = True
    return value


_RECORD_START = f'{{"format":"{Kind.RANK_RECORD}"'.encode()
_SEAL = re.compile(rb',"crc32":"([0-9a-f]{8})"}\n')
_SEAL_BYTES = len(b',"crc32":"00000000"}\n')


def to_bytes(manifest: Manifest, *, tensors: str | None = None) -> bytes:
    """Return the document as one line of JSON that ends with the crc32 of all preceding bytes.

    Args:
        tensors: The text of the tensors if the caller has printed it. The map must then be empty.

    Raises:
        UcpError: ``extra``, ``param_groups`` or ``source`` is not JSON.
    """
    try:
        text = json.dumps(to_json(manifest), separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UcpError(
            f"extra, param_groups or source cannot be kept as JSON: {error}; numbers must be "
            "finite, and tensors belong under tensors",
        ) from error
    if tensors is not None:
        assert not manifest.state_map.entries, "tensors come from one place"
        # The first match is the document's own key: only numbers precede it.
        text = text.replace('"tensors":{}', f'"tensors":{tensors}', 1)
    body = text[:-1].encode()
    return body + b',"crc32":"%08x"}\n' % crc32(body)


def from_bytes(data: bytes, *, where: str = "manifest") -> Manifest:
    """Return the manifest that ``to_bytes`` printed.

    Raises:
        ChecksumMismatchError: The bytes are damaged, cut short or edited.
        CheckpointCorruptError: The document has problems, all of which the error lists, or is too
            large.
        UnsupportedVersionError: The format is newer.
    """
    seal = _SEAL.fullmatch(data, max(0, len(data) - _SEAL_BYTES))
    if seal is None:
        raise ChecksumMismatchError(
            f"{where} does not end with its crc32: it is cut short or was edited", where=where
        )
    found = crc32(memoryview(data)[: seal.start()])
    if found != int(seal[1], 16):
        raise ChecksumMismatchError(
            f"{where} is damaged: its crc32 is {found:08x}, but it was written as "
            f"{seal[1].decode()}",
            where=where,
        )
    is_record = data.startswith(_RECORD_START)
    has_numpy = is_record or "numpy" in sys.modules
    if len(data) >= (_RECORD_COLUMNS_BYTES_MIN if has_numpy else _MANIFEST_COLUMNS_BYTES_MIN):
        from ucp_core.geometry import TableEntries
        from ucp_core.manifest.fragment_columns import scan

        if scanned := scan(data):
            return _manifest(scanned.document, TableEntries(scanned.table))
    num_entries = data.count(b'"crc32"')
    if num_entries > _ENTRIES_MAX:
        raise CheckpointCorruptError(
            f"{where} has {num_entries} entries of tensors and files; a document that is not "
            f"printed as SPEC.md, section 2 says may have at most {_ENTRIES_MAX}",
            where=where,
        )
    try:
        document = load_json(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"{where} is not JSON: {error}", where=where) from error
    return parse(document, where=where)


def merge(records: Sequence[Manifest]) -> Manifest:
    """Return the manifest of a distributed checkpoint from the records of all its ranks.

    The result is deterministic. ``extra``, ``source`` and hyper-parameters come from rank 0. The
    ``params`` of a group are the union over all ranks, because a pipeline stage knows only its
    own. The block size is the largest of any rank.

    In records that are ``uncoordinated``, a box that several ranks saved counts once, and ``extra``
    has the values of all ranks. If ranks have different values under one name, or for one buffer,
    the lowest rank's value counts.

    Raises:
        CheckpointCorruptError: Two ranks disagree on the dtype, the shape or the elements of a
            tensor, or the largest block size is not a multiple of another rank's.
        UncoveredRegionError: The ranks together do not hold every element exactly once.
    """
    records = sorted(records, key=lambda record: record.rank)
    first = records[0]
    block_bytes = max(record.state_map.block_bytes for record in records)
    roles = {fqn: role for record in records for fqn, role in record.roles.items()}
    is_joined = any(record.uncoordinated for record in records)
    buffers = {fqn for fqn, role in roles.items() if role == "buffer"} if is_joined else None
    entries = _merged_entries(records, block_bytes, buffers)
    state_map = StateMap(entries=entries, block_bytes=block_bytes)
    state_map.prove_coverage()
    return Manifest(
        kind=Kind.DISTRIBUTED,
        step=first.step,
        attempt=first.attempt,
        state_map=state_map,
        files={name: entry for record in records for name, entry in record.files.items()},
        param_groups=_merged_groups(records),
        extra=_joined([record.extra for record in records]) if is_joined else first.extra,
        source=first.source,
        world_size=first.world_size,
        ties={alias: fqn for record in records for alias, fqn in record.ties.items()},
        roles=roles,
        items={name: item for record in records for name, item in record.items.items()},
    )


def _joined(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge objects into one; where they differ, the first one counts."""
    found: dict[str, Any] = {}
    for one in values:
        for name, value in one.items():
            known = found.setdefault(name, value)
            if isinstance(known, dict) and isinstance(value, dict) and known != value:
                is_one = not _ONE_VALUE.isdisjoint({*known, *value})
                found[name] = known if is_one else _joined([known, value])
    return found


def _merged_entries(
    records: Sequence[Manifest], block_bytes: int, repeated: Collection[str] | None
) -> Mapping[TensorKey, TensorEntry]:
    """Return the tensors with the fragments of all records.

    Args:
        repeated: Names of tensors whose values may differ between ranks. A box that several ranks
            saved is then kept from the lowest rank. None if each box is saved once.
    """
    maps = [record.state_map for record in records]
    tables = [getattr(state_map.entries, "table", None) for state_map in maps]
    if all(tables) and all(state_map.block_bytes == block_bytes for state_map in maps):
        from ucp_core.geometry import TableEntries, merged, without_repeats

        table = merged(list(filter(None, tables)))
        return TableEntries(table if repeated is None else without_repeats(table, repeated))
    fragments: dict[TensorKey, list[Fragment]] = defaultdict(list)
    seen: dict[TensorKey, TensorEntry] = {}
    for record in records:
        for key, entry in record.state_map.entries.items():
            known = seen.setdefault(key, entry)
            if (known.dtype, known.shape) != (entry.dtype, entry.shape):
                raise CheckpointCorruptError(
                    f"{key}: rank {record.rank} saved {entry.dtype}{list(entry.shape)}, another "
                    f"rank {known.dtype}{list(known.shape)}",
                    fqn=key.fqn,
                    slot=key.slot,
                )
            fragments[key] += _with_blocks(entry.fragments, record, block_bytes)
    return {
        key: TensorEntry(
            key=key,
            dtype=entry.dtype,
            shape=entry.shape,
            fragments=tuple(_once(key, sorted(fragments[key]), repeated)),
        )
        for key, entry in sorted(seen.items())
    }


def _once(
    key: TensorKey, fragments: Sequence[Fragment], repeated: Collection[str] | None
) -> Sequence[Fragment]:
    """Return the fragments, sorted by box and rank, without repeated boxes."""
    if repeated is None:
        return fragments
    found: dict[Box, Fragment] = {}
    for fragment in fragments:
        first = found.setdefault(fragment.box, fragment)
        if first.crc32 != fragment.crc32 and key.fqn not in repeated:
            raise copies_differ(key, first.box, first.file, fragment.file)
    return [*found.values()]


def _with_blocks(
    fragments: Sequence[Fragment], record: Manifest, block_bytes: int
) -> Sequence[Fragment]:
    """Return a rank's fragments with checksums of blocks of ``block_bytes``.

    A snapshot has smaller blocks than a file that another rank saved itself.
    """
    small_bytes = record.state_map.block_bytes
    if small_bytes == block_bytes:
        return fragments
    if block_bytes % small_bytes:
        raise CheckpointCorruptError(
            f"rank {record.rank} has checksums of blocks of {small_bytes} bytes, another rank of "
            f"{block_bytes}",
            rank=record.rank,
        )
    return [
        fragment._replace(
            blocks=tuple(
                combine_blocks(
                    fragment.blocks[low // small_bytes : (low + block_bytes) // small_bytes],
                    min(block_bytes, fragment.num_bytes - low),
                    small_bytes,
                )
                for low in range(0, max(fragment.num_bytes, 1), block_bytes)
            )
        )
        for fragment in fragments
    ]


def _merged_groups(records: Sequence[Manifest]) -> list[dict[str, Any]]:
    merged: list[dict[str, Any]] = []
    for record in records:
        for index, group in enumerate(record.param_groups):
            if index == len(merged):
                merged.append(dict(group))
            elif "params" in group:
                names = [*merged[index].get("params", ()), *group["params"]]
                merged[index]["params"] = list(dict.fromkeys(names))
    return merged
