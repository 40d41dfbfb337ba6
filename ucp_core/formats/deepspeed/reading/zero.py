"""Finds the shards and elements that each of ZeRO's files holds, for stages 1 to 3.

Pure. Stages 1 and 2 concatenate the shards of a group, pad, and cut the buffer over the ranks;
stage 3 cuts each shard into parts of ``ceil(size / ranks)`` elements and concatenates the parts.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

from ucp_core.errors import CheckpointCorruptError, UnsupportedVersionError
from ucp_core.formats.deepspeed.keys import EXPERT
from ucp_core.formats.deepspeed.reading.partitions import MOMENTUM
from ucp_core.formats.shared import Rank
from ucp_core.geometry import TensorKey
from ucp_core.torch_files import extents_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucp_core.formats.deepspeed.reading.partitions import Partition, RankState
    from ucp_core.formats.shared import Assembly
    from ucp_core.torch_files import TensorRef


@dataclass(slots=True)
class Stage:
    """One model-parallel rank: the open files of its data-parallel ranks."""

    rank: Rank  #: Stage and tensor-parallel rank.
    states: Sequence[RankState]  #: Content of the files by data-parallel rank.
    #: Shapes of the parameters by group, in the order of flattening.
    shapes: Sequence[Mapping[str, tuple[int, ...]]]
    where: str  #: The file with the shapes, for messages.
    data_before_expert: bool = False  #: Whether expert-parallel ranks are not neighbours.
    names: list[list[str]] = field(default_factory=list)


def add_zero12(stage: Stage, found: Assembly) -> None:
    """Add the runs of stage 1 or 2; ``stage.names`` gets the parameters of each group."""
    dp = len(stage.states)
    for index, shapes in enumerate(stage.shapes):
        parts = [_part(state, index, stage.where) for state in stage.states]
        names: list[str] = []
        for members, rename in _families(stage, index, parts, shapes, dp):
            _check_total(stage, index, [parts[d] for d in members], shapes)
            _add_group(stage, found, [parts[d] for d in members], shapes, rename)
            names += [rename.get(name, name) for name in shapes]
        stage.names.append(names)


def _check_total(
    stage: Stage, index: int, parts: Sequence[Partition], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise an error if there are masters without a named parameter."""
    held = [part.num_held for part in parts]
    if any(number is None for number in held):
        return
    between = stage.states[0].rest.get("param_alignment_paddings") or []
    padding = sum(between[index]) if index < len(between) else 0
    total = sum(prod(shape) for shape in shapes.values()) + padding
    if sum(number for number in held if number is not None) != total:
        raise CheckpointCorruptError(
            f"{stage.where} names parameters of {total} elements in group {index}, {parts[0].file} "
            f"and the files of other ranks hold {sum(n for n in held if n is not None)}",
            file=stage.where,
        )


def _part(state: RankState, index: int, where: str) -> Partition:
    if index >= len(state.partitions):
        raise CheckpointCorruptError(
            f"{state.partitions[0].file if state.partitions else where} has "
            f"{len(state.partitions)} groups, {where} has parameters of more groups",
            file=where,
        )
    return state.partitions[index]


def _families(
    stage: Stage,
    index: int,
    parts: Sequence[Partition],
    shapes: Mapping[str, tuple[int, ...]],
    dp: int,
) -> Iterator[tuple[list[int], dict[str, str]]]:
    """Yield the data-parallel ranks that share a flat buffer, and new names of its parameters.

    A group of experts is cut over the ranks that hold the same experts. Every rank numbers its
    experts from 0, so the new names have the numbers in the whole layer.
    """
    for part in parts:
        if part.num_ranks != parts[0].num_ranks:
            raise CheckpointCorruptError(
                f"{part.file}: group {index} was cut over {part.num_ranks} ranks, in "
                f"{parts[0].file} over {parts[0].num_ranks}: the folder mixes two saves",
                file=part.file,
            )
    num_ranks = parts[0].num_ranks or dp
    if not any(EXPERT.fullmatch(name) for name in shapes):
        if num_ranks != dp:
            raise CheckpointCorruptError(
                f"{parts[0].file}: group {index} was cut over {num_ranks} ranks, but there are "
                f"{dp} data-parallel ranks: the folder mixes two saves",
                file=parts[0].file,
            )
        yield list(range(dp)), {}
        return
    if dp % num_ranks:
        raise CheckpointCorruptError(
            f"{parts[0].file}: experts cut over {num_ranks} ranks do not fit {dp} data-parallel "
            "ranks",
            file=parts[0].file,
        )
    ep_degree = dp // num_ranks
    # Layers may have different numbers of experts, and DeepSpeed may cut a large group within a
    # layer.
    local: dict[str, int] = defaultdict(int)
    for match in filter(None, map(EXPERT.fullmatch, chain.from_iterable(stage.shapes))):
        local[match[1]] = max(local[match[1]], 1 + int(match[2]))
    for ep_rank in range(ep_degree):
        apart = range(ep_rank, dp, ep_degree)
        together = range(ep_rank * num_ranks, (ep_rank + 1) * num_ranks)
        rename = {name: _global_expert(name, ep_rank, local) for name in shapes}
        yield list(together if stage.data_before_expert else apart), rename


def _global_expert(name: str, ep_rank: int, local: Mapping[str, int]) -> str:
    """Return the name of an expert's parameter with its number in the whole layer."""
    match = EXPERT.fullmatch(name)
    if match is None:
        return name
    return f"{match[1]}{ep_rank * local[match[1]] + int(match[2])}{match[3]}"


def _add_group(
    stage: Stage,
    found: Assembly,
    parts: Sequence[Partition],
    shapes: Mapping[str, tuple[int, ...]],
    rename: Mapping[str, str],
) -> None:
    """Add one flat buffer, which ``parts`` hold in order."""
    done: dict[str, int] = defaultdict(int)
    size = max(part.num_elements for part in parts)
    for name, shape in shapes.items():
        fqn = rename.get(name, name)
        for slot, ref in _flat(parts[0]):
            found.shards.add_flat(TensorKey(fqn, slot), stage.rank, ref, shape)
    mappings = [
        _computed(shapes, number * size, (number + 1) * size)
        if part.mapping is None
        else part.mapping
        for number, part in enumerate(parts)
    ]
    for part, mapping in zip(parts, mappings, strict=True):
        starts = _momentum_starts(part, mapping, shapes)
        for name, (start, count) in mapping.items():
            if name not in shapes:
                raise CheckpointCorruptError(
                    f"{part.file} has elements of {name}, which is not in group {part.group} of "
                    f"{stage.where}: the folder mixes two saves",
                    file=part.file,
                    fqn=name,
                )
            fqn, begin = rename.get(name, name), done[name]
            done[name] += count
            _add(stage, found, part, fqn, shapes[name], start, begin, begin + count)
            if part.momentum is not None:
                key, (ref, _) = TensorKey(fqn, MOMENTUM), part.momentum
                at = start if starts is None else starts[name] + begin
                span = begin, begin + count
                found.shards.add_flat(key, stage.rank, ref, shapes[name], at, span)
    for name, shape in shapes.items():
        if done[name] != prod(shape):
            raise CheckpointCorruptError(
                f"{stage.where} gives {name} the shape {list(shape)} of {prod(shape)} "
                f"elements, ZeRO's files hold {done[name]} of them",
                file=stage.where,
                fqn=name,
            )


def _momentum_starts(
    part: Partition,
    mapping: Mapping[str, tuple[int, int]],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, int] | None:
    """Return where each parameter begins in Muon's momentum.

    None if it begins where its masters do.
    """
    if part.momentum is None:
        return None
    ref, is_flat = part.momentum
    names = sorted((n for n in mapping if n in shapes), key=lambda name: mapping[name][0])
    starts: dict[str, int] = {}
    total = 0
    for name in names:
        starts[name] = total
        total += prod(shapes[name])
    if total == sum(mapping[name][1] for name in names) and is_flat:
        return None
    if is_flat is (total == ref.num_elements):
        raise UnsupportedVersionError(
            f"{part.file}: Muon's momentum of group {part.group} has {ref.num_elements} elements, "
            f"which fits {'both' if is_flat else 'neither'} the {part.weight.num_elements} flat "
            f"elements there {'and' if is_flat else 'nor'} the {total} of whole parameters; save "
            "with another number of ranks",
            file=part.file,
            slot=MOMENTUM,
        )
    return None if is_flat else starts


def _computed(
    shapes: Mapping[str, tuple[int, ...]], low: int, high: int
) -> dict[str, tuple[int, int]]:
    """Return the mapping of a partition ``[low, high)`` that an old version did not save."""
    found = {}
    begin = 0
    for name, shape in shapes.items():
        end = begin + prod(shape)
        first, last = max(begin, low), min(end, high)
        if first < last:
            found[name] = (first - low, last - first)
        begin = end
    return found


def _flat(part: Partition) -> Iterator[tuple[str, TensorRef]]:
    yield "weight", part.weight
    yield from part.slots.items()


def _add(
    stage: Stage,
    found: Assembly,
    part: Partition,
    fqn: str,
    shape: tuple[int, ...],
    start: int,
    begin: int,
    end: int,
) -> None:
    """Add elements ``[begin, end)`` of a shard, from ``start`` in a partition, and numbers."""
    for slot, ref in _flat(part):
        if start + end - begin > ref.shape[0]:
            raise CheckpointCorruptError(
                f"{part.file}: {fqn} ({slot}) should have elements up to {start + end - begin}, "
                f"but the rank's part of group {part.group} has {ref.shape[0]}",
                file=part.file,
                fqn=fqn,
                slot=slot,
            )
        found.shards.add_flat(TensorKey(fqn, slot), stage.rank, ref, shape, start, (begin, end))
    for slot, value in part.scalars.items():
        found.scalars.add(TensorKey(fqn, slot), value)


def add_zero3(stage: Stage, found: Assembly) -> None:
    """Add the runs of stage 3; ``stage.names`` gets the parameters of each group."""
    dp = len(stage.states)
    for dp_rank, state in enumerate(stage.states):
        names: dict[int, list[str]] = defaultdict(list)
        for part, left, is_last in _subgroups(stage, state):
            if part.num_ranks not in (0, dp):
                raise CheckpointCorruptError(
                    f"{part.file} was cut over {part.num_ranks} ranks, but there are {dp} "
                    "data-parallel ranks: the folder mixes two saves, or is of MiCS",
                    file=part.file,
                )
            for fqn in _add_subgroup(stage, found, part, left, dp_rank):
                names[part.group].append(fqn)
            if is_last:
                names[part.group] += _add_empty(stage, found, part, left)
        if dp_rank == 0:
            stage.names += [names[index] for index in range(max(names, default=-1) + 1)]


def _subgroups(
    stage: Stage, state: RankState
) -> Iterator[tuple[Partition, Iterator[tuple[str, tuple[int, ...]]], bool]]:
    """Yield a rank's sub-groups, the parameters left for each, and whether these are its last ones.

    DeepSpeed names the parameters by sub-group. Only these names show the sub-group of parameters
    without elements.
    """
    if len(stage.shapes) == len(state.partitions):
        for part, shapes in zip(state.partitions, stage.shapes, strict=True):
            yield part, iter(shapes.items()), True
        return
    named = [item for shapes in stage.shapes for item in shapes.items()]
    if not state.partitions and named:
        raise CheckpointCorruptError(
            f"{stage.where} names {named[0][0]}, but one of ZeRO's files has no sub-group",
            file=stage.where,
            fqn=named[0][0],
        )
    left = iter(named)
    for number, part in enumerate(state.partitions, start=1):
        yield part, left, number == len(state.partitions)


def _add_empty(
    stage: Stage,
    found: Assembly,
    part: Partition,
    left: Iterator[tuple[str, tuple[int, ...]]],
) -> Iterator[str]:
    """Add the empty parameters after a sub-group's last element; yield their names."""
    for name, shape in left:
        if prod(shape):
            raise CheckpointCorruptError(
                f"{part.file} holds nothing of {name}, which is in {stage.where}",
                file=stage.where,
                fqn=name,
            )
        _add(stage, found, part, name, shape, 0, 0, 0)
        yield name


def _add_subgroup(
    stage: Stage,
    found: Assembly,
    part: Partition,
    left: Iterator[tuple[str, tuple[int, ...]]],
    dp_rank: int,
) -> Iterator[str]:
    """Add a sub-group: the next parameters, whose parts fill it; yield their names."""
    start, size, dp = 0, part.weight.shape[0], len(stage.states)
    while start < size:
        name, shape = next(left, ("", ()))
        if not name:
            raise CheckpointCorruptError(
                f"{part.file} holds {size - start} elements more than the parameters in "
                f"{stage.where}",
                file=part.file,
            )
        total = prod(shape)
        piece = -(-total // dp)
        begin, end = min(total, dp_rank * piece), min(total, (dp_rank + 1) * piece)
        if start + piece > size:
            raise CheckpointCorruptError(
                f"{part.file}: the sub-group ends inside {name}, but by {stage.where} each of "
                f"{dp} ranks holds {piece} elements of it",
                file=part.file,
                fqn=name,
            )
        _add(stage, found, part, name, shape, start, begin, end)
        start += piece
        yield name


def param_shapes(tree: Mapping[str, Any], where: str) -> list[dict[str, tuple[int, ...]]] | None:
    """Return shapes by group and name; None if the file has none.

    Raises:
        CheckpointCorruptError: The shapes are not in DeepSpeed's form, or a name is there twice.
    """
    value = tree.get("param_shapes")
    if value is None:
        return None
    groups = [value] if isinstance(value, dict) else value
    seen: set[str] = set()
    found: list[dict[str, tuple[int, ...]]] = []
    try:
        for group in groups:
            shapes = {str(name): extents_of(shape) for name, shape in group.items()}
            twice = seen & set(shapes)
            if twice:
                raise CheckpointCorruptError(
                    f"{where}: param_shapes has {min(twice)} in two groups", file=where
                )
            seen |= set(shapes)
            found.append(shapes)
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(
            f"{where}: param_shapes is not a list of shapes by name: {error}", file=where
        ) from error
    return found
