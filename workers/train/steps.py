"""The steps of one attempt, one after the other: what is done between two of them, and the end."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from workers import collectives
from workers.data import DataLoader
from workers.errors import TaskError
from workers.protocol import WorkerPhase
from workers.records import ProgressRecord
from workers.settings import Settings
from workers.train.boundary import Boundary
from workers.train.executor import Quota, ShardedModel, Step

__all__ = ["REGISTERED", "STREAM", "Steps"]

log = logging.getLogger(__name__)

#: Where a version keeps what a script registered.
REGISTERED: Final = "registered"
#: Where a version keeps the place in a stream.
STREAM: Final = "stream"


class Steps:
    """The loop over the steps of an attempt.

    Args:
        step: The step that the attempt resumes from.
        restored: The small named values of its version.
        settings: Of the run.
        sharded: The model.
        boundary: What happens between two steps.
        progress: The worker's progress record.

    Attributes:
        step: Last completed step.
        loss: Its loss; nan if it is not known.
        current: The step that was yielded last; None before the first.
    """

    def __init__(
        self,
        step: int,
        restored: Mapping[str, Any],
        *,
        settings: Settings,
        sharded: ShardedModel,
        boundary: Boundary,
        progress: ProgressRecord,
    ) -> None:
        loss = restored.get("loss")
        self.step, self.loss = step, math.nan if loss is None else loss
        self.current: Step | None = None
        self._restored = restored
        self._settings, self._sharded = settings, sharded
        self._boundary, self._progress = boundary, progress
        self._first_step = step + 1
        self._timeout_s = settings.parallel.collective_timeout_s
        self._cursor: Mapping[str, Any] = {}
        self._stream: DataLoader | None = None
        self._begun_s = self._step_s = 0.0
        #: A step whose body has not ended, so that what is registered may still change.
        self._open: Step | None = None
        self._is_left = False

    def each(
        self,
        samples: Iterator[Any],
        quota: Quota,
        cursor: Mapping[str, Any],
        stream: DataLoader | None,
    ) -> Iterator[Step]:
        """Yield the remaining steps.

        Args:
            samples: Those of this rank's micro-batches from the next step on.
            quota: The passes of a step.
            cursor: What a version records about the data.
            stream: The loader, if its place is to be recorded.

        Raises:
            TaskError: A step was left without ``apply``.
        """
        self._cursor, self._stream = cursor, stream
        self._boundary.reads(stream)
        train = self._settings.train
        if self._boundary.ending.resumed():
            self._boundary.end(self.step, self._sharded, self._restored)
            return
        if self.step >= train.steps:
            log.warning("resumed at step %s of %s: no step is left", self.step, train.steps)
            return
        self._begun_s = time.perf_counter()
        self._is_left = True
        while self.step < train.steps:
            self.current = step = Step(
                self.step + 1,
                samples=samples,
                quota=quota,
                train=train,
                sharded=self._sharded,
                progress=self._progress,
                boundary=self._boundary,
                on_applied=self._applied,
            )
            yield step
            if self._ends(step):
                break
        self._is_left = False
        if not self._boundary.ending.reason:
            self._boundary.commit(self.step)

    def finish(self) -> None:
        """End the run where the script left its loop; every worker calls it behind the script.

        Raises:
            TaskError: The script has not begun the loop, or other workers are still in it.
        """
        steps = self._settings.train.steps
        if self._is_left and self.step:
            self._boundary.ending.leave_loop(self.step)
            self._complete_open()
            self._boundary.end(self.step, self._sharded, self._restored)
        elif self.step < steps and not self._boundary.ending.reason:
            raise TaskError(
                f"the script ended after step {self.step} of train.steps={steps}; iterate "
                "session.steps() to its end"
            )

    def _applied(self, step: Step) -> None:
        self.step, self.loss = step.number, step.loss
        now_s = time.perf_counter()
        self._step_s, self._begun_s = now_s - self._begun_s, now_s
        if step.number > self._first_step:
            self._extend_timeout()
        self._open = step
        if not self._sharded.registered:
            self._complete_open()
        self._progress.enter(WorkerPhase.SCRIPT)

    def _complete_open(self) -> None:
        """Report and save the step that was applied last, unless that is done."""
        step, self._open = self._open, None
        if step is None:
            return
        # JSON has no nan: such a step is saved all the same.
        loss = step.loss if math.isfinite(step.loss) else None
        extra = {
            **self._cursor,
            "order_position": step.order_range[1],
            "loss": loss,
            **self._boundary.finiteness.values(),
        }
        if self._stream is not None:
            extra[STREAM] = self._stream.state()
        registered = self._sharded.registered.values()
        if registered:
            extra[REGISTERED] = registered
        # The wait for protection happens once, so it does not count as time of the next step.
        self._begun_s += self._boundary.completed(step, self._step_s, self._sharded, extra)

    def _ends(self, step: Step) -> bool:
        """Do what is due once the body of the loop has ended; return whether the run ends here."""
        if not step.is_applied:
            raise TaskError(f"step {step.number} was left without step.apply(); call it once")
        if self._open is not None:
            # What the script does after ``apply`` belongs to the step: a scheduler's step, say.
            self._complete_open()
            self._progress.enter(WorkerPhase.SCRIPT)
        if step.number == self._settings.train.steps:
            return False
        if self._boundary.ending.is_due(agreed=step.agreed.stops):
            self._boundary.end(step.number, self._sharded, self._restored)
            return True
        if step.leaves:
            self._boundary.leave(step.number)
        return False

    def _extend_timeout(self) -> None:
        """Make collectives wait for longer than it takes to find a hung rank."""
        timeout_s = self._settings.parallel.timeout_s(self._step_s)
        if timeout_s > self._timeout_s:
            self._timeout_s = timeout_s
            collectives.set_timeout(timeout_s)
