"""Decide which snapshot memory may be overwritten, and which may be freed. Pure.

Two rules protect the newest version that all ranks may have. A writer keeps its newest version that
counts, and begins the next one only when all ranks have finished that version. A keeper frees an
arena only if arenas that stay hold newer versions. It frees a copy or parities only if the newer
versions are also protected, or if nothing is protected.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ucp_core import lineage as lineage_rule
from workers.protocol import Held

#: Number of characters of a node's id in the names of its copies.
_NODE_CHARS = 12
#: Stands for a node in the names of arenas that hold parities.
_PARITY = "parity"
#: Begins the names of arenas that hold shares of other ranks, in place of a node.
_GUARD = "replica"
#: Stands for a node in the names of arenas with a parity of such shares.
_REPLICA_PARITY = f"{_GUARD}-{_PARITY}"

#: If an attempt has this many versions newer than an older attempt's, the first of them is
#: complete, because no rank begins a version before all ranks have finished the previous one.
_PROVEN_VERSIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldArena:
    """An arena and the facts that decide whether to free it."""

    name: str
    in_use: bool  #: Whether a living worker writes it, or it copies one that is written.
    versions: tuple[Held, ...]  #: The complete versions in it.


def counts(held: Held, lineage: lineage_rule.Lineage) -> bool:
    """Return whether a version is part of the run's history."""
    return lineage_rule.counts(step=held.step, attempt=held.attempt, lineage=lineage)


def choose_buffer(
    buffers: Sequence[Held | None],
    *,
    pinned: int | None,
    lineage: Sequence[tuple[int, int]],
    kept: tuple[int, int] | None = None,
) -> int:
    """Return the buffer to write next.

    Never choose the pinned buffer or the newest version that counts. Prefer an empty buffer, then a
    version that does not count, then the oldest. Choose the kept version only if no other buffer is
    left.

    Args:
        buffers: The version in each buffer; None if it is empty, damaged or being written.
        pinned: A buffer that waits for storing.
        lineage: ``(attempt, resume_step)`` of every attempt so far; empty if unknown: all count.
        kept: Attempt and step of the newest version that all ranks and peers have.
    """
    counting = [held for held in buffers if held is not None and counts(held, lineage)]
    newest = max(counting, key=version_of, default=None)
    free = [
        buffer
        for buffer, held in enumerate(buffers)
        if buffer != pinned and (held is None or newest is None or held.buffer != newest.buffer)
    ]
    assert free, "one buffer is pinned and one is the newest, so one of three is left"
    # If storage and peers are both slow, all buffers are needed. Overwriting the kept version then
    # means that losing a node loses the steps that storage lacks.
    others = [
        buffer for buffer in free if (held := buffers[buffer]) is None or version_of(held) != kept
    ]
    return min(others or free, key=lambda buffer: worth(buffers[buffer], lineage))


def in_use(
    names: Sequence[str],
    *,
    living: Mapping[str, int],
    listed: Mapping[str, Collection[str]],
    attempt: int = 0,
) -> frozenset[str]:
    """Return the node's arenas that a worker writes, and their copies and parities.

    Args:
        living: The newest generation, or 0, that each living worker of this node has reserved.
            Memory for other ranks is listed under its ``owner_of``.
        listed: Arenas of other nodes to copy, by the first characters of the node's id.
        attempt: The current attempt: a keeper's parities have an attempt as generation.
    """
    newest: dict[str, tuple[int, str]] = {}
    used: set[str] = set()
    for name in names:
        node, worker, generation = split_name(name)
        owner = owner_of(name)
        if node and not is_guard(name):
            is_listed = name.partition("/")[2] in listed.get(node, ())
            if (generation >= attempt) if is_parity(name) else is_listed:
                used.add(name)
        elif generation >= living.get(owner, 0 if worker in living else sys.maxsize):
            newest[owner] = max(newest.get(owner, (-1, "")), (generation, name))
    return frozenset(used | {name for _, name in newest.values()})


def reapable(
    arenas: Sequence[HeldArena], *, lineage: Sequence[tuple[int, int]], stored_step: int = 0
) -> list[str]:
    """Return the names of the unused arenas that may be freed.

    An arena may be freed if no version in it can be needed, for one of these reasons:

    - The arenas that stay hold two newer versions of a later attempt. For a copy or parities only
      arenas of that kind count, if there are any.
    - Storage has a newer version.
    - Nothing in it counts, and a later attempt holds a version.

    ``stored_step`` is the newest step that is committed to storage and counts; 0 if none.
    """
    staying = [arena for arena in arenas if arena.in_use]
    protecting = [arena for arena in staying if _protects(arena)]
    doomed = []
    for arena in arenas:
        ahead = protecting if protecting and _protects(arena) else staying
        if not arena.in_use and _is_spent(arena, ahead, lineage, stored_step):
            doomed.append(arena.name)
    return doomed


def split_name(name: str) -> tuple[str, str, int]:
    """Return ``(node, worker, generation)`` of an arena; node is "" for this node's own."""
    node, _, own = name.rpartition("/")
    worker, dot, generation = own.rpartition(".")
    if not dot or not generation.isdigit():
        return node, own, 0
    return node, worker, int(generation)


def copy_name(node: str, arena: str) -> str:
    """Return the name of a copy of another node's arena on this node."""
    return f"{node[:_NODE_CHARS]}/{arena}"


def is_copy(arena: str) -> bool:
    """Return whether an arena holds another node's data: a copy, a share or parities."""
    return "/" in arena


def guard_name(number: int, worker: str) -> str:
    """Return the owner of the memory for the ``number``-th share that a worker saves for others."""
    return f"{_GUARD}{number}/{worker}"


def replica_parity_name(worker: str) -> str:
    """Return the owner of the memory for a worker's parity of other ranks' shares."""
    return f"{_REPLICA_PARITY}/{worker}"


def owner_of(name: str) -> str:
    """Return the name of an arena without its generation."""
    node, worker, _ = split_name(name)
    return f"{node}/{worker}" if node else worker


def is_guard(name: str) -> bool:
    """Return whether a worker of this node saves into the arena for other nodes' ranks."""
    return split_name(name)[0].startswith(_GUARD)


def is_parity(name: str) -> bool:
    """Return whether an arena holds parities, whose versions belong to no single rank."""
    return split_name(name)[0] in (_PARITY, _REPLICA_PARITY)


def _protects(arena: HeldArena) -> bool:
    """Return whether an arena is a copy or holds parities."""
    return bool(split_name(arena.name)[0])


def _is_spent(
    arena: HeldArena,
    ahead: Sequence[HeldArena],
    lineage: Sequence[tuple[int, int]],
    stored_step: int,
) -> bool:
    if not arena.versions:
        return True
    staying = [held for one in ahead for held in one.versions if counts(held, lineage)]
    counting = [held for held in arena.versions if counts(held, lineage)]
    last_attempt = max(held.attempt for held in counting or arena.versions)
    later = {(held.attempt, held.step) for held in staying if held.attempt > last_attempt}
    if not counting:
        return bool(later)
    last_step = max(held.step for held in counting)
    newer = [version for version in later if version[1] > last_step]
    return len(newer) >= _PROVEN_VERSIONS or last_step < stored_step


def worth(held: Held | None, lineage: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
    """Return a sort key for buffers: empty, not counting, then old and new versions."""
    if held is None:
        return (0, 0, 0)
    return (2 if counts(held, lineage) else 1, *version_of(held))


def version_of(held: Held) -> tuple[int, int]:
    """Return ``(attempt, step)``: among versions that count, a newer one is larger."""
    return held.attempt, held.step
