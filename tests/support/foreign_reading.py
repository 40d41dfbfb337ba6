"""Loads tensors of foreign checkpoints, and finds the checkpoints of ``tests/fixtures``."""

from pathlib import Path

import torch

from tests.support.made import tensor_of
from ucp_core.geometry import TensorKey
from ucp_core.native import Checkpoint, load

#: Checkpoints that the frameworks themselves wrote.
FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"

TORCH_DTYPES = {
    "F32": torch.float32,
    "F64": torch.float64,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def loaded(checkpoint: Checkpoint, fqn: str, slot: str = "weight") -> torch.Tensor:
    """Return one whole tensor."""
    entry = checkpoint.state_map.entries[TensorKey(fqn, slot)]
    tensor = torch.zeros(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
    data = tensor.reshape(-1).view(torch.uint8).numpy().data
    need = tensor_of(fqn, entry.shape, data, slot=slot, dtype=entry.dtype)
    load(checkpoint, [need])
    return tensor


def unequal(checkpoint: Checkpoint, expected: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of expected tensors (``<fqn>.<slot>``) that differ in any bit."""
    wrong: list[str] = []
    for name, tensor in expected.items():
        fqn, _, slot = name.rpartition(".")
        key = TensorKey(fqn, "weight" if slot == "fp32" else slot)
        if key not in checkpoint.state_map.entries:
            wrong.append(f"{name} is missing")
        elif not same_bits(loaded(checkpoint, *key), tensor):
            wrong.append(name)
    return wrong


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, two)]
    return torch.equal(*flat)


def checkpoint_fixture(name: str) -> Path:
    """Return the folder of a checkpoint that a framework wrote (``tests/fixtures/README.md``)."""
    folder = FIXTURES / name
    assert folder.is_dir(), f"there is no fixture {name} in {FIXTURES}"
    return folder
