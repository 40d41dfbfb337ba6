"""Splits the experts of ``transformers`` as DeepSpeed's MoE layers have them. Pure.

``transformers`` 5 has one tensor for all experts of a layer; DeepSpeed has a module for each
expert.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from ucp_core.formats.deepspeed.writing.streams import StackPart
from ucp_core.formats.shared import stacked_experts
from ucp_core.geometry import TensorKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ucp_core.formats.deepspeed.writing.model import Model
    from ucp_core.geometry import TensorEntry

_MATRICES = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
_ROUTERS = {"weight": "wg.weight"}
_ROUTER = re.compile(r"(?P<layer>.+)\.gate\.(?P<rest>.+)")


def with_single_experts(model: Model, ep: int) -> Model:
    """Return the model with a tensor for each matrix of each expert, in DeepSpeed's names.

    Without expert-parallel ranks the model stays as it is, as ``transformers`` itself runs on
    DeepSpeed.
    """
    if ep == 1:
        return model
    names = (*model.parameters, *model.frozen, *model.buffers)
    fused = stacked_experts({name: model.weight(name).shape for name in names})
    layers = {match["layer"] for match in fused.values()}
    routers = {
        name: f"{match['layer']}.deepspeed_moe.gate.{_ROUTERS.get(match['rest'], match['rest'])}"
        for name in names
        if (match := _ROUTER.fullmatch(name)) and match["layer"] in layers
    }
    # The tensor keeps its name in the source for reading, whatever its name here.
    entries: dict[TensorKey, TensorEntry] = {}
    renamed: dict[str, dict[str, None]] = {}
    for key, entry in model.entries.items():
        if key.fqn not in fused:
            entries[TensorKey(routers.get(key.fqn, key.fqn), key.slot)] = entry
            continue
        for own, part in _parts(fused[key.fqn], entry, model.weight(key.fqn).shape):
            entries[TensorKey(own, key.slot)] = part
            renamed.setdefault(key.fqn, {})[own] = None

    def named(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(new for name in names for new in renamed.get(name, [routers.get(name, name)]))

    return replace(
        model,
        entries=entries,
        groups=tuple(replace(group, names=named(group.names)) for group in model.groups),
        trained=named(model.trained),
        frozen=named(model.frozen),
        buffers=named(model.buffers),
    )


def _parts(
    match: re.Match[str], entry: TensorEntry, shape: tuple[int, ...]
) -> Iterator[tuple[str, TensorEntry]]:
    """Yield name and entry of each matrix; all matrices share a slot that is one number.

    Args:
        shape: Shape of the weight.
    """
    matrices = _MATRICES[match["kind"]]
    num_experts, num_rows, width = shape
    rows = num_rows // len(matrices)
    for expert in range(num_experts):
        prefix = f"{match['layer']}.deepspeed_moe.experts.deepspeed_experts.{expert}"
        for number, matrix in enumerate(matrices):
            part = entry
            if entry.shape == shape:
                part = StackPart(
                    key=entry.key,
                    dtype=entry.dtype,
                    shape=(rows, width),
                    fragments=(),
                    whole=entry,
                    corner=(expert, number * rows, 0),
                )
            yield f"{prefix}.{matrix}.weight", part
