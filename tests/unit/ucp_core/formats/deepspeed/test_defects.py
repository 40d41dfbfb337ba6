"""Bad input and the peers' known defects: an error that names the file, or the right tensors.

The defects are those of ``ds_to_universal`` of DeepSpeed 0.19.8; most of them are silent there.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.deepspeed_folders import (
    Array,
    Folder,
    Param,
    assert_equal,
    loaded,
    namespace,
    native,
    optim_name,
    read,
    tensor,
)
from ucp_core.errors import (
    CheckpointCorruptError,
    PatternError,
    UcpError,
    UnsupportedVersionError,
)
from ucp_core.language import Cut, Replicated, Rules
from ucp_core.language.rules import Rule

MODEL = [Param("up.weight", (7, 6)), Param("up.bias", (7,)), Param("scale", (3,), role="buffer")]
SHARDED = [
    Param("up.weight", (8, 6), 0),
    Param("down.weight", (6, 8), 1),
    Param("norm.weight", (6,)),
]
MODEL_FILE = "mp_rank_00_model_states.pt"


def _error(folder: Folder, path: Path, kind: type[UcpError] = CheckpointCorruptError) -> str:
    with pytest.raises(kind) as caught:
        read(folder.write(path))
    return str(caught.value)


@pytest.mark.parametrize(
    ("stage", "file"),
    [
        *((1, optim_name(rank, 0)) for rank in range(3)),
        (1, MODEL_FILE),
        (3, optim_name(1, 0)),
        (3, f"zero_pp_rank_1_{MODEL_FILE}"),
    ],
)
def test_a_missing_file_is_named(tmp_path: Path, stage: int, file: str) -> None:
    """The peer fails late, with the shape of a tensor; without the last file of stage 3 too."""
    folder = native(MODEL, stage=stage, dp=3)
    del folder.trees[file]

    assert f"lacks {file}" in _error(folder, tmp_path)


def test_shapes_that_contradict_each_other_are_named_with_both_places(tmp_path: Path) -> None:
    """They have as many elements, so the tensor would be another one with the same bytes."""
    folder = native(MODEL, dp=2)
    shapes = folder.trees[MODEL_FILE]["param_shapes"][0]
    shapes["up.weight"] = type(shapes["up.weight"])((6, 7))

    error = _error(folder, tmp_path)
    assert f"{MODEL_FILE}: up.weight is [7, 6] there" in error
    assert "and [6, 7] in param_shapes" in error


def _later_model(folder: Folder) -> None:
    folder.trees["mp_rank_01_model_states.pt"]["global_steps"] = 9


def _later_optim(folder: Folder) -> None:
    state = folder.optim(1, 1)["base_optimizer_state"]["state"][0]
    state["step"] = tensor(np.array(9, np.float32))


def _later_count(folder: Folder) -> None:
    folder.optim(1, 0)["partition_count"] = [4]


def _other_version(folder: Folder) -> None:
    folder.trees[optim_name(1, 0)]["ds_version"] = "0.14.5"


@pytest.mark.parametrize("spoil", [_later_model, _later_optim, _later_count, _other_version])
def test_files_of_two_saves_are_refused(tmp_path: Path, spoil: Callable[[Folder], None]) -> None:
    """A save that was interrupted in a folder of an older one leaves such a mixture."""
    folder = native(SHARDED, dp=2, tp=2, info={"parameter_with_row_parallelism_patterns": ["down"]})
    folder.trees["mp_rank_00_model_states.pt"]["universal_checkpoint_info"][
        "tp_replicated_parameter_patterns"
    ] = ["norm"]
    spoil(folder)

    assert "mixes two saves" in _error(folder, tmp_path)


def test_files_of_more_ranks_from_another_run_are_left_out(tmp_path: Path) -> None:
    """The peer takes whatever matches a name pattern."""
    folder = native(MODEL, dp=2)
    older = native(MODEL, dp=4, step=2)
    for name in (optim_name(2, 0), optim_name(3, 0)):
        folder.trees[name] = older.trees[name]
    folder.trees["mp_rank_01_model_states.pt"] = older.trees[MODEL_FILE]
    folder.trees["layer_00-model_states.pt"] = {"weight": tensor(np.zeros(4, np.float32))}

    checkpoint = read(folder.write(tmp_path))

    assert_equal(loaded(checkpoint), folder.expected)
    dropped = [
        name for name, item in checkpoint.manifest.items.items() if "another run" in item.note
    ]
    assert sorted(dropped) == [
        "layer_00-model_states.pt",
        "mp_rank_01_model_states.pt",
        optim_name(2, 0),
        optim_name(3, 0),
    ]


def test_files_of_two_stages_in_one_folder_are_refused(tmp_path: Path) -> None:
    """Nothing tells which of them is the newer."""
    folder = native(MODEL, dp=2)
    folder.trees |= {
        name: tree
        for name, tree in native(MODEL, stage=3, dp=2).trees.items()
        if name.endswith("model_states.pt")
    }

    assert "one kind is left from another run" in _error(folder, tmp_path)


def test_parts_that_sequence_parallel_ranks_overwrote_are_missed(tmp_path: Path) -> None:
    """By a mesh, stage 3 cuts over all ranks and saves only the data-parallel ones' files."""
    folder = native(MODEL, stage=3, dp=4)
    for rank in (2, 3):
        del folder.trees[optim_name(rank, 0)]
        del folder.trees[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"]
    for name, tree in folder.trees.items():
        if name.endswith("model_states.pt"):
            tree["dp_world_size"] = 2
            tree["frozen_param_shapes"] = tree["frozen_param_fragments"] = {}
        else:
            tree["optimizer_state_dict"]["partition_count"] = 2

    assert "should have elements up to 21" in _error(folder, tmp_path)


def test_wrong_degrees_are_refused(tmp_path: Path) -> None:
    """Two ranks cannot be two tensor parallel ranks in each of two stages."""
    folder = native(SHARDED, dp=1, tp=2)
    for name in ("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"):
        degrees = {"pp_degree": 2, "tp_degree": 2}
        folder.trees[name]["checkpoint_parallel_dimensions"] = degrees

    assert "do not fit" in _error(folder, tmp_path)


def test_tensor_parallel_tensors_without_a_word_are_refused(tmp_path: Path) -> None:
    """The peer, told to go on, doubles norms and cuts the rest wrongly: 33 of 63 wrong."""
    path = native(SHARDED, dp=2, tp=2).write(tmp_path)

    with pytest.raises(PatternError, match="--rules") as caught:
        read(path)

    unknown = caught.value.facts["unknown"]
    assert {name.split()[0] for name in unknown} == {param.name for param in SHARDED}


def test_what_the_checkpoint_says_counts_before_rules(tmp_path: Path) -> None:
    """The rules of a family cut embeddings, which AutoTP leaves whole: they would be doubled."""
    folder = native([Param("embed.weight", (8, 6))], dp=1, tp=2,
                    info={"tp_replicated_parameter_patterns": ["embed"]})  # fmt: skip
    rules = Rules((Rule(r"embed\..*", Cut(0)),))

    assert_equal(loaded(read(folder.write(tmp_path), rules=rules)), folder.expected)


ROWS_ONLY = {"parameter_with_row_parallelism_patterns": ["down"]}


def test_equal_shards_that_a_producer_forgot_to_list_are_refused(tmp_path: Path) -> None:
    """The peer doubles them: Megatron-DeepSpeed forgets untied position embeddings."""
    folder = native([Param("positions.weight", (8, 6))], dp=2, tp=2, info=ROWS_ONLY)
    path = folder.write(tmp_path)

    with pytest.raises(PatternError, match="same values"):
        read(path)
    rules = Rules((Rule(r"positions\..*", Replicated()),))
    assert_equal(loaded(read(path, rules=rules)), folder.expected)


def test_shards_of_different_extent_prove_where_they_were_cut(tmp_path: Path) -> None:
    """Only one extent differs, so the cut is along that dim."""
    folder = native([Param("up.weight", (7, 6), 0)], dp=2, tp=2)

    assert_equal(loaded(read(folder.write(tmp_path))), folder.expected)


def test_a_replicated_parameter_that_differs_is_found_when_it_is_compared(tmp_path: Path) -> None:
    """Declared replicas stay in the map, so that converting compares them."""
    folder = native(
        SHARDED, dp=1, tp=2, info={"tp_replicated_parameter_patterns": ["norm"],
                                   "parameter_with_row_parallelism_patterns": ["down"]}
    )  # fmt: skip

    entries = read(folder.write(tmp_path)).state_map.entries

    norm = next(e for k, e in entries.items() if k.fqn == "norm.weight" and k.slot == "weight")
    assert [f.replica for f in norm.fragments] == [False, True]


def _qkv(whole: Array, tp: int) -> list[Array]:
    """Cut q, k and v by themselves: each rank has all its q, then k, then v."""
    parts = [np.split(part, tp) for part in np.split(whole, 3)]
    return [np.concatenate([part[rank] for part in parts]) for rank in range(tp)]


QKV = "2.self_attention.query_key_value.weight"
ARGUMENTS = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_channels": 2}
MEGATRON = {"tp_replicated_parameter_patterns": [r"\d+\.norm"]}


def test_megatrons_newer_projection_is_put_together_by_parts(tmp_path: Path) -> None:
    """The peer concatenates [Q|K|V] blocks of each rank plainly: silently wrong at tp 1."""
    arguments = namespace(**ARGUMENTS, ds_sequence_parallel_fpdt=False)
    folder = native(
        [Param(QKV, (24, 3), _qkv)], dp=2, tp=2, info=MEGATRON, more={"args": arguments}
    )

    checkpoint = read(folder.write(tmp_path))

    assert_equal(loaded(checkpoint), folder.expected)
    assert "FPDT" in checkpoint.manifest.items[f"cut of {QKV}"].note


def test_megatrons_older_projection_is_concatenated(tmp_path: Path) -> None:
    """There a rank has whole head groups; the arguments lack an option of the newer one."""
    folder = native(
        [Param(QKV, (24, 3), 0)], dp=2, tp=2, info=MEGATRON, more={"args": namespace(**ARGUMENTS)}
    )

    assert_equal(loaded(read(folder.write(tmp_path))), folder.expected)


def test_megatrons_projection_without_arguments_is_asked_about(tmp_path: Path) -> None:
    """Both layouts have the same shapes, so any guess is right by luck."""
    folder = native([Param(QKV, (24, 3), 0)], dp=2, tp=2, info=MEGATRON)
    path = folder.write(tmp_path)

    with pytest.raises(PatternError, match="--rules"):
        read(path)
    rules = Rules((Rule(r".*query_key_value\.weight", Cut(0)),))
    assert_equal(loaded(read(path, rules=rules)), folder.expected)


def test_what_a_checkpoint_declares_unsupported_is_refused(tmp_path: Path) -> None:
    """AutoTP lists such parameters with the reason."""
    info = {
        "tp_replicated_parameter_patterns": ["norm"],
        "autotp_unsupported_parameter_patterns": {r"^up\.weight$": "fused by hand"},
    }
    folder = native(SHARDED, dp=1, tp=2, info=info)

    assert "fused by hand" in _error(folder, tmp_path, UnsupportedVersionError)


def test_a_newer_description_of_layouts_is_refused(tmp_path: Path) -> None:
    """It could mean something else by the same words."""
    folder = native(SHARDED, dp=1, tp=2, info={"universal_checkpoint_version": 0.5})

    assert "update everstep" in _error(folder, tmp_path, UnsupportedVersionError)


def test_an_affine_map_with_a_hole_is_refused(tmp_path: Path) -> None:
    """The peer returns what was in memory before."""
    pieces = {
        rank: {
            "shard_shape": [4, 3],
            "pieces": [
                {
                    "shape": [3, 3],
                    "source": [3 * rank, [6, 1]],
                    "dest": [0, [3, 1]],
                    "locations": [rank],
                }
            ],
        }
        for rank in range(2)
    }
    affine = {"version": 1, "params": {"^w$": {"logical_shape": [4, 6], "ranks": pieces}}}
    folder = native([Param("w", (4, 6), 1)], dp=1, tp=2, info={"affine_map": affine})

    assert "w (" in _error(folder, tmp_path, UcpError)


def _lacking(folder: Folder) -> None:
    del folder.trees[MODEL_FILE]["param_shapes"][0]["up.bias"]


def _larger(folder: Folder) -> None:
    folder.trees[MODEL_FILE]["param_shapes"][0]["up.bias"] = (8,)


def _smaller(folder: Folder) -> None:
    folder.trees[MODEL_FILE]["param_shapes"][0]["up.weight"] = (7, 5)


def _unnamed(folder: Folder) -> None:
    folder.trees[MODEL_FILE]["param_shapes"] = [3]


def _two_groups(folder: Folder) -> None:
    folder.trees[MODEL_FILE]["param_shapes"].append({"more": (2,)})


@pytest.mark.parametrize("spoil", [_lacking, _larger, _smaller, _unnamed, _two_groups])
def test_shapes_that_contradict_the_files_are_refused(
    tmp_path: Path, spoil: Callable[[Folder], None]
) -> None:
    """They decide where every later parameter begins."""
    folder = native(MODEL, dp=2)
    spoil(folder)

    _error(folder, tmp_path)


@pytest.mark.parametrize("change", [-1, 3])
def test_shapes_that_contradict_the_files_of_stage_3_are_refused(
    tmp_path: Path, change: int
) -> None:
    """No mapping is saved there, so the sums must fit."""
    folder = native(MODEL, stage=3, dp=2)
    for name, tree in folder.trees.items():
        if name.endswith("model_states.pt"):
            tree["param_shapes"][0] = dict(tree["param_shapes"][0])
            tree["param_shapes"][0]["up.bias"] = (7 + 2 * change,)

    _error(folder, tmp_path)


def test_optimizer_state_of_this_cut_only_is_refused(tmp_path: Path) -> None:
    """Block scales of 8-bit states fit no other cut; to leave them out would be silent."""
    folder = native(MODEL, dp=2)
    for rank in range(2):
        folder.optim(rank)["base_optimizer_state"]["state"][0]["absmax"] = tensor(
            np.ones(3, np.float32)
        )

    assert "absmax" in _error(folder, tmp_path, UnsupportedVersionError)


def test_a_missing_layer_file_is_named(tmp_path: Path) -> None:
    """Its buffers and frozen parameters would be missing without a word."""
    folder = native([Param("1.weight", (4, 3)), Param("2.weight", (4,), stages=(1,))], dp=1, pp=2)
    del folder.trees["layer_02-model_states.pt"]

    assert "layer 2" in _error(folder, tmp_path)


def test_experts_of_autoep_are_refused(tmp_path: Path) -> None:
    """Their placement is described in a form that is not read here."""
    folder = native(MODEL, dp=1, more={"ds_autoep_layers": [{"num_experts": 4}]})

    assert "AutoEP" in _error(folder, tmp_path, UnsupportedVersionError)
