"""Real DeepSpeed trains and saves in many configurations; what is read is what it held.

The truth is told by the training processes: every fp32 parameter, slot, frozen parameter and
buffer, gathered by DeepSpeed's own functions, must be equal bit for bit.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.support.foreign_reading import loaded
from tests.support.forked_commands import ForkedCommands
from ucp_core.errors import PatternError
from ucp_core.formats import open_source
from ucp_core.geometry import TensorKey
from ucp_core.storage import LocalStore

SCRIPT = "tests.support.train_deepspeed_sources"
CONVERTER = "deepspeed.checkpoint.ds_to_universal"

CASES: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero0-bf16": {"stage": 0, "dtype": "bf16"},
    "zero0-pipeline": {"stage": 0, "pp": 2, "model": "pipeline"},
    "zero0-pipeline-fp16": {"stage": 0, "pp": 2, "model": "pipeline", "dtype": "fp16"},
    "zero0-pipeline-bf16": {"stage": 0, "pp": 2, "model": "pipeline", "dtype": "bf16"},
    "zero0-experts": {"stage": 0, "model": "experts"},
    "zero0-experts-bf16": {"stage": 0, "model": "experts", "dtype": "bf16"},
    "zero0-experts-one-group": {"stage": 0, "model": "experts", "unsplit": True},
    # Without a step of any length, so that frozen and trained parameters stay alike.
    "zero0-twins-flat": {"stage": 0, "model": "twins", "dtype": "fp16", "fused": True, "lr": 0.0},
    "zero0-twins-fp16": {"stage": 0, "model": "twins", "dtype": "fp16", "named": True, "lr": 0.0},
    "zero0-twins": {"stage": 0, "model": "twins", "named": True},
    "zero1": {"stage": 1},
    "zero1-dp3": {"stage": 1, "world_size": 3},
    "zero1-one-group": {"stage": 1, "groups": 1},
    "zero1-elastic": {"stage": 1, "zero": {"elastic_checkpoint": True}},
    "zero1-aligned": {"stage": 1, "zero": {"parameter_alignment": True}},
    "zero1-bf16-optimizer": {
        "stage": 1,
        "dtype": "bf16",
        "config": {"data_types": {"grad_accum_dtype": "fp32"}},
    },
    "zero1-round-robin": {"stage": 1, "zero": {"round_robin_gradients": True}},
    "zero1-tp2": {"stage": 1, "tp": 2, "model": "parallel"},
    # The second rank has nothing of the layers that are cut.
    "zero1-tp2-empty": {"stage": 1, "tp": 2, "model": "parallel", "inner": 1},
    "zero1-pipeline": {"stage": 1, "pp": 2, "model": "pipeline"},
    "zero1-pipeline-bf16": {"stage": 1, "pp": 2, "model": "pipeline", "dtype": "bf16"},
    "zero1-experts": {"stage": 1, "model": "experts"},
    "zero1-experts-dp4": {"stage": 1, "model": "experts", "world_size": 4},
    "zero1-sp2-dp2": {"stage": 1, "sp": 2, "model": "sequence", "world_size": 4},
    "zero2-bf16": {"stage": 2, "dtype": "bf16"},
    "zero2-round-robin": {"stage": 2, "groups": 1, "zero": {"round_robin_gradients": True}},
    "zero2-sgd": {"stage": 2, "optimizer": "sgd"},
    "zero2-fp16": {"stage": 2, "dtype": "fp16"},
    "zero2-experts-bf16": {"stage": 2, "model": "experts", "dtype": "bf16"},
    "zero3": {"stage": 3},
    "zero3-dp3": {"stage": 3, "world_size": 3},
    "zero3-offloaded": {
        "stage": 3,
        "zero": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        "config": {"zero_force_ds_cpu_optimizer": False},
    },
    "zero3-sub-groups": {"stage": 3, "zero": {"sub_group_size": 20}},
    "zero3-bf16-persistent": {"stage": 3, "dtype": "bf16", "persistence": 20},
    "zero3-sp2-dp2": {"stage": 3, "sp": 2, "model": "sequence", "world_size": 4},
    "zero3-tp2": {"stage": 3, "tp": 2, "model": "parallel"},
}
#: No file names the parameters of a stage, or of one of several flat groups.
NAMELESS = {"zero0-pipeline", "zero0-pipeline-fp16", "zero0-twins-flat"}
#: Converted by DeepSpeed itself, with these options.
UNIVERSAL: dict[str, tuple[str, ...]] = {
    "zero1": ("--inject_missing_state",),
    "zero2-bf16": ("--inject_missing_state",),
    "zero3": (),
    "zero1-tp2": (),
    "zero3-tp2": (),
}

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="deepspeed is not installed: pip install -c constraints.txt -e '.[interop]'",
    ),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the checkpoints, and with what the processes told."""
    out = tmp_path_factory.mktemp("deepspeed")
    # DeepSpeed keeps its groups of ranks in globals, so one process can have one layout only.
    launches: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for name, facts in CASES.items():
        layout = facts.get("world_size", 2), facts.get("model", "whole")
        launches.setdefault(layout, []).append({"name": name, **facts})
    with ForkedCommands([SCRIPT, CONVERTER], out / "log") as commands:
        for (world_size, model), cases in launches.items():
            job = out / f"job-{world_size}-{model}.json"
            job.write_text(json.dumps(cases))
            commands.run(SCRIPT, [str(job), str(out)], num_ranks=world_size)
        for name, options in UNIVERSAL.items():
            source = out / f"{name}.ds" / "global_step3"
            folders = ["--input_folder", str(source), "--output_folder", f"{source}_universal"]
            commands.run(CONVERTER, [*folders, *options])
    return out


def _check(out: Path, name: str, tag: str | None = None) -> None:
    """Raise unless what is read equals what the processes told."""
    checkpoint = open_source(LocalStore(), str(out / f"{name}.ds"), tag=tag)
    entries, roles = checkpoint.state_map.entries, checkpoint.manifest.roles
    told = safetensors.numpy.load_file(out / f"{name}.safetensors")
    keys = {}
    for key in told:
        fqn, slot = key.rsplit("/", 1)
        role = slot if slot in {"frozen", "buffer"} else None
        keys[key] = TensorKey(fqn, "weight" if role else slot)
        assert roles.get(fqn) == role, f"{fqn}: {roles.get(fqn)}"
    assert {k for k in entries if k.slot != "step"} == set(keys.values())
    assert checkpoint.step == 3
    for key, array in told.items():
        assert np.array_equal(loaded(checkpoint, *keys[key]).float().numpy(), array), key


@pytest.mark.parametrize("name", sorted(CASES.keys() - NAMELESS))
def test_native_checkpoints_hold_what_the_processes_held(saved: Path, name: str) -> None:
    """Each configuration cuts and pads in its own way."""
    _check(saved, name)


@pytest.mark.parametrize("name", sorted(NAMELESS))
def test_an_optimizer_without_names_is_refused(saved: Path, name: str) -> None:
    """A guess would give a parameter the state of another one."""
    with pytest.raises(PatternError, match=r"cannot be found.*ZeRO stage 1"):
        open_source(LocalStore(), str(saved / f"{name}.ds"))


@pytest.mark.parametrize("name", UNIVERSAL)
def test_universal_folders_hold_what_the_processes_held(saved: Path, name: str) -> None:
    """Frozen parameters and buffers too, which DeepSpeed's own load loses."""
    _check(saved, name, tag="global_step3_universal")


@pytest.mark.parametrize("name", sorted(CASES.keys() - NAMELESS - {"zero1-elastic"}))
def test_groups_and_schedules_are_those_of_the_run(saved: Path, name: str) -> None:
    """By group: the peer's stage 3 gives all of them the first one's."""
    told = json.loads((saved / f"{name}.json").read_text())
    checkpoint = open_source(LocalStore(), str(saved / f"{name}.ds"))

    found = [(g["lr"], g["weight_decay"], list(g["betas"])) for g in checkpoint.param_groups
             if "betas" in g]  # fmt: skip
    expected = [(g["lr"], g["weight_decay"], g["betas"]) for g in told["groups"] if "betas" in g]
    assert found == expected
    assert checkpoint.extra["lr_scheduler"]["last_epoch"] == told["lr_scheduler"]["last_epoch"]
    assert checkpoint.extra["client_state"]["mine"] == [1, "two"]
