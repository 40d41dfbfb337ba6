"""The universal folder for DeepSpeed, read by torch; ``tests/interop`` has DeepSpeed load it."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.torch_files import load_torch_file
from tests.support.training_states import TrainingState, adam_state
from ucp_core.errors import UcpError
from ucp_core.formats.deepspeed.universal_writer import write
from ucp_core.language import Average, Cut, Grid, Pattern, Replicated, Rules
from ucp_core.language.rules import Rule
from ucp_core.storage import MemoryStore

MEMORY_BYTES = 32 << 20
HALVES = Rules((Rule(".*", Cut(0, ratio=(1, 1))),))
GRID = Rules((Rule(".*", Grid((Cut(0),), (2,))),))


def _written(state: TrainingState, **options: Any) -> dict[str, Any]:
    """Return every file by its name below the tag."""
    store = MemoryStore()
    write(state.save(MemoryStore(), "source"), store, "out", memory_bytes=MEMORY_BYTES, **options)
    tag = store.read("out/latest_universal").decode()
    assert tag == "global_step7_universal"
    return {name: load_torch_file(data) for name, data in _walk(store, f"out/{tag}", "")}


def _walk(store: MemoryStore, directory: str, name: str) -> list[tuple[str, bytes]]:
    inside = store.list(directory)
    if not inside:
        return [(name, store.read(directory))]
    return [
        found
        for child in inside
        for found in _walk(store, f"{directory}/{child}", f"{name}/{child}".lstrip("/"))
    ]


def test_stage_3_is_told_only_what_all_groups_share() -> None:
    """It gives what it finds to every group: the lr of one would become that of all."""
    state = adam_state({"a": (5, 3), "b": (4,)}, num_groups=2)

    optimizer = _written(state)["zero/optimizer_state.pt"]

    told = optimizer["optimizer_state_dict"]["param_groups"][0]
    assert told == {"eps": 1e-8, "foreach": None, "params": [0]}


def test_what_is_not_trained_is_in_the_module() -> None:
    """DeepSpeed does not load it from there, but other readers can."""
    state = adam_state({"a": (5, 3)})
    state.frozen = {"f": np.ones((2, 2), np.float32)}
    state.buffers = {"running": np.array([4], np.int64)}

    tree = _written(state, dtype="bf16")["mp_rank_00_model_states.pt"]

    assert tree["module"]["f"].dtype == torch.bfloat16
    assert tree["module"]["running"].tolist() == [4]
    assert tree["buffer_names"] == ["running"]
    assert tree["frozen_param_shapes"] == {"f": (2, 2)}


def test_any_slot_of_the_shape_of_its_parameter_is_written() -> None:
    """DeepSpeed's tool knows Adam's two; its loader takes whatever lies there."""
    state = adam_state({"a": (5, 3), "b": (4,)})
    state.slots = {"momentum_buffer": {"a": np.ones((5, 3), np.float32)}}

    files = _written(state)

    assert files["zero/a/momentum_buffer.pt"]["param"].sum() == 15
    assert files["zero/b/momentum_buffer.pt"]["param"].tolist() == [0, 0, 0, 0]
    assert "zero/a/step.pt" not in files


@pytest.mark.parametrize(
    ("pattern", "tags"),
    [
        (Cut(1), {"cat_dim": 1}),
        (Cut(-1), {"cat_dim": 1}),
        (Replicated(), {}),
        (Average(), {}),
        (Cut(0, parts=(2, 2)), {"cat_dim": 0, "param_n_sub_params": 2}),
        (Cut(0, ratio=(1, 1)), {"cat_dim": 0, "param_n_sub_params": 2}),
        (Cut(-1, ratio=(1, 1, 1)), {"cat_dim": 1, "param_n_sub_params": 3}),
        (Cut(0, unpadded=4), {"cat_dim": 0, "vocab_tensor": True}),
    ],
    ids=str,
)
def test_tensor_parallel_targets_are_told_how_to_cut(
    pattern: Pattern, tags: dict[str, Any]
) -> None:
    """A row-parallel weight cut along the other dim has the right size and the wrong values."""
    files = _written(adam_state({"a": (4, 6)}), rules=Rules((Rule(".*", pattern),)))

    found = dict(files["zero/a/exp_avg.pt"])
    del found["param"]
    assert found == tags


@pytest.mark.parametrize("cut", [Cut(0, parts=(4, 1, 1)), Cut(0, ratio=(4, 1, 1))], ids=str)
def test_uneven_parts_are_told_by_their_sizes(cut: Cut) -> None:
    """A fused q|k|v with fewer key heads has parts of different size."""
    files = _written(adam_state({"a": (6, 2)}), rules=Rules((Rule(".*", cut),)))

    shape = files["zero/a/fp32.pt"]["sub_param_shape"]
    assert (shape.shape, shape.partition_dim) == (((4, 1, 1), 2), 0)


@pytest.mark.parametrize(
    ("state", "options", "problem"),
    [
        (adam_state({"a/b": (2,)}), {}, "cannot be the name of a folder"),
        (adam_state({"..": (2,)}), {}, "cannot be the name of a folder"),
        (adam_state({}), {}, "no optimizer groups"),
        (adam_state({"a": (2,)}), {"dtype": "int8"}, "give one of"),
        (adam_state({"a": (2, 2)}), {"rules": GRID}, "even cuts"),
        (adam_state({"a": (5, 2)}), {"rules": HALVES}, "even cuts"),
    ],
    ids=["slash", "parent", "empty", "dtype", "grid", "odd halves"],
)
def test_what_the_folder_cannot_hold_is_refused(
    state: TrainingState, options: dict[str, Any], problem: str
) -> None:
    """The names of parameters become paths: one of them must not lead out of the folder."""
    with pytest.raises(UcpError, match=problem):
        _written(state, **options)


def test_a_number_for_each_parameter_has_no_place() -> None:
    """DeepSpeed's loader would take it for a tensor and fail in the middle."""
    state = adam_state({"a": (2,)})
    state.slots["mu_product"] = {"a": np.array(0.5, np.float32)}

    with pytest.raises(UcpError, match="mu_product is one number"):
        _written(state)
