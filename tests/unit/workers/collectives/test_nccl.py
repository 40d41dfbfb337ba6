"""Settings for torch and NCCL; only a GPU can show that they take effect."""

import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from workers.collectives import nccl

#: Guards against a hang.
WAIT_S_MAX = 60.0


def test_a_failed_collective_is_not_to_end_a_survivor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the user set: torch reads it when a group is made, and ends the process."""
    for name in [*nccl.ENVIRONMENT, "TORCH_NCCL_NONBLOCKING_TIMEOUT"]:
        monkeypatch.setenv(name, "3")

    monkeypatch.delenv("NCCL_RUNTIME_CONNECT", raising=False)

    nccl.prepare(timedelta(seconds=59.5))

    assert os.environ["NCCL_RUNTIME_CONNECT"] == "0"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "60"
    assert nccl.ENVIRONMENT.items() <= os.environ.items()


@pytest.mark.parametrize("name", sorted(nccl.ENVIRONMENT))
def test_this_torch_reads_the_variable(name: str) -> None:
    """A renamed one would be ignored silently."""
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
    assert f'"{name}"' in (header / "ProcessGroupNCCL.hpp").read_text()


class Communicator:
    """An abort as NCCL's can be: it waits until all others of the device are aborted too."""

    def __init__(self, together: threading.Barrier) -> None:
        self.together = together
        self.is_aborted = threading.Event()

    def abort(self) -> None:
        self.together.wait(WAIT_S_MAX)
        self.is_aborted.set()


class Refusing:
    """A communicator whose abort takes too long, as torch then says."""

    def abort(self) -> None:
        raise RuntimeError("Future for ProcessGroup abort timed out after 60000 ms")


def test_communicators_are_aborted_together_without_a_wait() -> None:
    """One after the other, each would wait for the next one for ever (pytorch#119797)."""
    together = threading.Barrier(4)
    communicators = [Communicator(together) for _ in range(3)]

    nccl.abort_together([Refusing(), *communicators])

    assert not any(one.is_aborted.is_set() for one in communicators)
    together.wait(WAIT_S_MAX)
    assert all(one.is_aborted.wait(WAIT_S_MAX) for one in communicators)


@pytest.mark.gpu
def test_a_communicator_is_made_without_blocking() -> None:
    """A blocking one waits in NCCL for a member that died, and nothing ends that."""
    options = nccl.options(timedelta(seconds=60), (0, 2))
    assert options.config.blocking == 0
    assert options._timeout == timedelta(seconds=60)
