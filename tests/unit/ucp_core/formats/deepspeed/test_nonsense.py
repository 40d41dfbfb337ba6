"""Values that no DeepSpeed writes: an error of ours each time."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.deepspeed_folders import Param, native, read, tensor
from ucp_core.errors import CheckpointCorruptError

MODEL = [Param("up.weight", (7, 6)), Param("up.bias", (7,)), Param("scale", (3,), role="buffer")]
MODEL_FILE = "mp_rank_00_model_states.pt"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dp_world_size", 0),
        ("mp_world_size", "one"),
        ("global_steps", -1),
        ("module", 3),
        ("universal_checkpoint_info", [1]),
        ("shared_params", {"head.weight": "nowhere"}),
    ],
)
def test_nonsense_in_a_model_file_is_an_error_of_ours(tmp_path: Path, key: str, value: Any) -> None:
    """Never a TypeError from the depths."""
    folder = native(MODEL, dp=1)
    tree = folder.trees[MODEL_FILE]
    tree[key] = value
    if key == "shared_params":
        tree["module"]["head.weight"] = tensor(np.zeros((2, 2), np.float32))
        # There: so no frozen parameter was left out.
        tree["frozen_param_shapes"] = {}

    with pytest.raises(CheckpointCorruptError):
        read(folder.write(tmp_path))


@pytest.mark.parametrize(
    "key",
    ["base_optimizer_state", "single_partition_of_fp32_groups", "param_slice_mappings"],
)
@pytest.mark.parametrize("value", [3, [], {}, [3], {"state": 1}])
def test_nonsense_in_an_optimizer_file_is_an_error_of_ours(
    tmp_path: Path, key: str, value: Any
) -> None:
    """Never a TypeError from the depths."""
    folder = native(MODEL, dp=1)
    folder.optim()[key] = value

    with pytest.raises(CheckpointCorruptError):
        read(folder.write(tmp_path))


def test_a_number_that_no_tensor_holds_is_an_error_of_ours(tmp_path: Path) -> None:
    """Python's integers have no end."""
    folder = native(MODEL, dp=1)
    folder.optim()["base_optimizer_state"]["state"][0]["step"] = 2**70

    with pytest.raises(CheckpointCorruptError):
        read(folder.write(tmp_path))
