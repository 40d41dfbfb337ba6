"""What happens between two steps: report, save, leave. The only place where membership changes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from ucp_core.storage.base import join
from workers.parallel.state import HostBuffer, scalars
from workers.protocol import Assignment, WorkerPhase
from workers.train.context import WorkerContext
from workers.train.evaluation import weights_digest
from workers.train.parts import Parts
from workers.train.step import Step
from workers.train.storing import SavedState, Storing

__all__ = ["Boundary", "YieldSignal"]

METRICS: Final = "metrics/rank0.jsonl"
RESULT: Final = "result.json"


class YieldSignal(BaseException):
    """All ranks agreed to leave after ``step``, whose state is committed."""

    def __init__(self, step: int) -> None:
        super().__init__(f"left after step {step}")
        self.step = step


class Boundary:
    """Reports and saves for one rank of one attempt.

    Args:
        assignment: The attempt.
        context: The worker around it.
        buffer: Host memory for copies of the state.
        storing: Where reports and states go.
    """

    def __init__(
        self,
        assignment: Assignment,
        context: WorkerContext,
        buffer: HostBuffer,
        storing: Storing,
    ) -> None:
        self._assignment = assignment
        self._context = context
        self._buffer = buffer
        self._storing = storing

    def line(self, step: int, **values: Any) -> dict[str, Any]:
        """Return a line of metrics: where it comes from, and ``values``; nan becomes null."""
        told = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        return {"step": step, "attempt": self._assignment.attempt, **told}

    def completed(self, step: Step, step_s: float, parts: Parts, extra: Mapping[str, Any]) -> None:
        """Report a step and save it if it is due.

        Raises:
            AbortedError: The attempt was fenced.
            UcpError: The state before this one could not be written.
        """
        context, train = self._context, self._context.settings.train
        context.page.completed(step.number, step_s, step.loss)
        if self._assignment.rank == 0:
            self._storing.append(METRICS, self._step_line(step, step_s))
        is_last = step.number == train.steps
        is_due = step.number % context.settings.checkpoint.every_steps == 0
        if is_last or is_due or step.leaves:
            self._save(step.number, parts, extra)

    def commit(self, step: int) -> None:
        """Return when the state after ``step``, which was saved here, is committed.

        Raises:
            AbortedError: The attempt was fenced.
            CollectiveError: A peer did not write its part.
        """
        self._context.page.enter(WorkerPhase.SAVING)
        timeout_s = self._context.settings.parallel.collective_timeout_s
        self._storing.wait_committed(step, timeout_s=timeout_s)

    def leave(self, step: int) -> NoReturn:
        """Leave after ``step``, as all ranks agreed to, once its state is committed.

        Raises:
            YieldSignal: It is.
            AbortedError: The attempt was fenced.
            CollectiveError: A peer did not write its part.
        """
        self.commit(step)
        raise YieldSignal(step)

    def finish(self, step: int, *, loss: float, validation_loss: float, parts: Parts) -> None:
        """Write down how the run ended. Every rank calls it."""
        digest = weights_digest(parts)
        if self._assignment.rank == 0:
            result = self.line(
                step, weights_digest=digest, final_loss=loss, validation_loss=validation_loss
            )
            self._context.store.write_atomic(
                join(self._context.directory, RESULT),
                json.dumps(result, indent=1).encode(),
                fsync=False,
            )

    def _step_line(self, step: Step, step_s: float) -> dict[str, Any]:
        start, stop = step.order_range
        return self.line(
            step.number,
            loss=step.loss,
            grad_norm=step.grad_norm,
            lr=step.lr,
            tokens=step.tokens,
            samples=stop - start,
            step_s=step_s,
            num_workers=self._assignment.layout.world_size,
            layout=str(self._assignment.layout),
            order_start=start,
            order_stop=stop,
            wall_time=time.time(),  # noqa: TID251  for people, and to match machines' logs
        )

    def _save(self, step: int, parts: Parts, extra: Mapping[str, Any]) -> None:
        self._context.page.enter(WorkerPhase.SAVING)
        # One save in flight: the buffer is free again once the last one is written.
        self._storing.wait_idle()
        by_parameter = {id(parameter): fqn for fqn, parameter in parts.parameters.items()}
        groups = [
            {
                **{name: value for name, value in group.items() if name != "params"},
                "params": [by_parameter[id(parameter)] for parameter in group["params"]],
            }
            for group in parts.optimizer.param_groups
        ]
        self._storing.save(
            SavedState(
                step=step,
                tensors=self._buffer.capture(parts.state()),
                extra={**extra, "optimizer": scalars(parts.parameters, parts.optimizer)},
                param_groups=groups,
            )
        )
