"""End a run before its last step, because the script calls ``session.stop`` or leaves its loop.

The request of one worker is enough. If all workers make it in the body of one step, that step is
the last one. If only some do, the others learn of it in the next step, which is then the last one.
``STOPPED`` in the run directory names the version with which the run ends, so that a resume has
nothing to do.
"""

import json
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, Final

from ucp_core.errors import StorageError
from workers import collectives
from workers.errors import ApartError
from workers.protocol import STOPPED, Assignment
from workers.train.context import WorkerContext

#: How long to wait for storage if the version is in memory. A request to storage that stopped
#: answering takes 15 s and more to fail, also when storage is back sooner.
_READ_S_MAX: Final = 1.0

log = logging.getLogger(__name__)


class Ending:
    """One worker's view of the end of a run, in one attempt."""

    def __init__(
        self,
        assignment: Assignment,
        context: WorkerContext,
        write: Callable[[str, Iterable[bytes]], None],
        read: Callable[[str, float], bytes | None],
    ) -> None:
        self._assignment, self._context = assignment, context
        self._write, self._read = write, read
        self.wish = ""  #: Why this worker's script has ended the run; "" if it has not.
        self.is_asked = False  #: Whether this worker's script has requested the end.
        self.reason = ""  #: Why the run has ended before its last step; "" if it has not.

    def ask(self, reason: str) -> None:
        """Record the script's request to end the run."""
        if not self.is_asked:
            self.is_asked, self.wish = True, reason or "no reason was given"

    def is_due(self, *, agreed: bool) -> bool:
        """Return whether the run ends after the step whose body has ended; equal on all workers.

        ``agreed`` says whether a worker had requested it before the step's reduction.
        """
        # Workers that made no request would wait for this one in the next step.
        return agreed or (self.is_asked and collectives.places().meet("session.stop") is None)

    def leave_loop(self, step: int) -> None:
        """Record that the script left its loop after ``step``, if it did so on all workers."""
        apart = collectives.places().meet("the end of the script")
        if apart:
            raise ApartError(
                f"the script left the loop over session.steps after step {step} on rank "
                f"{self._assignment.rank}, and {collectives.described(apart)}: leave it on all "
                "workers in the same step, or call session.stop(reason) on any of them"
            )
        self.wish = f"the script left its loop after step {step}"

    def end(self, step: int, wishes: Iterable[str]) -> None:
        """Record that the run ends with the version of ``step`` and of this attempt.

        ``wishes`` are those of all ranks.
        """
        self.reason = next(filter(None, wishes))
        if self._assignment.rank == 0:
            log.warning("the run ends with step %s: %s", step, self.reason)
            told = {"step": step, "attempt": self._assignment.attempt, "reason": self.reason}
            self._write(STOPPED, [json.dumps(told).encode()])

    def resumed(self) -> bool:
        """Return whether the run has ended with the version from which the attempt resumes.

        An outage of storage does not keep a run from a version in memory: then the answer is no.
        """
        assignment = self._assignment
        try:
            text = self._read(STOPPED, _READ_S_MAX if assignment.memory else math.inf)
        except StorageError as error:
            if not error.facts.get("missing") and not assignment.memory:
                raise
            return False
        if text is None:
            return False
        told: dict[str, Any] = json.loads(text)
        version = (told["step"], told["attempt"])
        if version != (assignment.resume_step, assignment.resume_attempt):
            return False
        self.reason = self.wish = told["reason"]
        if assignment.rank == 0:
            log.warning("the run has ended with step %s: %s", assignment.resume_step, self.reason)
        return True
