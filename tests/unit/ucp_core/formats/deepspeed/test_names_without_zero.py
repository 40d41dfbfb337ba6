"""Optimizers without ZeRO: what tells a trained parameter from a frozen one with its weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.deepspeed_folders import SLOTS, assert_equal, loaded, read
from ucp_core.errors import CheckpointCorruptError, PatternError

#: Name, shape, group; None: frozen. In half precision all of a shape are alike.
MODEL: tuple[tuple[str, tuple[int, ...], int | None], ...] = (
    ("a.norm", (4,), None),
    ("a.weight", (4, 4), None),
    ("b.norm", (4,), 1),
    ("b.weight", (4, 4), 0),
    ("c.weight", (4, 4), 0),
    ("c.norm", (4,), 1),
    ("d.norm", (4,), None),
)
FROZEN = {name: "frozen" for name, _, group in MODEL if group is None}
GROUPS = [[name for name, _, group in MODEL if group == number] for number in (0, 1)]
ORDERS = {
    "in order": GROUPS,
    "reversed": [group[::-1] for group in GROUPS],
    "alike": [["b.weight", "b.norm"], ["c.weight", "c.norm"]],
}
SHAPES = {name: shape for name, shape, _ in MODEL}


def _value(name: str, slot: str) -> torch.Tensor:
    shape = SHAPES[name]
    if slot == "weight":
        # The difference is lost in half precision.
        whole = torch.linspace(1, 2, int(np.prod(shape))).half().float().reshape(shape)
        return whole + 1e-5 * list(SHAPES).index(name)
    seed = [*f"{name}/{slot}".encode()]
    return torch.from_numpy(np.random.default_rng(seed).random(shape, np.float32))


def _tree(kind: str, groups: list[list[str]]) -> dict[str, Any]:
    """Return a model file as DeepSpeed 0.19.8 has it: ``flat`` or ``lists`` of masters, or none."""
    module = {name: _value(name, "weight") for name, *_ in MODEL}
    order = [name for group in groups for name in group]
    state: dict[int, Any] = {
        number: {slot: _value(name, slot) for slot in SLOTS} for number, name in enumerate(order)
    }
    hyper: list[dict[str, Any]] = [{"lr": 0.1, "params": list(map(order.index, g))} for g in groups]
    optimizer: dict[str, Any] = {"state": state, "param_groups": hyper}
    if kind != "none":
        module = {name: tensor.half() for name, tensor in module.items()}
        masters: Any = [[_value(name, "weight") for name in group] for group in groups]
        optimizer = {"optimizer_state_dict": optimizer, "fp32_groups": masters}
    if kind == "flat":
        for number, group in enumerate(groups):
            joined = {s: torch.cat([_value(n, s).flatten() for n in group]) for s in SLOTS}
            state[number] = joined
            hyper[number]["params"] = [number]
        del optimizer["fp32_groups"]
        flats = [torch.cat([t.flatten() for t in group]) for group in masters]
        optimizer["fp32_groups_flat"] = flats
        optimizer["optimizer_state_dict"]["state"] = {i: state[i] for i in range(len(groups))}
    return {
        "module": module,
        "buffer_names": [],
        "optimizer": optimizer,
        **dict.fromkeys(("param_shapes", "frozen_param_shapes", "frozen_param_fragments")),
        "shared_params": {},
        "global_steps": 3,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": "0.19.8",
    }


def _write(path: Path, tree: dict[str, Any]) -> Path:
    torch.save(tree, path / "mp_rank_00_model_states.pt")
    return path


def _hyper(tree: dict[str, Any]) -> list[dict[str, Any]]:
    optimizer = tree["optimizer"]
    found: list[dict[str, Any]] = optimizer.get("optimizer_state_dict", optimizer)["param_groups"]
    return found


def _check(path: Path, groups: list[list[str]]) -> None:
    """Raise unless everything is whose it is."""
    checkpoint = read(path)
    trained = [name for group in groups for name in group]
    expected = {(n, slot): _value(n, slot).numpy() for n in trained for slot in ("weight", *SLOTS)}
    found = loaded(checkpoint)
    assert_equal({key: value for key, value in found.items() if key[0] in trained}, expected)
    assert {key for key in found if key[0] not in trained} == {(n, "weight") for n in FROZEN}
    assert checkpoint.manifest.roles == FROZEN
    assert checkpoint.param_groups == [{"params": group, "lr": 0.1} for group in groups]


@pytest.mark.parametrize("order", ["in order", "alike"])
def test_flat_masters_of_several_groups_have_no_names(tmp_path: Path, order: str) -> None:
    """Only their sizes are known, and other parameters have the same."""
    with pytest.raises(PatternError, match=r"masters are flat.*named_parameters"):
        read(_write(tmp_path, _tree("flat", ORDERS[order])))


@pytest.mark.parametrize("kind", ["none", "lists", "flat"])
@pytest.mark.parametrize("order", ORDERS)
def test_an_optimizer_of_named_parameters_keeps_their_names(
    tmp_path: Path, kind: str, order: str
) -> None:
    """Torch 2.6 and later; without them orders would be taken for one another, or refused."""
    groups = ORDERS[order]
    tree = _tree(kind, groups)
    for group, names in zip(_hyper(tree), groups, strict=True):
        group["param_names"] = names

    _check(_write(tmp_path, tree), groups)


@pytest.mark.parametrize("kind", ["none", "lists", "flat"])
def test_shapes_by_name_tell_the_masters_too(tmp_path: Path, kind: str) -> None:
    """DeepSpeed leaves them out here, and who writes this form may not."""
    groups = ORDERS["alike"]
    tree = _tree(kind, groups)
    tree["param_shapes"] = [{name: torch.Size(SHAPES[name]) for name in g} for g in groups]

    _check(_write(tmp_path, tree), groups)


def test_names_of_frozen_parameters_can_be_among_those_of_a_group(tmp_path: Path) -> None:
    """DeepSpeed drops their masters, but not their names: then the shapes decide, or nothing."""
    tree = _tree("lists", GROUPS)
    names = [["a.norm", *GROUPS[0]], GROUPS[1]]
    for group, told in zip(_hyper(tree), names, strict=True):
        group["param_names"] = told

    _check(_write(tmp_path, tree), GROUPS)

    _hyper(tree)[0]["param_names"] = ["a.weight", *GROUPS[0]]
    with pytest.raises(PatternError, match="in several ways"):
        read(_write(tmp_path, tree))


@pytest.mark.parametrize("kind", ["none", "lists"])
@pytest.mark.parametrize(
    "change",
    [lambda names: [f"module.{name}" for name in names], lambda names: [names[0] for _ in names]],
    ids=["of another model", "twice"],
)
def test_names_that_are_not_the_models_tell_nothing(
    tmp_path: Path, kind: str, change: Callable[[list[str]], list[str]]
) -> None:
    """They were given by the user's code, before DeepSpeed had the model."""
    tree = _tree(kind, GROUPS)
    for group, names in zip(_hyper(tree), GROUPS, strict=True):
        group["param_names"] = change(names)

    with pytest.raises(PatternError, match="cannot be found"):
        read(_write(tmp_path, tree))


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        ([["b.weight"], ["b.norm", "c.norm"]], "not of its parameters"),
        ([["b.weight", "d.norm"], ["b.norm", "c.norm"]], r"d\.norm is \[4\].* is \[4, 4\]"),
    ],
    ids=["too few", "of another shape"],
)
def test_names_that_contradict_the_state_are_refused(
    tmp_path: Path, groups: list[list[str]], match: str
) -> None:
    """The file was put together of two."""
    tree = _tree("none", GROUPS)
    for group, names in zip(_hyper(tree), groups, strict=True):
        group["param_names"] = names

    with pytest.raises(CheckpointCorruptError, match=match):
        read(_write(tmp_path, tree))


@pytest.mark.parametrize("kind", ["lists", "flat"])
def test_masters_of_other_parameters_than_the_names_say_are_refused(
    tmp_path: Path, kind: str
) -> None:
    """Names are proven by the weights where there are masters."""
    tree = _tree(kind, GROUPS)
    tree["module"]["c.weight"] += 1
    for group, names in zip(_hyper(tree), GROUPS, strict=True):
        group["param_names"] = names

    with pytest.raises(PatternError, match="mixes two saves"):
        read(_write(tmp_path, tree))


def test_masters_of_a_group_that_are_missing_are_told(tmp_path: Path) -> None:
    """The file was put together of two."""
    tree = _tree("lists", GROUPS)
    tree["optimizer"]["fp32_groups"].pop()

    with pytest.raises(CheckpointCorruptError, match="not as DeepSpeed writes it"):
        read(_write(tmp_path, tree))
