"""Arrange rotated parity: which blocks each node of a group stores.

A group of n nodes has n stripes. Stripe i keeps its parity on node i, a second parity on node i +
1, and one data block on each other node. So with m parities every node holds n - m data blocks,
which are its part, and m parities. If m nodes are lost, a stripe loses at most m of its blocks.

If all n nodes hold the same state (data-parallel replicas), each saves one part of it and computes
its parities from its own replica without network. Otherwise the blocks are sent to the nodes that
keep their parity.

Source: RAIM5 of REFT (arXiv 2310.12670) for replicas, SCR's XOR scheme otherwise; both have only
one parity and equal parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workers.errors import ParityError
from workers.parity.code import GROUP_MAX, parity_bytes
from workers.protocol import parity_places


@dataclass(frozen=True, slots=True, kw_only=True)
class DataBlock:
    """A block of a node's part, and the nodes that keep its parity."""

    stripe: int
    index: int  #: Index of the block in the stripe's parity.
    start: int  #: Start of the block in the part, in bytes.
    stop: int  #: End of the block in the part.
    holders: tuple[int, ...]  #: The nodes with parity P and, if there are two, Q of the stripe.


@dataclass(frozen=True, slots=True, kw_only=True)
class Stripes:
    """The arithmetic of one group, whose nodes are numbered 0 to n - 1."""

    num_nodes: int  #: Size of the group, above ``tolerance``; even or odd.
    tolerance: int  #: Number of nodes that may be lost, 1 or 2.
    block_bytes: int  #: Size of a parity block; a data block may be shorter or empty.

    def __post_init__(self) -> None:
        if self.tolerance not in (1, 2) or self.num_nodes <= self.tolerance:
            raise ParityError(
                f"{self.tolerance} parities in a group of {self.num_nodes} nodes: take 1 or 2, "
                "and more nodes than parities",
                num_nodes=self.num_nodes,
                tolerance=self.tolerance,
            )
        if self.tolerance > 1 and self.num_data > GROUP_MAX:
            raise ParityError(
                f"double parity in a group of {self.num_nodes} nodes: take at most "
                f"{GROUP_MAX + self.tolerance}",
                num_nodes=self.num_nodes,
            )

    @classmethod
    def of_parts(cls, lengths: Sequence[int], *, tolerance: int) -> Stripes:
        """Return the stripes of parts of ``lengths``, one per node."""
        blocks = max(len(lengths) - tolerance, 1)
        block_bytes = parity_bytes([-(-max(lengths, default=0) // blocks)])
        return cls(num_nodes=len(lengths), tolerance=tolerance, block_bytes=block_bytes)

    @property
    def num_data(self) -> int:
        """Return the number of data blocks in a stripe, and in a part."""
        return self.num_nodes - self.tolerance

    def holders(self, stripe: int) -> tuple[int, ...]:
        """Return the nodes with the parities of a stripe."""
        return parity_places(stripe, num_nodes=self.num_nodes, tolerance=self.tolerance)

    def members(self, stripe: int) -> tuple[int, ...]:
        """Return the nodes with the data blocks of a stripe, by index in its parity."""
        holders = self.holders(stripe)
        return tuple(node for node in range(self.num_nodes) if node not in holders)

    def parities_of(self, node: int) -> tuple[int, ...]:
        """Return the stripes whose parity P, and Q if there are two, a node holds."""
        return tuple((node - which) % self.num_nodes for which in range(self.tolerance))

    def blocks(self, node: int, length: int) -> Iterator[DataBlock]:
        """Yield the non-empty blocks of a part of ``length`` bytes, in order."""
        start = 0
        for stripe in range(self.num_nodes):
            if node in self.holders(stripe):
                continue
            stop = min(start + self.block_bytes, length)
            if start < stop:
                yield DataBlock(
                    stripe=stripe,
                    index=self.members(stripe).index(node),
                    start=start,
                    stop=stop,
                    holders=self.holders(stripe),
                )
            start += self.block_bytes
