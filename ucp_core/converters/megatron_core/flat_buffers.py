"""The flat buffers of Megatron's distributed optimizer (``dp_reshardable``), told apart.

A buffer holds the parameters of one model-parallel rank one after the other, and the checkpoint
does not say which. Megatron lays them out in the reverse order of the model's modules, each at a
multiple of 64 elements; the metadata list the model's keys in that order. So the layout can be
worked out, and it can be proven: the buffer's fp32 weights, rounded, are the model's weights. What
does not fit in length and in values is refused, never guessed.

Source: ``_compute_per_buffer_param_layout`` in ``megatron/core/optimizer/distrib_optimizer.py``.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from ucp_core.boxes import Box, flat_range
from ucp_core.converters.megatron_core.key_names import BucketKey, stack_of
from ucp_core.dtypes.casts import FLOATS, cast
from ucp_core.errors import UnsupportedVersionError
from ucp_core.statemap import DTYPE_BYTES, Extent, Fragment, TensorEntry, TensorKey
from ucp_core.storage.base import join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ucp_core.converters.dcp.container import Container

_FILE_RANK = re.compile(r"(?:.*/)?__(\d+)_\d+\.distcp")
#: Elements at whose multiples parameters begin.
_ALIGNMENT = 64
#: Elements compared at either end of a piece.
_SAMPLE = 64


class _Piece(NamedTuple):
    """A chunk of the model's tensor that one rank holds: where its weights are."""

    key: str
    dtype: str
    fragment: Fragment


class _Param(NamedTuple):
    """What one rank holds of a parameter: its pieces, one after the other along dim 0."""

    key: str
    pieces: tuple[_Piece, ...]
    is_replica: bool

    @property
    def num_elements(self) -> int:
        return sum(piece.fragment.box.num_elements for piece in self.pieces)


class _Placed(NamedTuple):
    """A parameter in a buffer: which bucket of it, from which element on."""

    param: _Param
    bucket: BucketKey
    start: int


def decoded(
    container: Container,
    buckets: Mapping[BucketKey, str],
    models: Sequence[str],
) -> tuple[list[TensorEntry], dict[str, tuple[Extent, ...]]]:
    """Return the entries that flat buffers hold, by the model's keys, and their checksums.

    Args:
        container: The checkpoint.
        buckets: The buffers and their keys.
        models: The model's keys, in order.

    Raises:
        UnsupportedVersionError: The buffers do not fit the model's weights; names the first.
        CheckpointCorruptError: An item is not what the metadata say.
    """
    named = {key: TensorKey(key, "weight") for key in models}
    model = {key.fqn: entry for key, entry in container.entries(named)[0].items()}
    _check_kinds(container, buckets, model)
    flat, extents = container.entries({key: TensorKey(key, "flat") for key in buckets.values()})
    buffers = {bucket: _Buffer(flat[TensorKey(key, "flat")]) for bucket, key in buckets.items()}
    params = _by_group(container, buffers, model)
    fragments: dict[TensorKey, list[Fragment]] = defaultdict(list)
    for group in sorted(params):
        own = {bucket: buffer for bucket, buffer in buffers.items() if bucket.group == group}
        for placed in _laid_out(container, group, own, params[group]):
            _add_fragments(fragments, placed, own)
    entries = []
    for name, found in fragments.items():
        whole = model[name.fqn]
        dtype = buffers[next(b for b in buffers if b.slot == name.slot)].entry.dtype
        entries.append(
            TensorEntry(key=name, dtype=dtype, shape=whole.shape, fragments=tuple(sorted(found)))
        )
    return entries, extents


def _check_kinds(
    container: Container, buckets: Mapping[BucketKey, str], model: Mapping[str, TensorEntry]
) -> None:
    for bucket, key in buckets.items():
        item = container.tensors[key]
        if len(item.shape) != 1 or (bucket.slot == "weight" and item.dtype not in FLOATS):
            raise _refused(container, key, f"{item.dtype}{list(item.shape)} is no flat buffer")
    for key, entry in model.items():
        if entry.dtype not in FLOATS or any(f.strides is not None for f in entry.fragments):
            raise _refused(container, key, f"weights in {entry.dtype} cannot be compared")


class _Buffer:
    """One flat tensor and its chunks by position."""

    def __init__(self, entry: TensorEntry) -> None:
        self.entry = entry
        (self.num_elements,) = entry.shape
        self._starts = [fragment.box.start[0] for fragment in entry.fragments]

    def cut(self, start: int, stop: int) -> list[tuple[int, int, str, int]]:
        """Return the parts of ``[start, stop)``: bounds, file, and byte of the first element."""
        parts: list[tuple[int, int, str, int]] = []
        itemsize = DTYPE_BYTES[self.entry.dtype]
        index = max(0, bisect_right(self._starts, start) - 1)
        for fragment in self.entry.fragments[index:]:
            low, high = max(start, fragment.box.start[0]), min(stop, fragment.box.stop[0])
            if fragment.box.start[0] >= stop:
                break
            if low < high:
                at = fragment.offset_bytes + (low - fragment.box.start[0]) * itemsize
                parts.append((low, high, fragment.file, at))
        return parts


def _by_group(
    container: Container,
    buffers: Mapping[BucketKey, _Buffer],
    model: Mapping[str, TensorEntry],
) -> dict[str, list[_Param]]:
    """Return the parameters of each model-parallel rank, in order of its modules.

    A rank's files hold its buffers and its share of the model; what is the same on every rank of
    a stage is in the files of one of them only.
    """
    groups = {
        rank: bucket.group
        for bucket, buffer in buffers.items()
        for fragment in buffer.entry.fragments
        for rank in [_rank(container, fragment.file)]
    }
    owned: dict[tuple[str, int | None], dict[str, list[_Piece]]] = {}
    for key, layer, fragment in _in_order(model):
        rank = _rank(container, fragment.file)
        if rank not in groups:
            raise _refused(container, key, f"rank {rank} has written no buffer")
        places = owned.setdefault((key, layer), {})
        places.setdefault(groups[rank], []).append(_Piece(key, model[key].dtype, fragment))
    stages = _stages(set(groups.values()), [set(places) for places in owned.values()])
    params: dict[str, list[_Param]] = defaultdict(list)
    for (key, _), places in owned.items():
        stage = stages[next(iter(places))]
        if len(places) == len(stage):
            for group, pieces in places.items():
                params[group].append(_Param(key, tuple(pieces), is_replica=False))
        elif len(places) == 1:
            ((owner, pieces),) = places.items()
            for group in stage:
                replica = group != owner
                params[group].append(_Param(key, tuple(pieces), is_replica=replica))
        else:
            raise _refused(
                container, key, f"{len(places)} of {len(stage)} ranks of its stage hold it"
            )
    return params


def _in_order(
    model: Mapping[str, TensorEntry],
) -> list[tuple[str, int | None, Fragment]]:
    """Return the chunks in order of the modules: layer after layer where keys are stacks."""
    found: list[tuple[str, int | None, Fragment]] = []
    done: set[str] = set()
    stacks = {
        key: stack_of(key, entry.shape, (f.box for f in entry.fragments))
        for key, entry in model.items()
    }
    for key, entry in model.items():
        stack = stacks[key]
        if stack is None:
            found += [(key, None, fragment) for fragment in entry.fragments]
        elif stack not in done:
            done.add(stack)
            members = [other for other in model if stacks[other] == stack]
            found += [
                (other, fragment.box.start[0], fragment)
                for _, _, other, fragment in sorted(
                    (fragment.box.start[0], place, other, fragment)
                    for place, other in enumerate(members)
                    for fragment in model[other].fragments
                )
            ]
    return found


def _stages(groups: set[str], together: Sequence[set[str]]) -> dict[str, set[str]]:
    """Return the ranks of each rank's pipeline stage: those that share tensors."""
    stages = {group: {group} for group in groups}
    for members in together:
        merged = set().union(*(stages[group] for group in members))
        if len(merged) > len(stages[next(iter(members))]):
            for group in merged:
                stages[group] = merged
    return stages


def _rank(container: Container, file: str) -> int:
    match = _FILE_RANK.fullmatch(file)
    if match is None:
        raise _refused(container, file, "the name of the file names no rank")
    return int(match[1])


def _laid_out(
    container: Container,
    group: str,
    buffers: Mapping[BucketKey, _Buffer],
    params: Sequence[_Param],
) -> list[_Placed]:
    """Return where each parameter of a rank is: in reverse order, checked by length and values."""
    masters = sorted(bucket for bucket in buffers if bucket.slot == "weight")
    if not masters:
        raise _refused(container, group, "there are no fp32 weights in the buffers")
    expected = list(reversed(params))
    for choose in (_expected, _only):
        placed, left = _tried(container, buffers, masters, expected, choose)
        if placed is not None:
            return placed
    raise _refused(
        container,
        left[0].key if left else group,
        f"{len(left)} parameters are not to be found in the buffers of {group} by their weights",
    )


def _tried(
    container: Container,
    buffers: Mapping[BucketKey, _Buffer],
    masters: Sequence[BucketKey],
    params: Sequence[_Param],
    choose: Callable[[Container, _Buffer, int, Sequence[_Param]], _Param | None],
) -> tuple[list[_Placed] | None, list[_Param]]:
    """Return where the parameters are as ``choose`` finds them, or None, and those not found."""
    left = list(params)
    placed: list[_Placed] = []
    for bucket, start in _starts(buffers, masters, placed):
        param = choose(container, buffers[bucket], start, left)
        if param is None:
            return None, left
        left.remove(param)
        placed.append(_Placed(param, bucket, start))
    return (None if left else placed), left


def _starts(
    buffers: Mapping[BucketKey, _Buffer],
    masters: Sequence[BucketKey],
    placed: Sequence[_Placed],
) -> Iterator[tuple[BucketKey, int]]:
    """Yield where a parameter begins; the caller adds it to ``placed`` before the next one."""
    for bucket in masters:
        position = 0
        while position < buffers[bucket].num_elements:
            start = -(-position // _ALIGNMENT) * _ALIGNMENT
            yield bucket, start
            position = start + placed[-1].param.num_elements


def _expected(
    container: Container, buffer: _Buffer, start: int, left: Sequence[_Param]
) -> _Param | None:
    """Return the next parameter in order of the modules if it begins at ``start``."""
    return left[0] if left and _holds(container, buffer, start, left[0]) else None


def _only(
    container: Container, buffer: _Buffer, start: int, left: Sequence[_Param]
) -> _Param | None:
    """Return the parameter that begins at ``start`` if there is only one: order does not count.

    Ranks that share the saving may write the keys in another order.
    """
    found = [param for param in left if _holds(container, buffer, start, param)]
    return found[0] if len(found) == 1 else None


def _holds(container: Container, buffer: _Buffer, start: int, param: _Param) -> bool:
    """Return whether the buffer has the parameter's weights at both ends of each piece."""
    if start + param.num_elements > buffer.num_elements:
        return False
    low = start
    for piece in param.pieces:
        count = piece.fragment.box.num_elements
        sample = min(_SAMPLE, count)
        for skip in {0, count - sample}:
            master = _read(container, buffer.cut(low + skip, low + skip + sample), buffer.entry)
            if len(master) != sample * DTYPE_BYTES[buffer.entry.dtype]:
                return False
            rounded = bytes(cast(memoryview(master), buffer.entry.dtype, piece.dtype))
            if rounded != _weights(container, piece, skip, sample):
                return False
        low += count
    return True


def _read(
    container: Container, parts: Sequence[tuple[int, int, str, int]], entry: TensorEntry
) -> bytes:
    itemsize = DTYPE_BYTES[entry.dtype]
    return b"".join(
        container.store.read_range(join(container.directory, file), at, (high - low) * itemsize)
        for low, high, file, at in parts
    )


def _weights(container: Container, piece: _Piece, skip: int, count: int) -> bytes:
    fragment, itemsize = piece.fragment, DTYPE_BYTES[piece.dtype]
    path = join(container.directory, fragment.file)
    return container.store.read_range(
        path, fragment.offset_bytes + skip * itemsize, count * itemsize
    )


def _add_fragments(
    fragments: dict[TensorKey, list[Fragment]],
    placed: _Placed,
    buffers: Mapping[BucketKey, _Buffer],
) -> None:
    """Add what one parameter has in each slot of its buffer."""
    for bucket, buffer in buffers.items():
        if (bucket.buffer, bucket.bucket) != (placed.bucket.buffer, placed.bucket.bucket):
            continue
        found = fragments[TensorKey(placed.param.key, bucket.slot)]
        low = placed.start
        for piece in placed.param.pieces:
            count = piece.fragment.box.num_elements
            for start, stop, file, at in buffer.cut(low, low + count):
                found += _boxes(
                    piece.fragment.box,
                    (start - low, stop - low),
                    (file, at, DTYPE_BYTES[buffer.entry.dtype]),
                    replica=placed.param.is_replica,
                )
            low += count


def _boxes(
    box: Box, positions: tuple[int, int], place: tuple[str, int, int], *, replica: bool
) -> Iterator[Fragment]:
    """Yield the fragments of flat positions of a box; ``place``: file, byte, bytes an element."""
    file, at, itemsize = place
    for local in flat_range(box.shape, *positions):
        start = tuple(a + b for a, b in zip(local.start, box.start, strict=True))
        stop = tuple(a + b for a, b in zip(local.stop, box.start, strict=True))
        size = local.num_elements * itemsize
        yield Fragment(Box(start, stop), file, at, size, None, (), replica)
        at += size


def _refused(container: Container, what: str, why: str) -> UnsupportedVersionError:
    return UnsupportedVersionError(
        f"{container.where}: {what}: {why}, so the flat buffers of the distributed optimizer "
        "(dp_reshardable) cannot be told apart: load it with Megatron and save it with "
        "--dist-ckpt-optim-fully-reshardable",
        what=what,
        path=container.where,
    )
