"""A load into a wider dtype changes no value, and happens only where it is asked for."""

import ml_dtypes
import numpy as np
import pytest

from tests.support.checkpoints import ROOT, Whole, save
from ucp_core.errors import CheckpointCorruptError
from ucp_core.geometry import Box, TensorKey
from ucp_core.native import LocalTensor, load, open_checkpoint
from ucp_core.storage import MemoryStore

_NUMPY = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64}
#: Subnormal, of either sign, the largest of float16, what is no number.
_VALUES = (0.0, -0.0, 1.0009765625, -2.5, 6e-8, -1e-40, 65504.0, float("inf"), float("nan"), 3.0)


def _need(dtype: str, box: Box) -> tuple[LocalTensor, np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    data = np.full(box.num_elements * np.dtype(_NUMPY[dtype]).itemsize, 7, np.uint8)
    made = LocalTensor(fqn="w", slot="weight", dtype=dtype, shape=(5, 2), box=box, data=data.data)
    return made, data


@pytest.mark.parametrize(
    ("held", "needed"), [("BF16", "F32"), ("F16", "F32"), ("BF16", "F64"), ("F32", "F64")]
)
def test_narrow_weights_fill_wider_masters(held: str, needed: str) -> None:
    """Any box is widened; unless asked to, a load still refuses another dtype."""
    with np.errstate(over="ignore", under="ignore"):
        values = np.array(_VALUES, np.float64).reshape(5, 2).astype(_NUMPY[held])
    store = MemoryStore()
    state = {TensorKey("w", "weight"): Whole(dtype=held, shape=(5, 2), data=values.tobytes())}
    save(store, state, step=7, world_size=2)
    opened = open_checkpoint(store, f"{ROOT}/step-00000007")
    box = Box((1, 0), (5, 2))
    need, data = _need(needed, box)

    with pytest.raises(CheckpointCorruptError, match=f"the checkpoint has {held}"):
        load(opened, [need])
    load(opened, [need, _need(held, box)[0]], widen=True)

    assert data.tobytes() == values[1:].astype(_NUMPY[needed]).tobytes()


def test_what_would_be_rounded_is_refused_though_it_was_asked_for() -> None:
    """A caller that wants that makes its own cast."""
    store = MemoryStore()
    values = np.ones((5, 2), np.float32)
    state = {TensorKey("w", "weight"): Whole(dtype="F32", shape=(5, 2), data=values.tobytes())}
    save(store, state, step=7)
    opened = open_checkpoint(store, f"{ROOT}/step-00000007")

    for dtype in ("BF16", "F16"):
        with pytest.raises(CheckpointCorruptError, match="the checkpoint has F32"):
            load(opened, [_need(dtype, Box.full((5, 2)))[0]], widen=True)
