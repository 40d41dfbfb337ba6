"""Work of a simulated device, with the answers of torch's own for NCCL when Python asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class DeviceWork:
    """A collective of a simulated device: where the device is, and torch's work."""

    has_begun: bool = False
    has_ended: bool = False
    error: Exception | None = None
    #: The device's own failure, with which every question about it fails from then on.
    broken: RuntimeError | None = None
    num_waited: int = 0  #: How often streams were made to wait for it.
    outputs: Any = None  #: The tensors that it keeps alive.

    def is_reached(self) -> bool:
        if self.broken is not None:
            raise self.broken
        return self.has_begun

    def is_completed(self) -> bool:
        if self.broken is not None:
            raise self.broken
        return self.has_ended or self.error is not None

    def wait(self) -> bool:
        self.num_waited += 1
        if self.error is not None:
            raise dist.DistBackendError(str(self.error))
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_success(self) -> bool:
        raise RuntimeError("WorkNCCL::isSuccess() is deprecated")

    def exception(self) -> None:
        raise TypeError("Unable to convert function return value to a Python type!")

    def get_future(self) -> None:
        return None

    def get_future_result(self) -> Any:
        result: torch.futures.Future[int] = torch.futures.Future()
        if self.error is not None:
            result.set_result(2)
        return result


@dataclass
class DeviceClock:
    """The time of a simulated device, and the marks in its stream."""

    now_s: float = 0.0  #: When it came to the newest mark.
    num_asked: int = 0  #: How many marks were made.
    is_there: bool = True  #: Whether it has come to them.

    def mark(self) -> Any:
        self.num_asked += 1
        return _Mark(self, self.now_s)


@dataclass
class _Mark:
    clock: DeviceClock
    at_s: float

    def is_reached(self) -> bool:
        return self.clock.is_there

    def since(self, other: _Mark) -> float:
        assert self.clock.is_there, "torch refuses"
        return self.at_s - other.at_s
