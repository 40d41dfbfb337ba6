"""Checkpoints in DeepSpeed's form, of every layout, give back the tensors they were made of."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.deepspeed_folders import (
    Array,
    Folder,
    Param,
    assert_equal,
    dtype,
    loaded,
    namespace,
    native,
    optim_name,
    read,
    tensor,
)
from ucp_core.errors import CheckpointCorruptError, UnsupportedVersionError
from ucp_core.geometry import TensorKey
from ucp_core.language import load_rules
from ucp_core.torch_files import Instance

#: No size divides by the ranks; a scalar; two groups.
MODEL = [
    Param("embed.weight", (11, 6)),
    Param("block.up.weight", (7, 6)),
    Param("block.up.bias", (7,), group=1),
    Param("gain", (1,), group=1),
    Param("frozen.weight", (5, 3), role="frozen"),
    Param("scale", (3,), role="buffer"),
]


@pytest.mark.parametrize("dp", [1, 2, 3, 7])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_is_whole_again(tmp_path: Path, stage: int, dp: int) -> None:
    """Ranges cross parameters, and some ranks hold padding only; stage 3 pads each by itself."""
    folder = native(MODEL, stage=stage, dp=dp)

    assert_equal(loaded(read(folder.write(tmp_path))), folder.expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_sequence_parallel_ranks_are_data_parallel_ones_to_zero(tmp_path: Path, stage: int) -> None:
    """DeepSpeed 0.19 says that there are as many tensor parallel ranks, where there are none."""
    folder = native(MODEL, stage=stage, dp=4)
    for name, tree in folder.trees.items():
        if name.endswith("model_states.pt"):
            tree["checkpoint_parallel_dimensions"] = {"pp_degree": 1, "tp_degree": 2}

    checkpoint = read(folder.write(tmp_path))

    assert checkpoint.manifest.source["layout"] == {"dp": 4, "tp": 1, "pp": 1}
    assert_equal(loaded(checkpoint), folder.expected)


def test_parameters_of_one_group_in_several_sub_groups_are_found(tmp_path: Path) -> None:
    """Stage 3 cuts groups further, and some versions list the shapes by group all the same."""
    folder = native(MODEL, stage=3, dp=2)
    for name, tree in folder.trees.items():
        if name.endswith("model_states.pt"):
            tree["param_shapes"] = [
                {n: s for group in tree["param_shapes"] for n, s in group.items()}
            ]

    assert_equal(loaded(read(folder.write(tmp_path))), folder.expected)


def test_every_key_of_the_files_has_a_policy(tmp_path: Path) -> None:
    """An unclassified value would be silently lost."""
    folder = native(MODEL, dp=2, more={"surprise": {"x": 1}, "huge": tensor(np.zeros(1 << 16))})
    folder.optim()["clip_grad"] = 1.0

    items = read(folder.write(tmp_path)).manifest.items

    assert set(folder.trees["mp_rank_00_model_states.pt"]) <= set(items)
    optim = set(folder.optim()) - {"base_optimizer_state", "single_partition_of_fp32_groups"}
    assert {f"optimizer.{key}" for key in optim - {"param_slice_mappings"}} <= set(items)
    assert items["surprise"].policy == "replicate"
    assert items["huge"].policy == "drop"


def test_a_step_that_is_a_plain_number_becomes_a_tensor(tmp_path: Path) -> None:
    """DeepSpeed's own optimizers count in Python."""
    folder = native(MODEL[:2], dp=2)
    for rank in range(2):
        folder.optim(rank)["base_optimizer_state"]["state"][0]["step"] = 5

    checkpoint = read(folder.write(tmp_path))

    entry = checkpoint.state_map.entries[TensorKey("embed.weight", "step")]
    fragment = entry.fragments[0]
    path = f"{checkpoint.directory}/{fragment.file}"
    data = checkpoint.store.read_range(path, fragment.offset_bytes, fragment.num_bytes)
    assert (entry.dtype, np.frombuffer(data, np.float32)[0]) == ("F32", 5)


def test_elastic_state_is_read_without_hyper_parameters(tmp_path: Path) -> None:
    """Such files have a list, no padding, and the step beside it."""
    folder = native(MODEL, dp=3)
    for rank in range(3):
        state = folder.optim(rank)
        states = state["base_optimizer_state"]["state"]
        state["base_optimizer_state"] = [
            {k: v for k, v in states[index].items() if k != "step"} for index in (0, 1)
        ]
        state["base_optimizer_state_step"] = 5

    checkpoint = read(folder.write(tmp_path))

    assert_equal(loaded(checkpoint), folder.expected)
    assert [group["params"][0] for group in checkpoint.param_groups] == [
        "embed.weight",
        "block.up.bias",
    ]


def test_ties_are_seen_by_their_bytes_where_nothing_names_them(tmp_path: Path) -> None:
    """Older versions have no ``shared_params``; as a frozen one it would drift from its owner."""
    folder = native(MODEL, dp=2)
    module = folder.trees["mp_rank_00_model_states.pt"]["module"]
    module["head.weight"] = module["embed.weight"]
    module["copy.weight"] = module["frozen.weight"]

    checkpoint = read(folder.write(tmp_path))

    assert checkpoint.manifest.ties == {
        "copy.weight": "frozen.weight",
        "head.weight": "embed.weight",
    }


def _two_halves(whole: Array, tp: int) -> list[Array]:
    """Cut gate and up, which are fused, each by itself."""
    gate, up = np.split(whole, 2)
    halves = zip(np.array_split(gate, tp), np.array_split(up, tp), strict=True)
    return [np.concatenate(pair) for pair in halves]


def _query_key_value(widths: list[list[int]]) -> Any:
    """Return a cut of fused q, k and v by the widths of each rank's piece of each."""

    def cut(whole: Array, tp: int) -> list[Array]:
        parts = np.split(whole, np.cumsum([sum(row) for row in widths])[:-1])
        pieces = [np.split(p, np.cumsum(w)[:-1]) for p, w in zip(parts, widths, strict=True)]
        return [np.concatenate([piece[rank] for piece in pieces]) for rank in range(tp)]

    return cut


MEGATRON_INFO = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r"\d+\.norm\.(weight|bias)"],
    "parameter_with_row_parallelism_patterns": [r"\d+\.mlp\.down\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r"\d+\.mlp\.gate_up\.weight"],
    "vocabulary_parameter_patterns": ["tied_modules.embed.weight"],
    "pipeline_replicated_parameter_patterns": ["tied_modules.embed.weight"],
    "original_vocab_size": 13,
    "padded_vocab_size": 16,
}


def _megatron(stages: int) -> list[Param]:
    ends = (0, stages - 1) if stages > 1 else (0,)
    model = [Param("tied_modules.embed.weight", (16, 4), 0, stages=ends)]
    for layer in range(1, 3):
        stage = (layer - 1) * stages // 2
        model += [
            Param(f"{layer}.norm.weight", (4,), group=1, stages=(stage,)),
            Param(f"{layer}.mlp.gate_up.weight", (12, 4), _two_halves, stages=(stage,)),
            Param(f"{layer}.mlp.down.weight", (4, 6), 1, stages=(stage,)),
            Param(f"{layer}.mlp.up.bias", (6,), 0, group=1, stages=(stage,)),
        ]
    return model


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize(
    ("stage", "tp", "pp"), [(1, 2, 1), (1, 2, 2), (1, 1, 2), (1, 3, 1), (3, 2, 1), (3, 3, 1)]
)
def test_tensor_and_pipeline_parallel_tensors_are_whole_again(
    tmp_path: Path, tp: int, pp: int, dp: int, stage: int
) -> None:
    """Each of Megatron's patterns, under ZeRO's cuts, with stages that share the embedding."""
    if tp == 3:
        model = [p for p in _megatron(pp) if "embed" not in p.name]
        info = {k: v for k, v in MEGATRON_INFO.items() if "voc" not in k}
    else:
        model, info = _megatron(pp), MEGATRON_INFO
    folder = native(model, stage=stage, dp=dp, tp=tp, pp=pp, info=info)

    checkpoint = read(folder.write(tmp_path))

    expected = {
        (name, slot): array[:13] if "embed" in name else array
        for (name, slot), array in folder.expected.items()
    }
    assert_equal(loaded(checkpoint), expected)
    names = [set(group["params"]) for group in checkpoint.param_groups]
    assert names == [{p.name for p in model if p.group == g} for g in (0, 1)]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_rule_tells_where_padding_begins(tmp_path: Path, tp: int) -> None:
    """It is so of one rank as of several, and in every slot."""
    folder = native([Param("embed.weight", (16, 4), 0)], tp=tp, dp=2)
    text = "rules: [{match: embed.weight, pattern: {cut: {dim: 0, unpadded: 13}}}]"

    checkpoint = read(folder.write(tmp_path), rules=load_rules(text, "mine.yaml"))

    assert_equal(loaded(checkpoint), {key: v[:13] for key, v in folder.expected.items()})


def test_widths_of_fused_parts_are_honoured(tmp_path: Path) -> None:
    """From version 0.4 on heads may be shared out unevenly; even thirds would shift them."""
    widths = [[6, 2], [2, 1], [2, 1]]
    model = [Param("attn.qkv.weight", (14, 4), _query_key_value(widths))]
    info = {
        "universal_checkpoint_version": 0.4,
        "parameter_with_sub_params": [
            {"patterns": [r"attn\.qkv\.weight"], "shape": ((8, 3, 3), 4), "partition_dim": 0}
        ],
        "sub_param_shard_widths": {r"attn\.qkv\.weight": widths},
    }
    folder = native(model, tp=2, dp=2, info=info)

    assert_equal(loaded(read(folder.write(tmp_path))), folder.expected)


@pytest.mark.parametrize("shape", [(3, -1), ((8, 2, 2), -1)])
def test_older_fused_parts_were_cut_evenly(tmp_path: Path, shape: tuple[Any, ...]) -> None:
    """A number means so many equal parts, a tuple their sizes, and neither has widths."""
    widths = [[2, 2]] * 3 if shape[0] == 3 else [[4, 4], [1, 1], [1, 1]]
    model = [Param("attn.qkv.weight", (12, 4), _query_key_value(widths))]
    parts = {"patterns": ["attn.qkv"], "shape": shape, "partition_dim": 0}
    info = {"universal_checkpoint_version": 0.3, "parameter_with_sub_params": [parts]}
    folder = native(model, tp=2, dp=1, info=info)

    assert_equal(loaded(read(folder.write(tmp_path))), folder.expected)


def _piece(shape: list[int], source: Any, dest: Any, locations: list[int]) -> dict[str, Any]:
    return {"shape": shape, "source": source, "dest": dest, "locations": locations}


def test_an_affine_map_comes_before_the_patterns(tmp_path: Path) -> None:
    """Newer checkpoints have both; the patterns here say something else on purpose."""
    model = [Param("w", (4, 6), 1)]
    pieces = {
        rank: {
            "shard_shape": [4, 3],
            "pieces": [_piece([4, 3], [3 * rank, [6, 1]], [0, [3, 1]], [rank])],
        }
        for rank in range(2)
    }
    info = {
        "universal_checkpoint_version": 0.4,
        "tp_replicated_parameter_patterns": ["^w$"],
        "affine_map": {"version": 1, "params": {"^w$": {"logical_shape": [4, 6], "ranks": pieces}}},
    }
    folder = native(model, tp=2, dp=2, info=info)

    assert_equal(loaded(read(folder.write(tmp_path))), folder.expected)


def test_a_frozen_parameter_that_ranks_share_is_put_together(tmp_path: Path) -> None:
    """The peer keeps the first rank's shard and calls it the parameter."""
    model = [
        Param("up.weight", (6, 4), 0),
        Param("adapter.weight", (4, 6), 1, role="frozen"),
        Param("inv_freq", (3,), role="buffer"),
    ]
    info = {
        "universal_checkpoint_version": 0.2,
        "parameter_with_row_parallelism_patterns": [r"adapter\.weight"],
    }
    folder = native(model, tp=2, dp=2, info=info)

    checkpoint = read(folder.write(tmp_path))

    assert_equal(loaded(checkpoint), folder.expected)
    assert checkpoint.manifest.roles == {"adapter.weight": "frozen", "inv_freq": "buffer"}


def test_frozen_layers_and_buffers_of_a_pipeline_come_from_layer_files(tmp_path: Path) -> None:
    """Model files of a pipeline have no module."""
    model = [
        *_megatron(2),
        Param("1.rope.inv_freq", (3,), role="buffer"),
        Param("3.adapter.weight", (4, 4), role="frozen", stages=(1,)),
    ]
    info = {**MEGATRON_INFO, "tp_replicated_parameter_patterns": [r"\d+\.(norm|adapter)"]}
    folder = native(model, tp=2, pp=2, dp=2, info=info)

    checkpoint = read(folder.write(tmp_path))

    found = loaded(checkpoint)
    for name in ("1.rope.inv_freq", "3.adapter.weight"):
        assert np.array_equal(found[name, "weight"], folder.expected[name, "weight"])
    assert checkpoint.manifest.roles == {"1.rope.inv_freq": "buffer", "3.adapter.weight": "frozen"}
    assert not any(name.startswith("0.") for name, _ in found), "the tied layer is no tensor"


def _without_shapes(folder: Folder) -> Folder:
    """Return a folder as BF16_Optimizer saves it without ZeRO: mappings alone have names."""
    for name, tree in folder.trees.items():
        if name.startswith("mp_rank"):
            tree["param_shapes"] = None
            tree["optimizer"] = {"single_partition_of_fp32_groups": []}
    return folder


def _pipeline() -> list[Param]:
    ends = Param("tied_modules.embed.weight", (5, 4), stages=(0, 1))
    layers = [Param(f"{1 + n}.up.weight", (3, 4), stages=(n,)) for n in range(2)]
    return [ends, *layers]


def test_a_tied_module_that_fits_two_layers_is_no_guess(tmp_path: Path) -> None:
    """Two weights of one size and different shape would each look right."""
    folder = _without_shapes(native(_pipeline(), pp=2))
    folder.trees["layer_03-model_states.pt"] = {"weight": tensor(np.zeros((4, 5), np.float32))}

    with pytest.raises(CheckpointCorruptError, match=r"tied_modules\.embed\.weight"):
        read(folder.write(tmp_path))


def test_half_precision_masters_are_kept_as_they_are(tmp_path: Path) -> None:
    """``fp16_master_weights_and_gradients`` has no float32 anywhere."""
    folder = native(MODEL[:1], dp=1)
    state = folder.optim()
    state["single_partition_of_fp32_groups"] = [tensor(np.ones(66, np.float16))]

    found = loaded(read(folder.write(tmp_path)))

    assert found["embed.weight", "weight"].dtype == np.float16


@pytest.mark.parametrize("name", ["bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt",
                                  "fp16_zero_pp_rank_{}_mp_rank_00_optim_states.pt",
                                  "zero_pp_rank_{}_mp_rank_00optim_states.pt"])  # fmt: skip
def test_names_of_other_versions_are_known(tmp_path: Path, name: str) -> None:
    """The prefix tells the dtype; the oldest files lack an underscore."""
    folder = native(MODEL, dp=2)
    for rank in range(2):
        folder.trees[name.format(rank)] = folder.trees.pop(optim_name(rank, 0))

    assert_equal(loaded(read(folder.write(tmp_path))), folder.expected)


def test_the_arguments_of_megatron_are_kept(tmp_path: Path) -> None:
    """Its namespace holds dtypes and enums, which are no plain data."""
    arguments = namespace(
        num_layers=2, params_dtype=dtype("float16"), kind=Instance("argparse.Namespace", (), {})
    )
    path = native(MODEL, dp=1, more={"args": arguments, "rng_state": [1, 2]}).write(tmp_path)

    manifest = read(path).manifest

    kept = manifest.extra["client_state"]["args"]["state"]
    assert (kept["num_layers"], kept["params_dtype"]) == (2, "torch.float16")
    assert manifest.items["rng_state"].policy == "replicate"


def test_momentum_of_whole_parameters_is_refused(tmp_path: Path) -> None:
    """Muon's is not cut like the masters below stage 3; its elements would be shifted."""
    folder = native([Param("up.weight", (7, 6))], dp=2)
    for rank in range(2):
        folder.optim(rank)["base_optimizer_state"]["param_groups"][0]["use_muon"] = True

    with pytest.raises(UnsupportedVersionError, match="save at stage 3"):
        read(folder.write(tmp_path))
