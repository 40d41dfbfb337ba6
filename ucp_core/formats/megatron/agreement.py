"""Checks that all files belong to one save, and each to the rank of its folder. Pure.

A file does not name its model-parallel rank. But its ``args`` have the number of the process that
wrote it. Megatron numbers processes by stage, then by expert-parallel rank, then by tensor-parallel
rank; the first of several equal ranks writes. Conversion tools write all files in one process.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ucp_core.errors import CheckpointCorruptError
from ucp_core.formats.megatron.experts import is_expert
from ucp_core.formats.shared import refuse_equal
from ucp_core.torch_files import Opaque, TensorRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ucp_core.formats.megatron.model import RankFile
    from ucp_core.geometry import TensorKey
    from ucp_core.storage import Store

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
    """Check the files of all ranks.

    Args:
        path: The folder, for errors.
        ranks: In any order.

    Raises:
        CheckpointCorruptError: They belong to several saves, or to other ranks.
    """
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
            f"{path}/{lacking[0]} has no optimizer, which other ranks' files have: it is of "
            "another save, or was changed; bring the right one back or use another checkpoint",
            path=f"{path}/{lacking[0]}",
        )
    _check_writers(path, ranks)


def check_copies(
    store: Store,
    path: str,
    moments: Iterable[Sequence[tuple[TensorKey, TensorRef]]],
    shared: Callable[[TensorKey], bool],
) -> None:
    """Check that no two ranks have the same moments of different shards.

    Args:
        moments: Slots by rank, and where they are.
        shared: Whether several ranks hold the same shard of a slot.

    Raises:
        CheckpointCorruptError: One rank's file was copied over another's.
    """
    ranks = [[(key, ref) for key, ref in found if not shared(key)] for found in moments]
    for experts in (False, True):
        held = [[ref for key, ref in own if is_expert(key.fqn) == experts] for own in ranks]
        refuse_equal(store, path, held, "moments")


def _check_writers(path: str, ranks: Sequence[RankFile]) -> None:
    """Check that the numbers of the writing processes ascend with the ranks."""
    writers = [arguments_of(saved.tree).get("rank") for saved in ranks]
    numbers = [writer for writer in writers if isinstance(writer, int)]
    if len(numbers) < len(writers) or len(set(numbers)) == 1:
        return
    written = [(saved, number) for saved, number in zip(ranks, numbers, strict=True)]
    by_stage = _first_misplaced(written, lambda p: (p.rank.stage, p.expert, p.rank.tp))
    # With --use-tp-pp-dp-mapping of earlier versions.
    by_expert = _first_misplaced(written, lambda p: (p.expert, p.rank.stage, p.rank.tp))
    if by_stage is None or by_expert is None:
        return
    (one, low), (other, high) = by_stage
    raise CheckpointCorruptError(
        f"{path}/{other.file} was written by process {high}, {one.file} by process {low}, but "
        "processes are numbered as ranks are: one was copied over the other, or they changed "
        "places; bring them back or use another checkpoint",
        path=f"{path}/{other.file}",
        files=(one.file, other.file),
    )


def _first_misplaced(
    written: Sequence[tuple[RankFile, int]], order: Callable[[RankFile], tuple[int, ...]]
) -> tuple[tuple[RankFile, int], tuple[RankFile, int]] | None:
    """Return the first two neighbours whose processes are not in order."""
    ordered = sorted(written, key=lambda item: order(item[0]))
    return next(((a, b) for a, b in pairwise(ordered) if a[1] >= b[1]), None)
