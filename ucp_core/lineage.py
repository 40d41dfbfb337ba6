"""Which versions belong to a run's history, in storage and in memory (SPEC.md, 5)."""

from collections.abc import Sequence
from typing import TypeAlias

#: ``(attempt, resume_step)`` of the attempts so far, in any order.
Lineage: TypeAlias = Sequence[tuple[int, int]]


def counts(*, step: int, attempt: int, lineage: Lineage) -> bool:
    """Return whether the version of ``(step, attempt)`` is part of the run's history.

    It is not if a later attempt resumed from an older step: fenced processes made the version.

    Args:
        step: The step after which the state was taken.
        attempt: The attempt that took it.
    """
    return all(resume_step >= step for later, resume_step in lineage if later > attempt)
