"""Finds the parameters in the flat buffers of Megatron's distributed optimizer.

``distrib_optim.pt`` holds buffers without names or offsets. Megatron fills them with the parameters
in reverse order, each at the next multiple of 64 in its bucket, and omits the padding after the
last parameter of a bucket. The ends of buckets are not saved. But a master, rounded to the model's
dtype, is the model's weight: a few elements of each prove where it is.
Sources: ``distrib_optimizer.py`` (``get_parameter_state_dp_zero``) and
``param_and_grad_buffer.py`` of megatron-core 0.5 to 0.16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucp_core.errors import CheckpointCorruptError, PatternError
from ucp_core.formats.shared import is_master_of
from ucp_core.torch_files import TensorRef

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucp_core.storage import Store

#: Parameters begin at multiples of this, counted from their bucket.
_ALIGNMENT = 64
_FLAT = "param"
_NUMBERS = ("numel_unpadded",)


def buffers(
    tree: Any, where: str, place: tuple[int, int] = (0, 1)
) -> list[tuple[str, Mapping[str, TensorRef]]]:
    """Return every flat buffer: the dtype of its parameters, and its tensors by slot.

    Args:
        place: Number of the optimizer, and how many are chained.

    Raises:
        PatternError: It has another form.
        CheckpointCorruptError: It has no form of Megatron's.
    """
    states = tree if isinstance(tree, list) else [tree]
    index, count = place
    if len(states) != count or not isinstance(states[index], dict):
        raise PatternError(
            f"{where} is of {len(states)} chained optimizers, the model's file of {count}, of "
            f"which number {index} is looked for; save in torch_dist format",
            file=where,
        )
    state = states[index]
    if not state.get("buckets_coalesced"):
        raise PatternError(
            f"{where} is of megatron-core before 0.5; load it there and save again", file=where
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
    """Return where each trained parameter begins in a buffer; together they fill it.

    Args:
        flat: The masters.
        params: Names and the model's weights, in the model's order.

    Raises:
        PatternError: Masters do not round to the model's weights, or the trained parameters cannot
            be determined.
    """
    found: dict[str, int] = {}
    frozen: list[str] = []
    bucket = end = 0
    for name, ref in reversed(params):
        aligned = bucket + -(-(end - bucket) // _ALIGNMENT) * _ALIGNMENT
        for start in (aligned, end):
            if is_master_of(store, directory, flat, start, ref):
                bucket = bucket if start == aligned else start
                found[name] = start
                end = start + ref.num_elements
                break
        else:
            frozen.append(name)
    _check_frozen(store, directory, flat, params, found, frozen)
    if end != flat.num_elements:
        where = f"the parameters end at {end}, the buffer at {flat.num_elements}"
        if frozen:
            ref = dict(params)[frozen[0]]
            where += f", and the masters of {frozen[0]} are not the model's weights in {ref.file}"
        raise PatternError(
            f"{flat.file}: {where}: the files are of two saves, or the buffer is of another form; "
            "save in torch_dist format",
            file=flat.file,
            fqn=frozen[0] if frozen else "",
        )
    return found


def _check_frozen(
    store: Store,
    directory: str,
    flat: TensorRef,
    params: Sequence[tuple[str, TensorRef]],
    found: Mapping[str, int],
    frozen: Sequence[str],
) -> None:
    """Check that no parameter outside the buffer has the weights of one that is in it."""
    refs = dict(params)
    for name in frozen:
        for other, start in found.items():
            alike = refs[name].num_elements == refs[other].num_elements
            if alike and is_master_of(store, directory, flat, start, refs[name]):
                raise PatternError(
                    f"{flat.file}: one of {name} and {other}, whose weights are alike, was not "
                    "trained, and nothing says which; save in torch_dist format",
                    file=flat.file,
                    fqn=name,
                )
