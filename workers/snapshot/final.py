"""Decide whether a rank that leaves an attempt early takes a final snapshot, and where. Pure.

A rank that survives its attempt still has the state after its last step, of which there may be no
snapshot. So it takes one more before it reports that it has left. If all ranks do so, no step is
lost. A rank does not know whether the others can, so the version to resume from otherwise must
survive.
"""

from collections.abc import Sequence
from typing import Final

from ucp_core.lineage import Lineage
from workers.memory import counts, version_of, worth
from workers.protocol import Held

#: Time limit of the final snapshot: the controller waits for it, and kills the rank after 2 s.
FINAL_S_MAX: Final = 0.5
#: A snapshot that is expected to take longer is not begun.
_EXPECTED_S_MAX: Final = FINAL_S_MAX / 2
#: Expected speed of copying and checksumming: an eighth of an idle machine's.
_BYTES_PER_S: Final = 1 << 30


def is_quick(size_bytes: int, measured_s: float | None) -> bool:
    """Return whether a snapshot is short enough to be taken when leaving.

    ``measured_s`` is the duration of the last snapshot without its waits; None if there was none.
    """
    expected_s = size_bytes / _BYTES_PER_S if measured_s is None else measured_s
    return expected_s <= _EXPECTED_S_MAX


class Fallback:
    """The versions that the run can fall back on, as known to one rank of an attempt.

    Attributes:
        safe: ``(attempt, step)`` of the newest version that all ranks and their peers have, at
            first of the version that the rank resumed from; (0, 0) if none.
    """

    def __init__(self, attempt: int, resumed: tuple[int, int]) -> None:
        self._attempt = attempt
        self.safe = resumed
        self._taken: tuple[int, int] | None = None
        self._num_taken = 0

    def take(self, step: int) -> None:
        """Note that this rank has begun a snapshot."""
        self._taken = (self._attempt, step)
        self._num_taken += 1

    def agree(self, *, is_behind: bool, is_without_memory: bool) -> None:
        """Note the agreement of all ranks about the snapshots so far."""
        if is_without_memory:
            # One rank may have failed to complete its snapshot, and the others will not know.
            self._taken = None
        elif not is_behind and self._taken is not None:
            self.safe = self._taken

    def buffer(
        self, buffers: Sequence[Held | None], *, pinned: int | None, lineage: Lineage
    ) -> int | None:
        """Return the buffer for one more snapshot; None if every buffer may be needed.

        Spare the newest version that all ranks have completed and copied, and everything newer.
        Also, keepers assume that the first of two versions of an attempt is complete
        (``workers.memory.retention``), so no second one may follow a first one that may be
        incomplete.

        Args:
            buffers: The version in each buffer; None if it is empty, damaged or being written.
            pinned: A buffer that waits for storing.
            lineage: ``(attempt, resume_step)`` of every attempt up to this one.
        """
        if self._num_taken == 1 and self.safe != self._taken:
            return None
        free = [
            buffer
            for buffer, held in enumerate(buffers)
            if buffer != pinned
            and (held is None or not counts(held, lineage) or version_of(held) < self.safe)
        ]
        return min(free, key=lambda buffer: worth(buffers[buffer], lineage), default=None)
