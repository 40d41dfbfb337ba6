import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from everstep import Session, run
from workers.train.boundary import between_steps
from workers.train.boundary.device_memory import DeviceMemory
from workers.train.executor import Signals

DEVICE = torch.device("cuda", 1)


def test_the_driver_is_asked_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may take milliseconds."""
    asked: list[torch.device] = []

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return 30, 80

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    memory = DeviceMemory(DEVICE)

    assert [memory.bytes() for _ in range(3)] == [(50.0, 80.0)] * 3
    assert asked == [DEVICE]


def test_the_memory_of_the_host_is_not_told() -> None:
    """Other processes have most of it."""
    memory = DeviceMemory(torch.device("cpu"), num_ranks=2)
    assert all(map(math.isnan, memory.bytes()))
    assert memory.of_ranks(1) == ()


def test_all_ranks_learn_what_the_fullest_device_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 writes the lines of steps, and the last stage of a pipeline holds the logits."""
    free = iter((50, 20, 40))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (next(free), 80))
    said = [
        Signals(behind=rank == 1, device_bytes=DeviceMemory(DEVICE, num_ranks=3).of_ranks(rank))
        for rank in range(3)
    ]
    sums = [sum(numbers) for numbers in zip(*(one.numbers() for one in said), strict=True)]

    assert Signals.from_sums(sums) == Signals(behind=True, device_bytes=(30.0, 60.0, 40.0))


def test_the_line_of_a_step_has_the_memory_of_the_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A number of now does not show that memory grows from step to step until there is none."""
    free = iter((50, 20, 40))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (next(free), 80))

    def train(session: Session) -> None:
        model = session.model(lambda: nn.Linear(2, 2))
        session.optimizer(lambda named: torch.optim.SGD(named.values()))
        for _ in session.steps(4):
            session.train_step(lambda samples: model(torch.ones(len(samples), 2)).square().mean())

    def lines(name: str) -> list[float | None]:
        directory = str(tmp_path / name)
        run(train, directory=directory, steps=2, global_batch=4, micro_batch=2, lr=0.1)
        found = (tmp_path / name / "metrics/rank0.jsonl").read_text().splitlines()
        return [json.loads(line).get("device_bytes") for line in found]

    assert lines("host") == [None, None]
    # The model trains on the host; the driver of a device is asked beside it.
    on_device = partial(DeviceMemory, DEVICE)
    monkeypatch.setattr(between_steps, "DeviceMemory", lambda _device, **more: on_device(**more))
    assert lines("device") == [30.0, 30.0]
