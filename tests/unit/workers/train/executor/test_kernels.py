"""Checksums of kernels: equal where machines compute alike, other ones where they do not."""

import os
import subprocess
import sys

import pytest
import torch

from workers.train.executor import checksums, machine_kind

_SCRIPT = (
    "import torch; from workers.train.executor import checksums, machine_kind; "
    "cpu = torch.device('cpu'); torch.rand(9999); torch.set_num_threads(1); "
)
_KIND = "print(machine_kind(cpu))"
_CHECKSUMS = "print(checksums(cpu, torch.float32), checksums(cpu, torch.bfloat16))"


def printed(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT + script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    return done.stdout


def test_processes_of_one_machine_compute_alike_and_other_kernels_are_noticed() -> None:
    """Random inputs would already differ by processor, and small whole numbers in no kernel."""
    both = f"{_CHECKSUMS}; {_KIND}"
    usual = printed(both)

    assert printed(both) == usual
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "DEFAULT":
        pytest.skip("this processor has no other kernels")
    # On processors with AMX, torch 2.13 has no attention in bfloat16 with these kernels.
    assert printed(_KIND, ATEN_CPU_CAPABILITY="default").strip() != usual.split()[-1]


def test_the_random_numbers_of_a_script_stay_as_they_are() -> None:
    """The probe runs behind the script's own seeds, and draws its inputs."""
    before = torch.get_rng_state()
    checksums.cache_clear()
    machine_kind(torch.device("cpu"))

    assert torch.equal(torch.get_rng_state(), before)
