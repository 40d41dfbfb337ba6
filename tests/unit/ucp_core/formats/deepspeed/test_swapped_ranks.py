"""Files of stage 3 that were swapped are told by padding and ties, and sound ones never refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.deepspeed_folders import (
    Param,
    assert_equal,
    loaded,
    native,
    optim_name,
    read,
    tensor,
)
from ucp_core.errors import CheckpointCorruptError

#: 42 and 7 elements; 4 ranks have 11 and 2 each, of which the last has 9 and 1.
MODEL = [Param("up.weight", (7, 6)), Param("up.bias", (7,), group=1)]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_last_rank_under_another_ranks_name_is_refused(tmp_path: Path, rank: int) -> None:
    """Both files are sound; only what lies behind the end of a parameter tells."""
    folder = native(MODEL, stage=3, dp=4)
    mine, other = optim_name(3, 0), optim_name(rank, 0)
    folder.trees[mine], folder.trees[other] = folder.trees[other], folder.trees[mine]

    with pytest.raises(CheckpointCorruptError, match="the two were swapped") as caught:
        read(folder.write(tmp_path))

    assert (caught.value.facts["file"], caught.value.facts["swapped_with"]) == (mine, other)


def test_moments_in_the_padding_alone_prove_nothing(tmp_path: Path) -> None:
    """Decay that is part of the gradient moves what padding has, and masters there are garbage."""
    folder = native(MODEL, stage=3, dp=4)
    state = folder.optim(3)["optimizer_state_dict"]["state"][0]
    moments = np.zeros(11, np.float32)
    moments[:9] = folder.expected["up.weight", "exp_avg"].ravel()[33:]
    moments[9:] = 0.5
    state["exp_avg"] = tensor(moments)

    assert_equal(loaded(read(folder.write(tmp_path))), folder.expected)


def test_ties_under_another_ranks_name_are_refused(tmp_path: Path) -> None:
    """The pieces of frozen parameters would be put together in the wrong order."""
    folder = native([*MODEL, Param("base", (9, 8), role="frozen")], stage=3, dp=3)
    names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(3)]
    folder.trees[names[0]]["shared_params"] = {"head.weight": "up.weight"}
    folder.trees[names[0]], folder.trees[names[1]] = (folder.trees[n] for n in names[1::-1])

    with pytest.raises(CheckpointCorruptError, match=r"no shared_params.*swapped") as caught:
        read(folder.write(tmp_path))

    assert caught.value.facts["swapped_with"] == names[1]
