"""Files of ranks that were swapped, and edited places, are told by whatever tells them.

That is, under stages 1 and 2, where parameters cross the border of two ranks, their order, and
padding; under stage 3 padding and ties. Sound files are never refused.
"""

from __future__ import annotations

import shutil
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
from tests.support.foreign_reading import checkpoint_fixture
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


@pytest.mark.parametrize("in_order", [True, False])
def test_parts_of_a_flat_buffer_under_one_anothers_names_are_refused(
    tmp_path: Path,
    in_order: bool,  # noqa: FBT001
) -> None:
    """All elements are there, at the wrong places: a parameter crosses the border of the ranks."""
    folder = native(MODEL[:1], dp=2)
    zero = {"stage": 1, "round_robin_gradients": not in_order}
    folder.trees["mp_rank_00_model_states.pt"]["ds_config"] = {"zero_optimization": zero}
    mine, other = optim_name(0, 0), optim_name(1, 0)
    folder.trees[mine], folder.trees[other] = folder.trees[other], folder.trees[mine]

    with pytest.raises(CheckpointCorruptError, match="were swapped") as caught:
        read(folder.write(tmp_path))

    assert caught.value.facts["file"] in {mine, other}


def test_whole_parameters_in_another_order_than_the_model_has_are_refused(tmp_path: Path) -> None:
    """No parameter crosses the border, so only the order tells."""
    folder = native([Param("a", (8,)), Param("b", (8,))], dp=2)
    names = [optim_name(rank, 0) for rank in range(2)]
    folder.trees[names[0]], folder.trees[names[1]] = (folder.trees[n] for n in names[1::-1])

    with pytest.raises(CheckpointCorruptError, match="a comes after parameters that it should"):
        read(folder.write(tmp_path))


@pytest.mark.parametrize("start", [0, 3, 11])
def test_places_that_overlap_or_leave_a_gap_are_refused(tmp_path: Path, start: int) -> None:
    """Two parameters would have the same elements, and a third none."""
    folder = native([Param("a", (4,)), Param("b", (4,)), Param("c", (4,))], dp=1)
    (mapping,) = folder.optim(0)["param_slice_mappings"]
    mapping["b"].state["start"] = start

    with pytest.raises(CheckpointCorruptError, match=r"[bc] begins at element \d+, not at"):
        read(folder.write(tmp_path))


@pytest.mark.parametrize("padded", [True, False])
def test_padding_in_a_rank_before_the_last_is_refused(
    tmp_path: Path,
    padded: bool,  # noqa: FBT001
) -> None:
    """Old versions saved no mappings, so nothing else tells. BF16_Optimizer pads masters."""
    folder = native(MODEL[:1], dp=4, mappings=False)
    if padded:
        for rank in range(4):
            state = folder.optim(rank)
            del state["zero_stage"]
            if rank == 3:
                masters = np.append(folder.expected["up.weight", "weight"].ravel()[36:], [0.0] * 6)
                state["single_partition_of_fp32_groups"] = [tensor(masters.astype(np.float32))]
    mine, other = optim_name(3, 0), optim_name(1, 0)
    folder.trees[mine], folder.trees[other] = folder.trees[other], folder.trees[mine]

    with pytest.raises(CheckpointCorruptError, match="were swapped"):
        read(folder.write(tmp_path))


def test_parameters_that_were_dealt_out_in_turns_are_in_another_order(tmp_path: Path) -> None:
    """``round_robin_gradients`` flattens them so, and names their shapes in the model's order."""
    model = [Param("a", (8,)), Param("b", (8,))]
    folder = native(model[::-1], dp=2)
    tree = folder.trees["mp_rank_00_model_states.pt"]
    tree["param_shapes"] = [dict(reversed(tree["param_shapes"][0].items()))]
    tree["ds_config"] = {"zero_optimization": {"stage": 1, "round_robin_gradients": True}}

    assert_equal(loaded(read(folder.write(tmp_path))), folder.expected)


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


@pytest.mark.parametrize(
    ("fixture", "kind"),
    [
        ("ds_zero1_dp2", "optim"),
        ("ds_zero3_dp2", "optim"),
        ("ds_zero3_dp2", "model"),
        ("ds_tp2_dp2_zero1", "model"),
    ],
)
def test_the_name_that_torch_wrote_into_a_file_is_its_own(
    tmp_path: Path, fixture: str, kind: str
) -> None:
    """Where ranks divide all parameters evenly, it alone tells that two were swapped."""
    source = tmp_path / "source"
    shutil.copytree(checkpoint_fixture(fixture) / "checkpoint", source)
    files = sorted(source.rglob(f"*{kind}_states.pt"))
    kept = files[0].rename(tmp_path / "kept")
    files[1].rename(files[0])
    kept.rename(files[1])

    with pytest.raises(CheckpointCorruptError, match=r"was saved as .*swapped") as caught:
        read(source)

    names = {caught.value.facts["file"], caught.value.facts["swapped_with"]}
    assert names == {file.name for file in files[:2]}


def test_files_that_we_wrote_tell_their_names_too(tmp_path: Path) -> None:
    """Pieces of a frozen parameter that three ranks divide evenly show nothing else."""
    source = native([*MODEL, Param("base", (9, 8), role="frozen")], stage=3, dp=3).write(
        tmp_path / "source"
    )
    one, other = (source / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (1, 2))
    kept = one.rename(tmp_path / "kept")
    other.rename(one)
    kept.rename(other)

    with pytest.raises(CheckpointCorruptError, match=f"was saved as {other.name}"):
        read(source)
