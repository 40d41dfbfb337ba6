"""Pipelines without ZeRO: optimizers keep numbers, files of layers keep no stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.deepspeed_folders import (
    SLOTS,
    Folder,
    Param,
    assert_equal,
    loaded,
    read,
    tensor,
)
from ucp_core.errors import PatternError, UcpError
from ucp_core.torch_files import Size

EMBED = Param("0.weight", (11, 6))
MODEL = [
    EMBED,
    *(
        param
        for layer in (1, 2, 3, 4)
        for param in (
            Param(f"{layer}.norm.weight", (6,), group=1),
            Param(f"{layer}.up.weight", (6, 6)),
            Param(f"{layer}.up.bias", (6,), group=1),
        )
    ),
    Param("5.weight", (6,), group=1),
]
KEY = "tied_modules.embed.weight"
INFO = {
    "universal_checkpoint_version": 0.2,
    "pipeline_replicated_parameter_patterns": [r"tied_modules\.embed\.weight"],
}


def pipeline(
    model: Sequence[Param],
    starts: Sequence[int],
    *,
    tied: Mapping[int, Sequence[int]] | None = None,
    num_groups: int = 1,
    info: Mapping[str, Any] | None = None,
    tp: int = 1,
) -> Folder:
    """Return a checkpoint; ``starts`` are the first layers of stages, ``tied`` those of a layer."""
    folder = Folder()
    layers = sorted({_layer(p) for p in model})
    for stage, start in enumerate(starts):
        end = starts[stage + 1] if stage + 1 < len(starts) else layers[-1] + 1
        front = [layer for layer, stages in (tied or {}).items() if stage in stages]
        own = [ly for ly in layers if start <= ly < end and ly not in (tied or {})]
        held = [p for ly in (*front, *own) for p in model if _layer(p) == ly]
        for rank in range(tp):
            name = f"mp_rank_{stage * tp + rank:02d}_model_states.pt"
            folder.trees[name] = _states(held, num_groups, len(starts), tp, rank)
            if info is not None:
                folder.trees[name]["universal_checkpoint_info"] = dict(info)
    for param in model:
        for rank in range(tp):
            axis = f"-model_{rank:02d}" if tp > 1 else ""
            file = f"layer_{_layer(param):02d}{axis}-model_states.pt"
            shard = tensor(param.shards(param.value("weight"), tp)[rank])
            folder.trees.setdefault(file, {})[param.name.split(".", 1)[1]] = shard
        slots = ("weight", *SLOTS) if param.role == "trained" else ("weight",)
        folder.expected |= {(param.name, slot): param.value(slot) for slot in slots}
    return folder


def _layer(param: Param) -> int:
    return int(param.name.split(".", 1)[0])


def _states(held: Sequence[Param], num_groups: int, pp: int, tp: int, rank: int) -> dict[str, Any]:
    trained = [p for p in held if p.role == "trained"]
    groups = [[p for p in trained if p.group % num_groups == g] for g in range(num_groups)]
    order = [p for group in groups for p in group]
    state = {
        number: {
            "step": tensor(np.array(5, np.float32)),
            **{slot: tensor(p.shards(p.value(slot), tp)[rank]) for slot in SLOTS},
        }
        for number, p in enumerate(order)
    }
    numbers = {id(p): number for number, p in enumerate(order)}
    hyper = [
        {"params": [numbers[id(p)] for p in group], "lr": 0.1 * (g + 1)}
        for g, group in enumerate(groups)
        if group
    ]
    return {
        "module": None,
        "buffer_names": [p.name for p in held if p.role == "buffer"],
        "optimizer": {"state": state, "param_groups": hyper},
        "param_shapes": None,
        "global_steps": 5,
        "dp_world_size": 1,
        "mp_world_size": pp * tp,
        "checkpoint_parallel_dimensions": {"pp_degree": pp, "tp_degree": tp},
        "ds_config": {},
        "ds_version": "0.19.8",
    }


def _renamed(folder: Folder, name: str) -> dict[tuple[str, str], Any]:
    return {(name if f == "0.weight" else f, s): v for (f, s), v in folder.expected.items()}


@pytest.mark.parametrize("num_groups", [1, 2])
def test_stages_are_told_by_the_shapes_of_their_state(tmp_path: Path, num_groups: int) -> None:
    """All blocks are alike, and each stage's optimizer counts from 0 on."""
    folder = pipeline(MODEL, (0, 2, 4), num_groups=num_groups)

    checkpoint = read(folder.write(tmp_path))

    assert_equal(loaded(checkpoint), folder.expected)
    names = [name for group in checkpoint.param_groups for name in group["params"]]
    assert sorted(names) == sorted(p.name for p in MODEL)
    assert checkpoint.manifest.roles == {}


def _named(folder: Folder, model: Sequence[Param], starts: Sequence[int]) -> Folder:
    """Add ``param_shapes`` of stages that both hold the tied layer 0, as our writer does."""
    for stage, start in enumerate(starts):
        end = starts[stage + 1] if stage + 1 < len(starts) else 99
        held = [p for p in model if p is not EMBED and start <= _layer(p) < end]
        shapes = {KEY: Size(EMBED.shape), **{p.name: Size(p.shape) for p in held}}
        folder.trees[f"mp_rank_{stage:02d}_model_states.pt"]["param_shapes"] = [shapes]
    return folder


def test_a_tied_module_is_known_by_its_name(tmp_path: Path) -> None:
    """Its file is of layer 0 only; the last stage has its state first, before its own layers'."""
    folder = _named(pipeline(MODEL, (0, 3), tied={0: (0, 1)}), MODEL, (0, 3))

    checkpoint = read(folder.write(tmp_path))

    assert_equal(loaded(checkpoint), _renamed(folder, KEY))


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_tied_module_without_a_name_is_refused(tmp_path: Path, num_groups: int) -> None:
    """Several layers could be it, and each would have the state of another one."""
    folder = pipeline(MODEL, (0, 3), tied={0: (0, 1)}, num_groups=num_groups, info=INFO)

    with pytest.raises(PatternError, match=r"number 7, 8 parameters.*hold 14.*ZeRO stage 1"):
        read(folder.write(tmp_path))


def test_frozen_parameters_without_a_name_are_refused(tmp_path: Path) -> None:
    """They are of shapes that trained ones have too."""
    frozen = [Param(f"{n}.frozen", (6, 6), role="frozen") for n in (1, 3)]
    model = [EMBED, frozen[0], *MODEL[1:4], frozen[1], *MODEL[7:10]]
    folder = pipeline(model, (0, 2))

    with pytest.raises(PatternError, match="cannot be told"):
        read(folder.write(tmp_path))


def test_shards_of_a_pipeline_are_put_together(tmp_path: Path) -> None:
    """Every tensor parallel rank has an optimizer of its own in each stage."""
    model = [replace(p, cut=0 if "up" in p.name else None) for p in MODEL]
    info = {"tp_replicated_parameter_patterns": [r".*norm\.weight", r"0\.weight", "5.*"]}
    folder = pipeline(model, (0, 3), tp=2, info={"universal_checkpoint_version": 0.2, **info})

    checkpoint = read(folder.write(tmp_path))

    assert_equal(loaded(checkpoint), folder.expected)


def test_equal_states_in_two_stages_are_of_one_parameter(tmp_path: Path) -> None:
    """By shapes alone, no layer is frozen or tied, and each has the state of another."""
    model = [
        Param("0.weight", (2,), role="frozen"),
        Param("1.weight", (2,)),
        Param("2.weight", (2,)),
    ]
    folder = pipeline(model, (0, 1), tied={2: (0, 1)})

    with pytest.raises(PatternError, match="cannot be told"):
        read(folder.write(tmp_path))


def test_a_module_without_a_file_is_missed(tmp_path: Path) -> None:
    """A module that is only used by a ``forward_fn`` is trained, but saved nowhere."""
    folder = pipeline(MODEL, (0, 3), tied={0: (0, 1)})
    del folder.trees["layer_00-model_states.pt"]

    with pytest.raises(PatternError, match=r"mp_rank_00.*tied, frozen, or in no file"):
        read(folder.write(tmp_path))


def test_frozen_parameters_in_every_layer_do_not_make_the_search_endless(tmp_path: Path) -> None:
    """The borders of ten stages can be anywhere among forty layers that could all be frozen."""
    model = [
        Param(f"{layer}.{name}", (2,), role=role)
        for layer in range(40)
        for name, role in (("a", "frozen"), ("b", "trained"))
    ]
    folder = pipeline(model, range(0, 40, 4))

    with pytest.raises(PatternError, match="cannot be told"):
        read(folder.write(tmp_path))


def test_weights_without_any_state_are_read(tmp_path: Path) -> None:
    """Plain SGD keeps nothing of a parameter, so there is nothing to be mixed up."""
    folder = pipeline(MODEL, (0, 3), num_groups=2)
    for stage in range(2):
        folder.trees[f"mp_rank_{stage:02d}_model_states.pt"]["optimizer"]["state"] = {}

    checkpoint = read(folder.write(tmp_path))

    weights = {key: v for key, v in folder.expected.items() if key[1] == "weight"}
    assert_equal(loaded(checkpoint), weights)
    assert "groups of 2, 5" in checkpoint.manifest.items["optimizer.param_groups"].note


SHAPES = st.sampled_from([(2,), (3,), (2, 3)])


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_no_pipeline_is_read_as_another(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Shapes that repeat, frozen parameters and ties leave many ways to number them."""
    layers = data.draw(st.lists(st.lists(SHAPES, min_size=1, max_size=2), min_size=3, max_size=6))
    frozen = data.draw(st.sets(st.integers(0, 11), max_size=2))
    flat = [(f"{ly}.p{n}", shape) for ly, held in enumerate(layers) for n, shape in enumerate(held)]
    model = [
        Param(name, shape, role="frozen" if number in frozen else "trained")
        for number, (name, shape) in enumerate(flat)
    ]
    starts = [0, data.draw(st.integers(1, len(layers) - 1))]
    is_tied = data.draw(st.booleans())
    tied = {data.draw(st.integers(0, len(layers) - 1)): (0, 1)} if is_tied else {}
    folder = pipeline(model, starts, tied=tied)

    try:
        checkpoint = read(folder.write(tmp_path_factory.mktemp("pipeline")))
    except UcpError:
        return

    found = loaded(checkpoint)
    for key, array in folder.expected.items():
        assert found[key].tobytes() == array.tobytes(), key
