"""Checks that all files of a checkpoint belong to one save. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ucp_core.errors import CheckpointCorruptError
from ucp_core.formats.megatron.model import RankFile
from ucp_core.torch_files import Opaque

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


def arguments_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``args`` of a file; empty if it has none."""
    arguments = tree.get("args")
    values = arguments.state if isinstance(arguments, Opaque) else None
    return values if isinstance(values, dict) else {}


def check_agreement(path: str, ranks: Sequence[RankFile]) -> None:
    """Check the files of all ranks."""
    first = ranks[0]
    for saved in ranks:
        mine, others = (
            {key: tree.get(key) for key in _SAME}
            | {f"args.{key}": arguments_of(tree).get(key) for key in _SAME_ARGUMENTS}
            for tree in (saved.tree, first.tree)
        )
        for key, value in mine.items():
            if value != others.get(key):
                raise CheckpointCorruptError(
                    f"{path}/{saved.file} has {key} {value!r}, another file {others.get(key)!r}: "
                    "the folder mixes two saves",
                    path=f"{path}/{saved.file}",
                    key=key,
                )
    lacking = [saved.file for saved in ranks if saved.tree.get("optimizer") is None]
    if lacking and len(lacking) < len(ranks):
        raise CheckpointCorruptError(
            f"{path}/{lacking[0]} has no optimizer, which other ranks' files have: it is from "
            "another save, or was changed; bring the right one back or use another checkpoint",
            path=f"{path}/{lacking[0]}",
        )
