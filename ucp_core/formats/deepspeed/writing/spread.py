"""Spreads tensors over stages, layers and ranks, and says so in the checkpoint. Pure.

``3.mlp.weight`` of a ``PipelineModule`` belongs to layer 3, ``tied_modules.embed.weight`` to every
layer of the tied module ``embed``. A layer file belongs to the whole run, not to a stage.

Every expert-parallel rank numbers its experts from 0, layer by layer; the names of their files
count through the whole layer. Under ZeRO a group of the optimizer has only experts or none, and
groups of experts are cut over the ranks that hold the same experts (DeepSpeed 0.19,
``moe/utils.py``, ``utils/groups.py``). In ``transformers`` 5 all experts of a layer are one tensor,
which is split into their matrices.

ZeRO's stages cut flattened parameters among data-parallel ranks as in DeepSpeed 0.19
(``runtime/zero/stage_1_and_2.py`` and ``stage3.py``) without ``parameter_alignment`` and
``round_robin_gradients``.

``universal_checkpoint_info`` says how tensors are sharded. Without it DeepSpeed's own converter can
silently combine shards wrongly. ``ucp_core.formats.deepspeed.reading.tensor_parallel`` reads it.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple

from ucp_core.errors import UcpError
from ucp_core.formats.deepspeed.keys import EXPERT
from ucp_core.formats.deepspeed.writing.model import Group, Model, Source, part_of
from ucp_core.formats.shared import check_equal_shares, stacked_experts
from ucp_core.geometry import Box, TensorKey
from ucp_core.language import Placement, ShardPiece
from ucp_core.numerics import grouped

_NAME = re.compile(r"(?:(\d+)|tied_modules\.([^.]+))\.(.+)")


class Pipeline:
    """The stages of a run.

    Args:
        starts: First layer of every stage, ascending, the first one 0.
        tied_layers: The layers of each tied module by its key, ascending.
    """

    def __init__(self, starts: Sequence[int], tied_layers: Mapping[str, Sequence[int]]) -> None:
        if not starts or starts[0] != 0 or any(b <= a for a, b in pairwise(starts)):
            raise UcpError(f"stages={list(starts)} must ascend from 0: the first layers of stages")
        self._starts = tuple(starts)
        self._tied = {key: tuple(layers) for key, layers in tied_layers.items()}

    def place(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return the layers that have a tensor, and its name in the first layer's file."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise UcpError(
                f"{name} is not a name of a PipelineModule, such as 3.mlp.weight: rename the "
                "tensors"
            )
        if match[1] is not None:
            return (int(match[1]),), match[3]
        layers = self._tied.get(match[2])
        if not layers:
            raise UcpError(f"{name}: tied_layers does not list the layers of {match[2]}")
        return layers, match[3]

    def models(self, model: Model) -> list[Model]:
        """Return the model of every stage; several stages hold a tied tensor."""
        by_stage: list[dict[str, list[str]]] = [defaultdict(list) for _ in self._starts]
        for name in model.weights:
            for layer in self.place(name)[0]:
                by_stage[bisect_right(self._starts, layer) - 1][name] = [name]
        return [part_of(model, held.__getitem__) for held in by_stage]

    def tied(self, model: Model) -> tuple[str, ...]:
        """Return the tensors that several layers share."""
        return tuple(name for name in model.weights if len(self.place(name)[0]) > 1)

    def files(self, names: Iterable[str], axis: str) -> dict[str, dict[str, str]]:
        """Return the content of layers' files: the model's name by the name in the file.

        ``axis`` is a part of the files' names, the tensor-parallel rank.
        """
        files: dict[int, dict[str, str]] = {}
        for name in names:
            layers, local = self.place(name)
            files.setdefault(layers[0], {})[local] = name
        return {f"layer_{layer:02d}{axis}-model": own for layer, own in sorted(files.items())}


_GROUP = re.compile(r"ep_size_(\d+)")
_MATRICES = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
_ROUTERS = {"weight": "wg.weight"}
_ROUTER = re.compile(r"(?P<layer>.+)\.gate\.(?P<rest>.+)")
#: DeepSpeed cuts a rank's group of experts into groups of at most this many elements.
_GROUP_ELEMENTS_MAX = 178956971


def is_expert(name: str) -> bool:
    """Return whether a tensor belongs to an expert."""
    return EXPERT.fullmatch(name) is not None


class ExpertShares:
    """The experts of a model, spread over ``ep`` ranks.

    With ``apart``, groups of the optimizer have only experts or none, as under ZeRO.
    """

    def __init__(self, model: Model, ep: int, *, apart: bool) -> None:
        self._model = model
        self._ep = ep
        numbers: dict[str, set[int]] = {}
        for match in filter(None, map(EXPERT.fullmatch, model.weights)):
            numbers.setdefault(match[1], set()).add(int(match[2]))
        self._counts = {layer: len(held) for layer, held in numbers.items()}
        self.counts = list(self._counts.values())  #: Experts of each layer.
        check_equal_shares(self.counts, ep)
        self._groups = self._joined(_apart(model.groups) if apart else model.groups)

    def rank(self, ep_rank: int) -> Model:
        """Return the model of one rank, with the names that tensors have there."""

        def local(name: str) -> list[str]:
            match = EXPERT.fullmatch(name)
            if match is None:
                return [name]
            rank, number = divmod(int(match[2]), self._counts[match[1]] // self._ep)
            return [f"{match[1]}{number}{match[3]}"] if rank == ep_rank else []

        groups: list[Group] = []
        for group in self._groups:
            names = [name for name in _ordered(group.names) if local(name)]
            parts = [names]
            if group.is_expert:
                parts = list(grouped(names, self._numel, _GROUP_ELEMENTS_MAX))
            groups += [replace(group, names=tuple(part)) for part in parts]
        return part_of(replace(self._model, groups=tuple(groups)), local)

    def files(self, names: Iterable[str], _axis: str) -> dict[str, dict[str, str]]:
        """Return the content of every expert's file, whose tensors have the model's names."""
        layers = {layer: number for number, layer in enumerate(self._counts)}
        files: dict[str, dict[str, str]] = {}
        for name in names:
            match = EXPERT.fullmatch(name)
            if match is not None:
                file = f"layer_{layers[match[1]]}_expert_{int(match[2])}_mp_rank_00_model"
                files.setdefault(file, {})[name] = name
        return files

    def _numel(self, name: str) -> int:
        return prod(self._model.weight(name).shape)

    def _joined(self, groups: Iterable[Group]) -> list[Group]:
        """Return the groups; join groups of experts that the source cut by size."""
        found: list[Group] = []
        for group in groups:
            if not group.is_expert:
                found.append(group)
                continue
            hyper = {**group.hyper, "name": f"ep_size_{self._ep}"}
            match = _GROUP.fullmatch(str(group.hyper.get("name")))
            held = sum(map(self._numel, found[-1].names if found else ()))
            held = held // (int(match[1]) if match else 1) + sum(map(self._numel, group.names[:1]))
            if found and found[-1].hyper == hyper and held > _GROUP_ELEMENTS_MAX:
                found[-1] = replace(found[-1], names=(*found[-1].names, *group.names))
            else:
                found.append(replace(group, hyper=hyper))
        return found


def _apart(groups: Sequence[Group]) -> Iterator[Group]:
    """Yield groups that have only experts or none; groups cut off come after the others."""
    cut_off: list[Group] = []
    for group in groups:
        experts = tuple(filter(is_expert, group.names))
        others = tuple(name for name in group.names if name not in set(experts))
        marked = replace(group, names=experts, hyper={**group.hyper, "moe": True})
        if others:
            yield replace(group, names=others)
            cut_off += [marked] if experts else []
        else:
            yield marked if experts else group
    yield from cut_off


def _ordered(names: Sequence[str]) -> list[str]:
    """Return names in a rank's order, which has the experts of a layer side by side."""
    first: dict[str, int] = {}

    def place(numbered: tuple[int, str]) -> tuple[int, int]:
        match = EXPERT.fullmatch(numbered[1])
        if match is None:
            return numbered[0], 0
        return first.setdefault(match[1], numbered[0]), int(match[2])

    return [name for _, name in sorted(enumerate(names), key=place)]


def with_single_experts(model: Model, ep: int) -> Model:
    """Return the model with a tensor for each matrix of each expert, in DeepSpeed's names.

    Without expert-parallel ranks the model stays as it is, as ``transformers`` itself runs on
    DeepSpeed.
    """
    if ep == 1:
        return model
    fused = stacked_experts({name: model.weight(name).shape for name in model.weights})
    layers = {match["layer"] for match in fused.values()}
    #: The names of each tensor, and their places if it is a stack.
    names: dict[str, dict[str, ShardPiece | None]] = {
        name: dict(_matrices(match, model.weight(name).shape)) for name, match in fused.items()
    }
    for name in model.weights:
        if (match := _ROUTER.fullmatch(name)) and match["layer"] in layers:
            own = _ROUTERS.get(match["rest"], match["rest"])
            names[name] = {f"{match['layer']}.deepspeed_moe.gate.{own}": None}
    # The tensor keeps its name in the source for reading, whatever its name here. All matrices
    # share a slot that is one number.
    tensors = {
        TensorKey(own, key.slot): Source(held.entry, piece.local.shape, (piece,))
        if piece is not None and held.shape == model.weight(key.fqn).shape
        else held
        for key, held in model.tensors.items()
        for own, piece in names.get(key.fqn, {key.fqn: None}).items()
    }
    return part_of(model, lambda name: names.get(name, [name]), tensors)


def _matrices(match: re.Match[str], shape: tuple[int, ...]) -> Iterator[tuple[str, ShardPiece]]:
    """Yield the name of each matrix of a stack, and its place."""
    kinds = _MATRICES[match["kind"]]
    num_experts, num_rows, width = shape
    rows = num_rows // len(kinds)
    for expert, (number, kind) in product(range(num_experts), enumerate(kinds)):
        name = f"{match['layer']}.deepspeed_moe.experts.deepspeed_experts.{expert}.{kind}.weight"
        yield name, ShardPiece(Box.full((rows, width)), (expert, number * rows, 0))


#: Stages 1 and 2 pad a group to a multiple of this times the ranks: in 16 bit, every rank's range
#: begins at a multiple of four bytes.
_ALIGNMENT = 2

#: The ``tensor`` of a span of zeros.
PADDING = -1


class Span(NamedTuple):
    """Elements ``start <= i < stop`` of one flattened tensor, or this many zeros."""

    tensor: int  #: Index of the tensor in its group, or ``PADDING``.
    start: int  #: First element.
    stop: int  #: One past the last element.

    @property
    def num_elements(self) -> int:
        """Return how many elements it has."""
        return self.stop - self.start


def group_spans(numels: Sequence[int], dp: int, rank: int) -> tuple[Span, ...]:
    """Return the spans of a group that ``rank`` holds in stages 1 and 2, side by side.

    The tensors are flattened one after the other, padded at the end, and cut into ``dp`` equal
    ranges; a range may begin and end anywhere in a tensor.
    """
    total = sum(numels)
    extent = -(-total // (_ALIGNMENT * dp)) * _ALIGNMENT
    low, high = rank * extent, (rank + 1) * extent
    spans: list[Span] = []
    begin = 0
    for index, numel in enumerate(numels):
        start, stop = max(low, begin), min(high, begin + numel)
        if start < stop:
            spans.append(Span(index, start - begin, stop - begin))
        begin += numel
    padding = high - max(low, min(high, total))
    if padding:
        spans.append(Span(PADDING, 0, padding))
    return tuple(spans)


def tensor_spans(numels: Sequence[int], dp: int, rank: int) -> tuple[Span, ...]:
    """Return the spans of a sub-group that ``rank`` holds in stage 3, which cuts each tensor.

    A tensor of n elements gives every rank ``ceil(n / dp)`` elements, the last ones with padding.
    """
    spans: list[Span] = []
    for index, numel in enumerate(numels):
        extent = -(-numel // dp)
        start, stop = min(rank * extent, numel), min((rank + 1) * extent, numel)
        parts = (Span(index, start, stop), Span(PADDING, 0, extent - (stop - start)))
        spans += filter(lambda span: span.num_elements, parts)
    return tuple(spans)


def sub_groups(numels: Sequence[int], dp: int, sub_group_size: int) -> list[list[int]]:
    """Return the indices of a group's tensors by sub-group of stage 3.

    A sub-group ends where its tensors' parts on one rank reach ``sub_group_size`` elements.
    """
    parts = [-(-numel // dp) for numel in numels]
    if sub_group_size >= sum(parts):
        return [list(range(len(parts)))]
    groups: list[list[int]] = [[]]
    filled = 0
    for index, part in enumerate(parts):
        groups[-1].append(index)
        filled += part
        if filled >= sub_group_size and index + 1 < len(parts):
            groups.append([])
            filled = 0
    return groups


_VERSION = 0.4
_AFFINE_VERSION = 1


def universal_info(
    names: Iterable[str],
    placements: Mapping[str, Placement] | None,
    *,
    tied: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the document for parameters and buffers.

    ``placements`` is None with one tensor-parallel rank; several pipeline stages hold ``tied``.
    """
    replicated: list[str] = []
    averaged: list[str] = []
    rows: list[str] = []
    padded: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    affine: dict[str, Any] = {}
    for name in names if placements else ():
        placement, regex = (placements or {})[name], _regex(name)
        is_replica, shards = placement.relation == "replica", placement.shards
        held = sum(piece.local.num_elements for mine in placement.pieces for piece in mine)
        if placement.relation == "average":
            averaged.append(regex)
        elif not is_replica and held < sum(map(prod, shards)):
            key = placement.shape[0], tuple(shape[0] for shape in shards)
            padded.setdefault(key, []).append(regex)
        else:
            affine[regex] = _affine(placement)
            if is_replica and all(shape == placement.shape for shape in shards):
                replicated.append(regex)
            elif not is_replica and placement.shape[1:2] != shards[0][1:2]:
                rows.append(regex)
    info: dict[str, Any] = {
        "universal_checkpoint_version": _VERSION,
        "pipeline_replicated_parameter_patterns": [_regex(name) for name in tied],
        "tp_replicated_parameter_patterns": replicated,
        "parameter_to_average_patterns": averaged,
        "parameter_with_row_parallelism_patterns": rows,
        "affine_map": {"version": _AFFINE_VERSION, "params": affine},
        "vocabulary_parameter_patterns": [],
    }
    if padded:
        # The document can state only one size.
        (extent, heights), first = next(iter(padded.items()))
        others = [regex for key, group in padded.items() if group is not first for regex in group]
        info |= {
            "vocabulary_parameter_patterns": first,
            "original_vocab_size": extent,
            "padded_vocab_size": sum(heights),
            "autotp_unsupported_parameter_patterns": dict.fromkeys(
                others, "padded differently from the vocabulary"
            ),
        }
    return info


def _regex(name: str) -> str:
    return f"^{re.escape(name)}$"


def _affine(placement: Placement) -> dict[str, Any]:
    holders: dict[Any, list[int]] = {}
    for rank, pieces in enumerate(placement.pieces):
        for piece in pieces:
            holders.setdefault((piece.start, piece.local.shape), []).append(rank)
    ranks: dict[int, Any] = {}
    for rank, (shape, pieces) in enumerate(zip(placement.shards, placement.pieces, strict=True)):
        ranks[rank] = {
            "shard_shape": list(shape),
            "pieces": [
                {
                    "shape": list(piece.local.shape),
                    "source": _strided(placement.shape, piece.start),
                    "dest": _strided(shape, piece.local.start),
                    "locations": holders[piece.start, piece.local.shape],
                }
                for piece in pieces
            ],
        }
    return {"logical_shape": list(placement.shape), "ranks": ranks}


def _strided(shape: Sequence[int], start: Sequence[int]) -> list[Any]:
    """Return the flat position of ``start`` in a tensor, and the tensor's strides, in elements."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return [sum(a * b for a, b in zip(start, strides, strict=True)), strides]
