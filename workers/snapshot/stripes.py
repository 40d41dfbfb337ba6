"""Rotated parity: which blocks every node of a group stores, and where parity of what lies.

A group of n nodes has n stripes. Stripe i keeps its parities on nodes i and, with two, i + 1,
and one data block on each of the others, so every node holds n - m data blocks, its *share*, and
m parities, and any m lost nodes cost a stripe at most m of its blocks.

State that all n nodes hold anyway, as data-parallel replicas do, is cut into the n shares, and a
node computes its parities from its own replica: no byte crosses the network while saving. State
of which every node has its own part takes that part as its share, and the blocks travel to the
nodes that hold their parity.

Source: RAIM5 of REFT (arXiv 2310.12670) for the former, SCR's XOR scheme for the latter; both
with one parity only and equal parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from workers.errors import ParityError
from workers.snapshot.groups import parity_places
from workers.snapshot.parity import GROUP_MAX, Buffer, encode, parity_bytes, rebuild

__all__ = ["Piece", "Stripes", "rebuild_shares", "restore_state", "save_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A block of a node's share, and where its parity is kept.

    Attributes:
        stripe: Which.
        index: The member of the stripe's parity that it is.
        start: Where it begins in the share, in bytes.
        stop: Where it ends.
        holders: The nodes with parity P and, if there are two, Q of the stripe.
    """

    stripe: int
    index: int
    start: int
    stop: int
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stripes:
    """The arithmetic of one group. Nodes are numbered 0 to n - 1 here.

    Attributes:
        num_nodes: Size of the group, above ``num_parities``; any, odd ones too.
        num_parities: 1 or 2: how many lost nodes are survived.
        block_bytes: Size of a parity block; a data block may be shorter or empty.
    """

    num_nodes: int
    num_parities: int
    block_bytes: int

    def __post_init__(self) -> None:
        if self.num_parities not in (1, 2) or self.num_nodes <= self.num_parities:
            raise ParityError(
                f"{self.num_parities} parities in a group of {self.num_nodes} nodes: take 1 or 2, "
                "and more nodes than parities",
                num_nodes=self.num_nodes,
                num_parities=self.num_parities,
            )
        if self.num_parities > 1 and self.num_data > GROUP_MAX:
            raise ParityError(
                f"double parity in a group of {self.num_nodes} nodes: take at most "
                f"{GROUP_MAX + self.num_parities}",
                num_nodes=self.num_nodes,
            )

    @classmethod
    def of_state(cls, num_bytes: int, *, num_nodes: int, num_parities: int) -> Stripes:
        """Return the stripes of a state of ``num_bytes`` that every node holds as a whole."""
        blocks = num_nodes * max(num_nodes - num_parities, 1)
        block_bytes = parity_bytes([-(-num_bytes // blocks)])
        return cls(num_nodes=num_nodes, num_parities=num_parities, block_bytes=block_bytes)

    @classmethod
    def of_parts(cls, lengths: Sequence[int], *, num_parities: int) -> Stripes:
        """Return the stripes of parts of ``lengths``, one per node."""
        blocks = max(len(lengths) - num_parities, 1)
        block_bytes = parity_bytes([-(-max(lengths, default=0) // blocks)])
        return cls(num_nodes=len(lengths), num_parities=num_parities, block_bytes=block_bytes)

    @property
    def num_data(self) -> int:
        """Return how many data blocks a stripe has, and a share."""
        return self.num_nodes - self.num_parities

    def holders(self, stripe: int) -> tuple[int, ...]:
        """Return the nodes with the parities of a stripe."""
        return parity_places(stripe, num_nodes=self.num_nodes, num_parities=self.num_parities)

    def members(self, stripe: int) -> tuple[int, ...]:
        """Return the nodes with the data blocks of a stripe, by index in its parity."""
        holders = self.holders(stripe)
        return tuple(node for node in range(self.num_nodes) if node not in holders)

    def parities_of(self, node: int) -> tuple[int, ...]:
        """Return the stripes of which a node holds parity P and, if there are two, Q."""
        return tuple((node - which) % self.num_nodes for which in range(self.num_parities))

    def pieces(self, node: int, length: int) -> Iterator[Piece]:
        """Yield the blocks of a share of ``length`` bytes, in order; none that is empty."""
        start = 0
        for stripe in range(self.num_nodes):
            if node in self.holders(stripe):
                continue
            stop = min(start + self.block_bytes, length)
            if start < stop:
                yield Piece(
                    stripe=stripe,
                    index=self.members(stripe).index(node),
                    start=start,
                    stop=stop,
                    holders=self.holders(stripe),
                )
            start += self.block_bytes

    def share(self, node: int, num_bytes: int) -> tuple[int, int]:
        """Return where the share of a node begins and ends in a state of ``num_bytes``."""
        share_bytes = self.num_data * self.block_bytes
        return min(node * share_bytes, num_bytes), min((node + 1) * share_bytes, num_bytes)


def save_state(stripes: Stripes, node: int, state: Buffer, parities: Sequence[Buffer]) -> None:
    """Compute a node's parities from its own replica; the share it stores is a range of that.

    Args:
        stripes: ``Stripes.of_state`` of the state.
        node: This one.
        state: The whole state, flat.
        parities: Writable, ``stripes.block_bytes`` each.
    """
    view = _flat(state)
    for which, (stripe, target) in enumerate(zip(stripes.parities_of(node), parities, strict=True)):
        encode([_block(stripes, view, stripe, i) for i in range(stripes.num_data)], {which: target})


def restore_state(
    stripes: Stripes,
    shares: Mapping[int, Buffer],
    parities: Mapping[int, Sequence[Buffer]],
    target: Buffer,
) -> None:
    """Fill ``target`` with the state from what the nodes that are left have stored.

    Args:
        stripes: ``Stripes.of_state`` of the state.
        shares: By node that is left.
        parities: By node that is left, as ``save_state`` filled them.
        target: Writable, as long as the state.

    Raises:
        ParityError: Too many nodes are lost.
    """
    view = _flat(target)
    for node, share in shares.items():
        start, stop = stripes.share(node, len(view))
        view[start:stop] = _flat(share)
    _rebuild(stripes, set(shares), parities, lambda stripe, i: _block(stripes, view, stripe, i))


def rebuild_shares(
    stripes: Stripes,
    shares: Mapping[int, Buffer],
    parities: Mapping[int, Sequence[Buffer]],
    targets: Mapping[int, Buffer],
) -> None:
    """Bring back the lost nodes' own parts, or their shares of a replicated state.

    Args:
        stripes: ``Stripes.of_parts`` of the parts, or ``Stripes.of_state`` of the state.
        shares: The parts that are left, by node.
        parities: What is left of them, by node.
        targets: Writable, for every lost node, as long as its part.

    Raises:
        ParityError: Too many nodes are lost.
    """
    views = {node: _flat(part) for node, part in (*shares.items(), *targets.items())}
    table = {
        (piece.stripe, piece.index): view[piece.start : piece.stop]
        for node, view in views.items()
        for piece in stripes.pieces(node, len(view))
    }
    empty = memoryview(bytearray())
    _rebuild(stripes, set(shares), parities, lambda stripe, i: table.get((stripe, i), empty))


def _rebuild(
    stripes: Stripes,
    alive: set[int],
    parities: Mapping[int, Sequence[Buffer]],
    find: Callable[[int, int], memoryview],
) -> None:
    for stripe in range(stripes.num_nodes):
        members = stripes.members(stripe)
        missing = [index for index, node in enumerate(members) if node not in alive]
        present = {index: find(stripe, index) for index in range(stripes.num_data)}
        left = {
            which: parities[node][which]
            for which, node in enumerate(stripes.holders(stripe))
            if node in parities
        }
        rebuild(present, left, missing, [present[index] for index in missing])


def _block(stripes: Stripes, state: memoryview, stripe: int, index: int) -> memoryview:
    """Return a data block of a state: a part of the share of the node that stores it."""
    node = stripes.members(stripe)[index]
    before = sum(node not in stripes.holders(earlier) for earlier in range(stripe))
    start, stop = stripes.share(node, len(state))
    low = min(start + before * stripes.block_bytes, stop)
    return state[low : min(low + stripes.block_bytes, stop)]


def _flat(buffer: Buffer) -> memoryview:
    if isinstance(buffer, np.ndarray):
        buffer = buffer.reshape(-1)
    return memoryview(buffer).cast("B")
