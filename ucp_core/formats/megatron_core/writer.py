"""Writes any checkpoint that has Megatron-core's names as ``torch_dist``, which Megatron loads.

The optimizer has the form ``fully_reshardable``: any number of tensor-, pipeline- and data-parallel
ranks can load it. The files hold each weight once: the model's key and the key of the optimizer's
master point to the same bytes, which Megatron casts to the dtype of its parameters. Source:
``DistributedOptimizer.load_state_dict`` and ``load_parameter_state_from_fully_reshardable`` of
Megatron-core 0.16, and the files that it saves.

Hugging Face's tensors become parts of Megatron's parameters. The writer knows the names of Llama,
and of models with experts and the attention of Llama or DeepSeek. Megatron has q, k and v in one
parameter, the rows of one query group after the other, and gate and up in another. The elements are
equal, because both rotate the first half of a head with the second. In ``transformers`` 5 the
experts of a layer are also one tensor, of the same shape. Source:
``Attention.get_query_key_value_tensors``, ``MLP``, ``MLASelfAttention``, ``TopKRouter`` and
``SequentialMLP.sharded_state_dict`` of Megatron-core 0.16.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ucp_core.errors import UcpError
from ucp_core.formats.dcp import Contents, DcpFiles, Part, Rows, hyper
from ucp_core.formats.megatron import TRACKER
from ucp_core.formats.megatron_core import key_names
from ucp_core.formats.megatron_core.recognition import COMMON, CONFIG
from ucp_core.formats.shared import (
    check_equal_shares,
    number_of,
    restored,
    stacked_experts,
    tensors_of,
    weights_of,
)
from ucp_core.geometry import TensorEntry, TensorKey
from ucp_core.native import Checkpoint, check_memory, refuse_taken, stream
from ucp_core.storage import Store, join, undone
from ucp_core.torch_files import Instance, write_torch_file

#: Names of Hugging Face, and of Megatron, outside of layers and in a layer.
_OUTER = {
    r"(?:model\.)?embed_tokens\.weight": "embedding.word_embeddings.weight",
    r"(?:model\.)?norm\.weight": "decoder.final_layernorm.weight",
    r"lm_head\.weight": "output_layer.weight",
}
_IN_LAYER = {
    r"input_layernorm\.weight": "input_layernorm.weight",
    r"post_attention_layernorm\.weight": "pre_mlp_layernorm.weight",
    r"self_attn\.(?P<part>[qkv])_proj\.(?P<kind>weight|bias)": "self_attention.linear_qkv.{kind}",
    r"self_attn\.o_proj\.weight": "self_attention.linear_proj.weight",
    r"self_attn\.(?P<one>[qk])_norm\.weight": "self_attention.{one}_layernorm.weight",
    r"self_attn\.(?P<one>q|kv)_a_proj(_with_mqa)?\.weight": (
        "self_attention.linear_{one}_down_proj.weight"
    ),
    r"self_attn\.(?P<one>q|kv)_a_layernorm\.weight": "self_attention.{one}_layernorm.weight",
    r"self_attn\.(?P<one>q|kv)_b_proj\.weight": "self_attention.linear_{one}_up_proj.weight",
    r"mlp\.(?P<part>gate|up)_proj\.weight": "mlp.linear_fc1.weight",
    r"mlp\.down_proj\.weight": "mlp.linear_fc2.weight",
    r"mlp\.experts\.gate_up_proj": "mlp.experts.experts.linear_fc1.weight",
    r"mlp\.experts\.down_proj": "mlp.experts.experts.linear_fc2.weight",
    r"mlp\.gate\.weight": "mlp.router.weight",
    r"mlp\.gate\.e_score_correction_bias": "mlp.router.expert_bias",
    r"mlp\.shared_experts\.(?P<part>gate|up)_proj\.weight": "mlp.shared_experts.linear_fc1.weight",
    r"mlp\.shared_experts\.down_proj\.weight": "mlp.shared_experts.linear_fc2.weight",
}
_NAMES = [(re.compile(theirs), ours) for theirs, ours in _OUTER.items()] + [
    (
        re.compile(rf"(?:model\.)?layers\.(?P<layer>\d+)\.{theirs}"),
        f"decoder.layers.{{layer}}.{ours}",
    )
    for theirs, ours in _IN_LAYER.items()
]
_PARTS = (("q", "k", "v"), ("gate", "up"))


class Joined(NamedTuple):
    """Megatron's parameter that holds a tensor, its shape, and the tensor's rows in it.

    None means all rows.
    """

    fqn: str
    shape: tuple[int, ...]
    rows: Rows | None


def joined(shapes: Mapping[str, tuple[int, ...]], query_groups: int | None) -> dict[str, Joined]:
    """Return the place of each tensor; a tensor without a known name is a whole parameter.

    Args:
        query_groups: Number of heads of k and v.
    """
    stacked_experts(shapes)
    found: dict[str, Joined] = {}
    parts: dict[str, dict[str, str]] = {}
    for fqn, shape in shapes.items():
        found[fqn] = Joined(fqn, shape, None)
        for pattern, name in _NAMES:
            match = pattern.fullmatch(fqn)
            if match is None:
                continue
            target = name.format_map(match.groupdict())
            found[fqn] = Joined(target, shape, None)
            if match.groupdict().get("part"):
                parts.setdefault(target, {})[match["part"]] = fqn
    for target, names in parts.items():
        order = next(order for order in _PARTS if not names.keys().isdisjoint(order))
        missing = [part for part in order if part not in names]
        if missing:
            raise UcpError(f"{target} has no {', '.join(missing)} beside {min(names.values())}")
        groups = query_groups if "q" in order else 1
        if groups is None:
            raise UcpError(
                f"nothing gives the number of heads of {names['k']}: give query_groups "
                "(--query-groups)"
            )
        counts = [shapes[names[part]][0] for part in order]
        if groups < 1 or any(count % groups for count in counts):
            raise UcpError(
                f"query_groups={groups} does not divide the {counts[1]} rows of {names[order[1]]}"
            )
        shape = (sum(counts), *shapes[names[order[0]]][1:])
        sizes = [count // groups for count in counts]
        for index, part in enumerate(order):
            rows = Rows(sum(sizes[:index]), sizes[index], sum(sizes))
            found[names[part]] = Joined(target, shape, rows)
    return found


_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_SHARDING = "fully_reshardable"
#: Key in ``extra`` that has a path for each of the optimizer's own values.
_SCALER = "grad_scaler."
_NAMESPACE = "argparse.Namespace"
#: Since this version the rows of ``linear_qkv`` are grouped by query group.
_VERSION = 3.0


def write(
    checkpoint: Checkpoint,
    store: Store,
    directory: str,
    *,
    memory_bytes: int,
    progress: Callable[[int, int], None] | None = None,
    ep: int = 1,
    query_groups: int | None = None,
    fsync: bool = True,
) -> None:
    """Write ``directory/iter_STEP`` and, last, the file in ``directory`` that names it.

    ``directory`` is Megatron-LM's ``--load``; ``megatron.core.dist_checkpointing.load`` takes the
    folder in it. It leaves tied names out, because Megatron ties them itself. See ``export`` for
    the other arguments and the errors.

    Args:
        ep: Expert-parallel ranks of the target. Above 1, experts have an optimizer of their own.
        query_groups: Number of heads of k and v; None takes it from the source's ``config.json``.
    """
    check_memory(memory_bytes)
    shapes = {name: entry.shape for name, entry in weights_of(checkpoint).items()}
    places = joined(shapes, _heads(checkpoint) if query_groups is None else query_groups)
    check_equal_shares(
        {one.shape[0] for one in places.values() if key_names.has_experts(one.fqn)}, ep
    )
    name = f"iter_{checkpoint.step:07d}"
    folder = join(directory, name)
    refuse_taken(directory, (there for there in store.list(directory) if there in {TRACKER, name}))
    checkpoint.state_map.prove_coverage()
    contents = _contents(checkpoint, places)
    groups = _groups(checkpoint, shapes, memory_bytes, experts_apart=ep > 1)
    common = _common(checkpoint, contents, groups)
    with undone(store, directory) as written:
        # Megatron can load the folder even without the file that names it.
        written.append(folder)
        files = DcpFiles(checkpoint, store, folder, contents, memory_bytes, progress)
        files.write(written, fsync=fsync)
        path = join(folder, COMMON)
        write_torch_file(store, path, common, allow=frozenset({_NAMESPACE}), fsync=fsync)
        store.write_atomic(join(folder, CONFIG), json.dumps(_CONFIG).encode(), fsync=fsync)
        written.append(join(directory, TRACKER))
        store.write_atomic(written[-1], str(checkpoint.step).encode(), fsync=fsync)


def _heads(checkpoint: Checkpoint) -> int | None:
    """Return the number of heads of k and v by the source's ``config.json``; None: unknown."""
    documents = checkpoint.extra.get("huggingface")
    config = documents.get("config.json") if isinstance(documents, dict) else None
    values = config if isinstance(config, dict) else {}
    found = values.get("num_key_value_heads", values.get("num_attention_heads"))
    return found if isinstance(found, int) else None


def _contents(checkpoint: Checkpoint, places: Mapping[str, Joined]) -> Contents:
    """Return the key of every tensor, and the small objects beside them."""
    entries = {key: one for key, one in tensors_of(checkpoint).items() if key.slot != "step"}
    names = key_names.saved(_kinds(entries, places))
    trained = {key.fqn for key in entries if key.slot != "weight"}
    contents = Contents()
    for key, entry in entries.items():
        place = places[key.fqn]
        saved, layer = names[place.fqn]
        keys = [f"optimizer.state.{'param' if key.slot == 'weight' else key.slot}.{saved}"]
        if key.slot == "weight":
            keys = [saved, *keys] if key.fqn in trained else [saved]
            for name in key_names.module_states(saved, layer, entry.shape):
                contents.values[name] = [None]
        shape = entry.shape if place.rows is None else place.shape
        number, stack = (None, shape) if layer is None else (layer[0], (layer[1], *shape))
        contents.parts[key] = Part(entry.dtype, stack, keys, number, place.rows)
    for name, value in checkpoint.extra.items():
        if name == "_extra_state":
            contents.values |= {shard: restored(state) for shard, state in value.items()}
        elif key_names.is_object(name, value):
            contents.values |= {f"{name}/{shard}": restored(v) for shard, v in value.items()}
    named = {key for part in contents.parts.values() for key in part.keys}
    contents.paths = {key: (key,) for key in sorted(named | set(contents.values))}
    return contents


def _kinds(
    entries: Mapping[TensorKey, TensorEntry], places: Mapping[str, Joined]
) -> dict[str, dict[Any, Any]]:
    """Return the properties that all layers of a stack must share, by parameter."""
    kinds: dict[str, dict[Any, Any]] = {}
    for key, entry in entries.items():
        fqn, _, rows = places[key.fqn]
        kind = kinds.setdefault(fqn, {})
        kind[rows, key.slot] = entry.shape
        dtype = kind.setdefault(key.slot, entry.dtype)
        weight = entries[TensorKey(key.fqn, "weight")]
        if rows is not None and (entry.dtype, entry.shape) != (dtype, weight.shape):
            raise UcpError(
                f"{key} is {entry.dtype}{list(entry.shape)}: as a part of {fqn} it must be {dtype} "
                f"and have the shape of its weight, {list(weight.shape)}"
            )
    return kinds


def _common(
    checkpoint: Checkpoint, contents: Contents, groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the state that all ranks share: iteration, groups, and the source's own values."""
    common: dict[str, Any] = {"checkpoint_version": _VERSION}
    for name, value in checkpoint.extra.items():
        match value:
            case _ if name in {"_extra_state", "optimizer"} or key_names.is_object(name, value):
                continue
            case {"class": "argparse.Namespace", "state": dict(state)}:
                common[name] = Instance(_NAMESPACE, state=restored(state))
            case _:
                common[name] = restored(value)
    common["iteration"] = checkpoint.step
    # Megatron-LM requests the keys that these words imply.
    common["content_metadata"] = {
        "distrib_optim_sharding_type": _SHARDING,
        "singleton_local_shards": False,
        "non_homogeneous_layers": all(one.layer is None for one in contents.parts.values()),
        "chained_optim_avoid_prefix": True,
    }
    of_experts = [group for group in groups if group["is_expert_parallel"]]
    others = [group for group in groups if not group["is_expert_parallel"]]
    scaler = {
        name.rpartition(_SCALER)[2]: restored(value)
        for name, value in checkpoint.extra.get("optimizer", {}).items()
        if _SCALER in name
    }
    chained = [
        {"optimizer": {"param_groups": own}, "param_state_sharding_type": _SHARDING}
        | ({"grad_scaler": scaler} if scaler else {})
        for own in (others, of_experts)
        if own
    ]
    if chained:
        common["optimizer"] = dict(enumerate(chained)) if of_experts else chained[0]
    return common


def _groups(
    checkpoint: Checkpoint,
    shapes: Mapping[str, Sequence[int]],
    memory_bytes: int,
    *,
    experts_apart: bool,
) -> list[dict[str, Any]]:
    """Return the groups as Megatron has them: without parameters, each with its step."""
    entries = checkpoint.state_map.entries
    counters = [entry for key, entry in sorted(entries.items()) if key.slot == "step"]
    steps = {
        slab.piece.entry.key.fqn: number_of(slab.data, slab.piece.entry.dtype)
        for slab in stream(checkpoint, counters, memory_bytes=memory_bytes)
    }
    groups = []
    for group in key_names.grouped(checkpoint.param_groups, shapes, experts_apart=experts_apart):
        found = {steps[fqn]: fqn for fqn in group["params"] if fqn in steps}
        if len(found) > 1:
            (one, first), (other, second) = list(found.items())[:2]
            raise UcpError(
                f"{first} made {one} steps and {second} {other}, but Megatron counts one step "
                "for all parameters of a group"
            )
        made = {name: hyper(name, value) for name, value in group.items() if name != "params"}
        made["step"] = next(iter(found), checkpoint.step)
        groups.append(made)
    return groups
