"""Finds the model's parameter for each number of a torch optimizer.

Pure. A torch optimizer numbers its parameters group by group. Within a group they have the model's
order. Their shapes must prove which group has which parameters.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

from ucp_core.errors import CheckpointCorruptError, PatternError
from ucp_core.torch_files import TensorRef

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Shape = tuple[int, ...]

#: Advice to the user if the optimizer can keep names, and if it cannot.
NAME_THEM = (
    "make the optimizer of the trained ones of model.named_parameters(), whose names it keeps "
    "(torch 2.6 or later), or save with one that is distributed (ZeRO stage 1)"
)
DISTRIBUTE_IT = "save with an optimizer that is distributed (ZeRO stage 1)"


def largest_shape(state: Mapping[str, Any]) -> Shape | None:
    """Return the shape of the largest slot of a parameter's state; None if it has none.

    Among slots of one element, one with dims has the shape of its parameter.
    """
    refs = [v for slot, v in state.items() if isinstance(v, TensorRef) and slot != "step"]
    best = max(refs, key=lambda ref: (ref.num_elements, len(ref.shape)), default=None)
    return None if best is None else best.shape


def check_numbers(
    groups: Sequence[Mapping[str, Any]], masters: Sequence[Any] | None, file: str
) -> None:
    """Check that no parameter is numbered twice, and that each has a master if any has.

    Args:
        masters: Masters by group, if there are any.
        file: The file, for errors.

    Raises:
        CheckpointCorruptError: The file was changed, or combines two files.
    """
    numbers = Counter(number for group in groups for number in group["params"])
    twice = [number for number, times in numbers.items() if times > 1]
    if twice:
        raise CheckpointCorruptError(
            f"{file}: the optimizer has parameter {twice[0]} more than once: the file was changed, "
            "or combines two files; use another checkpoint",
            file=file,
        )
    counts = [len(group["params"]) for group in groups]
    if masters is not None and list(map(len, masters)) != counts:
        raise CheckpointCorruptError(
            f"{file}: the optimizer's groups have {counts} parameters, but "
            f"{list(map(len, masters))} masters: the file was changed, or combines two files; use "
            "another checkpoint",
            file=file,
        )


def assign(
    wanted: Sequence[Sequence[Shape | None]],
    params: Sequence[tuple[str, Shape]],
    file: str,
    remedy: str = DISTRIBUTE_IT,
) -> dict[int, list[str]]:
    """Return the names of every group's parameters, in order.

    One group with as many parameters as the model has the model's order, unless its shapes have
    another order. Otherwise all parameters of a shape must be in one group. They then have the
    model's order, unless shapes prove another order of this group. Or the shapes of each group, in
    order, must fit the model in one way only; the other parameters are frozen.

    Args:
        wanted: By group, the shape of each parameter's state, or None.
        params: Names and shapes in the model's order.
        file: The file, for errors.
        remedy: Advice to the user, for errors.

    Raises:
        PatternError: The shapes do not decide.
        CheckpointCorruptError: A state is larger than the parameter at its place.
    """
    count = sum(len(group) for group in wanted)
    if len(wanted) == 1 and count == len(params) and not _is_moved(wanted[0], params):
        for (name, shape), other in zip(params, wanted[0], strict=True):
            # Factored state is smaller than its parameter, never larger.
            if other is not None and prod(other) > prod(shape):
                raise CheckpointCorruptError(
                    f"{file}: {name} is {list(shape)}, but the optimizer's state at its place is "
                    f"{list(other)}",
                    file=file,
                    fqn=name,
                )
        return {0: [name for name, _ in params]}
    try:
        return _by_shape(wanted, params, file, remedy)
    except PatternError:
        found = _by_order(wanted, params)
        if found is None:
            raise
        return found


def _by_order(
    wanted: Sequence[Sequence[Shape | None]], params: Sequence[tuple[str, Shape]]
) -> dict[int, list[str]] | None:
    """Return the names if the shapes of every group fit the model's order in one way only."""
    shapes = [shape for _, shape in params]
    taken: set[int] = set()
    for group in wanted:
        first, last = _places(group, shapes), _places(group[::-1], shapes[::-1])
        if first is None or last is None or first != [len(shapes) - 1 - p for p in last[::-1]]:
            return None
        if taken & set(first):
            return None
        taken |= set(first)
    return {i: [params[p][0] for p in _places(g, shapes) or ()] for i, g in enumerate(wanted)}


def _places(group: Sequence[Shape | None], shapes: Sequence[Shape]) -> list[int] | None:
    """Return the first places in the model where a group's shapes follow; None if they do not."""
    places = []
    at = 0
    for other in group:
        while at < len(shapes) and shapes[at] != other:
            at += 1
        if at == len(shapes):
            return None
        places.append(at)
        at += 1
    return places


def _is_moved(group: Sequence[Shape | None], params: Sequence[tuple[str, Shape]]) -> bool:
    """Return whether a group has the model's shapes in another order."""
    shapes = [shape for _, shape in params]
    return list(group) != shapes and Counter(group) == Counter(shapes)


def _by_shape(
    wanted: Sequence[Sequence[Shape | None]],
    params: Sequence[tuple[str, Shape]],
    file: str,
    remedy: str,
) -> dict[int, list[str]]:
    names: dict[Shape | None, list[str]] = defaultdict(list)
    for name, shape in params:
        names[shape].append(name)
    places: dict[Shape | None, list[int]] = defaultdict(list)
    for index, group in enumerate(wanted):
        for other in group:
            places[other].append(index)
    if None in places:
        raise unclear(file, "some have no state that would tell their shape", remedy)
    for kind, groups in places.items():
        if len(set(groups)) > 1:
            raise unclear(file, f"parameters of shape {kind} are in several groups", remedy)
        if len(groups) != len(names[kind]):
            raise unclear(
                file,
                f"the model has {len(names[kind])} of shape {kind}, the optimizer {len(groups)}",
                remedy,
            )
    left = {shape: iter(names[shape]) for shape in places}
    found = {index: [next(left[other]) for other in group] for index, group in enumerate(wanted)}
    _check_order(wanted, found, params, file, remedy)
    return found


def _check_order(
    wanted: Sequence[Sequence[Shape | None]],
    found: Mapping[int, Sequence[str]],
    params: Sequence[tuple[str, Shape]],
    file: str,
    remedy: str,
) -> None:
    """Raise if a group has another order than the model, and repeats a shape."""
    place = {name: number for number, (name, _) in enumerate(params)}
    for index, names in found.items():
        shape, times = Counter(wanted[index]).most_common(1)[0] if names else (None, 0)
        if times > 1 and any(place[a] > place[b] for a, b in pairwise(names)):
            raise unclear(
                file,
                f"the parameters of group {index} are in another order than the model's, and "
                f"{times} of them are of shape {shape}",
                remedy,
            )


def unclear(file: str, why: str, remedy: str = DISTRIBUTE_IT) -> PatternError:
    """Return the error for state that cannot be matched to parameters."""
    return PatternError(
        f"{file}: the optimizer does not say which state belongs to which parameter, and that "
        f"cannot be told: {why}; {remedy}",
        file=file,
        why=why,
    )
