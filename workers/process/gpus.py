"""Find the GPUs of this machine, and decide how workers share them."""

import math
import os
from pathlib import Path
from typing import Final

#: One of these exists if a driver does. Without a driver, torch is not imported.
_DRIVERS: Final = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def gpus_here() -> tuple[str, ...]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if not any(path.exists() for path in _DRIVERS):
        return ()
    import torch

    if not torch.cuda.is_available():
        return ()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return tuple(named.split(","))
    return tuple(map(str, range(torch.cuda.device_count())))


def gpus_of_node(node: int, num_nodes: int, gpus: tuple[str, ...]) -> tuple[str, ...]:
    """Return the GPUs of one of ``num_nodes`` simulated nodes, which divide the machine's GPUs.

    If there are fewer GPUs than nodes, several nodes have the same one.
    """
    own = len(gpus) // max(1, num_nodes)
    if own or not gpus:
        return gpus[node * own : (node + 1) * own]
    return (gpus[node % len(gpus)],)


def share_of_gpu(num_workers: int, num_nodes: int, num_gpus: int) -> float:
    """Return the largest fraction of a GPU with which ``num_workers`` fit on simulated nodes."""
    on_node = math.ceil(num_workers / num_nodes)
    gpus_of_one = max(1, num_gpus // num_nodes)
    on_one = max(math.ceil(on_node / gpus_of_one), math.ceil(num_workers / num_gpus))
    return math.floor(1000 / on_one) / 1000
