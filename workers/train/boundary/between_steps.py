"""What happens between two steps: report, save, leave. The only place where membership changes.

Where the node's keeper has memory, the state after a step goes there, and the keeper stores it
now and then; without it, and where it must not be lost with the nodes, the workers store it.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn, cast

import torch
from torch import nn

from ucp_core.storage import join
from workers.errors import TaskError
from workers.parallel import fsdp_modules
from workers.protocol import Assignment, WorkerPhase
from workers.snapshot import (
    FINAL_S_MAX,
    Captured,
    Fallback,
    SnapshotMemory,
    SnapshotWriter,
    on_passes,
)
from workers.state import HostBuffer
from workers.train.boundary.cadence import Cadence, Due
from workers.train.boundary.costs import SaveMeter
from workers.train.boundary.protection import ProtectionWait
from workers.train.boundary.restore import LIVE_STATE
from workers.train.boundary.store import SavedState, StorageWriter
from workers.train.context import WorkerContext
from workers.train.evaluation import weights_digest
from workers.train.executor import ShardedModel, Signals, Step, all_agree

__all__ = ["Boundary", "YieldSignal"]

METRICS: Final = "metrics/rank0.jsonl"
RESULT: Final = "result.json"
#: A snapshot waits so long for the lines of its steps: a stalled store must not stop snapshots.
_TOLD_S: Final = 0.2

log = logging.getLogger(__name__)


class YieldSignal(BaseException):
    """All ranks agreed to leave after ``step``, whose state is in storage or in memory."""

    def __init__(self, step: int) -> None:
        super().__init__(f"left after step {step}")
        self.step = step


class Boundary:
    """Reports and saves for one rank of one attempt.

    Args:
        assignment: The attempt.
        context: The worker around it.
        device: Where collectives take their tensors.
        buffer: Host memory for copies of the state.
        memory: Memory at the keeper; None if there is none.
        storage: Where reports and states go.
    """

    def __init__(
        self,
        assignment: Assignment,
        context: WorkerContext,
        *,
        device: torch.device,
        buffer: HostBuffer,
        memory: SnapshotMemory | None,
        storage: StorageWriter,
    ) -> None:
        self._assignment = assignment
        self._context = context
        self._device = device
        self._buffer = buffer
        self._storage = storage
        settings = context.settings
        self._cadence = Cadence(
            snapshot_every=max(1, settings.snapshot.first_every),
            storage_every=settings.checkpoint.first_every,
            last_step=settings.train.steps,
        )
        self._writer: SnapshotWriter | None = None
        if memory is not None and settings.snapshot.every_steps:
            self._writer = SnapshotWriter(
                memory,
                assignment,
                fenced=lambda: context.fenced(assignment.attempt),
                told=self._wait_told,
            )
        self._unfollow: Callable[[], None] | None = None
        self._due = Due()
        self._state: Captured | None = None
        self._live: _Live | None = None
        self._told_step = 0
        resumed = (assignment.resume_attempt, assignment.resume_step)
        self._fallback = Fallback(assignment.attempt, resumed)
        self._waited_s = 0.0
        # Who asks for costs may do so after the attempt: it must not hold the state.
        meter, cadence = SaveMeter(), self._cadence
        self._meter = meter
        context.on_costs(assignment.attempt, lambda: meter.costs(cadence.intervals))

    def begin(self, step: int, sharded: ShardedModel, extra: Mapping[str, Any]) -> None:
        """Get ready for snapshots of a state that was loaded: its sizes are known already."""
        if self._writer is not None:
            self._writer.prepare(_captured(step, sharded, extra))

    def signals(self) -> Signals:
        """Return what this rank has to say in the step under way."""
        context, attempt, writer = self._context, self._assignment.attempt, self._writer
        leaves = context.yield_requested(attempt)
        leaves_durably = leaves and context.yield_durable(attempt)
        said = Signals(leaves=leaves, leaves_durably=leaves_durably)
        if self._assignment.rank == 0:
            pace = context.pace(attempt)
            said = replace(
                said, snapshot_steps=pace.snapshot_steps, storage_steps=pace.checkpoint_steps
            )
        if writer is None:
            self._look_at_storing()
        if writer is None or not writer.is_ready:
            return replace(said, no_memory=True)
        behind = writer.is_behind()
        if behind and self._device.type == "cuda":
            # This thread is ahead of the device, and a copy has until the device is here, too.
            torch.cuda.current_stream(self._device).synchronize()
            behind = writer.is_behind()
        storage_busy = writer.is_pinned()
        # What is to be stored is pinned once it is complete.
        self._meter.look(
            time.monotonic(), is_snapshot_busy=behind, is_checkpoint_busy=behind or storage_busy
        )
        return replace(said, behind=behind, storage_busy=storage_busy)

    def before_update(self) -> None:
        """Let the weights change; called in every step before they do.

        Raises:
            TaskError: They have changed already, by something else than the last update.
        """
        # Until the step is completed the state is that of no step.
        live, self._live = self._live, None
        if live is not None:
            live.check()
        if self._writer is not None:
            self._writer.hold_update()

    def line(self, step: int, **values: Any) -> dict[str, Any]:
        """Return a line of metrics: where it comes from, and ``values``; nan becomes null."""
        told = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        return {"step": step, "attempt": self._assignment.attempt, **told}

    def completed(
        self, step: Step, step_s: float, sharded: ShardedModel, extra: Mapping[str, Any]
    ) -> float:
        """Report a step and save it if it is due; return for how long protection was waited for.

        Raises:
            AbortedError: The attempt was fenced.
            UcpError: The state before this one could not be written.
        """
        begun_s = time.monotonic()
        self._live = _Live(step, step_s, sharded, extra, _versions(sharded))
        self._context.progress.completed(step.number, step_s, step.loss)
        self._state, agreed = None, step.agreed
        self._fallback.agree(is_behind=agreed.behind, is_without_memory=agreed.no_memory)
        wait = self._wait_of(step, step_s)
        if wait is not None:
            self._state = _captured(step.number, sharded, extra)
            is_ready = wait.get_ready(self._state)
            # Whoever is ready has completed its snapshot before, and all ranks are.
            agreed = replace(agreed, no_memory=not is_ready, behind=False)
        due = self._due = self._cadence.due(step.number, agreed)
        taking_s = time.monotonic()
        if due.snapshot or due.storage:
            self._context.progress.enter(WorkerPhase.SAVING)
            self._state = self._state or _captured(step.number, sharded, extra)
        is_taken = due.snapshot and self._take(self._state)
        snapshot_s = time.monotonic() - taking_s if due.snapshot else 0.0
        if self._assignment.rank == 0:
            how = "taken" if is_taken else "skipped" if due.snapshot or due.skipped else "none"
            times = {"snapshot_s": snapshot_s, "waited_s": self._waited_s}
            self._storage.append(METRICS, self._step_line(step, step_s, snapshot=how, **times))
            self._told_step = step.number
        if is_taken and self._writer is not None:
            self._writer.complete(pin=due.pin)
            self._follow(self._writer, sharded)
            self._meter.snapshot(taking_s, snapshot_s, is_pinned=due.pin)
        elif self._writer is not None:
            self._writer.look_after()
        if due.storage:
            self._store()
        if is_taken and wait is not None:
            wait.wait_copied(step.number)
        self._prepare_anew(step.number, sharded, extra)
        self._waited_s = wait.waited_s if wait is not None else 0.0
        self._meter.step(step_s, time.monotonic() - begun_s - self._waited_s)
        return self._waited_s

    def commit(self, step: int) -> None:
        """Return when the state after ``step``, which was saved here, is committed.

        Raises:
            AbortedError: The attempt was fenced.
            CollectiveError: A peer did not write its part.
        """
        self._context.progress.enter(WorkerPhase.SAVING)
        timeout_s = self._context.settings.parallel.patient_timeout_s
        self._storage.wait_committed(step, timeout_s=timeout_s)

    def leave(self, step: int) -> NoReturn:
        """Leave after ``step``, as all ranks agreed to, once its state is safe.

        In memory it is safe once every rank has completed its snapshot; if one could not, the
        ranks write it to storage.

        Raises:
            YieldSignal: It is.
            AbortedError: The attempt was fenced.
            CollectiveError: A peer did not write its part.
        """
        if not self._due.storage:
            self._context.progress.enter(WorkerPhase.SAVING)
            is_mine = self._writer is not None and self._writer.wait(step)
            if all_agree(is_mine, self._device):
                raise YieldSignal(step)
            self._store()
        self.commit(step)
        raise YieldSignal(step)

    def take_final(self) -> None:
        """Complete a snapshot of the state that this rank leaves with, early and perhaps fenced.

        Only if the state is that of a step, and no peer nor keeper is waited for. Never fails:
        the run then goes on from an older version, as it would have.
        """
        live, writer = self._live, self._writer
        if live is None or writer is None:
            return
        number = live.step.number
        if number == self._context.settings.train.steps:
            # That one is stored, or done again.
            return
        try:
            live.check()
            self._tell_late(live)
            state = _captured(number, live.sharded, {**live.extra, LIVE_STATE: True})
            is_taken = writer.take_final(state, self._fallback)
        except Exception as error:  # noqa: BLE001  a device that failed, for one
            is_taken = False
            log.warning("no_farewell", extra={"step": number, "reason": str(error)})
        log.info("farewell", extra={"step": number, "taken": is_taken})

    def _tell_late(self, live: _Live) -> None:
        """Have the lines of all steps so far written: a version that counts has them."""
        if self._assignment.rank == 0:
            self._storage.append_late(time.monotonic() + FINAL_S_MAX)
            if self._told_step < live.step.number:
                times = {"snapshot_s": 0.0, "waited_s": self._waited_s}
                line = self._step_line(live.step, live.step_s, snapshot="none", **times)
                self._storage.append(METRICS, line)

    def close(self) -> bool:
        """End taking snapshots; return whether their memory is let go of."""
        self._live = self._state = None
        if self._unfollow is not None:
            self._unfollow()
        return self._writer is None or self._writer.close()

    def leave_memory(self) -> None:
        """Let go of the memory of snapshots, from which a write goes on; for after ``close``."""
        if self._writer is not None:
            self._writer.leave()

    def finish(
        self, step: int, *, loss: float, validation_loss: float, sharded: ShardedModel
    ) -> None:
        """Write down how the run ended. Every rank calls it."""
        digest = weights_digest(sharded)
        if self._assignment.rank == 0:
            result = self.line(
                step, weights_digest=digest, final_loss=loss, validation_loss=validation_loss
            )
            self._context.store.write_atomic(
                join(self._context.directory, RESULT),
                json.dumps(result, indent=1).encode(),
                fsync=False,
            )

    def _step_line(self, step: Step, step_s: float, **more: Any) -> dict[str, Any]:
        start, stop = step.order_range
        return self.line(
            step.number,
            loss=step.loss,
            grad_norm=step.grad_norm,
            lr=step.lr,
            tokens=step.tokens,
            samples=stop - start,
            step_s=step_s,
            **more,
            num_workers=self._assignment.layout.world_size,
            layout=str(self._assignment.layout),
            order_start=start,
            order_stop=stop,
            wall_time=time.time(),  # noqa: TID251  for people, and to match machines' logs
        )

    def _wait_of(self, step: Step, step_s: float) -> ProtectionWait | None:
        """Return the wait that all ranks come to after this step; None if it is another's."""
        snapshot = self._context.settings.snapshot
        if not snapshot.every_steps or not self._cadence.waits(step.number, step.agreed):
            return None
        self._context.progress.enter(WorkerPhase.SAVING)
        return ProtectionWait(
            self._writer,
            step_s=step_s,
            node=self._context.node,
            is_copied=snapshot.tolerance > 0,
            device=self._device,
        )

    def _prepare_anew(self, step: int, sharded: ShardedModel, extra: Mapping[str, Any]) -> None:
        """Get memory for a state that there is none for, in the background."""
        writer = self._writer
        if writer is None or writer.is_broken:
            return
        entries = self._state.entries if self._state is not None else sharded.state.saved()
        if not writer.is_ready_for(entries, sharded.state.guarded()):
            writer.prepare(self._state or _captured(step, sharded, extra))

    def _take(self, state: Captured | None) -> bool:
        """Copy the state into memory; return whether that was possible here."""
        assert self._writer is not None, "ranks without memory say so"
        assert state is not None, "what is due was looked up"
        if self._due.barrier:
            # Of three slots one is written over now. All ranks must have the newest one whole.
            self._writer.wait(state.step)
            # Read, too: a collective on a device keeps no host waiting.
            all_agree(agreed=True, device=self._device)
        is_taken = self._writer.capture(state, kept_step=self._due.kept_step)
        if is_taken:
            self._fallback.take(state.step)
        return is_taken

    def _follow(self, writer: SnapshotWriter, sharded: ShardedModel) -> None:
        """Have snapshots leave with the passes of the model, once one has left a device."""
        if self._unfollow is None and writer.leaves_device:
            blocks = cast("Iterable[nn.Module]", fsdp_modules(sharded.model))
            self._unfollow = on_passes(blocks, writer.passed)

    def _store(self) -> None:
        """Write the state to storage, from memory if it was copied there."""
        state = self._state
        assert state is not None, "what is due was looked up"
        begun_s = time.monotonic()
        # One save in flight: the buffer is free again once the last one is written.
        self._storage.wait_idle()
        if self._writer is None:
            self._look_at_storing()
        held = self._writer.held() if self._writer is not None and self._due.snapshot else None
        self._storage.save(
            SavedState(
                step=state.step,
                tensors=held if held is not None else self._buffer.capture(state.entries),
                extra=state.extra,
                param_groups=state.param_groups,
            )
        )
        self._meter.checkpoint(begun_s, time.monotonic() - begun_s)

    def _look_at_storing(self) -> None:
        """Measure how long this rank itself writes a checkpoint, where nobody else does."""
        is_busy = not self._storage.is_idle
        self._meter.look(time.monotonic(), is_snapshot_busy=False, is_checkpoint_busy=is_busy)

    def _wait_told(self) -> None:
        if self._assignment.rank == 0:
            self._storage.wait_appended(_TOLD_S)


@dataclass(frozen=True, slots=True)
class _Live:
    """The state after a step, as long as no update has begun since."""

    step: Step
    step_s: float
    sharded: ShardedModel
    extra: Mapping[str, Any]
    versions: list[int]

    def check(self) -> None:
        """Do nothing if the weights are as the update left them.

        Told from version counters: it costs less than a microsecond for ten of them and waits for
        no device. Writes through ``.data`` leave no such trace.

        Raises:
            TaskError: One has changed. A snapshot may have some of that, or nothing.
        """
        now = _versions(self.sharded)
        if now == self.versions:
            return
        for shard, before, after in zip(self.sharded.shards, self.versions, now, strict=True):
            if before != after:
                raise TaskError(
                    f"parameter {shard.fqn} was changed after step.apply() of step "
                    f"{self.step.number}, and not by the next one: that is in no checkpoint of the "
                    "step, and would be lost when the run resumes. Change weights in a hook of the "
                    "optimizer (optimizer.register_step_post_hook), which step.apply() runs",
                    fqn=shard.fqn,
                    step=self.step.number,
                )


def _versions(sharded: ShardedModel) -> list[int]:
    """Return of each parameter how often it was written to: by an optimizer, or as the model's."""
    parameters = sharded.parameters
    return [
        shard.parameter._version + parameters[shard.fqn]._version  # noqa: SLF001
        for shard in sharded.shards
    ]


def _captured(step: int, sharded: ShardedModel, extra: Mapping[str, Any]) -> Captured:
    """Return the state as it is now; its tensors go on changing."""
    state = sharded.state
    return Captured(
        step=step,
        entries=state.saved(),
        guarded=state.guarded(),
        extra={**extra, "optimizer": state.scalars()},
        param_groups=state.param_groups(),
    )
