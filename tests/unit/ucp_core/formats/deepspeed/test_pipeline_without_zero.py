"""Pipelines without ZeRO: optimizers keep numbers, files of layers keep no stage."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
    read,
    tensor,
)
from ucp_core.errors import PatternError
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


def _named(folder: Folder, model: Sequence[Param], starts: Sequence[int], tp: int = 1) -> Folder:
    """Name the parameters of each stage, as our writer does; all stages hold a tied layer 0."""
    for stage, start in enumerate(starts):
        end = starts[stage + 1] if stage + 1 < len(starts) else 99
        held = [p for p in model if p is not EMBED and start <= _layer(p) < end]
        for rank in range(tp):
            parts = {p.name: p.shards(p.value("weight"), tp)[rank].shape for p in (EMBED, *held)}
            shapes = {KEY if name == EMBED.name else name: Size(s) for name, s in parts.items()}
            folder.trees[f"mp_rank_{stage * tp + rank:02d}_model_states.pt"]["param_shapes"] = [
                shapes
            ]
    return folder


@pytest.mark.parametrize("tp", [1, 2])
def test_a_tied_module_is_known_by_its_name(tmp_path: Path, tp: int) -> None:
    """Its file is of layer 0 only; the last stage has its state first, before its own layers'."""
    model = [replace(p, cut=0 if "up" in p.name else None) for p in MODEL[1:]]
    replicated = [r".*norm\.weight", r"5\.weight", r"tied_modules.*"]
    info = {**INFO, "tp_replicated_parameter_patterns": replicated}
    made = pipeline([EMBED, *model], (0, 3), tied={0: (0, 1)}, tp=tp, info=info)
    folder = _named(made, [EMBED, *model], (0, 3), tp)

    checkpoint = read(folder.write(tmp_path))

    assert_equal(loaded(checkpoint), _renamed(folder, KEY))


@pytest.mark.parametrize("tied", [{}, {0: (0, 1)}], ids=["apart", "tied"])
def test_stages_without_names_are_refused(tmp_path: Path, tied: dict[int, list[int]]) -> None:
    """Layers' files name no stage: another border would give each state to another parameter."""
    folder = pipeline(MODEL, (0, 3), tied=tied, info=INFO)

    with pytest.raises(PatternError, match=r"no param_shapes name them.*ZeRO stage 1"):
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
