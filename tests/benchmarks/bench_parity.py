"""Compares the cost of parity, making it and rebuilding from it, with a copy of the same bytes.

    python -m tests.benchmarks parity [--members 4] [--mib 32] [--repeat 7]

- ``replica``: one parity, as a data-parallel replica makes it from the state it already has;
- ``one``, ``two``: one and two parities, as a keeper makes them from what other nodes send, one
  window of each member after the other;
- ``rebuild_*``: one or two members rebuilt, from the first parity or from what is left.

Every kernel and the copy run in turn in one process on one core, and the best time of each counts:
on a busy machine the ratios hold and the rates do not. Rates are bytes of members per second.
``of_copy`` is the ratio to memcpy (numpy's) of all members into memory that is mapped already.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from workers.parity import Stripes
from workers.parity import code as parity
from workers.parity.code import BLOCK_BYTES, P, Q
from workers.snapshot.for_others import fold, folds

#: Issue of this part: at least so much of a copy's speed.
TARGETS = {"replica": 0.60, "one": 0.60, "two": 0.25}


#: A keeper takes so much at once of what comes.
WINDOW_BYTES = 8 * BLOCK_BYTES


def measure(num_members: int, num_bytes: int, repeat: int) -> dict[str, dict[str, float]]:
    """Return the rate of every kernel, and its ratio to the copy's.

    Args:
        num_members: Files of the group, at least 2.
        num_bytes: Number of bytes of each.
        repeat: Rounds of which the best counts.
    """
    rng = np.random.default_rng(0)
    members = [rng.integers(0, 256, num_bytes, dtype=np.uint8) for _ in range(num_members)]
    size = parity.parity_bytes([num_bytes])
    parities = [np.zeros(size, np.uint8) for _ in range(2)]
    spare = [np.zeros(size, np.uint8) for _ in range(2)]
    targets = [np.zeros(num_bytes, np.uint8) for _ in range(2)]
    copies = [np.zeros(num_bytes, np.uint8) for _ in range(num_members)]
    rest = dict(enumerate(members[2:], 2))
    stripes = Stripes.of_parts([num_bytes] * num_members, tolerance=1)
    # For every other member, the block that the first one's parity covers.
    others = {place: [member] for place, member in enumerate(members) if place}
    num_folded = len(others) * stripes.block_bytes

    def copy() -> None:
        for source, target in zip(members, copies, strict=True):
            np.copyto(target, source)

    def replica() -> None:
        for (low, high), sources in folds(stripes, 0, others):
            fold(spare[0][low:high], sources)

    def add(into: Sequence[NDArray[np.uint8]]) -> None:
        for index, member in enumerate(members):
            for low in range(0, num_bytes, WINDOW_BYTES):
                parity.add(into, index, member[low : low + WINDOW_BYTES], low)

    add(parities)
    every = num_members * num_bytes
    kernels: dict[str, tuple[Callable[[], None], int]] = {
        "copy": (copy, every),
        "replica": (replica, num_folded),
        "one": (lambda: add(spare[:1]), every),
        "two": (lambda: add(spare), every),
        "rebuild_one": (
            lambda: parity.rebuild({1: members[1]} | rest, {P: parities[P]}, [0], targets[:1]),
            every,
        ),
        "rebuild_two": (lambda: parity.rebuild(rest, parities, [0, 1], targets), every),
        "rebuild_one_from_q": (
            lambda: parity.rebuild({1: members[1]} | rest, {Q: parities[Q]}, [0], targets[:1]),
            every,
        ),
    }
    best_s = dict.fromkeys(kernels, float("inf"))
    for _ in range(repeat):
        for name, (kernel, _) in kernels.items():
            started_s = time.perf_counter()
            kernel()
            best_s[name] = min(best_s[name], time.perf_counter() - started_s)
    assert np.array_equal(targets[0], members[0]), "what was brought back is not what was lost"
    rates = {name: num / best_s[name] / 1e9 for name, (_, num) in kernels.items()}
    return {
        name: {"gb_per_s": round(rate, 2), "of_copy": round(rate / rates["copy"], 3)}
        for name, rate in rates.items()
    }


def main() -> None:
    """Print one JSON object; ``missed`` names the targets that were not reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=7)
    given = parser.parse_args()
    found = measure(given.members, given.mib << 20, given.repeat)
    missed = [name for name, least in TARGETS.items() if found[name]["of_copy"] < least]
    print(json.dumps({"members": given.members, "mib": given.mib, **found, "missed": missed}))


if __name__ == "__main__":
    main()
