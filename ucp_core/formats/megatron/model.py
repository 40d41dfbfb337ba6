"""Reads model and optimizer from the files of Megatron's model-parallel ranks."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ucp_core.errors import CheckpointCorruptError, PatternError, UnsupportedVersionError
from ucp_core.formats.megatron.experts import Experts, is_expert, is_fused, is_gated
from ucp_core.formats.shared import (
    Assembly,
    Files,
    Layouts,
    Place,
    Rank,
    assign,
    check_numbers,
    is_master_of,
    largest_shape,
    lay_out,
    tells_padding,
    unclear,
    vocabulary_of,
)
from ucp_core.geometry import DTYPE_BYTES, TensorKey
from ucp_core.language import Pattern, Replicated, Rules, Unique, builtin_rules
from ucp_core.manifest import Item
from ucp_core.torch_files import TensorRef, current_budget

WEIGHT = "weight"
_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..*)")
_CHUNK = re.compile(r"model(\d*)")
#: Names of the last stage's copy of the embedding.
_HEADS = {
    "word_embeddings_for_head.weight": "language_model.embedding.word_embeddings.weight",
    "language_model.word_embeddings_for_head.weight": (
        "language_model.embedding.word_embeddings.weight"
    ),
    "output_layer.weight": "embedding.word_embeddings.weight",
}
#: Since this version the rows of a fused projection are grouped by head.
_GROUPED_VERSION = 2.0
_MASTERS = "fp32_from_fp16_params"
#: Memory that an entry of a nested dict may take.
_ENTRY_BYTES = 128
_REMEDY = "save in torch_dist format"
#: The masters in a flat buffer.
_FLAT = "param"


class RankFile(NamedTuple):
    """The files of one model-parallel rank; ``distributed`` is None if one file holds everything.

    ``expert`` is the expert-parallel rank.
    """

    rank: Rank
    file: str
    tree: Mapping[str, Any]
    distributed: str | None
    expert: int = 0


@dataclass(slots=True)
class ModelPart:
    """Consecutive layers of one rank: its part of the model, or a chunk of that part."""

    rank: Rank
    number: int  #: Number of the chunk; above 0 in interleaved pipelines.
    params: list[tuple[str, TensorRef]]  #: Names in the whole model, and where the parameters are.
    expert: int = 0


@dataclass(slots=True, kw_only=True)
class Model(Assembly):
    """The whole model."""

    experts: Experts
    chunks: list[ModelPart] = field(default_factory=list)
    #: The weights that the optimizer has, as rank, expert-parallel rank and name.
    mastered: set[tuple[Rank, int, str]] = field(default_factory=set)

    def number_layers(self) -> None:
        """Number layers through the whole model, because every chunk counts from 0."""
        counts: dict[tuple[int, int], int] = {}
        for chunk in self.chunks:
            numbers = [int(m[2]) for name, _ in chunk.params if (m := _LAYER.fullmatch(name))]
            counts[chunk.number, chunk.rank.stage] = max(numbers, default=-1) + 1
        first: dict[tuple[int, int], int] = {}
        total = 0
        for place in sorted(counts):
            first[place] = total
            total += counts[place]
        num_layers = self.experts.arguments.get("num_layers")
        if isinstance(num_layers, int) and num_layers != total:
            raise CheckpointCorruptError(
                f"the files hold {total} layers, args says {num_layers}: stages are missing, "
                "or the files belong to two models"
            )
        stages = 1 + max(chunk.rank.stage for chunk in self.chunks)
        for chunk in self.chunks:
            offset = first[chunk.number, chunk.rank.stage]
            chunk.params = [
                (self._owner(_shifted(name, offset), chunk.rank, stages), ref)
                for name, ref in chunk.params
            ]

    def _owner(self, name: str, rank: Rank, stages: int) -> str:
        """Return a parameter's name; a copy of the embedding on the last stage gets its name."""
        owner = _HEADS.get(name)
        untied = self.experts.arguments.get("untie_embeddings_and_output_weights")
        if owner is None or stages == 1 or rank.stage == 0 or untied:
            return name
        self.ties[name] = owner
        return owner

    def add_weights(self) -> None:
        """Add the weights without a master, each once though expert-parallel ranks repeat it."""
        for chunk in self.chunks:
            for name, ref in chunk.params:
                is_first = chunk.expert == 0 or is_expert(name)
                if is_first and (chunk.rank, chunk.expert, name) not in self.mastered:
                    self.put_shard(TensorKey(name, WEIGHT), chunk, ref)

    def put_shard(self, key: TensorKey, place: RankFile | ModelPart, ref: TensorRef) -> None:
        """Add one rank's shard of a tensor."""
        if is_fused(key.fqn):
            part, first = self.experts.part(key, place.expert, ref)
            self.shards.add_rows(key, place.rank, part, first, self.experts.total or 0)
        else:
            self.shards.add_ref(key, place.rank, ref)


def _shifted(name: str, offset: int) -> str:
    match = _LAYER.fullmatch(name)
    return name if match is None else f"{match[1]}{offset + int(match[2])}{match[3]}"


def model_of(saved: RankFile, experts: Experts) -> list[ModelPart]:
    """Return the chunks of one rank's file."""
    keys = sorted(
        (int(match[1] or 0), key) for key in saved.tree if (match := _CHUNK.fullmatch(str(key)))
    )
    chunks = [
        ModelPart(
            saved.rank,
            number,
            list(_tensors(saved.tree, key, saved.file)),
            saved.expert,
        )
        for number, key in keys
    ]
    for chunk in chunks:
        chunk.params = [
            (experts.global_name(name, saved.expert, saved.file), ref) for name, ref in chunk.params
        ]
    if not any(chunk.params for chunk in chunks):
        raise CheckpointCorruptError(f"{saved.file} holds no tensors of a model")
    return chunks


def has_experts(tree: Mapping[str, Any], file: str) -> bool:
    """Return whether a rank's file has parameters of experts."""
    keys = [key for key in tree if _CHUNK.fullmatch(str(key))]
    return any(is_expert(name) for key in keys for name, _ in _tensors(tree, key, file))


def _tensors(tree: Mapping[str, Any], key: str, file: str) -> Iterator[tuple[str, TensorRef]]:
    """Yield the tensors below a key of a rank's file, by their names below it."""
    budget, where = current_budget(), f"{file}: {key}"

    def walk(value: Any, prefix: str) -> Iterator[tuple[str, TensorRef]]:
        if isinstance(value, TensorRef):
            if not prefix.endswith("_extra_state"):
                yield prefix, value
        elif isinstance(value, dict):
            for part, below in value.items():
                name = f"{prefix}.{part}" if prefix else str(part)
                # A dict that is in its parent twice would be walked once for each of its names.
                budget.draw(_ENTRY_BYTES + len(name), where)
                yield from walk(below, name)

    return walk(tree[key], "")


class _ChainedOptimizer(NamedTuple):
    """One of the chained optimizers of a rank; the second optimizer has the experts."""

    tree: Any
    place: tuple[int, int]
    chunks: list[ModelPart]

    @property
    def params(self) -> list[tuple[str, TensorRef]]:
        return [param for chunk in self.chunks for param in chunk.params]


def _parts(saved: RankFile, model: Model) -> list[_ChainedOptimizer]:
    """Return the optimizers of a rank that other ranks do not repeat."""
    trees = saved.tree.get("optimizer")
    if trees is None:
        return []
    chunks = [c for c in model.chunks if (c.rank, c.expert) == (saved.rank, saved.expert)]
    has_expert_ranks = any(chunk.expert for chunk in model.chunks)
    trees = trees if isinstance(trees, list) else [trees]
    # A stage without experts has one optimizer; other stages chain two.
    is_chained = has_expert_ranks and has_experts(saved.tree, saved.file)
    if len(trees) == 1 and not is_chained:
        return [_ChainedOptimizer(trees[0], (0, 1), chunks)] if saved.expert == 0 else []
    if len(trees) != len((False, True)) or not is_chained:
        raise UnsupportedVersionError(
            f"{saved.file}: {len(trees)} chained optimizers are not supported in this format; save "
            "in torch_dist format"
        )
    return [
        _ChainedOptimizer(
            trees[experts],
            (int(experts), len(trees)),
            [
                replace(c, params=[p for p in c.params if is_expert(p[0]) == experts])
                for c in chunks
            ],
        )
        for experts in (False, True)
        if experts or saved.expert == 0
    ]


def add_optimizer(files: Files, saved: RankFile, model: Model) -> None:
    """Add masters and slots of one rank."""
    for part in _parts(saved, model):
        tree = part.tree
        inner = tree.get("optimizer", tree) if isinstance(tree, dict) else None
        hyper = inner.get("param_groups") if isinstance(inner, dict) else None
        if inner is None or not isinstance(hyper, list):
            raise CheckpointCorruptError(f"{saved.file}: optimizer has no param_groups")
        if saved.distributed is None and any("params" not in group for group in hyper):
            raise CheckpointCorruptError(
                f"{saved.file}: the optimizer numbers no parameters: its state is in a "
                "separate file (distrib_optim.pt), but no rank's folder has one: bring the "
                "files back or use another checkpoint"
            )
        if saved.distributed is not None:
            names = _add_distributed(files, saved, part, model, hyper)
        else:
            names = _add_numbered(files, saved, part, model, inner)
        model.add_groups(hyper, names, f"{saved.file}: optimizer")
        trained = {name for group in names for name in group}
        if trained:
            model.roles |= {name: "frozen" for name, _ in part.params if name not in trained}


def _add_numbered(
    files: Files, saved: RankFile, part: _ChainedOptimizer, model: Model, inner: Mapping[str, Any]
) -> list[list[str]]:
    """Add an optimizer that numbers its parameters; return the names of each group."""
    hyper, state = inner["param_groups"], inner.get("state") or {}
    check_numbers(hyper, None, saved.file)
    masters = part.tree.get(_MASTERS) or part.tree.get("fp32_from_fp16")
    wanted = [[largest_shape(state.get(n, {})) for n in g["params"]] for g in hyper]
    if masters:
        wanted = [[master.shape for master in group] for group in masters]
    names = assign(wanted, [(name, ref.shape) for name, ref in part.params], saved.file, _REMEDY)
    weights = dict(part.params)
    for index, group in enumerate(hyper):
        if len(names[index]) != len(group["params"]):
            raise PatternError(
                f"{saved.file}: group {index} has {len(group['params'])} parameters, but only "
                f"{len(names[index])} have masters: some are kept in float32; save in "
                "torch_dist format"
            )
        for place, (name, number) in enumerate(zip(names[index], group["params"], strict=True)):
            if masters:
                master = masters[index][place]
                if not is_master_of(files.store, files.directory, master, 0, weights[name]):
                    raise unclear(
                        saved.file,
                        f"by order and shapes master {place} of group {index} belongs to "
                        f"{name}, but it does not round to its weights: the file mixes two "
                        "saves",
                        _REMEDY,
                    )
                model.put_shard(TensorKey(name, WEIGHT), saved, master)
                model.mastered.add((saved.rank, saved.expert, name))
            for slot, value in {"step": group.get("step"), **state.get(number, {})}.items():
                if isinstance(value, TensorRef) and value.shape and slot != "step":
                    model.put_shard(TensorKey(name, slot), saved, value)
                elif isinstance(value, TensorRef | int | float):
                    model.scalars.add(TensorKey(name, slot), value)
    return names


def _add_distributed(
    files: Files,
    saved: RankFile,
    part: _ChainedOptimizer,
    model: Model,
    hyper: Sequence[Mapping[str, Any]],
) -> list[list[str]]:
    """Add the flat buffers of the distributed optimizer; return the names of each group."""
    assert saved.distributed is not None, "the caller looked"
    files.open([saved.distributed], kinds=(dict, list))
    pending: list[tuple[str, list[tuple[str, TensorRef]]]] = []
    trained: set[str] = set()
    for chunk in part.chunks:
        kinds: dict[str, list[tuple[str, TensorRef]]] = defaultdict(list)
        for name, ref in chunk.params:
            kinds[ref.dtype].append((name, ref))
        pending += kinds.items()
    step = next((g["step"] for g in hyper if isinstance(g.get("step"), int | float)), None)
    tree = files.trees[saved.distributed]
    for kind, refs in _buffers(tree, saved.distributed, part.place):
        dtype = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}.get(kind, kind)
        index = next((i for i, (d, _) in enumerate(pending) if d == dtype), None)
        if index is None:
            raise PatternError(
                f"{saved.distributed} has a buffer of {kind}, but the model has no such "
                "parameters left"
            )
        params = dict(pending.pop(index)[1])
        starts = _starts(files, refs[_FLAT], list(params.items()))
        for name, start in starts.items():
            weight = params[name]
            model.mastered.add((saved.rank, saved.expert, name))
            for slot, ref in refs.items():
                key = TensorKey(name, WEIGHT if slot == _FLAT else slot)
                offset = ref.offset_bytes + start * DTYPE_BYTES[ref.dtype]
                part_of = ref._replace(
                    shape=weight.shape, strides=weight.strides, offset_bytes=offset
                )
                model.put_shard(key, saved, part_of)
            if step is not None:
                model.scalars.add(TensorKey(name, "step"), step)
        trained |= starts.keys()
    own = [param for param in part.params if param[0] in trained]
    return _names_by_decay(model, own, hyper)


def _buffers(
    tree: Any, where: str, place: tuple[int, int]
) -> Iterator[tuple[str, Mapping[str, TensorRef]]]:
    """Yield every flat buffer: the dtype of its parameters, and its tensors by slot.

    ``distrib_optim.pt`` holds buffers without names or offsets: all buckets one after the other,
    without the padding after each and without their ends. Source: ``get_parameter_state_dp_zero``
    in ``distrib_optimizer.py`` of megatron-core 0.5 to 0.16.
    """
    states = tree if isinstance(tree, list) else [tree]
    index, count = place
    if len(states) != count or not isinstance(states[index], dict):
        raise PatternError(
            f"{where} holds {len(states)} chained optimizers, the model's file {count}, so "
            f"number {index} cannot be found; {_REMEDY}"
        )
    state = states[index]
    if not state.get("buckets_coalesced"):
        raise PatternError(
            f"{where} is from megatron-core before 0.5; load it there and save again"
        )
    for number in sorted(key for key in state if isinstance(key, int)):
        for dtypes, slots in state[number].items():
            first = dtypes[0] if isinstance(dtypes, tuple) else dtypes
            refs = {slot: ref for slot, ref in slots.items() if slot != "numel_unpadded"}
            shapes = {ref.shape if isinstance(ref, TensorRef) else None for ref in refs.values()}
            if _FLAT not in refs or len(shapes) > 1 or None in shapes:
                raise CheckpointCorruptError(
                    f"{where}: buffer {number} does not hold flat tensors of one size"
                )
            yield str(getattr(first, "name", first)).removeprefix("torch."), refs


def _starts(
    files: Files, flat: TensorRef, params: Sequence[tuple[str, TensorRef]]
) -> dict[str, int]:
    """Return where each trained parameter begins in a buffer; together they fill it."""

    def refused(number: int | None, why: str) -> PatternError:
        name, ref = ("", flat) if number is None else params[number]
        return PatternError(
            f"{flat.file}: {name or 'a part'} in {ref.file}: {why}: the files come from two "
            f"saves, or the buffer has another form; {_REMEDY}"
        )

    def holds(number: int, place: Place) -> bool:
        weight = params[number][1]
        return is_master_of(files.store, files.directory, flat, place.start, weight)

    sizes = [ref.num_elements for _, ref in params]
    places = lay_out(sizes, [flat.num_elements], holds, refused=refused, is_joined=True)
    return {params[number][0]: place.start for number, place in places.items()}


def _names_by_decay(
    model: Model, params: Sequence[tuple[str, TensorRef]], hyper: Sequence[Mapping[str, Any]]
) -> list[list[str]]:
    """Return the names of each group by Megatron's rule: biases and vectors do not decay."""
    if len(hyper) == 1:
        return [[name for name, _ in params]]
    decays = [group.get("wd_mult") for group in hyper]
    if sorted(map(str, decays)) != ["0.0", "1.0"]:
        note = "the distributed optimizer does not say which group each parameter is in"
        model.items["param_groups"] = Item("drop", note)
        return [[] for _ in hyper]
    plain = [n for n, ref in params if n.endswith(".bias") or len(ref.shape) == 1]
    rest = [n for n, _ in params if n not in set(plain)]
    return [rest if decay else plain for decay in decays]


def layouts_of(
    arguments: Mapping[str, Any], rules: Rules | None, degree: int, tree: Mapping[str, Any]
) -> Layouts:
    """Return the source of patterns: the user's rules, then those of Megatron's names."""
    version = tree.get("checkpoint_version", 0)
    if degree > 1 and rules is None and not (version and version >= _GROUPED_VERSION):
        raise UnsupportedVersionError(
            f"checkpoint_version {version} orders the rows of fused projections differently; "
            "give rules for query_key_value with --rules"
        )
    family = builtin_rules("megatron-gated" if is_gated(arguments) else "megatron")
    wanted = family if rules is None else rules.over(family)
    vocabulary = vocabulary_of(arguments)

    def layout(key: TensorKey, shapes: Sequence[tuple[int, ...]]) -> tuple[Pattern, int | None]:
        if not any(shapes):
            return (Unique() if degree == 1 else Replicated("first")), None
        found = wanted.match(key.fqn, key.slot)
        if tells_padding(found):
            return found, None
        extent = vocabulary.extent(key.fqn, sum(shape[0] for shape in shapes if shape))
        if degree == 1:
            return Unique(), extent
        if found is None:
            raise PatternError(
                f"{key.fqn}: no rule says how it is cut over {degree} tensor parallel ranks; "
                "give one with --rules",
                unknown=f"{key.fqn} {list(shapes[0])}",
            )
        return found, extent

    return layout
