"""Copies of what is in this machine's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from workers.snapshot.host_copy import HostTensors


@pytest.mark.parametrize("num_elements", [0, 1, 100, 40_000])
def test_every_byte_is_copied_from_where_it_is_now(num_elements: int) -> None:
    """An optimizer may give a tensor other memory between two snapshots."""
    tensors = [torch.randn(num_elements), torch.arange(3, dtype=torch.float64)]
    targets = [memoryview(bytearray(one.numel() * one.element_size())) for one in tensors]
    host = HostTensors(tensors)
    assert host.copy_to(targets)
    tensors[0].add_(1)
    tensors[1].data = torch.arange(3, 6, dtype=torch.float64)
    assert host.copy_to(targets)

    for tensor, target in zip(tensors, targets, strict=True):
        array: Any = tensor.view(torch.uint8).numpy()
        assert target == array.tobytes()


def test_what_does_not_lie_side_by_side_is_left_to_others() -> None:
    """Its bytes in their order are those of other elements."""
    target = memoryview(bytearray(b"." * 24))
    assert not HostTensors([torch.ones(2, 3).t()]).copy_to([target])
    assert target == b"." * 24
