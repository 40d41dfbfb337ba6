"""Writes what Megatron-core writes as ``torch_dist``, from a model's whole tensors, without it.

Two layers, tensor parallel over ``tp`` ranks and pipeline parallel over ``pp`` stages of one layer
each; ``dp`` data-parallel ranks share the optimizer's flat buffers.
"""

import json
from argparse import Namespace
from itertools import pairwise, product
from typing import Any

import torch

from tests.support.dcp_files import Chunk, Save, blob, random_tensors, write
from ucp_core.storage import Store

LAYERS = 2
HIDDEN = 8
#: Key, shape without layers, dim that tensor parallel cuts; None: the same on every rank.
LAYER_KEYS: tuple[tuple[str, tuple[int, ...], int | None], ...] = (
    ("self_attention.linear_qkv.layer_norm_weight", (HIDDEN,), None),
    ("self_attention.linear_proj.weight", (HIDDEN, HIDDEN), 1),
    ("self_attention.linear_qkv.weight", (24, HIDDEN), 0),
    ("mlp.linear_fc1.layer_norm_weight", (HIDDEN,), None),
    ("mlp.linear_fc1.weight", (40, HIDDEN), 0),
    ("mlp.linear_fc2.weight", (HIDDEN, 20), 1),
)
OUTER_KEYS: tuple[tuple[str, tuple[int, ...], int | None], ...] = (
    ("embedding.word_embeddings.weight", (96, HIDDEN), 0),
    ("decoder.final_layernorm.weight", (HIDDEN,), None),
    ("output_layer.weight", (96, HIDDEN), 0),
)
EMBEDDING = "embedding.word_embeddings.weight"
#: Experts of their own optimizer: two on each of two ranks, over which nothing is replicated.
EXPERTS = 4
EXPERT_KEYS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("decoder.layers.mlp.experts.experts.linear_fc1.weight", (10, HIDDEN)),
    ("decoder.layers.mlp.experts.experts.linear_fc2.weight", (HIDDEN, 5)),
)
SLOTS = ("param", "exp_avg", "exp_avg_sq")
GROUPS = [
    {"lr": 0.5, "weight_decay": 0.1, "wd_mult": 1.0, "is_expert_parallel": False, "step": 4.0},
    {"lr": 0.5, "weight_decay": 0.1, "wd_mult": 0.0, "is_expert_parallel": False, "step": 4.0},
]
#: Names of modules that are not Transformer Engine's.
LOCAL = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def batch(step: int, *, rows: int = 4, length: int = 16, vocabulary: int = 128) -> torch.Tensor:
    """Return the tokens of a step, with one more in a row than a model sees."""
    made = torch.Generator().manual_seed(step)
    return torch.randint(0, vocabulary, (rows, length + 1), generator=made)


def state(seed: int = 0, *, experts: bool = False) -> dict[str, dict[str, torch.Tensor]]:
    """Return all slots of the model by the checkpoint's keys in order, layers stacked."""
    shapes = {key: shape for key, shape, _ in OUTER_KEYS[:1]}
    shapes |= {f"decoder.layers.{key}": (LAYERS, *shape) for key, shape, _ in LAYER_KEYS}
    if experts:
        shapes |= {key: (LAYERS, EXPERTS, *shape) for key, shape in EXPERT_KEYS}
    shapes |= {key: shape for key, shape, _ in OUTER_KEYS[1:]}
    return {slot: random_tensors(shapes, seed + n) for n, slot in enumerate(SLOTS)}


def expected(values: dict[str, dict[str, torch.Tensor]], *, local: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of the modules, ``<fqn>.<slot>``."""
    found: dict[str, torch.Tensor] = {}
    for slot, tensors in values.items():
        name = "fp32" if slot == "param" else slot
        for key, tensor in tensors.items():
            if not key.startswith("decoder.layers."):
                found[f"{key}.{name}"] = tensor
                continue
            rest = key.removeprefix("decoder.layers.")
            own = LOCAL.get(rest, rest) if local else rest
            for layer in range(LAYERS):
                found[f"decoder.layers.{layer}.{own}.{name}"] = tensor[layer]
    return found


def _dims() -> dict[str, int | None]:
    dims = {key: dim for key, _, dim in OUTER_KEYS}
    return dims | {f"decoder.layers.{key}": dim for key, _, dim in LAYER_KEYS}


def _parts(key: str, tensor: torch.Tensor, dim: int | None, tp: int) -> list[list[Any]]:
    """Return for each rank its pieces of one layer or tensor: where they begin, and elements."""
    if dim is None or tp == 1:
        pieces = [[((0,) * tensor.ndim, tensor)]]
        return pieces * tp if dim is None else pieces
    halves = tensor.chunk(2, 0) if key.endswith("linear_fc1.weight") else (tensor,)
    ranks: list[list[Any]] = [[] for _ in range(tp)]
    low = 0
    for half in halves:
        at = 0
        for rank, part in enumerate(half.chunk(tp, dim)):
            offsets = [0] * tensor.ndim
            offsets[0] = low
            offsets[dim] += at
            ranks[rank].append((tuple(offsets), part))
            at += part.shape[dim]
        low += half.shape[0]
    return ranks


def _stage(key: str, layer: int | None, pp: int) -> int:
    if layer is not None:
        return layer * pp // LAYERS
    return 0 if key.startswith("embedding") else pp - 1


def _layers(key: str) -> list[int | None]:
    return [*range(LAYERS)] if key.startswith("decoder.layers.") else [None]


def _experts(key: str, tensor: torch.Tensor, *, grouped: bool) -> list[Chunk]:
    """Return the chunks of experts: one of each, or the halves of all that a rank has."""
    count, parts = (2, 2 if "linear_fc1" in key else 1) if grouped else (1, 1)
    chunks = []
    for place, expert in product(range(LAYERS), range(0, EXPERTS, count)):
        row = 0
        for data in tensor[place : place + 1, expert : expert + count].chunk(parts, 2):
            at = (place, expert, row, 0)
            chunks.append(Chunk(offsets=at, data=data.clone(), rank=expert // 2))
            row += data.shape[2]
    return chunks


def _put(
    save: Save,
    prefix: str,
    tensors: dict[str, torch.Tensor],
    shape: tuple[int, int, int],
    *,
    grouped: bool = False,
) -> None:
    """Add tensors as Megatron cuts them, by the first rank of each that holds a piece."""
    tp, pp, dp = shape
    dims = _dims()
    for key, tensor in tensors.items():
        chunks: list[Chunk] = []
        if ".experts." in key:
            chunks = _experts(key, tensor, grouped=grouped)
            save.tensors[prefix + key] = (tuple(tensor.shape), chunks)
            continue
        for layer in _layers(key):
            one = tensor if layer is None else tensor[layer]
            ranks = _parts(key, one, dims[key], tp)
            for rank, pieces in enumerate(ranks[:1] if dims[key] is None else ranks):
                for offsets, part in pieces:
                    at = offsets if layer is None else (layer, *offsets)
                    data = part.clone() if layer is None else part.clone().unsqueeze(0)
                    where = rank + dp * tp * _stage(key, layer, pp)
                    chunks.append(Chunk(offsets=at, data=data, rank=where))
        save.tensors[prefix + key] = (tuple(tensor.shape), chunks)


def _buffers(
    save: Save,
    values: dict[str, dict[str, torch.Tensor]],
    shape: tuple[int, int, int],
    frozen: frozenset[str],
    *,
    grouped: bool = False,
) -> None:
    """Add the flat buffers: the reverse of the modules' order, each parameter at 64 elements.

    Args:
        save: Gets them.
        values: All slots.
        shape: Tensor parallel ranks, stages, data-parallel ranks.
        frozen: Keys that are in no buffer.
        grouped: The experts of a rank are one parameter, transposed.
    """
    tp, pp, dp = shape
    dims = _dims()
    before, after = OUTER_KEYS[:1], OUTER_KEYS[1:]
    order: list[tuple[str, int | None]] = [(key, None) for key, _, _ in before]
    order += [(f"decoder.layers.{k}", i) for i in range(LAYERS) for k, _, _ in LAYER_KEYS]
    order += [(key, None) for key, _, _ in after]
    has_experts = EXPERT_KEYS[0][0] in values["param"]
    for stage in range(pp):
        own = [(k, i) for k, i in reversed(order) if _stage(k, i, pp) == stage]
        tied = pp > 1 and "output_layer.weight" not in values["param"]
        if tied and stage == pp - 1:
            own.insert(0, (EMBEDDING, None))
        own = [(key, layer) for key, layer in own if key in values["param"] and key not in frozen]
        for rank in range(tp):
            group = f"optimizer.distributed.dp_group_idx_{rank + tp * stage}"
            group = f"chained_0.{group}" if has_experts else group
            ranks = [rank + tp * replica + dp * tp * stage for replica in range(dp)]
            for slot in SLOTS:
                # Parameters that two stages share have a bucket of their own.
                buckets: list[list[torch.Tensor]] = [[]]
                for key, layer in own:
                    tensor = values[slot][key] if layer is None else values[slot][key][layer]
                    pieces = _parts(key, tensor, dims[key], tp)[rank]
                    if tied and key == EMBEDDING and buckets[-1]:
                        buckets.append([])
                    buckets[-1].append(torch.cat([part.reshape(-1) for _, part in pieces]))
                    if tied and key == EMBEDDING:
                        buckets.append([])
                _put_buffers(save, f"{group}.", slot, [b for b in buckets if b], ranks)
            save.objects[f"{group}.per_bucket_numel/shard_0_1"] = [{"a": [1]}]
            save.objects[f"{group}.optimizer/shard_0_1"] = [{"param_groups": GROUPS}]
    for rank in range(2 if has_experts else 0):
        group = f"chained_1.optimizer.distributed.dp_group_idx_{rank}"
        for slot in SLOTS:
            parts = _expert_parts(values[slot], rank, grouped=grouped)
            _put_buffers(save, f"{group}.", slot, [parts], [rank, rank + 2])
        groups = [{**GROUPS[0], "is_expert_parallel": True}]
        save.objects[f"{group}.optimizer/shard_0_1"] = [{"param_groups": groups}]


def _expert_parts(
    tensors: dict[str, torch.Tensor], rank: int, *, grouped: bool
) -> list[torch.Tensor]:
    """Return the flat parameters of a rank's experts, the last module first."""
    keys = [key for key, _ in EXPERT_KEYS]
    own = slice(2 * rank, 2 * rank + 2)
    if grouped:
        names = [*product(range(LAYERS), keys)][::-1]
        return [tensors[key][layer, own].transpose(-1, -2).reshape(-1) for layer, key in names]
    apart = [*product(range(LAYERS), (own.start, own.start + 1), keys)][::-1]
    return [tensors[key][layer, expert].reshape(-1) for layer, expert, key in apart]


def _put_buffers(
    save: Save, prefix: str, slot: str, buckets: list[list[torch.Tensor]], ranks: list[int]
) -> None:
    """Add the buckets of a flat buffer, shared among ranks; all but the last end at 64.

    A rank writes what it has of each parameter, and of the padding between two, by itself.
    """
    for number, parts in enumerate(buckets):
        flat = torch.zeros(0)
        marks = []
        for part in parts:
            marks.append(len(flat))
            flat = torch.cat([flat, torch.zeros(-len(flat) % 64)])
            marks.append(len(flat))
            flat = torch.cat([flat, part])
        if number + 1 < len(buckets):
            marks.append(len(flat))
            flat = torch.cat([flat, torch.zeros(-len(flat) % 64)])
        chunks = []
        share = -(-len(flat) // len(ranks))
        for rank, low in zip(ranks, range(0, len(flat), share), strict=True):
            high = min(low + share, len(flat))
            cuts = sorted({low, high, *(mark for mark in marks if low < mark < high)})
            for start, stop in pairwise(cuts):
                chunks.append(Chunk(offsets=(start,), data=flat[start:stop].clone(), rank=rank))
        dtypes = "(torch.bfloat16, torch.float32)"
        name = f"{prefix}gbuf_idx_0.dtype_{dtypes}.bucket_idx_{number}.{slot}"
        save.tensors[name] = (tuple(flat.shape), chunks)


def write_checkpoint(  # noqa: PLR0913 - what Megatron can be told
    store: Store,
    directory: str,
    values: dict[str, dict[str, torch.Tensor]],
    *,
    tp: int = 2,
    pp: int = 1,
    dp: int = 2,
    buffers: bool = False,
    local: bool = True,
    common_file: bool = True,
    objects: dict[str, Any] | None = None,
    frozen: frozenset[str] = frozenset(),
    arguments: dict[str, Any] | None = None,
    grouped: bool = False,
    optimizer: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint; ``buffers``: ``dp_reshardable``, else ``fully_reshardable``.

    ``optimizer`` is its part of the common state, which is that of rank 0.

    The model's weights are the masters, or what ``values`` has as ``model``.
    """
    save = Save()
    weights = values.get("model", values["param"])
    models = {key: tensor.bfloat16() for key, tensor in weights.items()}
    _put(save, "", models, (tp, pp, dp), grouped=grouped)
    for layer in range(LAYERS):
        value = [None] if local else [torch.arange(4, dtype=torch.uint8)]
        save.objects[f"decoder.layers.mlp.linear_fc1._extra_state/shard_{layer}_{LAYERS}"] = value
    common: dict[str, Any] = {
        "iteration": 4,
        "checkpoint_version": 3.0,
        "optimizer": optimizer or {},
    }
    if arguments is not None:
        common["args"] = Namespace(**arguments)
    if buffers:
        _buffers(save, values, (tp, pp, dp), frozen, grouped=grouped)
    else:
        for slot in SLOTS:
            _put(save, f"optimizer.state.{slot}.", values[slot], (tp, pp, dp), grouped=grouped)
        common["optimizer"] = {"optimizer": {"param_groups": GROUPS}}
    save.objects |= objects or {}
    if common_file:
        store.write_atomic(f"{directory}/common.pt", blob(common), fsync=False)
    else:
        save.objects["common_state/shard_0_1"] = [common]
    write(store, directory, save)
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    store.write_atomic(f"{directory}/metadata.json", json.dumps(config).encode(), fsync=False)
