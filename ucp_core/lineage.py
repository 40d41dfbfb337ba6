"""Which versions belong to a run's history: one rule, for storage and for memory (SPEC.md, 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

__all__ = ["Lineage", "counts"]

#: ``(attempt, resume_step)`` of the attempts so far, in any order.
Lineage: TypeAlias = Sequence[tuple[int, int]]


def counts(*, step: int, attempt: int, lineage: Lineage) -> bool:
    """Return whether the version of ``(step, attempt)`` is part of the run's history.

    It is unless a later attempt resumed from before it: then the run went another way, and the
    version was made by processes that were already fenced.

    Args:
        step: The step after which the state was taken.
        attempt: Who took it.
        lineage: Of the run.
    """
    return all(resume_step >= step for later, resume_step in lineage if later > attempt)
