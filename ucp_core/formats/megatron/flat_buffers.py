"""Finds the parameters in the flat buffers of Megatron's distributed optimizer.

``distrib_optim.pt`` holds buffers without names or offsets: all buckets one after the other,
without the padding after each and without their ends. ``shared.flat_buffers`` computes the layout.
Source: ``get_parameter_state_dp_zero`` in ``distrib_optimizer.py`` of megatron-core 0.5 to 0.16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucp_core.errors import CheckpointCorruptError, PatternError
from ucp_core.formats.shared import is_master_of, lay_out
from ucp_core.torch_files import TensorRef

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucp_core.storage import Store

_FLAT = "param"
_NUMBERS = ("numel_unpadded",)


def buffers(
    tree: Any, where: str, place: tuple[int, int] = (0, 1)
) -> list[tuple[str, Mapping[str, TensorRef]]]:
    """Return every flat buffer: the dtype of its parameters, and its tensors by slot.

    Args:
        place: Number of the optimizer, and the number of chained optimizers.

    Raises:
        PatternError: The file has another form.
        CheckpointCorruptError: The file has no form that Megatron writes.
    """
    states = tree if isinstance(tree, list) else [tree]
    index, count = place
    if len(states) != count or not isinstance(states[index], dict):
        raise PatternError(
            f"{where} holds {len(states)} chained optimizers, the model's file {count}, so "
            f"number {index} cannot be found; save in torch_dist format",
            file=where,
        )
    state = states[index]
    if not state.get("buckets_coalesced"):
        raise PatternError(
            f"{where} is from megatron-core before 0.5; load it there and save again", file=where
        )
    found: list[tuple[str, Mapping[str, TensorRef]]] = []
    for index in sorted(key for key in state if isinstance(key, int)):
        for dtypes, slots in state[index].items():
            first = dtypes[0] if isinstance(dtypes, tuple) else dtypes
            refs = {k: v for k, v in slots.items() if k not in _NUMBERS}
            flat = refs.get(_FLAT)
            if not isinstance(flat, TensorRef) or any(
                not isinstance(ref, TensorRef) or ref.shape != flat.shape for ref in refs.values()
            ):
                raise CheckpointCorruptError(
                    f"{where}: buffer {index} does not hold flat tensors of one size", file=where
                )
            found.append((str(getattr(first, "name", first)).removeprefix("torch."), refs))
    return found


def find(
    store: Store, directory: str, flat: TensorRef, params: Sequence[tuple[str, TensorRef]]
) -> dict[str, int]:
    """Return where each trained parameter begins in a buffer; together the parameters fill it.

    Args:
        flat: The masters.
        params: Names and the model's weights, in the model's order.

    Raises:
        PatternError: Masters do not round to the model's weights, or the trained parameters cannot
            be determined.
    """

    def refused(number: int | None, why: str) -> PatternError:
        name, ref = ("", flat) if number is None else params[number]
        return PatternError(
            f"{flat.file}: {name or 'a part'} in {ref.file}: {why}: the files come from two "
            "saves, or the buffer has another form; save in torch_dist format",
            file=flat.file,
            fqn=name,
        )

    places = lay_out(
        [ref.num_elements for _, ref in params],
        [flat.num_elements],
        lambda number, place: is_master_of(store, directory, flat, place.start, params[number][1]),
        refused=refused,
        is_joined=True,
    )
    return {params[number][0]: place.start for number, place in places.items()}
