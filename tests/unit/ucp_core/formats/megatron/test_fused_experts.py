"""Megatron's older checkpoints whose ranks have all their experts in one parameter each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import megatron_files
from tests.support.deepspeed_folders import Array, assert_equal, loaded, read, tensor
from tests.support.megatron_folders import Megatron
from ucp_core.errors import CheckpointCorruptError, UcpError, UnsupportedVersionError
from ucp_core.formats.megatron_core import reader as megatron_core
from ucp_core.geometry import TensorKey
from ucp_core.storage import MemoryStore

FIRST = "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"
SECOND = "decoder.layers.0.mlp.experts.experts.linear_fc2.weight"


def _made(**values: Any) -> Megatron:
    return Megatron(expert="", **values)


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_experts_of_all_ranks_are_one_tensor(
    tmp_path: Path, ep: int, tp: int, *, gated: bool, distributed: bool
) -> None:
    """In every slot: each expert is transposed, and of a gated one each rank has two parts."""
    made = _made(ep=ep, tp=tp, gated=gated, distributed=distributed)

    checkpoint = read(made.write(tmp_path))

    assert_equal(loaded(checkpoint), made.expected)
    named = [name for group in checkpoint.param_groups for name in group["params"]]
    assert sorted(named) == sorted({name for name, _ in made.expected})
    assert checkpoint.manifest.roles == {}
    assert TensorKey(FIRST, "step") in checkpoint.state_map.entries


@pytest.mark.parametrize("distributed", [False, True])
def test_they_are_numbered_by_stage_too(tmp_path: Path, *, distributed: bool) -> None:
    """Ranks of the second stage count layers from 0 on, and those of the second part experts."""
    made = _made(ep=2, tp=2, pp=2, distributed=distributed)

    assert_equal(loaded(read(made.write(tmp_path))), made.expected)


def test_weights_without_an_optimizer_are_read(tmp_path: Path) -> None:
    """They are then in the model's dtype."""
    made = _made(ep=2, tp=2)
    for tree in made.trees.values():
        del tree["optimizer"]

    checkpoint = read(made.write(tmp_path))

    weights = {key: v for key, v in made.expected.items() if key[1] == "weight"}
    assert_equal(loaded(checkpoint), {key: v.astype(np.float16) for key, v in weights.items()})


def _torch_dist(values: dict[tuple[str, str], Array]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the same experts as Megatron's newer format has them, layers stacked."""
    slots = {"param": "weight", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    prefix = "decoder.layers."
    return {
        slot: {
            f"{prefix}mlp.experts.experts.{end}": torch.stack(
                [
                    torch.from_numpy(values[f"{prefix}{n}.mlp.experts.experts.{end}", ours])
                    for n in range(2)
                ]
            )
            for end in ("linear_fc1.weight", "linear_fc2.weight")
        }
        for slot, ours in slots.items()
    }


def test_the_newer_format_of_the_same_model_reads_as_the_same(tmp_path: Path) -> None:
    """Names and the order of elements: who changes formats can go on, and compare."""
    made = _made(ep=2, distributed=True)
    store = MemoryStore()
    values = _torch_dist(made.expected)
    state = megatron_files.state()
    for slot, tensors in values.items():
        state[slot] |= tensors
    megatron_files.write_checkpoint(store, "c", state, tp=1)

    newer = loaded(megatron_core.read(store, "c"))

    older = loaded(read(made.write(tmp_path)))
    found = {key: value for key, value in older.items() if ".experts." in key[0]}
    assert len(found) == 2 * 2 * 3
    for key, value in found.items():
        np.testing.assert_array_equal(newer[key], value)


def _with(**values: Any) -> Callable[[Megatron], None]:
    def spoil(made: Megatron) -> None:
        for name, tree in made.trees.items():
            if name.endswith("model_optim_rng.pt"):
                tree["args"].state.update(values)

    return spoil


def _without(name: str) -> Callable[[Megatron], None]:
    def spoil(made: Megatron) -> None:
        for tree in made.trees.values():
            tree["args"].state.pop(name)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        pytest.param(_without("num_experts"), "num_experts None", id="no-number"),
        pytest.param(_without("hidden_size"), "hidden_size None", id="no-width"),
        pytest.param(_without("moe_ffn_hidden_size"), "hidden_size None", id="no-inner-width"),
        pytest.param(_with(moe_grouped_gemm=False), "moe_grouped_gemm False", id="no-grouping"),
        pytest.param(_with(num_experts=2), "with all 2 experts", id="too-few"),
        pytest.param(_with(num_experts=8), "with all 8 experts", id="too-many"),
        pytest.param(_with(hidden_size=12), "hidden_size 12", id="width"),
        pytest.param(_with(moe_ffn_hidden_size=5), "moe_ffn_hidden_size 5", id="inner-width"),
        pytest.param(_with(swiglu=False), "not gated", id="gate"),
    ],
)
def test_what_the_arguments_do_not_prove_is_refused(
    tmp_path: Path, spoil: Callable[[Megatron], None], match: str
) -> None:
    """Most of these shapes would do for another number of experts, in another order."""
    made = _made()
    spoil(made)

    with pytest.raises(UcpError, match=match) as caught:
        read(made.write(tmp_path))

    assert "mp_rank_00/model_optim_rng.pt" in str(caught.value)
    assert "experts.linear_fc" in str(caught.value)


def test_the_width_that_experts_share_with_the_rest_will_do(tmp_path: Path) -> None:
    """Megatron-core before 0.10 had no other."""
    made = _made(ep=2)
    _with(moe_ffn_hidden_size=None, ffn_hidden_size=10)(made)

    assert_equal(loaded(read(made.write(tmp_path))), made.expected)


@pytest.mark.parametrize(
    ("ep", "match"),
    [(1, "lacks mp_rank_00 .* 1 expert"), (4, "lacks mp_rank_00_002"), (3, "num_experts 4 for 3")],
)
def test_another_number_of_ranks_than_the_files_are_of_is_refused(
    tmp_path: Path, ep: int, match: str
) -> None:
    """Experts would be missing, or have another's number."""
    made = _made(ep=2)
    _with(expert_model_parallel_size=ep)(made)
    if ep == 3:
        made.trees["mp_rank_00_002/model_optim_rng.pt"] = made.trees[
            "mp_rank_00_001/model_optim_rng.pt"
        ]

    with pytest.raises(CheckpointCorruptError, match=match):
        read(made.write(tmp_path))


@pytest.mark.parametrize("file", ["model_optim_rng.pt", "distrib_optim.pt"])
def test_the_missing_file_of_an_expert_parallel_rank_is_named(tmp_path: Path, file: str) -> None:
    """Half of the experts would be missing."""
    made = _made(ep=2, distributed=True)
    for name in [n for n in made.trees if n.startswith("mp_rank_00_001") and n.endswith(file)]:
        del made.trees[name]

    with pytest.raises(UcpError, match="mp_rank_00_001"):
        read(made.write(tmp_path))


def test_a_truncated_file_of_an_expert_parallel_rank_is_named(tmp_path: Path) -> None:
    """Its tensors are at its begin, and what describes them behind."""
    path = _made(ep=2).write(tmp_path)
    file = path / "iter_0000005" / "mp_rank_00_001" / "model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:-300])

    with pytest.raises(CheckpointCorruptError, match="mp_rank_00_001/model_optim_rng"):
        read(path)


def test_a_rank_with_masters_of_other_experts_only_is_refused(tmp_path: Path) -> None:
    """Half of the tensor would be rounded, and without moments."""
    made = _made(ep=2)
    tree = made.trees["mp_rank_00_001/model_optim_rng.pt"]["optimizer"][1]
    tree["optimizer"]["param_groups"][0]["params"] = [1, 2, 3]
    tree["fp32_from_fp16_params"][0].pop(0)

    with pytest.raises(CheckpointCorruptError, match=r"linear_fc1\.weight.* is F16.*rank_00_001"):
        read(made.write(tmp_path))


def test_a_slot_of_another_shape_is_refused(tmp_path: Path) -> None:
    """Nothing shows which expert has which part of a factored moment."""
    made = _made(ep=2)
    tree = made.trees["mp_rank_00_001/model_optim_rng.pt"]["optimizer"][1]
    for state in tree["optimizer"]["state"].values():
        state["exp_avg_sq"] = tensor(np.ones(6, np.float32))

    with pytest.raises(CheckpointCorruptError, match=r"mp_rank_00_001.*exp_avg_sq.*is \[6\]"):
        read(made.write(tmp_path))


def test_experts_cut_over_expert_parallel_ranks_are_refused(tmp_path: Path) -> None:
    """Extended tensor parallelism: every rank has a part of every expert."""
    made = _made(ep=2, tp=2)
    _with(moe_extended_tp=True)(made)

    with pytest.raises(UnsupportedVersionError, match="cut over 4 ranks"):
        read(made.write(tmp_path))


def test_a_name_of_the_newer_format_is_no_parameter_of_this_one(tmp_path: Path) -> None:
    """It would be taken for what has all experts, in the order of elements of a parameter."""
    made = _made()
    made.trees["mp_rank_00/model_optim_rng.pt"]["model"][FIRST] = tensor(np.ones((4, 20, 6)))

    with pytest.raises(UnsupportedVersionError, match="an unknown form"):
        read(made.write(tmp_path))
