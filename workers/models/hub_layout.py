"""Stack the per-expert tensors of a Hugging Face MoE's files as ``transformers`` 5 has them.

The files of most MoEs have one tensor per matrix and expert (``experts.3.w1.weight``); the module
has one for all experts (``experts.gate_up_proj``). ``transformers`` declares this conversion for
each model type. This module only says which boxes of the new tensors the old ones are; it copies
nothing.
"""

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Final

from torch import nn

from ucp_core.geometry import Box, Fragment, TensorEntry, TensorKey
from ucp_core.language import rename
from ucp_core.manifest import Manifest
from workers.errors import TaskError

_WEIGHT: Final = "weight"
_MATRIX_DIMS: Final = 2


def as_in_module(manifest: Manifest, model: nn.Module, needed: Collection[str]) -> Manifest:
    """Return the checkpoint with the names and tensors that ``model`` has.

    Keep the tensors named in ``needed``, and those that no conversion turns into one of these. Only
    models of ``transformers`` have conversions.
    """
    for one in pretrained(model):
        manifest = _converted(manifest, one, needed)
    return manifest


def pretrained(model: nn.Module) -> Iterator[Any]:
    """Yield the outermost models of ``transformers`` in ``model``."""
    transformers: Any = sys.modules.get("transformers")
    if transformers is None:
        return
    if isinstance(model, transformers.PreTrainedModel):
        yield model
        return
    for child in model.children():
        yield from pretrained(child)


def _converted(manifest: Manifest, model: Any, needed: Collection[str]) -> Manifest:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    held = manifest.state_map.entries
    theirs = sorted({key.fqn for key in held if key.slot == _WEIGHT} - set(needed))
    if not theirs:
        return manifest
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if not isinstance(one, WeightRenaming)]
    ours = dict.fromkeys(needed, True)
    names: dict[str, str] = {}
    parts: dict[str, dict[str, list[str]]] = {}
    for name in theirs:
        new, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, ours)
        if new not in ours or TensorKey(new, _WEIGHT) in held:
            continue
        if pattern is None:
            names[name] = new
        else:
            parts.setdefault(new, {}).setdefault(pattern, []).append(name)
    entries = dict(held)
    for new, found in parts.items():
        converter = next(one for one in converters if found.keys() <= set(one.source_patterns))
        if _stacks_experts(converter):
            ordered = [found.get(pattern, []) for pattern in converter.source_patterns]
            entries[TensorKey(new, _WEIGHT)] = _stacked(entries, new, ordered)
            for name in chain(*ordered):
                del entries[TensorKey(name, _WEIGHT)]
    state_map = replace(manifest.state_map, entries=dict(sorted(entries.items())))
    return rename(replace(manifest, state_map=state_map), names)


def _stacks_experts(converter: Any) -> bool:
    """Return whether a conversion only stacks experts, and perhaps then joins matrices by rows."""
    found = [(type(one).__name__, one.dim) for one in converter.operations if hasattr(one, "dim")]
    rows = [("MergeModulelist", 0), ("Concatenate", 1)]
    return len(found) == len(converter.operations) and found in (rows[:1], rows)


def _stacked(
    entries: dict[TensorKey, TensorEntry], new: str, ordered: Sequence[Sequence[str]]
) -> TensorEntry:
    """Return a tensor ``new``, ``(experts, rows, columns)``, made of matrices ``(rows, columns)``.

    ``ordered`` has the names for each matrix of an expert, in row order.
    """
    found = [
        [
            entries[TensorKey(name, _WEIGHT)]
            for name in sorted(
                names, key=lambda one: [int(x) for x in one.split(".") if x.isdigit()]
            )
        ]
        for names in ordered
    ]
    kinds = {(len(one), each.shape, each.dtype, each.copies) for one in found for each in one}
    if len(kinds) != 1 or not all(ordered) or len(found[0][0].shape) != _MATRIX_DIMS:
        first = min(name for names in ordered for name in names)
        differing = sorted(f"{count} of {dtype}{list(shape)}" for count, shape, dtype, _ in kinds)
        raise TaskError(
            f"run.init_from: cannot build {new} from the matrices of its experts (such as {first}):"
            f" some are missing or differ in shape or dtype: {', '.join(differing)}",
            fqn=new,
        )
    ((num_experts, (rows, columns), dtype, copies),) = kinds
    fragments: list[Fragment] = []
    for expert in range(num_experts):
        for number, matrices in enumerate(found):
            first_row = number * rows
            for one in matrices[expert].fragments:
                (top, left), (bottom, right) = one.box
                start, stop = (
                    (expert, first_row + top, left),
                    (expert + 1, first_row + bottom, right),
                )
                strides = None if one.strides is None else (0, *one.strides)
                fragments.append(one._replace(box=Box(start, stop), strides=strides))
    return TensorEntry(
        key=TensorKey(new, _WEIGHT),
        dtype=dtype,
        shape=(num_experts, rows * len(found), columns),
        fragments=tuple(fragments),
        copies=copies,
    )
