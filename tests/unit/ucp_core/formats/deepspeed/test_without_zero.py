"""Optimizers without ZeRO keep numbers for names: what tells which state is whose."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.deepspeed_folders import (
    SLOTS,
    Folder,
    Param,
    assert_equal,
    loaded,
    native,
    optim_name,
    read,
    tensor,
)
from ucp_core.errors import CheckpointCorruptError, PatternError

MODEL = [
    Param("embed.weight", (11, 6)),
    Param("block.up.weight", (7, 6)),
    Param("block.up.bias", (7,)),
    Param("gain", (1,)),
]


def test_one_flat_group_of_fp16_is_taken_apart_in_the_models_order(tmp_path: Path) -> None:
    """DeepSpeed's FP16_Optimizer keeps float32 masters without padding or names."""
    folder = _with_masters([MODEL], MODEL, flat=True)
    optimizer = folder.trees["mp_rank_00_model_states.pt"]["optimizer"]
    optimizer["cur_scale"] = 1024.0
    optimizer["optimizer_state_dict"]["state"][0]["step"] = 5

    checkpoint = read(folder.write(tmp_path))

    assert_equal(loaded(checkpoint), folder.expected)
    assert checkpoint.extra["optimizer"] == {"cur_scale": 1024.0}


def _half(param: Param) -> Any:
    return tensor(param.value("weight").astype(np.float16))


def _with_masters(groups: list[list[Param]], model: list[Param], *, flat: bool) -> Folder:
    """Return a checkpoint of half precision, whose masters have an order of their own."""
    folder = native(model, dp=1)
    del folder.trees[optim_name(0, 0)]
    tree = folder.trees["mp_rank_00_model_states.pt"]
    tree["module"] |= {p.name: _half(p) for p in model if p.role == "trained"}
    order = [param for group in groups for param in group]

    def joined(group: list[Param], slot: str) -> Any:
        return tensor(np.concatenate([p.value(slot).ravel() for p in group]))

    if flat:
        state = {i: {s: joined(g, s) for s in SLOTS} for i, g in enumerate(groups)}
        params = [[index] for index in range(len(groups))]
        masters = {"fp32_groups_flat": [joined(group, "weight") for group in groups]}
    else:
        state = {i: {s: tensor(p.value(s)) for s in SLOTS} for i, p in enumerate(order)}
        params = [[order.index(p) for p in group] for group in groups]
        masters = {"fp32_groups": [[tensor(p.value("weight")) for p in g] for g in groups]}
    hyper = [{"params": numbers, "lr": 0.1} for numbers in params]
    inner = {"state": state, "param_groups": hyper}
    tree |= {"param_shapes": None, "optimizer": {"optimizer_state_dict": inner, **masters}}
    return folder


def test_masters_are_known_by_their_shapes(tmp_path: Path) -> None:
    """Weights decay and biases do not, so that each group has shapes of its own."""
    weights = [Param(f"layer.{n}.weight", (4, 3)) for n in range(3)]
    biases = [Param(f"layer.{n}.bias", (4,), group=1) for n in range(3)]
    frozen = Param("layer.x.weight", (5, 3), role="frozen")
    model = [p for pair in zip(weights, biases, strict=True) for p in pair] + [frozen]
    groups = [weights, biases]
    folder = _with_masters(groups, model, flat=False)

    checkpoint = read(folder.write(tmp_path))

    assert_equal(loaded(checkpoint), folder.expected)
    assert [g["params"] for g in checkpoint.param_groups] == [[p.name for p in g] for g in groups]
    assert checkpoint.manifest.roles == {"layer.x.weight": "frozen"}


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("role", ["trained", "frozen"])
def test_a_shape_in_two_groups_or_frozen_is_not_guessed(
    tmp_path: Path, role: str, *, flat: bool
) -> None:
    """The first in the model's order would get the moments of the other."""
    model = [Param("a.norm", (4,), role=role), Param("b.norm", (4,)), Param("c", (3, 2))]
    groups = [[model[1], model[2]], *([[model[0]]] if role == "trained" else [])]
    folder = _with_masters(groups, model, flat=flat)

    with pytest.raises(PatternError, match=r"cannot be found: .*named_parameters\(\)"):
        read(folder.write(tmp_path))


@pytest.mark.parametrize("flat", [True, False])
def test_one_group_in_an_order_of_its_own_is_noticed(tmp_path: Path, *, flat: bool) -> None:
    """Shapes and sizes fit the model's order, but masters do not round to these weights."""
    model = [Param("a.weight", (4, 3)), Param("b.weight", (4, 3))]
    folder = _with_masters([model[::-1]], model, flat=flat)

    with pytest.raises(PatternError, match="an order of its own"):
        read(folder.write(tmp_path))


@pytest.mark.parametrize("flat", [True, False])
def test_masters_of_another_save_are_refused(tmp_path: Path, *, flat: bool) -> None:
    """By order alone they would be taken."""
    model = [Param("a.weight", (4, 3)), Param("b.weight", (4, 3))]
    folder = _with_masters([model], model, flat=flat)
    module = folder.trees["mp_rank_00_model_states.pt"]["module"]
    module["b.weight"] = tensor(np.ones((4, 3), np.float16))

    with pytest.raises(PatternError, match="mixes two saves"):
        read(folder.write(tmp_path))


def test_groups_that_share_a_shape_are_not_guessed(tmp_path: Path) -> None:
    """Without masters nothing tells which of two alike is in which group."""
    model = [Param("a.weight", (4, 3)), Param("b.weight", (4, 3))]
    folder = native(model, dp=1)
    del folder.trees[optim_name(0, 0)]
    tree = folder.trees["mp_rank_00_model_states.pt"]
    state = {i: {s: tensor(p.value(s)) for s in SLOTS} for i, p in enumerate(model)}
    hyper = [{"params": [0]}, {"params": [1]}]
    tree |= {"param_shapes": None, "optimizer": {"state": state, "param_groups": hyper}}

    with pytest.raises(PatternError, match="in several ways"):
        read(folder.write(tmp_path))


def _numbered(model: list[Param], groups: list[list[Param]]) -> Folder:
    """Return a checkpoint in float32 without ZeRO, whose optimizer numbers ``groups``."""
    folder = native(model, dp=1)
    del folder.trees[optim_name(0, 0)]
    order = [param for group in groups for param in group]
    state = {i: {s: tensor(p.value(s)) for s in SLOTS} for i, p in enumerate(order)}
    hyper = [{"params": [order.index(param) for param in group]} for group in groups]
    tree = {"param_shapes": None, "optimizer": {"state": state, "param_groups": hyper}}
    folder.trees["mp_rank_00_model_states.pt"] |= tree
    return folder


@pytest.mark.parametrize("num_groups", [1, 2])
def test_groups_in_an_order_of_their_own_are_not_guessed(tmp_path: Path, num_groups: int) -> None:
    """Reversed, the state of two parameters of one shape would change places unseen."""
    weights = [Param("a.weight", (4, 3)), Param("b.weight", (3, 4))]
    biases = [Param("a.bias", (4,)), Param("c.bias", (4,)), Param("b.bias", (3,))]
    model = [*weights, *biases]
    groups = [model[::-1]] if num_groups == 1 else [weights, biases[::-1]]
    folder = _numbered(model, groups)

    with pytest.raises(PatternError, match="in no way"):
        read(folder.write(tmp_path))


def test_a_number_of_the_state_is_not_the_shape_of_a_parameter_of_one_element(
    tmp_path: Path,
) -> None:
    """NAdam and ASGD keep numbers before what has the parameter's shape."""
    model = [Param("a.weight", (4, 3)), Param("gain", (1,)), Param("x", (5,), role="frozen")]
    folder = _numbered(model, [model[:2]])
    state = folder.trees["mp_rank_00_model_states.pt"]["optimizer"]["state"]
    for number, param in enumerate(model[:2]):
        state[number] = {"mu_product": tensor(np.array(0.5, np.float32)), **state[number]}
        folder.expected[param.name, "mu_product"] = np.array(0.5, np.float32)

    assert_equal(loaded(read(folder.write(tmp_path))), folder.expected)


def _experts(split: str) -> Folder:
    """Return four experts over two ranks, of shapes that other parameters have too."""
    layer = "moe.deepspeed_moe"
    dense = [
        Param("in.weight", (4, 4)),
        Param(f"{layer}.gate.wg.weight", (4, 4)),
        Param("out.weight", (4, 4)),
    ]
    experts = [
        Param(f"{layer}.experts.deepspeed_experts.{e}.{kind}", shape)
        for e in range(4)
        for kind, shape in (("a", (4, 4)), ("b", (4,) if split == "by shape" else (4, 4)))
    ]
    folder = native(dense, dp=2)
    for rank in range(2):
        del folder.trees[optim_name(rank, 0)]
    for number, expert in enumerate(experts):
        name = f"layer_0_expert_{number // 2}_mp_rank_00_model_states.pt"
        folder.trees.setdefault(name, {})[expert.name] = tensor(expert.value("weight"))
        folder.expected |= {(expert.name, s): expert.value(s) for s in ("weight", *SLOTS)}
    for ep in range(2):
        mine = experts[4 * ep : 4 * ep + 4]
        # Where DeepSpeed splits groups, a large one of experts is cut into several.
        groups = [[*dense[:2], *mine, dense[2]]]
        if split == "by size":
            groups = [dense, mine[:3], mine[3:]]
        elif split == "by shape":
            groups = [dense, mine[::2], mine[1::2]]
        order = [param for group in groups for param in group]
        state = {i: {s: tensor(p.value(s)) for s in SLOTS} for i, p in enumerate(order)}
        hyper: list[dict[str, Any]] = [{"params": [order.index(p) for p in g]} for g in groups]
        for group in hyper[1:]:
            group |= {"name": "ep_size_2", "moe": True}
        tree = {"state": state, "param_groups": hyper}
        folder.trees[f"expp_rank_{ep}_mp_rank_00_optim_states.pt"] = {"optimizer": tree}
    folder.trees["mp_rank_00_model_states.pt"] |= {
        "param_shapes": None,
        "num_experts": [4],
        "optimizer": folder.trees["expp_rank_0_mp_rank_00_optim_states.pt"]["optimizer"],
    }
    return folder


@pytest.mark.parametrize("split", ["", "by size", "by shape"])
def test_every_expert_parallel_rank_numbers_its_own_experts(tmp_path: Path, split: str) -> None:
    """Both ranks count from 0 on, and what they share is in both files."""
    folder = _experts(split)

    checkpoint = read(folder.write(tmp_path))

    assert_equal(loaded(checkpoint), folder.expected)
    names = [name for group in checkpoint.param_groups for name in group["params"]]
    assert sorted(names) == sorted({name for name, _ in folder.expected})


def test_an_optimizer_of_experts_that_is_missing_is_named(tmp_path: Path) -> None:
    """The model's file holds the first rank's, which would do for a rank of all experts."""
    folder = _experts("by size")
    del folder.trees["expp_rank_1_mp_rank_00_optim_states.pt"]

    with pytest.raises(CheckpointCorruptError, match="lacks expp_rank_1_mp_rank_00_optim"):
        read(folder.write(tmp_path))


def test_experts_without_named_groups_are_counted(tmp_path: Path) -> None:
    """No name tells the number of ranks then; one that is missing leaves experts over."""
    folder = _experts("")
    del folder.trees["expp_rank_1_mp_rank_00_optim_states.pt"]

    with pytest.raises(PatternError, match="cannot be found"):
        read(folder.write(tmp_path))


def test_weights_without_any_state_are_read(tmp_path: Path) -> None:
    """Plain SGD has groups, but nothing that could be given to the wrong parameter."""
    model = [Param("a.weight", (4, 3)), Param("b.weight", (4, 3))]
    folder = native(model, dp=1)
    del folder.trees[optim_name(0, 0)]
    tree = folder.trees["mp_rank_00_model_states.pt"]
    hyper = [{"params": [0], "lr": 0.1}, {"params": [1], "lr": 0.2}]
    tree |= {"param_shapes": None, "optimizer": {"state": {}, "param_groups": hyper}}

    checkpoint = read(folder.write(tmp_path))

    weights = {key: value for key, value in folder.expected.items() if key[1] == "weight"}
    assert_equal(loaded(checkpoint), weights)
    assert checkpoint.manifest.items["optimizer.param_groups"].policy == "drop"
    assert checkpoint.manifest.roles == {}
