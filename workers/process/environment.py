"""What processes that train should find in their environment when they start.

The C library copies past the caches from some size on, which by default is about the size of the
last cache: blocks of a snapshot never reach it. So every copy first reads what it is about to write
over, and drives out of the caches what the next step needs. A setting of the library makes it do so
from blocks of ours on; it reads it when a process starts, so whoever starts Ray has to give it.

Measured (Xeon, 260 MB of last cache; 50 and 300 MB each of 1 and of 4 workers,
``tests.benchmarks.bench_snapshot`` and ``bench_snapshot_load``): training waits for a snapshot 0.6
to 0.8 as long, and loads from the own node's memory take 0.8 to 0.9 of the time.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Final

__all__ = ["TUNABLE", "VARIABLE", "copies_past_caches", "tuned"]

VARIABLE: Final = "GLIBC_TUNABLES"
_NAME: Final = "glibc.cpu.x86_non_temporal_threshold"
#: Half a block of a snapshot (``workers.snapshot.slot_layout.BLOCK_BYTES``), since the last one
#: of a
#: tensor is shorter: of 50 MB a quarter lies in such, and training waits a tenth less than from
#: whole blocks on. From 64 or 32 KiB on it is the same; a step of the small preset takes as long
#: either way.
TUNABLE: Final = f"{_NAME}=0x20000"


def copies_past_caches(environment: Mapping[str, str]) -> bool:
    """Tell whether somebody has chosen from what size on copies go past the caches.

    True also where nobody can choose: it is a setting of glibc on x86.
    """
    if platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        return True
    return any(
        setting.partition("=")[0] == _NAME for setting in environment.get(VARIABLE, "").split(":")
    )


def tuned(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to ``environment``; a choice made there stays, as do other tunables."""
    if copies_past_caches(environment):
        return {}
    return {VARIABLE: ":".join(filter(None, (environment.get(VARIABLE, ""), TUNABLE)))}
