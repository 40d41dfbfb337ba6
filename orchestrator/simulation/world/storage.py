"""Simulated storage: commits land when the last record is written, reports of them travel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Commit:
    """One version. ``landed_s`` is when its manifest appeared."""

    step: int
    attempt: int
    landed_s: float
    damaged: bool = False


class Storage:
    """All versions ever committed; none is ever overwritten (S2)."""

    def __init__(self) -> None:
        self.commits: dict[tuple[int, int], Commit] = {}

    def commit(self, step: int, attempt: int, now_s: float) -> None:
        """Land a version; doing it again changes nothing."""
        self.commits.setdefault((step, attempt), Commit(step, attempt, now_s))

    def newest(
        self, lineage: tuple[tuple[int, int], ...], bad_steps: frozenset[int] = frozenset()
    ) -> tuple[int, int]:
        """Return (step, attempt) of the newest version that counts, (0, 0) if none does.

        A commit of attempt a counts if every later attempt resumed from its step or a later one.
        """
        bound: dict[int, int] = {}
        least = 1 << 60
        for attempt, resume_step in reversed(lineage):
            bound[attempt] = least
            least = min(least, resume_step)
        best = (0, 0)
        for (step, attempt), commit in self.commits.items():
            is_out = commit.damaged or step in bad_steps
            if not is_out and step <= bound.get(attempt, -1):
                best = max(best, (step, attempt))
        return best
