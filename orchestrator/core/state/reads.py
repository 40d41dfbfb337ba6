"""What was asked of keepers and storage since the last attempt started."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.state.frozen import Frozen, Part


@dataclass(eq=False)
class Reads(Part):
    """The ``ReadCommitted`` actions and which of their answers can be relied on.

    Attributes:
        num: How many there were in the whole run: the number of the newest.
        pending: How many of those, the newest ones, have no answer.
        final_from: Number of the first read after the last member had left.
        memory_from: Number of the first read after the last loss of a node.
        bad_from: Number of the first read that leaves out all that is bad, and who is not reached.
        stored_from: Number of the first read after the newest commit in storage was reported.
        seen: Whether the newest answer can be relied on.
    """

    num: int = 0
    pending: int = 0
    final_from: int = 0
    memory_from: int = 0
    bad_from: int = 0
    stored_from: int = 0
    seen: bool = False


class FrozenReads(Frozen, Reads):
    """Reads as a value."""
