"""Frozen parameters that were left out of a checkpoint, as a base model is beside its LoRA."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.deepspeed_folders import Param, assert_equal, loaded, native, read, tensor

MODEL = [Param("lora_a.weight", (3, 7)), Param("lora_b.weight", (5, 3), group=1)]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_tie_of_what_was_left_out_is_no_damage(tmp_path: Path, stage: int) -> None:
    """``exclude_frozen_parameters`` leaves the second name in: with its values below stage 3."""
    folder = native(MODEL, stage=stage, dp=2)
    embed = np.arange(6, dtype=np.float32).reshape(2, 3)
    for name, tree in folder.trees.items():
        if "model_states" in name:
            tree["frozen_param_shapes"] = tree["frozen_param_fragments"] = None
            tree["module"]["head.weight"] = tensor(embed if stage == 2 else embed.ravel()[:0])
            tree["shared_params"] = {"head.weight": "base.weight"}

    checkpoint = read(folder.write(tmp_path))

    if stage == 2:
        assert checkpoint.manifest.ties == {"head.weight": "base.weight"}
        assert checkpoint.manifest.roles["base.weight"] == "frozen"
        folder.expected["base.weight", "weight"] = embed
    else:
        assert checkpoint.manifest.ties == {}
        assert checkpoint.manifest.items["module.head.weight"].policy == "drop"
    assert_equal(loaded(checkpoint), folder.expected)
