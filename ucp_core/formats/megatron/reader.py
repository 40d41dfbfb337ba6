"""Reads Megatron-LM's checkpoints from before ``torch_dist``: a folder per model-parallel rank.

``iter_0001000/mp_rank_TT[_PPP]/model_optim_rng.pt`` has the model and the optimizer. A distributed
optimizer writes ``distrib_optim.pt`` beside it. Only Megatron's code says how tensors are sharded,
so the rules of its family apply unless the user gives others.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ucp_core.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    UnsupportedVersionError,
)
from ucp_core.formats.megatron.experts import Experts
from ucp_core.formats.megatron.model import (
    Model,
    RankFile,
    add_optimizer,
    has_experts,
    layouts_of,
    model_of,
)
from ucp_core.formats.megatron.recognition import (
    MODEL_FILE,
    NAME,
    RANK,
    TRACKER,
    is_checkpoint,
    located,
)
from ucp_core.formats.shared import Files, Rank, Shards, refusing_nonsense, vocabulary_of
from ucp_core.language import Rules
from ucp_core.manifest import Item
from ucp_core.native import Checkpoint
from ucp_core.storage import Store, join
from ucp_core.torch_files import Opaque

_DISTRIBUTED_FILE = "distrib_optim.pt"
_MODEL_KEY = re.compile(r"model\d*")
_SAME = ("iteration", "checkpoint_version")
#: Arguments that decide shapes, which all ranks share.
_SAME_ARGUMENTS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "moe_ffn_hidden_size",
    "num_experts",
)


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
    model.step = _iteration(first, file)
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
    values = _arguments(first)
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
        raise CheckpointCorruptError(
            f"{path} {what} {name} ({tp} tensor parallel ranks in {pp} stage(s), {ep} expert "
            "parallel rank(s)): the checkpoint was not copied completely, or is mixed with another",
            path=path,
        )
    distributed = {n for n in wanted if _DISTRIBUTED_FILE in store.list(join(path, n))}
    for name, (_, expert) in sorted(wanted.items()) if distributed else ():
        # The first expert-parallel rank gathers the state that all of them repeat.
        is_needed = expert == 0 or has_experts(
            files.trees[f"{name}/{MODEL_FILE}"], f"{name}/{MODEL_FILE}"
        )
        if is_needed and name not in distributed:
            raise CheckpointCorruptError(
                f"{path}/{name} lacks {_DISTRIBUTED_FILE}, which other ranks have", path=path
            )
    ranks = [
        RankFile(
            rank=rank,
            file=f"{name}/{MODEL_FILE}",
            tree=files.trees[f"{name}/{MODEL_FILE}"],
            distributed=f"{name}/{_DISTRIBUTED_FILE}" if name in distributed else None,
            expert=expert,
        )
        for name, (rank, expert) in wanted.items()
    ]
    _check_agreement(path, ranks)
    return files, ranks, values


def _arguments(tree: Mapping[str, Any]) -> dict[str, Any]:
    arguments = tree.get("args")
    values = arguments.state if isinstance(arguments, Opaque) else None
    return values if isinstance(values, dict) else {}


def _check_agreement(path: str, ranks: Sequence[RankFile]) -> None:
    """Check that the files of all ranks belong to one save."""
    first, *others = [
        {key: saved.tree.get(key) for key in _SAME}
        | {f"args.{key}": _arguments(saved.tree).get(key) for key in _SAME_ARGUMENTS}
        | {"optimizer": "none" if saved.tree.get("optimizer") is None else "some"}
        for saved in ranks
    ]
    for saved, other in zip(ranks[1:], others, strict=True):
        wrong = next((key for key, value in other.items() if value != first[key]), None)
        if wrong is not None:
            raise CheckpointCorruptError(
                f"{path}/{saved.file} has {wrong} {other[wrong]!r}, {ranks[0].file} "
                f"{first[wrong]!r}: the folder mixes two saves; use another checkpoint",
                path=f"{path}/{saved.file}",
            )


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
        raise CheckpointCorruptError(
            f"{path}: args has num_experts {total!r} for {ranks} expert parallel ranks", path=path
        )
    return Experts(arguments, ranks, total if isinstance(total, int) else None, tp)


def _iteration(first: Mapping[str, Any], file: str) -> int:
    value = first.get("iteration", 0)
    if value == "release":
        return 0
    if not isinstance(value, int) or value < 0:
        raise CheckpointCorruptError(f"{file}: iteration is {value!r}")
    return value


def _add_extras(model: Model, tree: Mapping[str, Any], file: str, num_ranks: int) -> None:
    """Add the small values, and a note on every key."""
    for key, value in tree.items():
        if _MODEL_KEY.fullmatch(str(key)) or key == "optimizer":
            model.items[str(key)] = Item("reshard", "its tensors")
            continue
        name = "lr_scheduler" if key in ("opt_param_scheduler", "lr_scheduler") else str(key)
        model.keep(name, value, file, item=str(key), num_ranks=num_ranks)
