"""Copies of what is in this machine's memory."""

import zlib
from typing import Any, Final

import pytest
import torch

from ucp_core.numerics import NO_SUMS
from workers.snapshot.buffer_layout import HostTensors

#: More than what is copied without letting other threads run.
BLOCK_BYTES: Final = 100_000


@pytest.mark.parametrize(
    "num_bytes", [0, 1, 100, 70_000, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 5]
)
def test_every_byte_is_copied_from_where_it_is_now(num_bytes: int) -> None:
    """An optimizer may give a tensor other memory between two snapshots."""
    sized = torch.randint(256, (num_bytes,), dtype=torch.uint8)
    tensors = [sized, torch.arange(3, dtype=torch.float64)]
    targets = [memoryview(bytearray(one.numel() * one.element_size())) for one in tensors]
    host = HostTensors(tensors, block_bytes=BLOCK_BYTES)
    assert host.copy_to(targets) is not None
    tensors[0].add_(1)
    tensors[1].data = torch.arange(3, 6, dtype=torch.float64)
    found = host.copy_to(targets)

    for tensor, target in zip(tensors, targets, strict=True):
        array: Any = tensor.view(torch.uint8).numpy()
        assert target == array.tobytes()
    # Tensors with several blocks, or a whole one, are left to the other thread.
    is_left = num_bytes == 0 or num_bytes >= BLOCK_BYTES
    sums = [(value := zlib.crc32(target), str(value)) for target in targets]
    assert found == [NO_SUMS if is_left else sums[0], sums[1]]


def test_what_does_not_lie_side_by_side_is_left_to_others() -> None:
    """Its bytes in their order are those of other elements."""
    target = memoryview(bytearray(b"." * 24))
    host = HostTensors([torch.ones(2, 3).t()], block_bytes=BLOCK_BYTES)
    assert host.copy_to([target]) is None
    assert target == b"." * 24
