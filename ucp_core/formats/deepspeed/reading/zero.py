"""Reads ZeRO's files: which elements of which parameters each holds, for stages 1 to 3.

Stages 1 and 2 concatenate the shards of a group, pad, and cut the buffer over the ranks; stage 3
cuts each shard into parts of ``ceil(size / ranks)`` elements and concatenates the parts. Sources:
``state_dict`` of ``runtime/zero/stage_1_and_2.py``, ``runtime/bf16_optimizer.py`` and
``runtime/zero/stage3.py`` of DeepSpeed 0.14 to 0.19.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from ucp_core.errors import UnsupportedVersionError
from ucp_core.formats.deepspeed.keys import EXPERT
from ucp_core.formats.refusals import corrupt, two_saves
from ucp_core.formats.shared import Assembly, Rank, refusing_nonsense
from ucp_core.geometry import TensorKey
from ucp_core.torch_files import TensorRef, extents_of

Shapes = Mapping[str, tuple[int, ...]]

WEIGHT = "weight"
_STATE = "optimizer_state_dict"
_WEIGHTS = "single_partition_of_fp32_groups"
_WEIGHTS_ZERO3 = "fp32_flat_groups"
_MAPPINGS = "param_slice_mappings"


class Partition(NamedTuple):
    """A rank's part of one flat group (stage 1, 2) or sub-group (stage 3)."""

    file: str
    group: int  #: Number of the optimizer's group.
    #: The flat masters as ``weight``, and the optimizer's tensors, which are flat like the masters
    #: and may end with padding.
    flat: Mapping[str, TensorRef]
    #: The optimizer's numbers and 0-d tensors, such as ``step``.
    scalars: Mapping[str, TensorRef | float]
    #: ``(start, number of elements)`` in this partition by name; empty at stage 3.
    mapping: Mapping[str, tuple[int, int]] = MappingProxyType({})
    num_ranks: int = 0  #: Ranks that share the group; 0 if unknown.


class RankState(NamedTuple):
    """The content of one of ZeRO's files."""

    partitions: Sequence[Partition]  #: Its partitions in order.
    #: Hyper-parameters by group, with ``params``; empty if the file has none.
    groups: Sequence[Mapping[str, Any]]
    rest: Mapping[str, Any]  #: All other values in the file.


class Stage(NamedTuple):
    """One model-parallel rank: the open files of its data-parallel ranks."""

    rank: Rank  #: Stage and tensor-parallel rank.
    states: Sequence[RankState]  #: Content of the files by data-parallel rank.
    shapes: Sequence[Shapes]  #: Shapes of the parameters by group, in the order of flattening.
    where: str  #: The file with the shapes, for messages.
    data_before_expert: bool = False  #: Whether expert-parallel ranks are not neighbours.


def param_shapes(tree: Mapping[str, Any], where: str) -> list[dict[str, tuple[int, ...]]] | None:
    """Return shapes by group and name; None if the file has none."""
    value = tree.get("param_shapes")
    if value is None:
        return None
    with refusing_nonsense(f"{where}: param_shapes", "DeepSpeed"):
        groups = [value] if isinstance(value, dict) else value
        found = [{str(n): extents_of(shape) for n, shape in group.items()} for group in groups]
    names = list(chain.from_iterable(found))
    if len(set(names)) < len(names):
        raise corrupt(where, "param_shapes has a name in two groups")
    return found


def read_rank(tree: Mapping[str, Any], file: str, *, is_zero3: bool) -> RankState:
    """Return the content of one of ZeRO's files."""
    with refusing_nonsense(file, "DeepSpeed"):
        return _zero3(tree[_STATE], file) if is_zero3 else _zero12(tree[_STATE], file)


def _zero12(state: dict[str, Any], file: str) -> RankState:
    base = state["base_optimizer_state"]
    groups: list[Any] = []
    if isinstance(base, list):
        # ``elastic_checkpoint`` saves no hyper-parameters.
        step = state.get("base_optimizer_state_step")
        states = [dict(item) if step is None else {"step": step, **item} for item in base]
    else:
        groups = list(base["param_groups"])
        # A group has one tensor, which may have no state yet.
        states = [base["state"].get(g["params"][0], {}) if g["params"] else {} for g in groups]
    mappings = state[_MAPPINGS]
    paddings = state.get("group_paddings")
    counts = state.get("partition_count")
    found = []
    for index, (weight, own) in enumerate(zip(state[_WEIGHTS], states, strict=True)):
        padding = paddings[index] if paddings else None
        if groups and groups[index].get("use_muon"):
            # DeepSpeed (0.19.8) orthogonalises whole parameters, so a rank keeps the whole momentum
            # of each parameter that it has a part of.
            raise UnsupportedVersionError(
                f"{file}: Muon's momentum of group {index} is not cut like its masters, which is "
                "not supported; save at stage 3"
            )
        part = _partition((file, index), weight, own, padding)
        num_ranks = int(counts[index]) if counts else 0
        found.append(part._replace(mapping=_mapping(mappings[index]), num_ranks=num_ranks))
    known = {_WEIGHTS, "base_optimizer_state", _MAPPINGS, "base_optimizer_state_step"}
    return RankState(found, groups, {k: v for k, v in state.items() if k not in known})


def _mapping(items: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return start and size by name from stand-ins for ``fragment_address``."""
    found = {}
    for name, address in items.items():
        if isinstance(address.state, dict):
            start, count = address.state["start"], address.state["numel"]
        else:
            count, start = address.args
        start, count = extents_of((start, count))
        found[name] = (start, count)
    return found


def _zero3(state: dict[str, Any], file: str) -> RankState:
    inner, count = state[_STATE], state.get("partition_count", 0)
    groups = list(inner["param_groups"])
    group_of = {p: index for index, group in enumerate(groups) for p in group["params"]}
    num_ranks = count if isinstance(count, int) else max(count, default=0)
    found = []
    for index, weight in enumerate(state[_WEIGHTS_ZERO3]):
        own, group = inner["state"].get(index, {}), group_of.get(index, 0)
        found.append(_partition((file, group), weight, own, 0)._replace(num_ranks=num_ranks))
    known = {_WEIGHTS_ZERO3, _STATE}
    return RankState(found, groups, {k: v for k, v in state.items() if k not in known})


def _partition(
    place: tuple[str, int],
    weight: TensorRef,
    state: Mapping[str, Any],
    padding: int | None,
) -> Partition:
    """Return a partition with its slots and numbers; ``place`` is its file and group."""
    file, group = place
    if len(weight.shape) != 1 or weight.byte_strides is not None:
        raise corrupt(file, f"the masters of group {group} are not a flat tensor")
    size = weight.shape[0]
    flat = {WEIGHT: weight}
    scalars: dict[str, TensorRef | float] = {}
    for name, value in state.items():
        is_number = isinstance(value, int | float)
        if isinstance(value, TensorRef):
            is_number = not value.shape or (name == "step" and value.num_elements == 1)
        if is_number:
            scalars[name] = value
        elif (
            isinstance(value, TensorRef)
            and len(value.shape) == 1
            and value.byte_strides is None
            and value.shape[0] >= size
            and (padding is None or value.shape[0] in (size, size + padding))
        ):
            flat[name] = value
        elif value is not None:
            shape = list(value.shape) if isinstance(value, TensorRef) else type(value).__name__
            raise UnsupportedVersionError(
                f"{file}: optimizer state {name!r} of group {group} is {shape}, but the group has "
                f"{size} flat elements here: it fits only this partition and cannot be "
                "resharded; use an optimizer whose state is one value per element"
            )
    return Partition(file, group, flat, scalars)


def add_zero12(stage: Stage, found: Assembly) -> list[list[str]]:
    """Add the runs of stage 1 or 2; return the parameters of each group."""
    names: list[list[str]] = []
    for index, shapes in enumerate(stage.shapes):
        if any(index >= len(state.partitions) for state in stage.states):
            raise corrupt(stage.where, "it has parameters of more groups than one of ZeRO's files")
        names.append([])
        all_parts = [state.partitions[index] for state in stage.states]
        for parts, fqns in _families(stage, all_parts, shapes):
            names[-1] += fqns.values()
            done = dict.fromkeys(shapes, 0)
            for name, shape in shapes.items():
                for slot, ref in parts[0].flat.items():
                    found.shards.add_flat(TensorKey(fqns[name], slot), stage.rank, ref, shape)
            for part in parts:
                if strange := part.mapping.keys() - shapes.keys():
                    why = f"it has elements of {min(strange)}, which is not in {stage.where}"
                    raise two_saves(part.file, why)
                for name, (start, count) in part.mapping.items():
                    span = done[name], done[name] + count
                    done[name] += count
                    _add(stage, found, part, fqns[name], shapes[name], start, span)
    return names


def _families(
    stage: Stage, parts: Sequence[Partition], shapes: Shapes
) -> Iterator[tuple[Sequence[Partition], dict[str, str]]]:
    """Yield the parts of each flat buffer, in order, and the fqns of its parameters by name.

    A group of experts is cut over the ranks that hold the same experts. Every rank numbers its
    experts from 0, so the fqns have the numbers in the whole layer.
    """
    dp, num_ranks = len(parts), parts[0].num_ranks or len(parts)
    matches = {name: match for name in shapes if (match := EXPERT.fullmatch(name))}
    told = {part.num_ranks for part in parts}
    if len(told) > 1 or dp % num_ranks or (num_ranks != dp and not matches):
        raise two_saves(
            parts[0].file,
            f"group {parts[0].group} was cut over {', '.join(map(str, sorted(told)))} ranks, there "
            f"are {dp} data-parallel ranks",
        )
    if not matches:
        yield parts, {name: name for name in shapes}
        return
    # Layers may have different numbers of experts, and DeepSpeed may cut a large group within a
    # layer.
    local: dict[str, int] = defaultdict(int)
    for match in filter(None, map(EXPERT.fullmatch, chain.from_iterable(stage.shapes))):
        local[match[1]] = max(local[match[1]], 1 + int(match[2]))
    for ep_rank in range(dp // num_ranks):
        apart = parts[ep_rank :: dp // num_ranks]
        together = parts[ep_rank * num_ranks : (ep_rank + 1) * num_ranks]
        yield (
            together if stage.data_before_expert else apart,
            {name: name for name in shapes}
            | {n: f"{m[1]}{ep_rank * local[m[1]] + int(m[2])}{m[3]}" for n, m in matches.items()},
        )


def _add(
    stage: Stage,
    found: Assembly,
    part: Partition,
    fqn: str,
    shape: tuple[int, ...],
    start: int,
    span: tuple[int, int],
) -> None:
    """Add elements ``span`` of a shard, from ``start`` in a partition, and its numbers."""
    stop = start + span[1] - span[0]
    for slot, ref in part.flat.items():
        if stop > ref.shape[0]:
            raise corrupt(
                part.file,
                f"{fqn} ({slot}) should have elements up to {stop}, but the rank's part of group "
                f"{part.group} has {ref.shape[0]}",
            )
        found.shards.add_flat(TensorKey(fqn, slot), stage.rank, ref, shape, start, span)
    for slot, value in part.scalars.items():
        found.scalars.add(TensorKey(fqn, slot), value)


def share(total: int, degree: int, rank: int) -> tuple[int, tuple[int, int]]:
    """Return the size of each rank's share of a tensor at stage 3, and the elements in it."""
    size = -(-total // degree)
    return size, (min(total, rank * size), min(total, (rank + 1) * size))


def add_zero3(stage: Stage, found: Assembly) -> list[list[str]]:
    """Add the runs of stage 3; return the parameters of each group."""
    names: dict[int, list[str]] = defaultdict(list)
    for dp_rank, state in enumerate(stage.states):
        for part, fqn, shape, start, span in _subgroups(stage, state, dp_rank):
            _add(stage, found, part, fqn, shape, start, span)
            if dp_rank == 0:
                names[part.group].append(fqn)
    return [names[index] for index in range(max(names, default=-1) + 1)]


def _subgroups(
    stage: Stage, state: RankState, dp_rank: int
) -> Iterator[tuple[Partition, str, tuple[int, ...], int, tuple[int, int]]]:
    """Yield sub-group, name and shape of each parameter, and a rank's share: start and elements.

    DeepSpeed names the parameters by sub-group, some versions by group. Only the former shows the
    sub-group of parameters without elements.
    """
    dp = len(stage.states)
    left = [deque(shapes.items()) for shapes in stage.shapes]
    if by_group := len(left) != len(state.partitions):
        left = [deque(chain.from_iterable(left))] * max(1, len(state.partitions))
    for number, (part, own) in enumerate(zip(state.partitions, left, strict=False), start=1):
        if part.num_ranks not in (0, dp):
            raise two_saves(
                part.file,
                f"it was cut over {part.num_ranks} ranks (as MiCS does, which is not supported), "
                f"but there are {dp} data-parallel ranks",
            )
        size, start = part.flat[WEIGHT].shape[0], 0
        is_last = number == len(state.partitions) or not by_group
        while own and (start < size or is_last):
            name, shape = own.popleft()
            extent, span = share(prod(shape), dp, dp_rank)
            yield part, name, shape, start, span
            start += extent
        if start < size:
            raise corrupt(
                part.file, f"it holds {size - start} elements more than named in {stage.where}"
            )
    if any(left):
        raise corrupt(stage.where, "it names parameters, but one of ZeRO's files has no sub-group")
