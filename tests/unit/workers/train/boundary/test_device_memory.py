from __future__ import annotations

import math

import pytest
import torch

from workers.train.boundary.device_memory import DeviceMemory


def test_the_driver_is_asked_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may take milliseconds."""
    asked: list[torch.device] = []

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return 30, 80

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    memory = DeviceMemory(torch.device("cuda", 1))

    assert [memory.bytes() for _ in range(3)] == [(50.0, 80.0)] * 3
    assert asked == [torch.device("cuda", 1)]


def test_the_memory_of_the_host_is_not_told() -> None:
    """Other processes have most of it."""
    assert all(map(math.isnan, DeviceMemory(torch.device("cpu")).bytes()))
