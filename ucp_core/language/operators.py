"""The operators of Universal Checkpointing, as functions on fragments and maps. Pure.

The paper's operators (ATC'25, table 2) move tensors. These move descriptions; bytes move once, at
the end. ``extract`` returns the boxes in one rank's file, ``union`` proves that they cover the
tensor, and ``strip_padding`` crops it. The paper's Load and Save are ``ucp_core.load`` and
``convert``; the boxes that a worker holds (``workers.state``) are its UcpInfo.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from operator import add, sub
from typing import Any

from ucp_core.errors import PatternError
from ucp_core.geometry import (
    DTYPE_BYTES,
    Box,
    Fragment,
    TensorEntry,
    TensorKey,
    flat_range,
    packed_strides,
    prove_entry,
    span,
)
from ucp_core.language.patterns import Placement
from ucp_core.manifest import Manifest


def extract(
    key: TensorKey,
    dtype: str,
    placement: Placement,
    rank: int,
    *,
    file: str,
    offset_bytes: int,
    flat: tuple[int, int] | None = None,
) -> list[Fragment]:
    """Return the fragments of one tensor in one rank's file, without padding.

    Args:
        dtype: Dtype of the bytes in the file.
        placement: How the ranks' shards form the tensor.
        file: Name in the checkpoint's directory.
        offset_bytes: Offset of the first element in the file.
        flat: The file holds elements ``[start, stop)`` of the flattened shard, as ZeRO cuts it;
            anything beyond the shard is padding. None: the whole shard.
    """
    if not 0 <= rank < len(placement.shards):
        raise PatternError(f"{key}: rank {rank} of {len(placement.shards)} in {file}", rank=rank)
    shard = placement.shards[rank]
    total = prod(shard)
    start, stop = (0, total) if flat is None else flat
    if not 0 <= start <= stop:
        raise PatternError(f"{key}: flat range [{start}, {stop}) in {file}", rank=rank)
    held = flat_range(shard, start, min(stop, total)) if start < total else ()
    copy = rank if placement.relation == "average" else 0
    itemsize = DTYPE_BYTES[dtype]
    origin = offset_bytes - start * itemsize
    strides = packed_strides(shard, itemsize)
    found: list[Fragment] = []
    for local, begin, is_copy in placement.pieces[rank]:
        for inner, first, last in _inside(held, local, shard, start):
            found.append(
                Fragment(
                    _moved(inner, local, begin),
                    file,
                    origin + first * itemsize,
                    (last - first) * itemsize,
                    None,
                    (),
                    is_copy,
                    None if last - first == inner.num_elements else strides,
                    copy,
                )
            )
    return found


def _inside(
    held: Sequence[Box], local: Box, shard: tuple[int, ...], start: int
) -> Iterator[tuple[Box, int, int]]:
    """Yield the parts of a flat range's boxes that lie in ``local``, and their flat positions."""
    if local.stop == shard and not any(local.start):
        # The usual case: the boxes of a flat range are adjacent.
        for box in held:
            stop = start + box.num_elements
            yield box, start, stop
            start = stop
        return
    full = Box.full(shard)
    for box in held:
        inner = local.intersect(box)
        if inner is not None:
            yield inner, *span(inner, full)


def _moved(inner: Box, local: Box, begin: tuple[int, ...]) -> Box:
    """Return the box of the whole tensor that ``inner``, a part of ``local``, covers."""
    if begin == local.start:
        return inner
    shift = list(map(sub, begin, local.start))
    return Box(tuple(map(add, inner.start, shift)), tuple(map(add, inner.stop, shift)))


def union(
    key: TensorKey, dtype: str, placement: Placement, fragments: Iterable[Fragment]
) -> TensorEntry:
    """Return the tensor that the fragments of all files form, with proof of coverage.

    Replicas stay in the entry for comparison, unless the placement takes the first one. Every copy
    of an average covers the tensor.
    """
    first_only = placement.relation == "replica" and placement.check == "first"
    kept = [f for f in fragments if not (first_only and f.replica)]
    kept.sort(key=_order)
    entry = TensorEntry(
        key=key,
        dtype=dtype,
        shape=placement.shape,
        fragments=tuple(kept),
        copies=len(placement.shards) if placement.relation == "average" else 1,
    )
    prove_entry(entry)
    return entry


def _order(fragment: Fragment) -> tuple[Box, int, bool, str, int]:
    # Fragments cannot be compared: their crc32 and strides may be None.
    return (fragment.box, fragment.copy, fragment.replica, fragment.file, fragment.offset_bytes)


def strip_padding(entry: TensorEntry, shape: Sequence[int]) -> TensorEntry:
    """Return the tensor without padding, cropped to ``shape``, which must fit inside."""
    whole = Box.full(shape)
    if len(shape) != len(entry.shape) or not Box.full(entry.shape).contains(whole):
        raise PatternError(
            f"{entry.key}: has shape {list(entry.shape)}, which padding could not have brought "
            f"from {list(shape)}",
            fqn=entry.key.fqn,
            slot=entry.key.slot,
        )
    itemsize = DTYPE_BYTES[entry.dtype]
    cropped = (_cropped(fragment, whole, itemsize) for fragment in entry.fragments)
    fragments = sorted((f for f in cropped if f is not None), key=_order)
    return replace(entry, shape=tuple(shape), fragments=tuple(fragments))


def _cropped(fragment: Fragment, whole: Box, itemsize: int) -> Fragment | None:
    inner = fragment.box.intersect(whole)
    if inner is None or inner == fragment.box:
        return None if inner is None else fragment
    strides = fragment.strides or packed_strides(fragment.box.shape, itemsize)
    last = sum((n - 1) * s for n, s in zip(inner.shape, strides, strict=True))
    num_bytes = last + itemsize
    # Padding comes after the elements, so the first one keeps its place.
    return fragment._replace(
        box=inner,
        num_bytes=num_bytes,
        crc32=None,
        blocks=(),
        strides=None if num_bytes == inner.num_elements * itemsize else strides,
    )


def rename(manifest: Manifest, mapping: Mapping[str, str]) -> Manifest:
    """Return the checkpoint with other tensor names, in every slot, group, tie and role.

    Args:
        mapping: New names by old ones; other tensors keep their names.
    """
    known = {key.fqn for key in manifest.state_map.entries} | set(manifest.ties)
    missing = sorted(set(mapping) - known)
    if missing:
        raise PatternError(
            f"{missing[0]}: to be renamed, but the checkpoint has no such tensor "
            f"({len(missing)} such names)",
            fqn=missing[0],
        )
    names = sorted((mapping.get(fqn, fqn), fqn) for fqn in known)
    for (new, one), (same, other) in pairwise(names):
        if new == same:
            raise PatternError(f"{new}: would be the new name of both {one} and {other}", fqn=new)

    def new_name(fqn: str) -> str:
        return mapping.get(fqn, fqn)

    entries: dict[TensorKey, TensorEntry] = {}
    for key, entry in manifest.state_map.entries.items():
        new_key = TensorKey(new_name(key.fqn), key.slot)
        entries[new_key] = replace(entry, key=new_key)
    return replace(
        manifest,
        state_map=replace(manifest.state_map, entries=dict(sorted(entries.items()))),
        param_groups=_with_params(manifest, new_name),
        ties={new_name(alias): new_name(owner) for alias, owner in manifest.ties.items()},
        roles={new_name(fqn): role for fqn, role in manifest.roles.items()},
        patterns={
            key._replace(fqn=new_name(key.fqn)): pattern
            for key, pattern in manifest.patterns.items()
        },
    )


def _with_params(manifest: Manifest, new: Callable[[str], str | None]) -> list[Mapping[str, Any]]:
    """Return the groups with renamed parameters; if ``new`` returns None, drop the parameter."""
    return [
        {**group, "params": [name for fqn in group["params"] if (name := new(fqn)) is not None]}
        if "params" in group
        else group
        for group in manifest.param_groups
    ]


def tie(manifest: Manifest, ties: Mapping[str, str]) -> Manifest:
    """Return the checkpoint with ties added.

    The bytes of an alias become a replica of the tensor that owns them, so conversion and
    verification compare the two.

    Args:
        ties: The owner of each alias; an alias may have no bytes.
    """
    entries = dict(manifest.state_map.entries)
    for alias, owner in ties.items():
        if owner in ties or not any(key.fqn == owner for key in entries):
            raise PatternError(
                f"{alias}: tied to {owner}, which "
                + ("is tied itself" if owner in ties else "the checkpoint does not have"),
                fqn=alias,
            )
        for key in [key for key in entries if key.fqn == alias]:
            kept = TensorKey(owner, key.slot)
            entries[kept] = _joined(entries.get(kept), entries.pop(key), owner)
    return replace(
        manifest,
        state_map=replace(manifest.state_map, entries=entries),
        param_groups=_with_params(manifest, lambda fqn: None if fqn in ties else fqn),
        ties={**manifest.ties, **ties},
        roles={fqn: role for fqn, role in manifest.roles.items() if fqn not in ties},
        patterns={key: found for key, found in manifest.patterns.items() if key.fqn not in ties},
    )


def _joined(kept: TensorEntry | None, alias: TensorEntry, owner: str) -> TensorEntry:
    """Return the owner's entry with the fragments of an alias as replicas."""
    if kept is None or (kept.dtype, kept.shape) != (alias.dtype, alias.shape) or kept.copies > 1:
        has = "nothing" if kept is None else f"{kept.dtype}{list(kept.shape)}"
        raise PatternError(
            f"{alias.key}: tied to {owner}, but it has {alias.dtype}{list(alias.shape)} and "
            f"{owner} {has}",
            fqn=alias.key.fqn,
            slot=alias.key.slot,
        )
    copies = (fragment._replace(replica=True) for fragment in alias.fragments)
    fragments = sorted([*kept.fragments, *copies], key=_order)
    return replace(kept, fragments=tuple(fragments))
