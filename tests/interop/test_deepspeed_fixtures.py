"""Checkpoints that DeepSpeed and Megatron-DeepSpeed made, kept beside the repository.

``expected.safetensors`` was gathered in the training processes; ``universal_ds`` is what DeepSpeed
itself made of the checkpoint.
"""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tests.support.deepspeed_folders import Array, loaded, read, with_shapes
from tests.support.foreign_reading import checkpoint_fixture

NATIVE = (
    "ds_zero1_dp2",
    "ds_zero1_dp2_tied",
    "ds_zero3_dp2",
    "ds_pp2_dp2_zero1",
    "ds_tp2_dp2_zero1",
    "mds_tp2_pp2_zero1",
)
UNIVERSAL = tuple(name for name in NATIVE if "tied" not in name)
HEADS, HEAD_CHANNELS, TP = 4, 8, 2


def _expected(folder: Path) -> dict[tuple[str, str], Array]:
    told = safetensors.numpy.load_file(folder / "expected.safetensors")
    found = {}
    for key, array in told.items():
        fqn, slot = key.rsplit(".", 1)
        found[fqn, "weight" if slot == "fp32" else slot] = array
    return found


def _by_parts(array: Array) -> Array:
    """Return rows in the order of one rank: q, k and v of the first, then of the second."""
    blocks = array.reshape(TP, 3, HEADS // TP * HEAD_CHANNELS, -1)
    return blocks.transpose(1, 0, 2, 3).reshape(array.shape)


@pytest.mark.parametrize("name", NATIVE)
def test_native_checkpoints_are_read_bit_for_bit(name: str) -> None:
    """Padding, cuts across ranks, tensor and pipeline parallelism as they really occur."""
    folder = checkpoint_fixture(name)
    expected = _expected(folder)
    if name.startswith("mds"):
        # The gathered tensor is the ranks' shards one after the other, which no model of one rank
        # could use: each has its q, then its k, then its v.
        expected = {
            key: _by_parts(array) if "query_key_value" in key[0] else array
            for key, array in expected.items()
        }

    found = loaded(read(folder / "checkpoint"))

    assert sorted(found) == sorted(expected)
    for key, array in expected.items():
        assert np.array_equal(found[key], array), key


@pytest.mark.parametrize("name", UNIVERSAL)
def test_universal_folders_are_read_bit_for_bit(name: str) -> None:
    """That of stage 3 lacks the model files here, so its shapes come from elsewhere."""
    folder = checkpoint_fixture(name)
    expected = _expected(folder)

    checkpoint = read(folder / "universal_ds")
    found = loaded(with_shapes(checkpoint, {key[0]: a.shape for key, a in expected.items()}))

    assert sorted(found) == sorted(expected)
    for key, array in expected.items():
        assert np.array_equal(found[key], array), key
