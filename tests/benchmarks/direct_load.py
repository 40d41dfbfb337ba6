"""Load a checkpoint of any format under another layout, without a second copy: one of the ways of
``bench_convert``.

    python -m tests.benchmarks.direct_load SOURCE RANKS

Every rank is a process of its own that opens the source and loads its part of every tensor, cut
along the first dim. The end is that of the slowest rank.
"""

from __future__ import annotations

import os
import sys

import numpy as np

from ucp_core.checkpoint import LocalTensor, load
from ucp_core.formats import open_source
from ucp_core.geometry import DTYPE_BYTES, Box
from ucp_core.storage import open_store


def load_rank(source: str, rank: int, num_ranks: int) -> int:
    """Load what ``rank`` needs and return its bytes."""
    store, directory = open_store(source)
    checkpoint = open_source(store, directory)
    need = []
    for key, entry in checkpoint.state_map.entries.items():
        whole = Box.full(entry.shape)
        box = whole.split(0, num_ranks)[rank] if entry.shape else whole
        data = np.empty(box.num_elements * DTYPE_BYTES[entry.dtype], np.uint8).data
        need.append(
            LocalTensor(
                fqn=key.fqn, slot=key.slot, dtype=entry.dtype, shape=entry.shape, box=box, data=data
            )
        )
    return load(checkpoint, need, threads=1).size_bytes


def main() -> None:
    """Load in as many processes as there are ranks."""
    source, num_ranks = sys.argv[1], int(sys.argv[2])
    children = []
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            load_rank(source, rank, num_ranks)
            os._exit(0)
        children.append(pid)
    failed = [pid for pid in children if os.waitpid(pid, 0)[1] != 0]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
