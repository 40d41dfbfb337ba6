"""A file of ZeRO under the name of another rank is told by what is in it, and by nothing else."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

from tests.support.deepspeed_folders import (
    Array,
    Param,
    assert_equal,
    loaded,
    native,
    optim_name,
    read,
)
from ucp_core.errors import CheckpointCorruptError


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_file_that_was_copied_over_another_is_refused(tmp_path: Path, stage: int) -> None:
    """Of the same size and shapes, and it does not say whose it is: half of the model twice."""
    folder = native([Param("up.weight", (16, 6)), Param("up.bias", (8,))], stage=stage, dp=4)
    mappings = [folder.optim(rank).get("param_slice_mappings") for rank in range(4)]
    folder.trees[optim_name(2, 0)] = deepcopy(folder.trees[optim_name(1, 0)])
    if stage == 1:
        # Whatever else such a file says: the bytes are another rank's.
        folder.optim(2)["param_slice_mappings"] = mappings[2]

    with pytest.raises(CheckpointCorruptError, match="holds the same masters") as caught:
        read(folder.write(tmp_path))

    assert caught.value.facts["file"] == optim_name(2, 0)
    assert f"as {optim_name(1, 0)}," in str(caught.value)


def test_a_model_file_of_stage_3_that_was_copied_is_refused(tmp_path: Path) -> None:
    """All it has of its own are the pieces of frozen parameters; nothing in it names its rank."""
    folder = native(
        [Param("up.weight", (16, 6)), Param("base.weight", (9, 7), role="frozen")], stage=3, dp=3
    )
    mine, other = (f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (2, 1))
    folder.trees[mine] = deepcopy(folder.trees[other])

    with pytest.raises(CheckpointCorruptError, match="the same pieces of frozen") as caught:
        read(folder.write(tmp_path))

    assert (caught.value.facts["file"], caught.value.facts["same_as"]) == (mine, other)


class _Constant(Param):
    """A parameter that is one number over and over, and has not been trained."""

    def value(self, slot: str) -> Array:
        return np.full(self.shape, 0.5 if slot == "weight" else 0, np.float32)


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_hold_nothing_but_one_number_are_no_copies(tmp_path: Path, stage: int) -> None:
    """Parameters as they were initialised, and ranks that hold only padding, are alike."""
    params = [_Constant("up.weight", (8, 6)), _Constant("up.bias", (3,))]
    params.append(_Constant("base.bias", (40,), role="frozen"))
    folder = native(params, stage=stage, dp=8)

    checkpoint = read(folder.write(tmp_path))

    assert_equal(loaded(checkpoint), folder.expected)
