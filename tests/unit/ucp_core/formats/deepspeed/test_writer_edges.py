"""States at the edges of what DeepSpeed can hold: empty, 0-d, without a state, without a step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.deepspeed_folders import Param, assert_equal, loaded, native, read
from tests.support.torch_files import load_torch_file
from tests.support.training_states import TrainingState, adam_state
from ucp_core.errors import UcpError
from ucp_core.formats import left_behind, open_source
from ucp_core.formats.deepspeed import writer as deepspeed_writer
from ucp_core.inspection import diff
from ucp_core.language import Cut, Replicated, Rules
from ucp_core.language.rules import Rule
from ucp_core.storage import MemoryStore


def _files(state: TrainingState, **target: Any) -> dict[str, Any]:
    store = MemoryStore()
    source = state.save(MemoryStore(), "source")
    deepspeed_writer.write(source, store, "out", memory_bytes=32 << 20, **target)
    tag = store.read("out/latest").decode()
    return {
        name: load_torch_file(store.read(f"out/{tag}/{name}")) for name in store.list(f"out/{tag}")
    }


def _optimizer(files: dict[str, Any]) -> Any:
    return files["zero_pp_rank_0_mp_rank_00_optim_states.pt"]["optimizer_state_dict"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_without_elements_is_not_in_the_flat_groups(stage: int) -> None:
    """DeepSpeed keeps such parameters with the frozen ones, or its ranges would be off by one."""
    state = adam_state({"a": (3,), "none": (0, 4), "b": (2,)})

    files = _files(state, stage=stage)

    prefix = "zero_pp_rank_0_" if stage == 3 else ""
    tree = files[f"{prefix}mp_rank_00_model_states.pt"]
    assert [list(group) for group in tree["param_shapes"]] == [["a", "b"]]
    assert tree["frozen_param_shapes"] == {"none": (0, 4)}
    assert tree["frozen_param_fragments"]["none"].numel() == 0
    assert tree["module"]["none"].numel() == 0


def test_a_parameter_of_one_element_keeps_its_place() -> None:
    """Its moments have no dims either, and are not to be taken for a number of the group."""
    state = adam_state({"scale": (), "a": (3,)})

    held = _optimizer(_files(state, stage=1))["base_optimizer_state"]["state"][0]

    flat = held["exp_avg"].numpy()
    assert flat[0] == state.slots["exp_avg"]["scale"]
    assert np.array_equal(flat[1:4], state.slots["exp_avg"]["a"])


def test_numbers_of_a_group_come_once() -> None:
    """NAdam's product of momenta is one number for each parameter and equal in all of them."""
    state = adam_state({"a": (3,), "b": (4,)})
    state.slots["mu_product"] = {name: np.array(0.5, np.float32) for name in ("a", "b")}

    held = _optimizer(_files(state, stage=3))["optimizer_state_dict"]["state"][0]

    assert held["mu_product"].shape == ()
    assert held["mu_product"].item() == 0.5


def test_a_step_that_is_an_integer_stays_one() -> None:
    """Optimizers that count without tensors hand it to compiled code, which takes no tensor."""
    state = adam_state({"a": (3,)})
    state.slots["step"] = {"a": np.array(9, np.int64)}

    step = _optimizer(_files(state, stage=1))["base_optimizer_state"]["state"][0]["step"]

    assert (type(step), step) == (int, 9)


def test_an_optimizer_without_state_is_one_without_state() -> None:
    """Plain SGD has none, and none is to be made up."""
    state = adam_state({"a": (3,), "b": (4,)}, num_groups=2)
    state.slots = {}

    native, flat, plain = (_files(state, stage=stage) for stage in (1, 3, 0))

    assert _optimizer(native)["base_optimizer_state"]["state"] == {}
    assert _optimizer(flat)["optimizer_state_dict"]["state"] == {}
    assert plain["mp_rank_00_model_states.pt"]["optimizer"]["state"] == {}
    assert len(_optimizer(native)["base_optimizer_state"]["param_groups"]) == 2


def test_weights_alone_can_be_written_at_stage_0_only() -> None:
    """ZeRO's files are those of an optimizer; a model of Hugging Face has none."""
    state = adam_state({"a": (3,)})
    state.slots, state.groups = {}, []

    tree = _files(state, stage=0)["mp_rank_00_model_states.pt"]

    assert tree["optimizer"] is None
    assert torch.equal(tree["module"]["a"], torch.from_numpy(state.weights["a"]))
    with pytest.raises(UcpError, match="stage 0"):
        _files(state, stage=1)


def test_integers_of_weights_alone_are_kept_as_they_are() -> None:
    """Without an optimizer nothing says that they are buffers, and no float holds all of them."""
    state = adam_state({"a": (3,)})
    state.slots, state.groups = {}, []
    state.weights["seen"] = np.array([2**40 + 1], np.int64)

    tree = _files(state, stage=0)["mp_rank_00_model_states.pt"]

    assert tree["buffer_names"] == ["seen"]
    assert tree["module"]["seen"].tolist() == [2**40 + 1]


@pytest.mark.parametrize("stage", [1, 2])
def test_momentum_of_muon_is_written_only_where_it_is_cut_like_the_masters(stage: int) -> None:
    """DeepSpeed would take slices of whole parameters out of it, and get another's elements."""
    state = adam_state({"a": (3,), "b": (4,)})
    state.slots = {"momentum_buffer": state.slots["exp_avg"]}
    state.groups[0]["use_muon"] = True

    with pytest.raises(UcpError, match="Muon's momentum as whole parameters"):
        _files(state, stage=stage)
    assert _files(state, stage=3)


def test_a_new_fp16_run_gets_the_scaler_that_deepspeed_starts_with() -> None:
    """The source was not trained in fp16, so it has none."""
    scaler = _optimizer(_files(adam_state({"a": (3,)}), stage=2, dtype="fp16"))["loss_scaler"]

    assert type(scaler).__name__ == "DynamicLossScaler"
    assert (scaler.cur_scale, scaler.delayed_shift) == (65536.0, 2)
    assert scaler.dtype == torch.float16


def test_a_slot_in_two_precisions_takes_the_wider() -> None:
    """A flat group has one dtype; what was kept in the narrower one loses nothing."""
    state = adam_state({"a": (3,), "b": (4,)})
    state.slots["exp_avg"]["b"] = state.slots["exp_avg"]["b"].astype(np.float16)

    flat = _optimizer(_files(state, stage=1))["base_optimizer_state"]["state"][0]["exp_avg"]

    assert flat.dtype == torch.float32
    assert np.array_equal(flat[3:7].numpy(), state.slots["exp_avg"]["b"].astype(np.float32))


def test_a_tie_to_nothing_is_refused() -> None:
    """The alias would be missing from the module, and a strict load would fail far away."""
    state = adam_state({"a": (3,)})
    state.ties = {"head": "gone"}

    with pytest.raises(UcpError, match="gone: the checkpoint has no weight of that name"):
        _files(state, stage=1)


def test_a_tensor_outside_the_model_is_left_out_and_told() -> None:
    """DeepSpeed's module refuses to load a checkpoint with a name that it does not have."""
    state = adam_state({"a": (3, 2)})
    state.weights["ema.a"] = state.weights["a"] / 3
    store = MemoryStore()
    source = state.save(store, "source")
    source = replace(source, manifest=replace(source.manifest, roles={"ema.a": "extra"}))

    deepspeed_writer.write(source, store, "out", memory_bytes=32 << 20)

    assert {key.fqn for key in open_source(store, "out").state_map.entries} == {"a"}
    assert left_behind(source, format="deepspeed") == ["tensor ema.a"]


def test_stage_0_says_whose_the_optimizers_numbers_are() -> None:
    """DeepSpeed saves no names there, and shapes alone do not tell them apart."""
    state = adam_state({"a": (2, 3), "b": (2, 3), "c": (2, 3)}, num_groups=2)
    state.frozen = {"f": np.ones((2, 3), np.float32)}
    store = MemoryStore()
    source = state.save(store, "source")
    deepspeed_writer.write(source, store, "out", memory_bytes=32 << 20, stage=0, dp=2)

    back = open_source(store, "out")

    assert diff(source, back).tensors == ()
    assert [group["params"] for group in back.param_groups] == [["a", "c"], ["b"]]
    assert back.manifest.roles == {"f": "frozen"}


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("tp", [1, 3])
def test_stage_3_of_old_versions_keeps_empty_parameters_in_their_groups(
    dp: int, tp: int, tmp_path: Path
) -> None:
    """They fill no place in flat groups, so they could be taken for the next group's, or lost."""
    params = [
        Param("a", (6,), 0),
        Param("none", (0, 4)),
        Param("narrow", (2, 5), 0),
        Param("b", (3,), 0, group=1),
        Param("last", (2, 2), 1, group=1),
        Param("gone", (0,), group=1),
    ]
    folder = native(params, stage=3, dp=dp, tp=tp)
    cuts = {"a": Cut(0), "narrow": Cut(0), "b": Cut(0), "last": Cut(1)}
    rules = Rules(tuple(Rule(p.name, cuts.get(p.name, Replicated())) for p in params))

    found = read(folder.write(tmp_path), rules=rules if tp > 1 else None)

    names = [["a", "none", "narrow"], ["b", "last", "gone"]]
    assert [group["params"] for group in found.param_groups] == names
    assert found.manifest.roles == {}
    assert_equal(loaded(found), folder.expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_vector_without_elements_is_no_stand_in(stage: int) -> None:
    """It has the shape of those that stage 3 puts in place of parameters; it would get lost."""
    store = MemoryStore()
    state = adam_state({"a": (3,)})
    state.frozen = {"f": np.ones(0, np.float32)}
    source = state.save(store, "source")
    deepspeed_writer.write(source, store, "out", memory_bytes=32 << 20, stage=stage, dp=2)

    back = open_source(store, "out")

    assert diff(source, back).tensors == ()
    assert back.manifest.roles == {"f": "frozen"}
