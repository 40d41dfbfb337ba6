"""Finds the model's parameter for each number of a torch optimizer.

Pure. A torch optimizer numbers its parameters group by group. Within a group they have the model's
order, which their shapes must fit in one way only.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ucp_core.errors import CheckpointCorruptError, PatternError
from ucp_core.torch_files import TensorRef

Shape = tuple[int, ...]

#: Advice to the user: for optimizers that can keep names, and for others.
NAME_THEM = (
    "make the optimizer from the trained parameters of model.named_parameters(), so that it "
    "keeps their names (torch 2.6 or later), or save with a distributed optimizer (ZeRO stage "
    "1)"
)
DISTRIBUTE_IT = "save with a distributed optimizer (ZeRO stage 1)"


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
    """Check that no parameter is numbered twice, and that all have masters if any has."""
    numbers = Counter(number for group in groups for number in group["params"])
    twice = [number for number, times in numbers.items() if times > 1]
    if twice:
        raise CheckpointCorruptError(
            f"{file}: the optimizer has parameter {twice[0]} more than once: the file was changed, "
            "or combines two files; use another checkpoint"
        )
    counts = [len(group["params"]) for group in groups]
    if masters is not None and list(map(len, masters)) != counts:
        raise CheckpointCorruptError(
            f"{file}: the optimizer's groups have {counts} parameters, but "
            f"{list(map(len, masters))} masters: the file was changed, or combines two files; use "
            "another checkpoint"
        )


def assign(
    wanted: Sequence[Sequence[Shape | None]],
    params: Sequence[tuple[str, Shape]],
    file: str,
    remedy: str = DISTRIBUTE_IT,
) -> list[list[str]]:
    """Return the names of every group's parameters: each group has the model's order.

    A group with as many parameters as the model has all of them. Otherwise the shapes of each group
    must fit the model's order in one way only; parameters in no group are frozen.

    Args:
        wanted: By group, the shape of each parameter's state, or None.
        params: Names and shapes in the model's order.
        file: The file, for messages.
        remedy: Advice to the user, for messages.
    """
    shapes = [shape for _, shape in params]
    count = sum(len(group) for group in wanted)
    is_all = len(wanted) == 1 and count == len(params)
    if is_all and (list(wanted[0]) == shapes or Counter(wanted[0]) != Counter(shapes)):
        for (name, shape), other in zip(params, wanted[0], strict=True):
            # Factored state is smaller than its parameter, never larger.
            if other is not None and prod(other) > prod(shape):
                raise CheckpointCorruptError(
                    f"{file}: {name} is {list(shape)}, but the optimizer's state at its place is "
                    f"{list(other)}"
                )
        return [[name for name, _ in params]]
    # The first and the last places in the model that fit each group's shapes in order.
    end = len(shapes) - 1
    places = [
        (_first(group, shapes), [end - at for at in _first(group[::-1], shapes[::-1])][::-1])
        for group in wanted
    ]
    for index, (first, last) in enumerate(places):
        if first != last or len(first) != len(wanted[index]):
            how = "in no way" if len(first) != len(wanted[index]) else "in several ways"
            raise unclear(
                file,
                f"the shapes of the {len(wanted[index])} parameters of group {index} fit those of "
                f"the model's {len(params)}, in order, {how}",
                remedy,
            )
    taken = Counter(place for first, _ in places for place in first)
    twice = [params[place][0] for place, times in taken.items() if times > 1]
    if twice:
        raise unclear(file, f"by the shapes, two groups would have {twice[0]}", remedy)
    return [[params[place][0] for place in first] for first, _ in places]


def _first(group: Sequence[Shape | None], shapes: Sequence[Shape]) -> list[int]:
    places: list[int] = []
    for place, shape in enumerate(shapes):
        if len(places) < len(group) and shape == group[len(places)]:
            places.append(place)
    return places


def unclear(file: str, why: str, remedy: str = DISTRIBUTE_IT) -> PatternError:
    """Return the error for state that cannot be matched to parameters."""
    return PatternError(
        f"{file}: the optimizer does not say which state belongs to which parameter, and this "
        f"cannot be found: {why}; {remedy}",
        why=why,
    )
