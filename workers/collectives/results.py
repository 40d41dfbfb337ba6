"""Check results of collectives before the host uses them or they become state.

An abort ends a collective on a device by force, which makes its result arbitrary. The abort sets
the attempt's flag first, so a check of the flag after the result is reliable.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from workers.collectives.forming import check


def on_host(numbers: Tensor) -> list[float]:
    """Return the result of a collective, read from its device.

    Raise ``AbortedError`` if the collective ran on a device and was aborted.
    """
    return reading(numbers)()


def reading(numbers: Tensor) -> Callable[[], list[float]]:
    """Start to read a collective's result; return a function that waits for it, like ``on_host``.

    The function does not wait for work enqueued later.
    """
    if not numbers.is_cuda:
        # On the host, waiting for the collective has already raised.
        return numbers.tolist
    held = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    held.copy_(numbers, non_blocking=True)
    there = torch.cuda.Event()
    there.record()

    def read() -> list[float]:
        there.synchronize()
        check()
        found: list[float] = held.tolist()
        return found

    return read


def settled(result: Tensor) -> Tensor:
    """Return the result of a collective, once its device has it.

    Raise ``AbortedError`` if the collective ran on a device and was aborted.
    """
    if result.is_cuda:
        torch.cuda.current_stream(result.device).synchronize()
        check()
    return result
