"""Which parameters an optimizer without ZeRO has, where a file says so by itself.

Torch's optimizers keep the names of parameters that they were given with (torch 2.6 and later).
DeepSpeed's ``FP16_Optimizer`` makes the trained parameters of a group parts of one flat tensor of
the model's dtype, in its own order, and ``torch.save`` keeps what lies in one storage together: a
frozen parameter is in another one, whatever its values are.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from ucp_core.formats.deepspeed.reading.plain_pipeline import INNER
from ucp_core.formats.shared import is_master_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucp_core.storage import Store
    from ucp_core.torch_files import TensorRef

    Params = Sequence[tuple[str, TensorRef]]

#: What torch's optimizers call the names of a group.
NAMES = "param_names"


def told_names(tree: Mapping[str, Any], params: Params) -> list[list[str]] | None:
    """Return the names that an optimizer keeps, by group; None unless all are the model's.

    Those of frozen parameters can be among them.
    """
    inner = tree.get(INNER, tree)
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return None
    names = [group.get(NAMES) for group in groups]
    if not names or not all(isinstance(group, list) for group in names):
        return None
    told = [[str(name) for name in group] for group in names]
    joined = [name for group in told for name in group]
    is_of_model = {name for name, _ in params}.issuperset(joined)
    return told if is_of_model and len(set(joined)) == len(joined) else None


def names_by_storage(
    store: Store, directory: str, flats: Sequence[TensorRef], params: Params
) -> dict[int, list[str]] | None:
    """Return the parameters of each flat group, in order, by where the model has them.

    Args:
        store: Where.
        directory: Of the files.
        flats: The masters of each group.
        params: Names and the model's weights.

    Returns:
        None unless every group is the masters of just one storage.
    """
    stored: dict[tuple[str, int], list[tuple[int, str, TensorRef]]] = defaultdict(list)
    for name, ref in params:
        if ref.extent is not None and ref.num_elements:
            start = ref.offset_bytes - ref.extent.offset_bytes
            stored[ref.file, ref.extent.offset_bytes].append((start, name, ref))
    found: dict[int, list[str]] = {}
    for index, flat in enumerate(flats):
        fitting = [
            [name for _, name, _ in held]
            for held in map(sorted, stored.values())
            if _fills(store, directory, flat, held)
        ]
        if len(fitting) != 1:
            return None
        found[index] = fitting[0]
    joined = [name for names in found.values() for name in names]
    return found if len(set(joined)) == len(joined) else None


def _fills(
    store: Store, directory: str, flat: TensorRef, held: Sequence[tuple[int, str, TensorRef]]
) -> bool:
    """Return whether the parameters of a storage fill it, and have all of a group's masters."""
    end = count = 0
    for start, _, ref in held:
        if start != end or not is_master_of(store, directory, flat, count, ref):
            return False
        end += ref.num_bytes
        count += ref.num_elements
    extent = held[0][2].extent
    return extent is not None and end == extent.num_bytes and count == flat.num_elements
