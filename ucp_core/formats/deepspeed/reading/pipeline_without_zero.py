"""Finds the tensors that each stage of a pipeline without ZeRO trained.

The files of layers do not name their stage. If the checkpoint has ``param_shapes``, these name the
parameters of every stage. Otherwise stages hold consecutive layers, and the number of parameters in
their optimizers decides where each stage ends. Tied modules and frozen parameters change these
numbers, and no file names them: such a checkpoint is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucp_core.errors import CheckpointCorruptError
from ucp_core.formats.deepspeed.reading.topology import Native
from ucp_core.formats.deepspeed.reading.zero import param_shapes
from ucp_core.formats.shared import largest_shape, unclear
from ucp_core.manifest import Item
from ucp_core.torch_files import TensorRef

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    #: Tensors by name, by layer.
    Layers = Mapping[int, Mapping[str, TensorRef]]

INNER = "optimizer_state_dict"
FLAT = "fp32_groups_flat"
LISTS = "fp32_groups"

_TIED_NAME = re.compile(r"tied_modules\.([^.]+)\.(.+)")


@dataclass(slots=True)
class LayerFiles:
    """The content of the files of layers.

    Attributes:
        params: By model-parallel rank, the parameters of its optimizer, in the model's order.
        names: Names of the tensors that are not named by their layer: (layer, name in the file).
        items: How the stages were found.
    """

    params: dict[int, list[tuple[str, TensorRef]]] = field(default_factory=dict)
    names: dict[tuple[int, str], str] = field(default_factory=dict)
    items: dict[str, Item] = field(default_factory=dict)

    def fqn(self, layer: int, local: str) -> str:
        """Return the name of a tensor of a layer's file."""
        return self.names.get((layer, local), f"{layer}.{local}")


def read_layer_files(native: Native) -> LayerFiles:
    """Return which tensors of the layers' files each stage's optimizer numbers.

    Raises:
        PatternError: The files do not decide it.
        CheckpointCorruptError: A file holds something that DeepSpeed does not write.
    """
    found = LayerFiles()
    numbers = sorted({layer for layer, _ in native.layers})
    layers = {layer: held for layer in numbers if (held := _params(native, layer, 0))}
    named = [
        param_shapes(native.files.trees[native.model[0, s * native.tp]], native.model[0, 0])
        for s in range(native.pp)
    ]
    if all(shapes is not None for shapes in named):
        stages = _stages_by_name(layers, [shapes or [] for shapes in named], found)
    else:
        optimizers = [_optimizer(native, stage) for stage in range(native.pp)]
        if not all(_has_state(optimizer) for optimizer in optimizers):
            return found
        borders = _stages_by_count(native, layers, optimizers)
        stages = [[(layer, n) for layer in held for n in layers[layer]] for held in borders]
        shown = "; ".join(f"{s}: {', '.join(map(str, held))}" for s, held in enumerate(borders))
        found.items["layers by stage"] = Item("drop", f"counted by what optimizers hold: {shown}")
    for mp in range(native.tp * native.pp):
        rank = native.rank(mp)
        refs = {layer: _params(native, layer, rank.tp) for layer, _ in stages[rank.stage]}
        found.params[mp] = [(found.fqn(ly, n), refs[ly][n]) for ly, n in stages[rank.stage]]
    return found


def _params(native: Native, layer: int, tp: int) -> dict[str, TensorRef]:
    """Return the tensors of a layer's file that are no buffers."""
    trees = (native.files.trees[file] for file in native.model.values())
    buffers = {str(name) for tree in trees for name in tree.get("buffer_names") or ()}
    tied = {match[2] for name in buffers if (match := _TIED_NAME.fullmatch(name))}
    own = native.files.trees[native.layers[layer, tp]]
    return {
        str(name): ref
        for name, ref in own.items()
        if isinstance(ref, TensorRef) and f"{layer}.{name}" not in buffers and name not in tied
    }


def _optimizer(native: Native, stage: int) -> Mapping[str, Any]:
    """Return a stage's optimizer; empty if the stage saved none."""
    file = native.model[0, stage * native.tp]
    tree = native.files.trees[file].get("optimizer")
    if not isinstance(tree, dict):
        return {}
    inner = tree.get(INNER, tree)
    if not isinstance(inner, dict) or not isinstance(inner.get("param_groups"), list):
        raise CheckpointCorruptError(f"{file}: optimizer has no param_groups", file=file)
    return tree


def _has_state(tree: Mapping[str, Any]) -> bool:
    """Return whether an optimizer holds anything by parameter: plain SGD does not."""
    if FLAT in tree or LISTS in tree:
        return True
    state = tree.get(INNER, tree).get("state") or {} if tree else {}
    return any(largest_shape(slots) for slots in state.values())


def _stages_by_name(
    layers: Layers, named: Sequence[Sequence[Mapping[str, tuple[int, ...]]]], found: LayerFiles
) -> list[list[tuple[int, str]]]:
    """Return layers and names by stage; add the names of tied modules to ``found``."""
    shapes = {n: s for stage in named for group in stage for n, s in group.items()}
    for name, shape in shapes.items():
        match = _TIED_NAME.fullmatch(name)
        if match is None:
            continue
        for layer, held in layers.items():
            is_own = any(f"{layer}.{local}" in shapes for local in held)
            ref = held.get(match[2])
            if not is_own and ref is not None and ref.shape == shape:
                found.names[layer, match[2]] = name
                break
    by_name = {found.fqn(layer, n): (layer, n) for layer, held in layers.items() for n in held}
    return [[by_name[n] for group in stage for n in group if n in by_name] for stage in named]


def _stages_by_count(
    native: Native, layers: Layers, optimizers: Sequence[Mapping[str, Any]]
) -> list[list[int]]:
    """Return the consecutive layers of each stage, by the size of its optimizer."""
    is_flat = FLAT in optimizers[0]
    sizes = {
        layer: sum(ref.num_elements for ref in held.values()) if is_flat else len(held)
        for layer, held in layers.items()
    }
    needs = [_count(tree) for tree in optimizers]
    left = list(sizes)
    stages: list[list[int]] = []
    for need in needs:
        mine: list[int] = []
        while left and sum(sizes[layer] for layer in mine) < need:
            mine.append(left.pop(0))
        stages.append(mine)
    file = native.model[0, 0]
    if left or [sum(sizes[layer] for layer in mine) for mine in stages] != needs:
        what = "elements" if is_flat else "parameters"
        raise unclear(
            file,
            f"the optimizers of {len(needs)} stage(s) number {', '.join(map(str, needs))} {what}, "
            f"the files of {len(layers)} layers hold {sum(sizes.values())}, and no borders between "
            "layers fit: a module is tied, frozen, or in no file",
        )
    shared = _shared_state(optimizers)
    if shared is not None:
        raise unclear(
            file,
            f"stages {shared[0]} and {shared[1]} have an equal state, which is that of a tied "
            "module, and no file says which layer it is",
        )
    return stages


def _count(tree: Mapping[str, Any]) -> int:
    """Return how many parameters an optimizer has; elements if its masters are flat."""
    if FLAT in tree:
        return sum(ref.num_elements for ref in tree[FLAT])
    return sum(len(group["params"]) for group in tree.get(INNER, tree)["param_groups"])


def _shared_state(optimizers: Sequence[Mapping[str, Any]]) -> tuple[int, int] | None:
    """Return two stages with the same state of a parameter, by torch's checksums.

    Stages sum the gradients of a tied module, so their states of it are equal bit for bit.
    """
    owners: dict[tuple[Any, ...], int] = {}
    for stage, tree in enumerate(optimizers):
        for slots in (tree.get(INNER, tree).get("state") or {}).values():
            refs = [r for s, r in slots.items() if isinstance(r, TensorRef) and s != "step"]
            mark = tuple(
                (ref.shape, ref.extent and (ref.extent.num_bytes, ref.extent.crc32)) for ref in refs
            )
            if mark and owners.setdefault(mark, stage) != stage:
                return owners[mark], stage
    return None
