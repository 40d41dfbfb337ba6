"""Layers of experts, which every expert parallel rank numbers from 0 on, get their own numbers."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.deepspeed_folders import (
    Array,
    Folder,
    Param,
    assert_equal,
    loaded,
    native,
    read,
    tensor,
)
from ucp_core.errors import CheckpointCorruptError

_EXPERTS = ".deepspeed_moe.experts.deepspeed_experts."


def _with_experts(
    dp: int, layers: Mapping[str, int] | None = None
) -> tuple[Folder, dict[tuple[str, str], Array]]:
    """Return a checkpoint whose experts are shared out over two ranks, ``dp / 2`` times.

    Args:
        dp: Data-parallel ranks.
        layers: Experts that a rank has of each layer; 2 of one layer.
    """
    layers = layers or {"moe": 2}
    dense = [Param("up.weight", (3, 5))]
    expected: dict[tuple[str, str], Array] = {}
    local: list[Folder] = []
    for ep_rank in range(2):
        names = [
            f"{layer}{_EXPERTS}{count * ep_rank + number}.weight"
            for layer, count in layers.items()
            for number in range(count)
        ]
        folder = native([Param(name, (3, 3)) for name in names], dp=dp // 2)
        expected |= folder.expected
        local.append(folder)
    counts = {layer: 2 * count for layer, count in layers.items()}
    whole = native(dense, dp=dp, more={"num_experts": [*counts.values()]})
    whole.expected |= expected
    model = whole.trees["mp_rank_00_model_states.pt"]
    shapes = local[0].trees["mp_rank_00_model_states.pt"]["param_shapes"][0]
    model["param_shapes"].append(dict(shapes))
    for rank in range(dp):
        state, expert = whole.optim(rank), local[rank % 2].optim(rank // 2)
        base, other = state["base_optimizer_state"], expert["base_optimizer_state"]
        base["state"][1] = other["state"][0]
        base["param_groups"].append(other["param_groups"][0] | {"moe": True, "params": [1]})
        for key in ("single_partition_of_fp32_groups", "group_paddings", "partition_count"):
            state[key].append(expert[key][0])
        # Every rank counts its experts from 0 on.
        mapping = {}
        for name, address in expert["param_slice_mappings"][0].items():
            layer, number = name.removesuffix(".weight").split(_EXPERTS)
            mapping[f"{layer}{_EXPERTS}{int(number) % layers[layer]}.weight"] = address
        state["param_slice_mappings"].append(mapping)
    for index, (layer, count) in enumerate(counts.items()):
        for number in range(count):
            name = f"{layer}{_EXPERTS}{number}.weight"
            file = f"layer_{index}_expert_{number}_mp_rank_00_model_states.pt"
            whole.trees[file] = {name: tensor(expected[name, "weight"])}
    return whole, whole.expected


def test_experts_are_found_where_only_mappings_name_them(tmp_path: Path) -> None:
    """Before 0.19 the files of such models had no shapes, no version and no configuration."""
    folder, expected = _with_experts(2)
    tree = folder.trees["mp_rank_00_model_states.pt"]
    for key in ("param_shapes", "ds_config", "ds_version", "buffer_names", "shared_params"):
        del tree[key]

    checkpoint = read(folder.write(tmp_path))

    assert_equal(loaded(checkpoint), expected)
    assert checkpoint.manifest.source["version"] == "0.19.8"


def test_layers_may_have_different_numbers_of_experts(tmp_path: Path) -> None:
    """Counted by the layer with the most, the second expert of a smaller one would be its third."""
    folder, expected = _with_experts(4, {"first": 1, "moe": 2})

    checkpoint = read(folder.write(tmp_path))

    assert_equal(loaded(checkpoint), expected)
    assert checkpoint.manifest.roles == {}


def test_experts_that_only_zero_has_are_refused(tmp_path: Path) -> None:
    """Their numbers in the layer would be wrong: they are counted from what is trained."""
    folder, _ = _with_experts(2)
    file = "layer_0_expert_3_mp_rank_00_model_states.pt"
    tree = folder.trees[file]
    folder.trees[file] = {name.replace("experts.3.", "experts.4."): v for name, v in tree.items()}

    with pytest.raises(
        CheckpointCorruptError, match=r"experts\.3\.weight, but the files of experts"
    ):
        read(folder.write(tmp_path))
