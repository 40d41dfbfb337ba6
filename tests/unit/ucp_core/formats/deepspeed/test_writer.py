"""Checkpoints written for DeepSpeed, file by file.

That all layouts read back: ``tests/property``. That DeepSpeed itself goes on from them:
``tests/interop``.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.deepspeed_folders import read
from tests.support.foreign_reading import loaded
from tests.support.torch_files import load_torch_file
from tests.support.training_states import TrainingState, adam_state
from ucp_core.errors import CheckpointCorruptError, UcpError
from ucp_core.formats.deepspeed.writer import write
from ucp_core.language import Cut, Replicated, Rules
from ucp_core.language.rules import Rule
from ucp_core.native import Checkpoint
from ucp_core.storage import LocalStore, MemoryStore

MEMORY_BYTES = 32 << 20


def _source(state: TrainingState, tmp_path: Path) -> Checkpoint:
    return state.save(LocalStore(), str(tmp_path / "source"))


def _written(state: TrainingState, tmp_path: Path, **target: Any) -> Path:
    """Write into memory, which needs no fsync, and return the tag's folder as a copy on disk."""
    source = state.save(MemoryStore(), "source")
    store = MemoryStore()
    write(source, store, "out", memory_bytes=MEMORY_BYTES, **target)
    tag = store.read("out/latest").decode()
    (tmp_path / "out" / tag).mkdir(parents=True)
    for name in store.list(f"out/{tag}"):
        (tmp_path / "out" / tag / name).write_bytes(store.read(f"out/{tag}/{name}"))
    return tmp_path / "out" / tag


def _load(path: Path) -> Any:
    return load_torch_file(path.read_bytes())


def test_what_is_not_trained_is_kept_and_aliases_share_memory(tmp_path: Path) -> None:
    """DeepSpeed loads them from the module, at stage 3 frozen ones from fragments."""
    state = adam_state({"wte": (4, 3), "b": (5,)})
    state.frozen = {"f": np.arange(10, dtype=np.float32).reshape(2, 5)}
    state.buffers = {"running": np.array([4, 5], np.int64)}
    state.ties = {"head": "wte"}

    module = _load(_written(state, tmp_path / "2", stage=2) / "mp_rank_00_model_states.pt")
    stage_1 = _load(_written(state, tmp_path / "1", stage=1) / "mp_rank_00_model_states.pt")
    parts = [
        _load(path)
        for path in sorted(_written(state, tmp_path / "3", stage=3, dp=3).glob("*model_states.pt"))
    ]

    assert sorted(module["module"]) == ["b", "f", "head", "running", "wte"]
    assert module["module"]["head"].data_ptr() == module["module"]["wte"].data_ptr()
    assert module["module"]["running"].tolist() == [4, 5]
    assert module["buffer_names"] == ["running"]
    assert module["shared_params"] == {"head": "wte"}
    for tree in (stage_1, module):
        assert torch.equal(tree["frozen_param_fragments"]["f"], tree["module"]["f"])
    assert [p["module"]["wte"].shape for p in parts] == [(0,)] * 3
    assert [p["module"]["running"].tolist() for p in parts] == [[4, 5]] * 3
    pieces = [p["frozen_param_fragments"]["f"].tolist() for p in parts]
    assert pieces == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]
    assert parts[0]["frozen_param_shapes"] == {"f": torch.Size((2, 5))}
    assert [p["shared_params"] for p in parts] == [{"head": "wte"}, {}, {}]


@pytest.mark.parametrize(("dtype", "name"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_model_gets_its_dtype_and_the_masters_stay_exact(
    dtype: str, name: torch.dtype, tmp_path: Path
) -> None:
    """Masters rounded to the model's dtype would look right and train worse."""
    state = adam_state({"a": (33, 5)})
    state.frozen = {"f": np.array([1 / 3], np.float32)}

    folder = _written(state, tmp_path, stage=1, dp=2, dtype=dtype)

    module = _load(folder / "mp_rank_00_model_states.pt")["module"]
    assert torch.equal(module["a"], torch.from_numpy(state.weights["a"]).to(name))
    assert module["f"].dtype == name
    assert torch.equal(loaded(read(folder), "a"), torch.from_numpy(state.weights["a"]))


def test_small_values_come_where_deepspeed_looks_for_them(tmp_path: Path) -> None:
    """A key not listed there is handed to the user as client state."""
    state = adam_state({"a": (3,)})
    state.extra = {
        "lr_scheduler": {"last_epoch": 3},
        "counters": {"global_steps": 5, "skipped_steps": 2},
        "client_state": {"mine": [1, 2], "rng": {"dtype": "U8", "shape": [2], "base64": "AQI="}},
        "cursor": {"epoch": 1, "raw": {"base64": "AQI="}},
        "optimizer": {"clip_grad": 1.5, "overflow": False},
        "ds_config": {"zero_optimization": {"stage": 3, "a": 1}, "tensor_parallel": {}},
    }

    folder = _written(state, tmp_path, stage=2, dp=4)

    tree = _load(folder / "mp_rank_00_model_states.pt")
    assert folder.name == "global_step5"
    assert (tree["lr_scheduler"], tree["global_steps"]) == ({"last_epoch": 3}, 5)
    assert (tree["skipped_steps"], tree["dp_world_size"], tree["mp_world_size"]) == (2, 4, 1)
    assert (tree["mine"], tree["cursor"]) == ([1, 2], {"epoch": 1, "raw": b"\x01\x02"})
    assert torch.equal(tree["rng"], torch.tensor([1, 2], dtype=torch.uint8))
    assert tree["ds_config"] == {"zero_optimization": {"stage": 2, "a": 1}}
    optim = _load(folder / "zero_pp_rank_3_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    assert optim["clip_grad"] == 1.5


def test_the_precision_of_the_source_is_the_default(tmp_path: Path) -> None:
    """A file without its prefix is not found by the run that it is for."""
    state = adam_state({"a": (3,)})
    state.extra = {"ds_config": {"fp16": {"enabled": False}, "bf16": {"enabled": True}}}

    names = [path.name for path in _written(state, tmp_path, stage=1).iterdir()]

    assert min(names) == "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"


def test_the_scaler_of_an_fp16_run_is_kept(tmp_path: Path) -> None:
    """A fresh scale would skip steps until it has come down again."""
    state = adam_state({"a": (3,)})
    name = "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"
    kept = {"cur_scale": 128.0, "dynamic": True, "dtype": "torch.float16"}
    state.extra = {"loss_scaler": {"class": name, "state": kept}}

    folder = _written(state, tmp_path, stage=1, dtype="fp16")

    held = _load(folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    assert type(held["loss_scaler"]).__name__ == "DynamicLossScaler"
    assert vars(held["loss_scaler"]) == kept | {"dtype": torch.float16}
    assert held["dynamic_loss_scale"] is True


def test_tensor_parallel_ranks_get_their_shards(tmp_path: Path) -> None:
    """Parts of a fused tensor are cut each by itself, and a vocabulary is padded for its ranks."""
    shapes = {"up": (5, 4), "down": (3, 6), "norm": (3,), "qkv": (8, 2), "wte": (7, 2)}
    state = adam_state(shapes)
    state.frozen = {"f": np.arange(12, dtype=np.float32).reshape(3, 4)}
    state.ties = {"head": "wte"}
    rules = Rules(
        (
            Rule("up", Cut(0)),
            Rule("down|f", Cut(1)),
            Rule("norm", Replicated()),
            Rule("qkv", Cut(0, parts=(4, 2, 2))),
            Rule("wte", Cut(0, unpadded=7)),
        )
    )

    folder = _written(state, tmp_path, stage=0, dp=2, tp=2, rules=rules, dtype="fp32")

    ranks = []
    for rank in range(2):
        tree = _load(folder / f"mp_rank_{rank:02d}_model_states.pt")
        moments = tree["optimizer"]["state"]
        found = {(n, "exp_avg"): moments[i]["exp_avg"].numpy() for i, n in enumerate(shapes)}
        ranks.append(found | {(n, "weight"): tree["module"][n].numpy() for n in shapes})
    for slot, of in (("weight", state.weights), ("exp_avg", state.slots["exp_avg"])):
        both = {name: [rank[name, slot] for rank in ranks] for name in shapes}
        assert [part.shape[0] for part in both["up"]] == [3, 2]
        assert np.array_equal(np.concatenate(both["up"]), of["up"])
        assert np.array_equal(np.concatenate(both["down"], axis=1), of["down"])
        assert all(np.array_equal(part, of["norm"]) for part in both["norm"])
        whole = of["qkv"]
        assert np.array_equal(both["qkv"][0], whole[[0, 1, 4, 6]])
        assert np.array_equal(both["qkv"][1], whole[[2, 3, 5, 7]])
        padded = np.concatenate(both["wte"])
        assert np.array_equal(padded[:7], of["wte"])
        assert [part.shape for part in both["wte"]] == [(4, 2)] * 2
        assert not padded[7:].any()


def test_a_pipeline_has_files_by_stage_and_by_layer(tmp_path: Path) -> None:
    """A tied module is on both its stages, and in the file of its first layer alone."""
    shapes = {"tied_modules.embed.weight": (3, 2), "1.w": (2,), "2.w": (5,)}
    state = adam_state(shapes)
    state.buffers = {"2.running": np.ones(1, np.float32)}

    folder = _written(state, tmp_path, stage=1, dp=2, stages=(0, 2), tied_layers={"embed": (0, 3)})

    layers = {p.name[6:8]: list(_load(p)) for p in folder.glob("layer_*-model_states.pt")}
    assert layers == {"00": ["weight"], "01": ["w"], "02": ["w", "running"]}
    stages = [_load(folder / f"mp_rank_0{mp}_model_states.pt") for mp in range(2)]
    assert [list(s["param_shapes"][0]) for s in stages] == [
        ["tied_modules.embed.weight", "1.w"],
        ["tied_modules.embed.weight", "2.w"],
    ]
    assert [s["module"] for s in stages] == [None, None]
    assert [s["buffer_names"] for s in stages] == [[], ["2.running"]]
    assert stages[0]["checkpoint_parallel_dimensions"] == {"pp_degree": 2, "tp_degree": 1}


def test_a_parameter_without_state_gets_zeros(tmp_path: Path) -> None:
    """It never had a gradient; its neighbours in the flat group had."""
    state = adam_state({"a": (3,), "b": (4,)})
    for slot in ("exp_avg", "exp_avg_sq", "step"):
        del state.slots[slot]["a"]

    found = read(_written(state, tmp_path, stage=1))

    assert not loaded(found, "a", "exp_avg").any()
    expected = torch.from_numpy(state.slots["exp_avg"]["b"])
    assert torch.equal(loaded(found, "b", "exp_avg"), expected)


def _no_group(state: TrainingState) -> None:
    state.groups[0]["params"].remove("b")


def _unknown(state: TrainingState) -> None:
    state.groups[0]["params"].append("c")


def _other_shape(state: TrainingState) -> None:
    state.slots["exp_avg_sq_row"] = {"a": np.zeros(2, np.float32)}


def _other_step(state: TrainingState) -> None:
    state.slots["step"]["b"] = np.array(8.0, np.float32)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (_no_group, "b is in no group of the optimizer"),
        (_unknown, "c: the checkpoint has no weight of that name"),
        (_other_shape, "DeepSpeed flattens a slot like its parameter"),
        (_other_step, "DeepSpeed keeps one number for the whole group"),
    ],
)
def test_a_state_that_deepspeed_cannot_hold_is_refused(
    spoil: Any, problem: str, tmp_path: Path
) -> None:
    """Each of these would load, and train as something else."""
    state = adam_state({"a": (3, 2), "b": (4,)})
    spoil(state)

    with pytest.raises(UcpError, match=problem):
        _written(state, tmp_path, stage=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ({"stage": 4}, "stages 0 to 3"),
        ({"dtype": "float32"}, "give one of fp32, bf16, fp16"),
        ({"dp": 0}, "dp=0 must be at least 1"),
        ({"stage": 0, "dtype": "bf16"}, "give stage 1, or fp32"),
        ({"tp": 2}, "no rule says how a is spread over 2"),
        ({"tag": "../x"}, "not the name of a folder"),
        ({"stages": (0, 2), "stage": 3}, "ZeRO stage 0 or 1 only"),
        ({"stages": (1, 2)}, "must ascend from 0"),
        ({"stages": (0, 2, 2)}, "must ascend from 0"),
        ({"stages": (0,)}, "a is not a name of a PipelineModule"),
    ],
)
def test_a_target_that_cannot_be_is_refused(
    target: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    """A typing error must not cost a conversion of hours."""
    with pytest.raises(UcpError, match=problem):
        _written(adam_state({"a": (3, 2)}), tmp_path, **target)


def test_a_destination_in_use_is_refused_and_left_alone(tmp_path: Path) -> None:
    """The existing files may be the only copy of something."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")

    with pytest.raises(UcpError, match="holds mine already"):
        write(
            _source(adam_state({"a": (3,)}), tmp_path),
            LocalStore(),
            str(tmp_path / "out"),
            memory_bytes=MEMORY_BYTES,
        )

    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_hole_in_the_source_is_found_before_anything_is_written(tmp_path: Path) -> None:
    """Zeros in its place would train on unnoticed."""
    source = _source(adam_state({"a": (4, 2)}), tmp_path)
    key = next(iter(source.state_map.entries))
    entry = source.state_map.entries[key]
    entries = dict(source.state_map.entries) | {key: replace(entry, fragments=entry.fragments[:1])}
    state_map = replace(source.state_map, entries=entries)
    broken = replace(source, manifest=replace(source.manifest, state_map=state_map))

    with pytest.raises(CheckpointCorruptError, match="is in none of the files"):
        write(broken, LocalStore(), str(tmp_path / "out"), memory_bytes=MEMORY_BYTES)
    assert not (tmp_path / "out").exists()


def test_progress_ends_at_everything(tmp_path: Path) -> None:
    """A bar that stops at 97 % looks like a hang; tied tensors are written once."""
    state = adam_state({"a": (300, 20), "b": (4,)})
    state.ties = {"c": "a"}
    seen: list[tuple[int, int]] = []

    write(
        _source(state, tmp_path),
        MemoryStore(),
        "out",
        memory_bytes=MEMORY_BYTES,
        progress=lambda done, total: seen.append((done, total)),
        stage=2,
        dp=3,
    )

    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 4 * 3 * 6000
