"""Reads Megatron-LM's checkpoints from before ``torch_dist``: a folder per model-parallel rank.

``iter_0001000/mp_rank_TT[_PPP]/model_optim_rng.pt`` has the model and the optimizer. A distributed
optimizer writes ``distrib_optim.pt`` beside it. Only Megatron's code says how tensors are sharded,
so the rules of its family apply unless the user gives others.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ucp_core.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    PatternError,
    UnsupportedVersionError,
)
from ucp_core.formats.megatron.experts import Experts, assigned, is_expert, is_fused, is_gated
from ucp_core.formats.megatron.recognition import (
    MODEL_FILE,
    NAME,
    RANK,
    TRACKER,
    is_checkpoint,
    located,
)
from ucp_core.formats.refusals import corrupt, missing, two_saves
from ucp_core.formats.shared import (
    Assembly,
    Files,
    Layouts,
    Place,
    Rank,
    Shards,
    arguments_of,
    assign,
    check_master,
    is_master_of,
    lay_out,
    refusing_nonsense,
    shapes_by_group,
    tells_padding,
    vocabulary_of,
)
from ucp_core.geometry import DTYPE_BYTES, TensorKey
from ucp_core.language import Pattern, Replicated, Rules, Unique, builtin_rules
from ucp_core.manifest import Item
from ucp_core.native import Checkpoint
from ucp_core.storage import Store, join
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

    saved: RankFile
    number: int  #: Number of the chunk; above 0 in interleaved pipelines.
    params: list[tuple[str, TensorRef]]  #: Names in the whole model, and where the parameters are.

    @property
    def place(self) -> tuple[int, int]:
        """Return its place in the order of layers: chunk and stage."""
        return self.number, self.saved.rank.stage


@dataclass(slots=True, kw_only=True)
class Model(Assembly):
    """The whole model."""

    experts: Experts
    chunks: list[ModelPart] = field(default_factory=list)
    #: The weights that the optimizer has, by file and name.
    mastered: set[tuple[str, str]] = field(default_factory=set)

    def number_layers(self) -> None:
        """Number layers through the whole model, because every chunk counts from 0."""
        counts: dict[tuple[int, int], int] = {}
        for chunk in self.chunks:
            numbers = [int(m[2]) for name, _ in chunk.params if (m := _LAYER.fullmatch(name))]
            counts[chunk.place] = max(numbers, default=-1) + 1
        first: dict[tuple[int, int], int] = {}
        for place in sorted(counts):
            first[place] = sum(counts[before] for before in first)
        stages = 1 + max(chunk.saved.rank.stage for chunk in self.chunks)
        for chunk in self.chunks:
            chunk.params = [
                (self._whole_name(name, first[chunk.place], chunk.saved.rank, stages), ref)
                for name, ref in chunk.params
            ]

    def _whole_name(self, name: str, offset: int, rank: Rank, stages: int) -> str:
        """Return a parameter's name; a copy of the embedding on the last stage gets its name."""
        if (match := _LAYER.fullmatch(name)) is not None:
            return f"{match[1]}{offset + int(match[2])}{match[3]}"
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
                is_first = chunk.saved.expert == 0 or is_expert(name)
                if is_first and (chunk.saved.file, name) not in self.mastered:
                    self.put_shard(TensorKey(name, WEIGHT), chunk.saved, ref)

    def put_shard(self, key: TensorKey, saved: RankFile, ref: TensorRef) -> None:
        """Add one rank's shard of a tensor."""
        if is_fused(key.fqn):
            part, first = self.experts.part(key, saved.expert, ref)
            self.shards.add_rows(key, saved.rank, part, first, self.experts.total or 0)
        else:
            self.shards.add_ref(key, saved.rank, ref)


def model_of(saved: RankFile, experts: Experts) -> list[ModelPart]:
    """Return the chunks of one rank's file."""
    found = []
    for key in saved.tree:
        if (match := _CHUNK.fullmatch(str(key))) is not None:
            params = [
                (experts.global_name(name, saved.expert, saved.file), ref)
                for name, ref in _tensors(saved.tree, key, saved.file)
            ]
            found.append(ModelPart(saved, int(match[1] or 0), params))
    return sorted(found, key=lambda chunk: chunk.number)


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
    chunks = [chunk for chunk in model.chunks if chunk.saved is saved]
    has_expert_ranks = any(chunk.saved.expert for chunk in model.chunks)
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
        inner = part.tree.get("optimizer", part.tree)
        hyper = inner["param_groups"]
        if saved.distributed is None and any("params" not in group for group in hyper):
            raise missing(model.directory, [_DISTRIBUTED_FILE])
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
    masters = part.tree.get(_MASTERS) or part.tree.get("fp32_from_fp16")
    wanted = shapes_by_group(hyper, state, masters)
    names = assign(wanted, [(name, ref.shape) for name, ref in part.params], saved.file)
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
                of = f"group {index} belongs to {name}"
                check_master(files.store, files.directory, master, 0, weights[name], of)
                model.put_shard(TensorKey(name, WEIGHT), saved, master)
                model.mastered.add((saved.file, name))
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
            model.mastered.add((saved.file, name))
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
    shapes = {name: ref.shape for name, ref in part.params if name in trained}
    named, unsure = assigned(hyper, shapes)
    if unsure:
        note = "the distributed optimizer does not say which group each parameter is in"
        model.items["param_groups"] = Item("drop", note)
    return [[] if unsure else group["params"] for group in named]


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


_DISTRIBUTED_FILE = "distrib_optim.pt"
_MODEL_KEY = re.compile(r"model\d*")


def read(
    store: Store, directory: str, *, rules: Rules | None = None, tag: str | None = None
) -> Checkpoint:
    """Open a checkpoint; read pickles, and at most a few elements of tensors.

    See ``open_source`` for arguments and errors. ``rules`` override those for Megatron's own
    names. ``tag`` is the name of an iteration's folder, such as ``iter_0001000``.
    """
    path = located(store, directory, tag, is_checkpoint)
    if path is None:
        raise CheckpointNotFoundError(
            f"{directory} holds no checkpoint of Megatron ({tag or TRACKER})", path=directory
        )
    with refusing_nonsense(path, "Megatron"):
        return _read(store, path, rules)


def _read(store: Store, path: str, rules: Rules | None) -> Checkpoint:
    files, ranks, arguments = _opened(store, path)
    tp = 1 + max(saved.rank.tp for saved in ranks)
    model = Model(store, path, Shards(tp), experts=_experts(path, arguments, tp))
    for saved in ranks:
        model.chunks += model_of(saved, model.experts)
    model.number_layers()
    for saved in ranks:
        add_optimizer(files, saved, model)
    model.add_weights()
    first, file = files.trees[ranks[0].file], ranks[0].file
    model.entries |= model.shards.entries(layouts_of(arguments, rules, tp, first))
    _add_extras(model, first, file, len(ranks))
    model.items |= vocabulary_of(arguments).item(model.entries)
    iteration = first.get("iteration")  # A release has none.
    model.step = iteration if isinstance(iteration, int) else 0
    model.extents = files.extents
    model.layout = {"tp": tp, "pp": 1 + max(saved.rank.stage for saved in ranks)}
    version, tag = str(first.get("checkpoint_version", "")), path.rsplit("/", 1)[-1]
    source = {"format": NAME, "version": version, "tag": tag}
    return model.checkpoint(source, world_size=len(ranks))


def _opened(store: Store, path: str) -> tuple[Files, list[RankFile], Mapping[str, Any]]:
    """Open the files of all ranks; refuse files of further ranks."""
    folders = [name for name in store.list(path) if RANK.fullmatch(name)]
    files = Files(store, path)
    files.open(f"{name}/{MODEL_FILE}" for name in folders)
    first = files.trees[f"{folders[0]}/{MODEL_FILE}"]
    values = arguments_of(first)
    tp = values.get("tensor_model_parallel_size")
    pp = values.get("pipeline_model_parallel_size")
    matches = [match for name in folders if (match := RANK.fullmatch(name))]
    tp = tp if isinstance(tp, int) else 1 + max(int(match[1]) for match in matches)
    pp = pp if isinstance(pp, int) else 1 + max(int(match[2] or 0) for match in matches)
    ep = _expert_ranks(values)
    wanted = {
        f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else ""): (
            Rank(p, t),
            e,
        )
        for e in range(ep)
        for p in range(pp)
        for t in range(tp)
    }
    for name in sorted(set(wanted) ^ set(folders)):
        what = "lacks" if name in wanted else "has more than the ranks of its arguments:"
        raise corrupt(
            path,
            f"it {what} {name} ({tp} tensor parallel ranks in {pp} stage(s), {ep} expert "
            "parallel rank(s)): the checkpoint was not copied completely, or is mixed with another",
        )
    distributed = {n for n in wanted if _DISTRIBUTED_FILE in store.list(join(path, n))}
    ranks: list[RankFile] = []
    for name, (rank, expert) in wanted.items():
        file, beside = f"{name}/{MODEL_FILE}", f"{name}/{_DISTRIBUTED_FILE}"
        tree = files.trees[file]
        # The first expert-parallel rank gathers the state that all of them repeat.
        if distributed and name not in distributed and (expert == 0 or has_experts(tree, file)):
            raise missing(path, [beside])
        ranks.append(RankFile(rank, file, tree, beside if name in distributed else None, expert))
    _check_agreement(path, ranks)
    return files, ranks, values


def _check_agreement(path: str, ranks: Sequence[RankFile]) -> None:
    """Check that the files of all ranks belong to one save."""
    first, *others = [(r.tree.get("iteration"), r.tree.get("optimizer") is None) for r in ranks]
    for saved, other in zip(ranks[1:], others, strict=True):
        if other != first:
            where = f"{path}/{saved.file}"
            raise two_saves(where, f"its iteration or optimizer is not that of {ranks[0].file}")


def _expert_ranks(arguments: Mapping[str, Any]) -> int:
    ranks = arguments.get("expert_model_parallel_size")
    return ranks if isinstance(ranks, int) and ranks > 1 else 1


def _experts(path: str, arguments: Mapping[str, Any], tp: int) -> Experts:
    """Return what the arguments say about experts."""
    ranks, total = _expert_ranks(arguments), arguments.get("num_experts")
    own = arguments.get("expert_tensor_parallel_size")
    if total is not None and ranks > 1 and arguments.get("moe_extended_tp"):
        own = tp * ranks
    if total is not None and own is not None and own != tp:
        raise UnsupportedVersionError(
            f"{path}: experts are cut over {own} ranks, the rest of the model over {tp}, and "
            "the names of the folders do not show the difference; save in torch_dist format",
            path=path,
        )
    if ranks > 1 and (not isinstance(total, int) or total % ranks):
        raise corrupt(path, f"args has num_experts {total!r} for {ranks} expert parallel ranks")
    return Experts(arguments, ranks, total if isinstance(total, int) else None, tp)


def _add_extras(model: Model, tree: Mapping[str, Any], file: str, num_ranks: int) -> None:
    """Add the small values, and a note on every key."""
    for key, value in tree.items():
        if _MODEL_KEY.fullmatch(str(key)) or key == "optimizer":
            model.items[str(key)] = Item("reshard", "its tensors")
            continue
        name = "lr_scheduler" if key in ("opt_param_scheduler", "lr_scheduler") else str(key)
        model.keep(name, value, file, item=str(key), num_ranks=num_ranks)
