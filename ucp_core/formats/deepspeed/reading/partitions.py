"""Reads ZeRO's files: for every group, a rank's part of the flat buffer and its slots.

Sources: ``state_dict`` of ``runtime/zero/stage_1_and_2.py``, ``runtime/bf16_optimizer.py`` and
``runtime/zero/stage3.py`` of DeepSpeed 0.14 to 0.19.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ucp_core.errors import CheckpointCorruptError, UnsupportedVersionError
from ucp_core.torch_files import TensorRef

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_STATE = "optimizer_state_dict"
WEIGHTS = "single_partition_of_fp32_groups"
WEIGHTS_ZERO3 = "fp32_flat_groups"
MAPPINGS = "param_slice_mappings"
#: Muon's only slot.
MOMENTUM = "momentum_buffer"


class Partition(NamedTuple):
    """A rank's part of one flat group (stage 1, 2) or sub-group (stage 3)."""

    file: str
    weight: TensorRef  #: The flat masters.
    #: The optimizer's tensors, flat like the masters; they may end with padding.
    slots: Mapping[str, TensorRef]
    #: The optimizer's numbers and 0-d tensors, such as ``step``.
    scalars: Mapping[str, TensorRef | float]
    #: ``(start, number of elements)`` in this partition by name; None in old versions.
    mapping: Mapping[str, tuple[int, int]] | None
    num_ranks: int  #: Ranks that share the group; 0 if unknown.
    group: int  #: Number of the optimizer's group.
    #: Elements without the padding after the last parameter; None in old versions.
    num_held: int | None = None
    #: Muon's momentum, and whether it can be flat like the masters. If not, it holds one after the
    #: other the whole parameters that the partition has a part of.
    momentum: tuple[TensorRef, bool] | None = None

    @property
    def num_elements(self) -> int:
        """Return the number of elements, with padding if any tensor includes it."""
        return max(ref.shape[0] for ref in (self.weight, *self.slots.values()))


class RankState(NamedTuple):
    """The content of one of ZeRO's files."""

    partitions: Sequence[Partition]  #: Its partitions in order.
    #: Hyper-parameters by group, with ``params``; empty if the file has none.
    groups: Sequence[Mapping[str, Any]]
    rest: Mapping[str, Any]  #: All other values in the file.


def read_rank(tree: Mapping[str, Any], file: str, *, is_zero3: bool) -> RankState:
    """Return the content of one of ZeRO's files.

    Raises:
        CheckpointCorruptError: DeepSpeed does not write such a file.
        UnsupportedVersionError: The file holds optimizer state that cannot be resharded.
    """
    state = tree.get(_STATE)
    if not isinstance(state, dict):
        raise _bad(file, f"{_STATE} is missing")
    try:
        return _zero3(state, file) if is_zero3 else _zero12(state, file)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise _bad(file, f"{type(error).__name__} {error}") from error


def _bad(file: str, what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"{file} is not as DeepSpeed writes it: {what}", file=file)


def _zero12(state: dict[str, Any], file: str) -> RankState:
    if state[WEIGHTS] is None:
        raise _bad(file, f"{WEIGHTS} is None")
    weights = list(state[WEIGHTS])
    base = state["base_optimizer_state"]
    groups = [] if isinstance(base, list) else list(base["param_groups"])
    states = _elastic(base, state) if isinstance(base, list) else _states(base["state"], groups)
    if len(states) != len(weights):
        raise _bad(file, f"{len(weights)} groups of masters, {len(states)} of optimizer state")
    mappings = state.get(MAPPINGS)
    paddings = state.get("group_paddings") or [None] * len(weights)
    counts = state.get("partition_count") or [0] * len(weights)
    found = []
    for index, weight in enumerate(weights):
        _check_flat(weight, f"{WEIGHTS}[{index}]", file)
        kept, momentum = states[index], None
        if groups and groups[index].get("use_muon"):
            kept, momentum = _without_momentum(kept, weight, paddings[index])
        slots, scalars = _sorted_state(kept, weight, paddings[index], index, file)
        found.append(
            Partition(
                file=file,
                weight=weight,
                slots=slots,
                scalars=scalars,
                mapping=None if mappings is None else _mapping(mappings[index]),
                num_ranks=int(counts[index]),
                group=index,
                num_held=_num_held(state, weight.shape[0], paddings[index]),
                momentum=momentum,
            )
        )
    known = {WEIGHTS, "base_optimizer_state", MAPPINGS, "base_optimizer_state_step"}
    return RankState(found, groups, {k: v for k, v in state.items() if k not in known})


def _without_momentum(
    state: Mapping[str, Any], weight: TensorRef, padding: int | None
) -> tuple[Mapping[str, Any], tuple[TensorRef, bool] | None]:
    """Split off Muon's momentum, if it is a flat tensor of any size.

    DeepSpeed (0.19.8) orthogonalises whole parameters, so a rank keeps the whole momentum of each
    parameter that it has a part of. With the optimizer offloaded, a rank keeps only the momentum of
    its own elements.
    """
    value = state.get(MOMENTUM)
    if not isinstance(value, TensorRef) or len(value.shape) != 1 or value.byte_strides is not None:
        return state, None
    rest = {slot: other for slot, other in state.items() if slot != MOMENTUM}
    return rest, (value, _is_flat(value, weight.shape[0], padding))


def _num_held(state: Mapping[str, Any], size: int, padding: int | None) -> int | None:
    """Return the number of masters without padding; only BF16_Optimizer saves padding."""
    if padding is None:
        return None
    return size if "zero_stage" in state else size - padding


def _states(
    state: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the state of each group's only tensor, which may have no state yet."""
    return [state.get(group["params"][0], {}) if group["params"] else {} for group in groups]


def _elastic(base: list[Any], state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the states of ``elastic_checkpoint``, which saves no hyper-parameters."""
    step = state.get("base_optimizer_state_step")
    return [dict(item) if step is None else {"step": step, **item} for item in base]


def _mapping(items: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return start and size by name from stand-ins for ``fragment_address``."""
    found = {}
    for name, address in items.items():
        if isinstance(address.state, dict):
            start, count = address.state["start"], address.state["numel"]
        else:
            count, start = address.args
        if not (isinstance(start, int) and isinstance(count, int) and min(start, count) >= 0):
            raise TypeError(f"{MAPPINGS} has {start!r}, {count!r} for {name}")
        found[name] = (start, count)
    return found


def _zero3(state: dict[str, Any], file: str) -> RankState:
    inner = state[_STATE]
    groups = list(inner["param_groups"])
    weights = list(state[WEIGHTS_ZERO3])
    group_of = {p: index for index, group in enumerate(groups) for p in group["params"]}
    count = state.get("partition_count", 0)
    if state.get("ds_zero_partition_groups"):
        raise UnsupportedVersionError(
            f"{file}: experts of AutoEP under ZeRO-3 have their own groups of ranks, which is not "
            "supported; save at stage 1 or 2",
            file=file,
        )
    found = []
    for index, weight in enumerate(weights):
        _check_flat(weight, f"{WEIGHTS_ZERO3}[{index}]", file)
        slots, scalars = _sorted_state(inner["state"].get(index, {}), weight, 0, index, file)
        found.append(
            Partition(
                file=file,
                weight=weight,
                slots=slots,
                scalars=scalars,
                mapping=None,
                num_ranks=count if isinstance(count, int) else max(count, default=0),
                group=group_of.get(index, 0),
            )
        )
    known = {WEIGHTS_ZERO3, _STATE}
    return RankState(found, groups, {k: v for k, v in state.items() if k not in known})


def _check_flat(ref: Any, what: str, file: str) -> None:
    if not isinstance(ref, TensorRef) or len(ref.shape) != 1 or ref.byte_strides is not None:
        raise _bad(file, f"{what} is not a flat tensor")


def _sorted_state(
    state: Mapping[str, Any], weight: TensorRef, padding: int | None, index: int, file: str
) -> tuple[dict[str, TensorRef], dict[str, TensorRef | float]]:
    """Return the slots and the numbers of a group's state."""
    slots: dict[str, TensorRef] = {}
    scalars: dict[str, TensorRef | float] = {}
    size = weight.shape[0]
    for name, value in state.items():
        if isinstance(value, int | float):
            scalars[name] = value
        elif isinstance(value, TensorRef) and (
            not value.shape or (name == "step" and value.num_elements == 1)
        ):
            scalars[name] = value._replace(shape=(), strides=())
        elif isinstance(value, TensorRef) and _is_flat(value, size, padding):
            slots[name] = value
        elif value is not None:
            shape = list(value.shape) if isinstance(value, TensorRef) else type(value).__name__
            raise UnsupportedVersionError(
                f"{file}: optimizer state {name!r} of group {index} is {shape}, but the group has "
                f"{size} flat elements here: it fits only this partition and cannot be "
                "resharded; use an optimizer whose state is one value per element",
                file=file,
                slot=name,
            )
    return slots, scalars


def _is_flat(ref: TensorRef, size: int, padding: int | None) -> bool:
    if len(ref.shape) != 1 or ref.byte_strides is not None:
        return False
    if padding is None:
        return ref.shape[0] >= size
    return ref.shape[0] in (size, size + padding)
