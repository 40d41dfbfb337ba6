"""The flat buffers of Megatron's distributed optimizer (``dp_reshardable``), told apart.

A buffer holds the parameters of one model-parallel rank one after the other, and the checkpoint
does not say which. Megatron lays them out in the reverse order of the model's modules, each at a
multiple of 64 elements; the metadata list the model's keys in that order. So the layout can be
worked out, and it can be proven: the buffer's fp32 weights, rounded, are the model's weights. What
does not fit in length and in values is refused, never guessed. Buffers must be filled; parameters
that are in none were not trained.

Source: ``_compute_per_buffer_param_layout`` in ``megatron/core/optimizer/distrib_optimizer.py``.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from ucp_core.boxes import Box, flat_range
from ucp_core.converters.megatron_core.key_names import BucketKey, stack_of
from ucp_core.converters.shared.evidence import rounded
from ucp_core.dtypes import FLOATS
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
#: Experts have an optimizer of their own where their ranks are others than those of the rest.
_EXPERTS = ".experts."
_CHAIN = re.compile(r"chained_(\d+)\.")
#: The last stage has a copy of the embedding if there is no output layer of its own.
_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"


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
    fragments: dict[TensorKey, list[Fragment]] = defaultdict(list)
    for chain, weights in _by_chain(buffers, model):
        params = _by_group(container, chain, weights)
        for group in sorted({bucket.group for bucket in chain}):
            own = {bucket: buffer for bucket, buffer in chain.items() if bucket.group == group}
            for placed in _laid_out(container, group, own, params.get(group, ())):
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


def _by_chain(
    buffers: Mapping[BucketKey, _Buffer], model: Mapping[str, TensorEntry]
) -> list[tuple[dict[BucketKey, _Buffer], dict[str, TensorEntry]]]:
    """Return the buffers of each kind of optimizer, and the weights that may be in them.

    Of several optimizers the last is that of the experts; a stage without has one, unnumbered.
    """
    numbers = {
        bucket: int(match[1]) if (match := _CHAIN.match(bucket.group)) else 0 for bucket in buffers
    }
    last = max(numbers.values())
    if last == 0:
        return [(dict(buffers), dict(model))]
    return [
        (
            {bucket: buffers[bucket] for bucket in buffers if (numbers[bucket] == last) == experts},
            {key: entry for key, entry in model.items() if (_EXPERTS in key) == experts},
        )
        for experts in (False, True)
    ]


def _by_group(
    container: Container,
    buffers: Mapping[BucketKey, _Buffer],
    model: Mapping[str, TensorEntry],
) -> dict[str, list[_Param]]:
    """Return the parameters of each model-parallel rank, in order of its modules.

    A rank's files hold its buffers and its share of the model; what is the same on every rank of
    a stage is in the files of one of them only.
    """
    groups = _groups(container, buffers)
    owned: dict[_Name, dict[str, list[_Piece]]] = {}
    for name, fragment in _in_order(model):
        rank = _rank(container, fragment.file)
        if rank not in groups:
            raise _refused(container, name.key, f"rank {rank} has written no buffer")
        places = owned.setdefault(name, {})
        places.setdefault(groups[rank], []).append(
            _Piece(name.key, model[name.key].dtype, fragment)
        )
    stages = _stages(set(groups.values()), [set(places) for places in owned.values()])
    params: dict[str, list[_Param]] = defaultdict(list)
    for name, places in owned.items():
        stage = stages[next(iter(places))]
        if len(places) == len(stage):
            for group, pieces in places.items():
                params[group].append(_Param(name.key, tuple(pieces), is_replica=False))
        elif len(places) == 1:
            ((owner, pieces),) = places.items()
            for group in stage:
                replica = group != owner
                params[group].append(_Param(name.key, tuple(pieces), replica))
        else:
            raise _refused(
                container, name.key, f"{len(places)} of {len(stage)} ranks of its stage hold it"
            )
    if _OUTPUT not in model:
        _add_copies(params, stages, owned.get(_Name(_EMBEDDING, None, None), {}))
    return params


def _groups(container: Container, buffers: Mapping[BucketKey, _Buffer]) -> dict[int, str]:
    """Return the group of buffers of each rank."""
    groups: dict[int, str] = {}
    for bucket, buffer in buffers.items():
        for fragment in buffer.entry.fragments:
            rank = _rank(container, fragment.file)
            if groups.setdefault(rank, bucket.group) != bucket.group:
                raise _refused(container, bucket.group, f"rank {rank} has other optimizers too")
    return groups


def _add_copies(
    params: dict[str, list[_Param]],
    stages: Mapping[str, set[str]],
    places: Mapping[str, Sequence[_Piece]],
) -> None:
    """Add to other stages, behind all that they have, what only the embedding's has written."""
    owners = sorted(places, key=_number)
    for stage in {tuple(sorted(stage, key=_number)) for stage in stages.values()}:
        if len(stage) == len(owners) and not set(stage) & set(owners):
            for group, owner in zip(stage, owners, strict=True):
                copy = _Param(_EMBEDDING, tuple(places[owner]), is_replica=True)
                params[group].append(copy)


def _number(group: str) -> int:
    return int(group.rpartition("_")[2])


class _Name(NamedTuple):
    """What is a parameter of its own: a tensor, or a layer of a stack, or an expert of that."""

    key: str
    layer: int | None
    expert: int | None


def _name(entry: TensorEntry, box: Box, *, is_stack: bool) -> _Name:
    key, dim = entry.key.fqn, int(is_stack)
    layer = box.start[0] if is_stack else None
    apart = _EXPERTS in key and len(box.start) > dim + 1 and box.stop[dim] == box.start[dim] + 1
    return _Name(key, layer, box.start[dim] if apart else None)


def _in_order(model: Mapping[str, TensorEntry]) -> list[tuple[_Name, Fragment]]:
    """Return the chunks in order of the modules: layer after layer where keys are stacks.

    Experts that are modules of their own follow one another.
    """
    found: list[tuple[_Name, Fragment]] = []
    done: set[str] = set()
    stacks = {
        key: stack_of(key, entry.shape, (f.box for f in entry.fragments))
        for key, entry in model.items()
    }
    for key, entry in model.items():
        stack = stacks[key]
        if stack is None:
            found += [(_name(entry, f.box, is_stack=False), f) for f in entry.fragments]
        elif stack not in done:
            done.add(stack)
            members = [other for other in model if stacks[other] == stack]
            experts = min((i for i, k in enumerate(members) if _EXPERTS in k), default=0)
            chunks = []
            for place, other in enumerate(members):
                for fragment in model[other].fragments:
                    name = _name(model[other], fragment.box, is_stack=True)
                    block = (place, 0) if name.expert is None else (experts, name.expert)
                    chunks.append((name.layer or 0, block, place, fragment, name))
            found += [(name, fragment) for *_, fragment, name in sorted(chunks)]
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
    left: Sequence[_Param] = params
    for order, choose in (
        (params[::-1], _next),
        (params[::-1], _later),
        (params, _only),
    ):
        placed, left = _tried(container, buffers, masters, order, choose)
        if placed is not None and _is_only_way(container, buffers, placed, left):
            return placed
    raise _refused(
        container,
        left[0].key if left else group,
        f"where it is in the buffers of {group} does not follow from its weights: they are not "
        "there, or others have the same",
    )


def _tried(
    container: Container,
    buffers: Mapping[BucketKey, _Buffer],
    masters: Sequence[BucketKey],
    params: Sequence[_Param],
    choose: Callable[[Container, _Buffer, int, Sequence[_Param]], int | None],
) -> tuple[list[_Placed] | None, list[_Param]]:
    """Return where the parameters are as ``choose`` finds them, or None, and those not found."""
    left = list(params)
    skipped: list[_Param] = []
    placed: list[_Placed] = []
    for bucket, start in _starts(buffers, masters, placed):
        index = choose(container, buffers[bucket], start, left)
        if index is None:
            return None, skipped + left
        placed.append(_Placed(left.pop(index), bucket, start))
        if choose is _later:
            skipped += left[:index]
            del left[:index]
    return placed, skipped + left


def _is_only_way(
    container: Container,
    buffers: Mapping[BucketKey, _Buffer],
    placed: Sequence[_Placed],
    left: Sequence[_Param],
) -> bool:
    """Return whether no parameter that was not placed could be where another one was."""
    return not any(
        _holds(container, buffers[one.bucket], one.start, other) for other in left for one in placed
    )


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


def _next(container: Container, buffer: _Buffer, start: int, left: Sequence[_Param]) -> int | None:
    """Return 0 if the next parameter in order of the modules begins at ``start``."""
    return 0 if left and _holds(container, buffer, start, left[0]) else None


def _later(container: Container, buffer: _Buffer, start: int, left: Sequence[_Param]) -> int | None:
    """Return the next in order that begins at ``start``: those before it are not in a buffer."""
    return next((i for i, p in enumerate(left) if _holds(container, buffer, start, p)), None)


def _only(container: Container, buffer: _Buffer, start: int, left: Sequence[_Param]) -> int | None:
    """Return the parameter that begins at ``start`` if there is only one: order does not count.

    Ranks that share the saving may write the keys in another order.
    """
    found = [i for i, param in enumerate(left) if _holds(container, buffer, start, param)]
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
            expected = _weights(container, piece, skip, sample)
            if rounded(master, buffer.entry.dtype, piece.dtype) != expected:
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
