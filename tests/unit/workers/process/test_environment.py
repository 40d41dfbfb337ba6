"""Copies past the caches: what is added to an environment, and that the C library takes it."""

import os
import platform
import subprocess
from pathlib import Path

import pytest

from workers.process import TUNABLE, VARIABLE, copies_past_caches, tuned
from workers.snapshot.buffer_layout import BLOCK_BYTES

LOADER = Path("/lib64/ld-linux-x86-64.so.2")

needs_glibc = pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc",
    reason="a setting of glibc on x86",
)


@needs_glibc
def test_blocks_of_snapshots_are_copied_past_the_caches() -> None:
    """The last block of a tensor too, if it is not the smaller half."""
    shown = subprocess.run(
        [LOADER, "--list-tunables"],
        env={**os.environ, VARIABLE: "", **tuned({})},
        capture_output=True,
        text=True,
        check=False,
    )
    if shown.returncode:
        pytest.skip("this glibc does not list its settings")
    lines = [line for line in shown.stdout.splitlines() if line.startswith(TUNABLE.split("=")[0])]
    assert [int(line.split()[1], 16) for line in lines] == [BLOCK_BYTES // 2]


@needs_glibc
def test_other_tunables_stay() -> None:
    """An operator has them for a reason, and the variable is one for all."""
    found = tuned({VARIABLE: "glibc.malloc.check=3"})

    assert found == {VARIABLE: f"glibc.malloc.check=3:{TUNABLE}"}
    assert copies_past_caches(found)


def test_what_somebody_chose_stays() -> None:
    """Twice in one variable, the last would win."""
    chosen = {VARIABLE: f"glibc.malloc.check=3:{TUNABLE.split('=')[0]}=0x80000"}

    assert copies_past_caches(chosen)
    assert tuned(chosen) == {}
