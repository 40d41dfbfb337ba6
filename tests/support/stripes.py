"""Lost shares of a group from the shares and parities that are left, all in one process."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from workers.parity import Stripes
from workers.parity.code import rebuild

Bytes = NDArray[np.uint8]


def rebuild_shares(
    stripes: Stripes,
    shares: Mapping[int, Bytes],
    parities: Mapping[int, Sequence[Bytes]],
    targets: Mapping[int, Bytes],
) -> None:
    """Bring back the shares of lost nodes."""
    table = {
        (piece.stripe, piece.index): share[piece.start : piece.stop]
        for node, share in (*shares.items(), *targets.items())
        for piece in stripes.blocks(node, len(share))
    }
    empty = np.empty(0, np.uint8)
    for stripe in range(stripes.num_nodes):
        members = stripes.members(stripe)
        missing = [index for index, node in enumerate(members) if node not in shares]
        present = {at: table.get((stripe, at), empty) for at in range(stripes.num_data)}
        left = {
            which: parities[node][which]
            for which, node in enumerate(stripes.holders(stripe))
            if node in parities
        }
        rebuild(present, left, missing, [present[index] for index in missing])
