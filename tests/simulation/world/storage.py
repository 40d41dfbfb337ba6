"""Simulated storage: commits land when the last record is written, reports of them travel."""

from dataclasses import dataclass

from ucp_core.lineage import counts


@dataclass(slots=True)
class Commit:
    """One version. ``landed_s`` is when its manifest appeared."""

    step: int
    attempt: int
    landed_s: float
    damaged: bool = False


class Storage:
    """All versions that are committed; none is ever overwritten (S2).

    Attributes:
        claim: The newest claim on the run directory.
        back_s: Before then every read and write hangs.
    """

    def __init__(self) -> None:
        self.back_s = 0.0
        self.commits: dict[tuple[int, int], Commit] = {}
        self.claim = 1

    def claim_again(self) -> None:
        """Claim the run directory again."""
        self.claim += 1

    def owns(self, claim: int) -> bool:
        """Return whether there is no later claim."""
        return claim == self.claim

    def commit(self, step: int, attempt: int, now_s: float) -> None:
        """Land a version; doing it again changes nothing."""
        self.commits.setdefault((step, attempt), Commit(step, attempt, now_s))

    def newest(
        self, lineage: tuple[tuple[int, int], ...], bad_steps: frozenset[int] = frozenset()
    ) -> tuple[int, int]:
        """Return (step, attempt) of the newest version that counts, (0, 0) if none does."""
        sound = (
            (step, attempt)
            for (step, attempt), commit in self.commits.items()
            if not commit.damaged and step not in bad_steps
        )
        counting = (v for v in sound if counts(step=v[0], attempt=v[1], lineage=lineage))
        return max(counting, default=(0, 0))

    def older(self, lineage: tuple[tuple[int, int], ...], *, keep: int) -> list[tuple[int, int]]:
        """Return the versions that retention deletes: those behind the newest that count."""
        sound = sorted(v for v, commit in self.commits.items() if not commit.damaged)
        kept = [v for v in sound if counts(step=v[0], attempt=v[1], lineage=lineage)][-keep:]
        return [v for v in self.commits if len(kept) == keep and v[0] < kept[0][0]]

    def steps(
        self, lineage: tuple[tuple[int, int], ...], *, damaged_only: bool = False
    ) -> tuple[int, ...]:
        """Return the steps of the versions that count; those whose damage a look at them shows."""
        return tuple(
            step
            for (step, attempt), commit in self.commits.items()
            if (commit.damaged or not damaged_only)
            and counts(step=step, attempt=attempt, lineage=lineage)
        )
