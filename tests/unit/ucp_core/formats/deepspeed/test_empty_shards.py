"""Dims that are shorter than there are tensor parallel ranks leave some without a part."""

from pathlib import Path

import pytest

from tests.support.deepspeed_folders import Folder, Param, assert_equal, loaded, native, read
from ucp_core.errors import CheckpointCorruptError

NAMES = ("up.weight", "up.bias", "down.weight")
MODEL = [
    Param("norm.weight", (6,)),
    Param("up.weight", (2, 6), cut=0),
    Param("up.bias", (2,), cut=0, group=1),
    Param("gate.weight", (2, 6), cut=0, role="frozen"),
    Param("down.weight", (6, 2), cut=1),
]
INFO = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r"norm\.weight"],
    "parameter_with_row_parallelism_patterns": [r"down\.weight"],
}


def _folder(*, is_listed: bool) -> Folder:
    """Return a checkpoint over three ranks, of which the last has no part of some parameters.

    ``is_listed``: its ``param_shapes`` name them; DeepSpeed 0.19 takes them for frozen there.
    """
    folder = native(MODEL, tp=3, info=INFO)
    for shapes in folder.trees["mp_rank_02_model_states.pt"]["param_shapes"]:
        for name in NAMES if not is_listed else ():
            shapes.pop(name, None)
    return folder


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_rank_without_a_part_of_a_parameter_has_an_empty_shard(
    tmp_path: Path, *, is_listed: bool
) -> None:
    """ZeRO's files of that rank pass over it; only the model's file has it, with no elements."""
    folder = _folder(is_listed=is_listed)

    checkpoint = read(folder.write(tmp_path))

    assert_equal(loaded(checkpoint), folder.expected)
    assert checkpoint.manifest.roles == {"gate.weight": "frozen"}


def test_a_part_that_is_missing_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    """The model's file says that the rank has elements of it."""
    folder = _folder(is_listed=False)
    for shapes in folder.trees["mp_rank_01_model_states.pt"]["param_shapes"]:
        shapes.pop("down.weight", None)
    for rank in range(2):
        for mapping in folder.optim(rank, 1)["param_slice_mappings"]:
            mapping.pop("down.weight", None)

    with pytest.raises(CheckpointCorruptError, match="the files of other ranks have it"):
        read(folder.write(tmp_path))
