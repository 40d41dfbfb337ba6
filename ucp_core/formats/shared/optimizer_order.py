"""Finds the model's parameter for each number of a torch optimizer.

A torch optimizer numbers its parameters group by group. Within a group they have the model's
order, which their shapes must fit in one way only.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ucp_core.errors import PatternError
from ucp_core.formats.refusals import corrupt
from ucp_core.formats.shared.flat_buffers import is_master_of
from ucp_core.storage import Store
from ucp_core.torch_files import TensorRef

Shape = tuple[int, ...]

#: Advice to the user.
_REMEDY = (
    "make the optimizer from the trained parameters of model.named_parameters(), so that it keeps "
    "their names, or save with a distributed optimizer (ZeRO stage 1; torch_dist of Megatron)"
)


def largest_shape(state: Mapping[str, Any]) -> Shape | None:
    """Return the shape of the largest slot of a parameter's state; None if it has none.

    Among slots of one element, one with dims has the shape of its parameter.
    """
    refs = [v for slot, v in state.items() if isinstance(v, TensorRef) and slot != "step"]
    best = max(refs, key=lambda ref: (ref.num_elements, len(ref.shape)), default=None)
    return None if best is None else best.shape


def shapes_by_group(
    groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any], masters: Sequence[Any] | None
) -> list[list[Shape | None]]:
    """Return the shape of each numbered parameter: that of its master, or of its state."""
    if masters:
        return [[master.shape for master in group] for group in masters]
    return [[largest_shape(state.get(n, {})) for n in group["params"]] for group in groups]


def check_master(
    store: Store,
    directory: str,
    master: TensorRef,
    start: int,
    weight: TensorRef,
    place: str,
) -> None:
    """Raise an error unless a master rounds to the weight that its number leads to.

    Args:
        start: Number of its first element in ``master``, which may hold more parameters.
        place: The group and the name that it has by its number, for messages.
    """
    if not is_master_of(store, directory, master, start, weight):
        raise unclear(
            master.file,
            f"by order, names and shapes a master of {place}, but it does not round to its "
            "weights: the group has an order of its own, or the file mixes two saves",
        )


def assign(
    wanted: Sequence[Sequence[Shape | None]],
    params: Sequence[tuple[str, Shape]],
    file: str,
) -> list[list[str]]:
    """Return the names of every group's parameters: each group has the model's order.

    A group with as many parameters as the model has all of them. Otherwise the shapes of each group
    must fit the model's order in one way only; parameters in no group are frozen.

    Args:
        wanted: By group, the shape of each parameter's state, or None.
        params: Names and shapes in the model's order.
        file: The file, for messages.
    """
    shapes = [shape for _, shape in params]
    count = sum(len(group) for group in wanted)
    is_all = len(wanted) == 1 and count == len(params)
    if is_all and (list(wanted[0]) == shapes or Counter(wanted[0]) != Counter(shapes)):
        for (name, shape), other in zip(params, wanted[0], strict=True):
            # Factored state is smaller than its parameter, never larger.
            if other is not None and prod(other) > prod(shape):
                raise corrupt(file, f"{name} is {list(shape)}, but its state is {list(other)}")
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
            )
    taken = Counter(place for first, _ in places for place in first)
    twice = [params[place][0] for place, times in taken.items() if times > 1]
    if twice:
        raise unclear(file, f"by the shapes, two groups would have {twice[0]}")
    return [[params[place][0] for place in first] for first, _ in places]


def _first(group: Sequence[Shape | None], shapes: Sequence[Shape]) -> list[int]:
    places: list[int] = []
    for place, shape in enumerate(shapes):
        if len(places) < len(group) and shape == group[len(places)]:
            places.append(place)
    return places


def unclear(file: str, why: str) -> PatternError:
    """Return the error for state that cannot be matched to parameters."""
    return PatternError(
        f"{file}: the optimizer does not say which state belongs to which parameter, and this "
        f"cannot be found: {why}; {_REMEDY}",
        why=why,
    )
