"""Sources that workers found bad, which must not be loaded again. Pure.

A source is a buffer in the memory of one keeper, or a version in storage (``workers.protocol``). A
bad source is excluded from the versions to resume from for as long as its version counts.
"""

from collections.abc import Collection, Iterable, Sequence

from ucp_core.lineage import Lineage, counts
from workers.protocol import Inventory, Source


def good(
    inventories: Iterable[Inventory], bad: Sequence[Source], unreached: Collection[str] = ()
) -> list[Inventory]:
    """Return what keepers hold, without bad sources and without the nodes in ``unreached``."""
    inventories = [each for each in inventories if each.node not in unreached]
    if not bad:
        return inventories
    left_out = frozenset(bad)
    return [each.only(lambda part: part.source not in left_out) for each in inventories]


def in_storage(bad: Iterable[Source], lineage: Lineage) -> frozenset[int]:
    """Return the steps whose version in storage is bad.

    The step is enough: storage has one version of a step, and if a later attempt writes the step
    again, the bad one no longer counts.
    """
    return frozenset(step for step, _, node, *_ in still_bad(bad, lineage) if not node)


def on_node(bad: Iterable[Source], node: str) -> tuple[tuple[str, int, int], ...]:
    """Return ``(arena, buffer, sequence)`` of the bad sources in a node's memory."""
    return tuple(
        (arena, buffer, sequence) for _, _, at, arena, buffer, sequence in bad if at == node
    )


def still_bad(bad: Iterable[Source], lineage: Lineage) -> tuple[Source, ...]:
    """Return the bad sources whose version still counts; other versions are never offered."""
    return tuple(
        source for source in bad if counts(step=source[0], attempt=source[1], lineage=lineage)
    )


def described(bad: Iterable[Source]) -> list[str]:
    """Return a line for people for each bad source."""
    return [
        f"step {step} of attempt {attempt} in "
        + (f"the memory of node {node[:8]} ({arena})" if node else "storage")
        + " could not be loaded and is no longer used"
        for step, attempt, node, arena, _, _ in bad
    ]
