"""Finds parameters in the flat buffers of Megatron's distributed optimizer.

In the form ``dp_reshardable`` a buffer holds the parameters of one model-parallel rank. The
metadata list the model's keys in the order of its modules; ``shared.flat_buffers`` computes the
layout. The reader refuses a buffer that does not fit in length and values.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import add
from typing import NamedTuple

from ucp_core.errors import UnsupportedVersionError
from ucp_core.formats.dcp import Container
from ucp_core.formats.megatron_core.key_names import BucketKey, stack_of
from ucp_core.formats.shared import Buffer, Param, lay_out
from ucp_core.geometry import (
    DTYPE_BYTES,
    Box,
    Extent,
    Fragment,
    TensorEntry,
    TensorKey,
    flat_range,
    prove_entry,
)
from ucp_core.numerics import FLOATS

_FILE_RANK = re.compile(r"(?:.*/)?__(\d+)_\d+\.distcp")
#: Experts have an optimizer of their own if their ranks differ from the other parameters' ranks.
_EXPERTS = ".experts."
_CHAIN = re.compile(r"chained_(\d+)\.")
#: The last stage has a copy of the embedding if the output layer is tied to it.
_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"


def decoded(
    container: Container,
    buckets: Mapping[BucketKey, str],
    models: Sequence[str],
) -> tuple[list[TensorEntry], dict[str, tuple[Extent, ...]]]:
    """Return the entries in flat buffers by the model's keys, and their checksums.

    Args:
        models: The model's keys, in order.
    """
    named = {key: TensorKey(key, "weight") for key in models}
    model = {key.fqn: entry for key, entry in container.entries(named)[0].items()}
    for key, entry in model.items():
        if entry.dtype not in FLOATS or any(f.strides is not None for f in entry.fragments):
            raise _refused(container, key, f"weights in {entry.dtype} cannot be compared")
    flat, extents = container.entries({key: TensorKey(key, "flat") for key in buckets.values()})
    buffers = {
        bucket: Buffer(container.store, container.directory, flat[TensorKey(key, "flat")])
        for bucket, key in buckets.items()
    }
    fragments: dict[TensorKey, list[Fragment]] = defaultdict(list)
    for chain, weights in _by_chain(buffers, model):
        params = _by_group(container, chain, weights)
        for group in sorted({bucket.group for bucket in chain}):
            own = {bucket: buffer for bucket, buffer in chain.items() if bucket.group == group}
            for param, master, start in _laid_out(container, group, own, params.get(group, ())):
                for bucket, buffer in own.items():
                    if bucket[:3] == master[:3]:
                        name = TensorKey(param.key, bucket.slot)
                        fragments[name] += _fragments(param, start, buffer)
    entries = []
    for name, found in fragments.items():
        whole = model[name.fqn]
        dtype = buffers[next(b for b in buffers if b.slot == name.slot)].dtype
        parts = tuple(sorted(found))
        entries.append(TensorEntry(key=name, dtype=dtype, shape=whole.shape, fragments=parts))
        prove_entry(entries[-1])
    return entries, extents


def _by_chain(
    buffers: Mapping[BucketKey, Buffer], model: Mapping[str, TensorEntry]
) -> list[tuple[dict[BucketKey, Buffer], dict[str, TensorEntry]]]:
    """Return the buffers of each chained optimizer, and the weights that may be in them.

    The last of several optimizers has the experts; a stage without experts has only one optimizer.
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
    buffers: Mapping[BucketKey, Buffer],
    model: Mapping[str, TensorEntry],
) -> dict[str, list[Param]]:
    """Return the parameters of each model-parallel rank, in the order of its modules.

    A rank's files hold its buffers and its shards of the model. Only one rank's files hold the
    tensors that all ranks of a stage share.
    """
    groups = _groups(container, buffers)
    owned: dict[_Name, dict[str, list[Fragment]]] = {}
    for name, fragment in _in_order(model):
        rank = _rank(container, fragment.file)
        if rank not in groups:
            raise _refused(container, name.key, f"rank {rank} wrote no buffer")
        places = owned.setdefault(name, {})
        places.setdefault(groups[rank], []).append(fragment)
    stages = _stages(set(groups.values()), [set(places) for places in owned.values()])
    params: dict[str, list[Param]] = defaultdict(list)
    for name, places in owned.items():
        stage, dtype = stages[next(iter(places))], model[name.key].dtype
        if len(places) == len(stage):
            for group, pieces in places.items():
                params[group].append(Param(name.key, dtype, tuple(pieces)))
        elif len(places) == 1:
            ((owner, pieces),) = places.items()
            for group in stage:
                params[group].append(Param(name.key, dtype, tuple(pieces), group != owner))
        else:
            raise _refused(
                container, name.key, f"{len(places)} of {len(stage)} ranks of its stage hold it"
            )
    if _OUTPUT not in model:
        _add_copies(params, stages, owned.get(_Name(_EMBEDDING, None, None), {}), model)
    return params


def _groups(container: Container, buffers: Mapping[BucketKey, Buffer]) -> dict[int, str]:
    """Return the group of buffers of each rank."""
    groups: dict[int, str] = {}
    for bucket, buffer in buffers.items():
        for fragment in buffer.fragments:
            rank = _rank(container, fragment.file)
            if groups.setdefault(rank, bucket.group) != bucket.group:
                raise _refused(container, bucket.group, f"rank {rank} also has other optimizers")
    return groups


def _add_copies(
    params: dict[str, list[Param]],
    stages: Mapping[str, set[str]],
    places: Mapping[str, Sequence[Fragment]],
    model: Mapping[str, TensorEntry],
) -> None:
    """Append the embedding's tied weight to the stages that did not write it."""
    owners = sorted(places, key=_number)
    for stage in {tuple(sorted(stage, key=_number)) for stage in stages.values()}:
        if len(stage) == len(owners) and not set(stage) & set(owners):
            for group, owner in zip(stage, owners, strict=True):
                dtype, own = model[_EMBEDDING].dtype, tuple(places[owner])
                params[group].append(Param(_EMBEDDING, dtype, own, is_replica=True))


def _number(group: str) -> int:
    return int(group.rpartition("_")[2])


class _Name(NamedTuple):
    """A parameter: a tensor, a layer of a stack, or an expert of that layer."""

    key: str
    layer: int | None
    expert: int | None


def _name(entry: TensorEntry, box: Box, *, is_stack: bool) -> _Name:
    key, dim = entry.key.fqn, int(is_stack)
    layer = box.start[0] if is_stack else None
    apart = _EXPERTS in key and len(box.start) > dim + 1 and box.stop[dim] == box.start[dim] + 1
    return _Name(key, layer, box.start[dim] if apart else None)


def _in_order(model: Mapping[str, TensorEntry]) -> list[tuple[_Name, Fragment]]:
    """Return the chunks in the order of the modules, layer after layer.

    Experts that are separate modules follow one another.
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
    """Return the ranks of each rank's pipeline stage, which share tensors."""
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
        raise _refused(container, file, "the file's name does not contain a rank")
    return int(match[1])


def _laid_out(
    container: Container,
    group: str,
    buffers: Mapping[BucketKey, Buffer],
    params: Sequence[Param],
) -> list[tuple[Param, BucketKey, int]]:
    """Return the bucket and the first element of a rank's parameters, by length and values."""
    masters = sorted(bucket for bucket in buffers if bucket.slot == "weight")
    if not masters:
        raise _refused(container, group, "the buffers hold no fp32 weights")
    joined = next((one.key for one in params if _EXPERTS in one.key and one.num_experts > 1), None)
    if joined is not None:
        # Megatron's ``GroupedMLP`` transposes them.
        raise _refused(container, joined, "the experts of a rank are one parameter there")

    def refused(number: int | None, why: str) -> UnsupportedVersionError:
        key = group if number is None else params[number].key
        return _refused(container, key, f"the buffers of {group} do not show its place: {why}")

    places = lay_out(
        [param.num_elements for param in params],
        [buffers[bucket].num_elements for bucket in masters],
        lambda number, place: buffers[masters[place.bucket]].holds(place.start, params[number]),
        refused=refused,
    )
    return [(params[n], masters[at.bucket], at.start) for n, at in places.items()]


def _fragments(param: Param, low: int, buffer: Buffer) -> Iterator[Fragment]:
    """Yield one parameter's fragments in a buffer of its bucket, from an element on."""
    itemsize = DTYPE_BYTES[buffer.dtype]
    for box in param.boxes:
        for start, stop, file, at in buffer.cut(low, low + box.num_elements):
            offset = at
            for local in flat_range(box.shape, start - low, stop - low):
                begin = tuple(map(add, local.start, box.start))
                inner = Box(begin, tuple(map(add, local.stop, box.start)))
                size = local.num_elements * itemsize
                yield Fragment(inner, file, offset, size, None, (), param.is_replica)
                offset += size
        low += box.num_elements


def _refused(container: Container, what: str, why: str) -> UnsupportedVersionError:
    return UnsupportedVersionError(
        f"{container.where}: {what}: {why}, so the parameters in the flat buffers of the "
        "distributed optimizer (dp_reshardable) cannot be found: load it with Megatron and "
        "save it with --dist-ckpt-optim-fully-reshardable",
        path=container.where,
    )
