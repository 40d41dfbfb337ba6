"""Work between two steps: report, save, leave. Membership changes only here.

If the node's keeper has memory, the state after a step goes there, and the keeper stores some of
these snapshots. Without a keeper, and if the state must outlive the nodes, the workers store it.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, NoReturn, cast

import torch
from torch import nn

from workers.data import DataLoader
from workers.errors import TaskError
from workers.parallel import fsdp_modules
from workers.protocol import METRICS, Assignment, Noted, SaveCosts, StepFacts, WorkerPhase
from workers.snapshot import (
    FINAL_S_MAX,
    Captured,
    Fallback,
    SnapshotMemory,
    SnapshotWriter,
    on_passes,
)
from workers.state import HostBuffer
from workers.train.boundary.best import Best
from workers.train.boundary.cadence import Cadence, Due
from workers.train.boundary.costs import SaveMeter
from workers.train.boundary.device_memory import DeviceMemory
from workers.train.boundary.ending import Ending
from workers.train.boundary.live_state import LiveState, Marks, capture
from workers.train.boundary.protection_wait import ProtectionWait
from workers.train.boundary.replicas import refuse_diverged
from workers.train.boundary.store import StorageWriter
from workers.train.context import WorkerContext
from workers.train.executor import (
    Finiteness,
    ShardedModel,
    Signals,
    Step,
    all_agree,
    exchanged,
)
from workers.train.loading import LIVE_STATE
from workers.train.whole_weights import digest_of_weights

#: In the small values of a snapshot: lines of metrics that storage may lack.
UNWRITTEN: Final = "unwritten_lines"
#: A snapshot waits at most this long for the metrics of its steps: stalled storage must not stop
#: snapshots.
_METRICS_S_MAX: Final = 0.2

log = logging.getLogger(__name__)


class YieldSignal(BaseException):
    """All ranks agreed to leave after ``step``; its state is in storage or in memory."""

    def __init__(self, step: int) -> None:
        super().__init__(f"left after step {step}")
        self.step = step


class Boundary:
    """Reports and saves for one rank of one attempt.

    Its waits for storage or other ranks raise ``AbortedError`` once the attempt is fenced, and
    ``CollectiveError`` if another rank does not write its part.
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
        self._stream: DataLoader | None = None
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
                told=lambda: (
                    storage.wait_appended(_METRICS_S_MAX) if assignment.rank == 0 else None
                ),
            )
        #: Decides about updates that are not finite.
        self.finiteness = Finiteness(settings.train.not_finite, tell=self.tell)
        #: Ends the run before its last step, if the script requests that.
        self.ending = Ending(assignment, context, storage.write, storage.read)
        #: Decides which versions to keep because a value was best.
        self.best = Best(settings.checkpoint.best, device)
        self._unfollow: Callable[[], None] | None = None
        self._due = Due()
        self._state: Captured | None = None
        self._is_taken = False
        self._live: LiveState | None = None
        self._loaded: Marks | None = None
        self._is_lent = False
        self._reported_step = 0
        resumed = (assignment.resume_attempt, assignment.resume_step)
        self._fallback = Fallback(assignment.attempt, resumed)
        self._waited_s = 0.0
        # Costs may be read after the attempt: the callback must not hold the state.
        meter, cadence = SaveMeter(), self._cadence
        self._meter = meter
        self._device_memory = DeviceMemory(device, num_ranks=assignment.layout.world_size)

        def costs() -> SaveCosts:
            return replace(meter.costs(cadence.intervals), trouble=storage.trouble)

        context.on_costs(assignment.attempt, costs)

    def begin(self, step: int, sharded: ShardedModel, extra: Mapping[str, Any]) -> None:
        """Prepare memory for snapshots, because the sizes of a loaded state are known."""
        if self._writer is not None:
            self._writer.prepare(capture(step, sharded, extra))

    def loaded(self, sharded: ShardedModel, extra: Mapping[str, Any]) -> None:
        """Note the weights at the start of the attempt, and the values that their version keeps."""
        self._loaded = Marks(sharded.shards)
        self.finiteness.load(extra)
        self.best.load(extra)

    def tell(self, step: int, text: str, ranks: tuple[int, ...] = ()) -> None:
        """Report in the terminal, and record, an event that the attempt survives."""
        if self._assignment.rank == 0:
            log.warning(text)
            attempt = self._assignment.attempt
            self._context.on_note(Noted(attempt=attempt, step=step, text=text, ranks=ranks))

    def reads(self, stream: DataLoader | None) -> None:
        """Make ``signals`` report the samples of a stream from now on."""
        self._stream = stream

    def signals(self) -> Signals:
        """Return this rank's signals in the current step."""
        context, attempt, writer = self._context, self._assignment.attempt, self._writer
        leaves = context.yield_requested(attempt)
        leaves_durably = leaves and context.yield_durable(attempt)
        read = self._stream.read_digest if self._stream is not None else 0
        signals = Signals(
            stops=self.ending.is_asked,
            leaves=leaves,
            leaves_durably=leaves_durably,
            read=read,
            read_squared=read**2,
            device_bytes=self._device_memory.of_ranks(self._assignment.rank),
        )
        if self._assignment.rank == 0:
            pace = context.pace(attempt)
            signals = replace(
                signals, snapshot_steps=pace.snapshot_steps, storage_steps=pace.checkpoint_steps
            )
        if writer is None:
            self._measure_storage()
        if writer is None or not writer.is_ready:
            return replace(signals, no_memory=True)
        behind = writer.is_behind()
        if behind and self._device.type == "cuda":
            # This thread runs ahead of the device, so the copy has time until the device gets here.
            torch.cuda.current_stream(self._device).synchronize()
            behind = writer.is_behind()
        storage_busy = writer.is_pinned()
        # A snapshot to be stored is pinned only when it is complete.
        self._meter.look(
            time.monotonic(), is_snapshot_busy=behind, is_checkpoint_busy=behind or storage_busy
        )
        return replace(signals, behind=behind, storage_busy=storage_busy)

    def before_update(self) -> None:
        """Let the weights change; refuse changes since the last update or loading.

        Every step calls it before they change.
        """
        if self._is_lent:
            raise TaskError(
                "a step trains inside `with average.swapped()`, where the weights are the average; "
                "train outside of it"
            )
        # During the update the state belongs to no step.
        live, self._live = self._live, None
        loaded, self._loaded = self._loaded, None
        if live is not None:
            live.check()
        if loaded is not None:
            self._check_loaded(loaded)
        if self._writer is not None:
            self._writer.device_copy.hold_update()

    @contextmanager
    def lent(self, swap: Callable[[], None]) -> Iterator[None]:
        """Replace the model's weights by ``swap`` in a block, in which nothing is saved."""
        if self._is_lent:
            raise TaskError("average.swapped() is entered within another one; leave that first")
        if self._writer is not None:
            # A copy of the last step may be under way.
            self._writer.device_copy.hold_update()
        (live, self._live), (loaded, self._loaded) = (self._live, None), (self._loaded, None)
        self._is_lent = True
        swap()
        try:
            yield
        finally:
            swap()
            self._is_lent = False
            self._live, self._loaded = live, loaded

    def _check_loaded(self, loaded: Marks) -> None:
        """Refuse weights that the script wrote over loaded ones; warn if none were loaded yet."""
        step, fqn = self._assignment.resume_step, loaded.written(frozen_too=False)
        if fqn is None:
            return
        if step:
            raise TaskError(
                f"parameter {fqn} was written to after step {step} was loaded and before the next "
                "update. The learned values would be lost each time the run resumes: write to "
                "weights `if session.step == 0:`, or give them by build, initialise or init_from",
                fqn=fqn,
                step=step,
            )
        if self._assignment.rank == 0:
            log.warning(
                "parameter %s was written to after session.optimizer: write to weights "
                "`if session.step == 0:`, or the run is refused when it resumes",
                fqn,
            )

    def line(self, step: int, **values: Any) -> dict[str, Any]:
        """Return a line of metrics: step, attempt and ``values``; nan becomes null."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        return {"step": step, "attempt": self._assignment.attempt, **finite}

    def completed(
        self, step: Step, step_s: float, sharded: ShardedModel, extra: Mapping[str, Any]
    ) -> float:
        """Report a step, and save its state if due; return the seconds waited for protection."""
        begun_s = time.monotonic()
        unwritten: list[tuple[str, str]] = []
        if self._storage.holds_lines:
            extra = {**extra, UNWRITTEN: unwritten}
        self._live = LiveState(step, step_s, sharded, extra)
        self._context.progress.completed(step.number, step_s, step.loss, self._facts(step))
        self._state, agreed = None, step.agreed
        self._fallback.agree(is_behind=agreed.behind, is_without_memory=agreed.no_memory)
        wait = self._wait_of(step, step_s)
        if wait is not None:
            self._state = self._compared(step.number, sharded, extra)
            is_ready = wait.get_ready(self._state)
            # A ready rank has completed its last snapshot.
            agreed = replace(agreed, no_memory=not is_ready, behind=False)
        due = self._due = self._cadence.due(step.number, agreed, is_best=self.best.is_new)
        taking_s = time.monotonic()
        if due.snapshot or due.storage:
            self._context.progress.enter(WorkerPhase.SAVING)
            self._state = self._state or self._compared(step.number, sharded, extra)
        is_taken = self._is_taken = due.snapshot and self._take(self._state)
        snapshot_s = time.monotonic() - taking_s if due.snapshot else 0.0
        if self._reports():
            how = "taken" if is_taken else "skipped" if due.snapshot or due.skipped else "none"
            times = {"snapshot_s": snapshot_s, "waited_s": self._waited_s}
            self._storage.append(METRICS, self._step_line(step, step_s, snapshot=how, **times))
            self._reported_step = step.number
            unwritten += self._storage.unwritten() if self._storage.holds_lines else ()
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
        self._prepare_again(step.number, sharded, extra)
        self._waited_s = wait.waited_s if wait is not None else 0.0
        self._meter.step(step_s, time.monotonic() - begun_s - self._waited_s)
        return self._waited_s

    def _facts(self, step: Step) -> StepFacts:
        in_use, there_is = self._device_memory.bytes()
        return StepFacts(
            grad_norm=step.grad_norm,
            lr=step.lr,
            tokens=step.own_tokens,
            data_s=step.data_s,
            device_bytes=in_use,
            device_bytes_max=there_is,
        )

    def _compared(self, step: int, sharded: ShardedModel, extra: Mapping[str, Any]) -> Captured:
        """Return the state of a step, once all its copies are known to be equal."""
        # Otherwise it is the state of no step, and gets no final snapshot.
        live, self._live = self._live, None
        refuse_diverged(step, sharded)
        self._live = live
        return capture(step, sharded, extra)

    def commit(self, step: int) -> None:
        """Wait until the state after ``step``, which all ranks write to storage, is committed."""
        self._context.progress.enter(WorkerPhase.SAVING)
        timeout_s = self._context.settings.parallel.patient_timeout_s
        self._storage.wait_committed(step, timeout_s=timeout_s)

    def commit_loaded(self, step: int, sharded: ShardedModel, extra: Mapping[str, Any]) -> None:
        """Wait until a best state that was loaded from memory is committed."""
        if self._assignment.memory and step in dict(self.best.kept):
            self._store_again(step, sharded, extra)
            self.commit(step)
            self._state = None

    def has_ended(self) -> bool:
        """Return whether the run has ended with the loaded version; equal on all ranks."""
        return not all_agree(not self.ending.resumed(), self._device)

    def end(self, step: int, sharded: ShardedModel, extra: Mapping[str, Any]) -> None:
        """Record the state after ``step`` as the end of the run; wait until it is committed.

        ``extra`` has the small named values of the version that the attempt resumed from.
        """
        self._context.progress.enter(WorkerPhase.SAVING)
        live, due, assignment = self._live, self._due, self._assignment
        is_loaded = live is None and not assignment.memory
        if is_loaded and step == assignment.resume_step:
            # It was loaded from storage.
            return
        self.ending.end(step, exchanged(self.ending.wish, self._device))
        is_mine = due.storage or (self._is_taken and due.pin)
        if not all_agree(is_mine, self._device):
            self._store_again(step, sharded, live.extra if live is not None else extra)
        self.commit(step)

    def leave(self, step: int) -> NoReturn:
        """Raise ``YieldSignal`` after ``step``, as all ranks agreed, once its state is safe.

        It is safe in memory if every rank completed its snapshot; otherwise the ranks write it to
        storage.
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
        """Take the final snapshot of a rank that leaves early, perhaps after the fence.

        Does nothing during an update. Waits for no peer and no keeper. Never fails: without a
        final snapshot the run resumes from an older version.
        """
        live, writer = self._live, self._writer
        if live is None or writer is None:
            return
        number = live.step.number
        if number == self._context.settings.train.steps:
            # The last step is stored, or trained again.
            return
        try:
            live.check()
            self._append_late(live)
            state = capture(number, live.sharded, {**live.extra, LIVE_STATE: True})
            is_taken = writer.take_final(state, self._fallback)
        except Exception as error:  # noqa: BLE001  a device that failed, for one
            is_taken = False
            log.warning("step %s gets no final snapshot: %s", number, error)
        log.info("final_snapshot", extra={"step": number, "taken": is_taken})

    def _append_late(self, live: LiveState) -> None:
        """Write the metrics of all steps so far, without which a version does not count."""
        storage = self._storage
        if self._assignment.rank == 0:
            storage.append_late(time.monotonic() + FINAL_S_MAX)
        if self._reported_step < live.step.number and self._reports():
            times = {"snapshot_s": 0.0, "waited_s": self._waited_s}
            line = self._step_line(live.step, live.step_s, snapshot="none", **times)
            storage.append(METRICS, line)
        if storage.holds_lines:
            live.extra[UNWRITTEN][:] = storage.unwritten()

    def _reports(self) -> bool:
        """Return whether this rank writes the metrics of steps, or keeps them in snapshots."""
        return self._assignment.rank == 0 or self._storage.holds_lines

    def close(self) -> bool:
        """End snapshots; return whether their memory is unused."""
        self._live = self._loaded = self._state = None
        if self._unfollow is not None:
            self._unfollow()
        return self._writer is None or self._writer.close()

    def leave_memory(self) -> None:
        """Leave the memory of snapshots to a write that still reads it; call it after ``close``."""
        if self._writer is not None:
            self._writer.leave()

    def finish(
        self, step: int, *, loss: float, validation_loss: float, sharded: ShardedModel
    ) -> None:
        """Write the run's result. Every rank calls it."""
        digest = digest_of_weights(sharded)
        if self._assignment.rank == 0:
            result = self.line(
                step, weights_digest=digest, final_loss=loss, validation_loss=validation_loss
            )
            result |= self.best.described()
            if self.ending.reason:
                result["ended"] = self.ending.reason
            self._storage.write_result(json.dumps(result, indent=1).encode())

    def _step_line(self, step: Step, step_s: float, **more: Any) -> dict[str, Any]:
        start, stop = step.order_range
        held = step.agreed.device_bytes
        return self.line(
            step.number,
            loss=step.loss,
            grad_norm=step.grad_norm,
            lr=step.lr,
            tokens=step.tokens,
            samples=stop - start,
            step_s=step_s,
            **({"skipped": True} if step.is_skipped else {}),
            **({"device_bytes": max(held)} if held else {}),
            **more,
            num_workers=self._assignment.layout.world_size,
            layout=str(self._assignment.layout),
            order_start=start,
            order_stop=stop,
            wall_time=time.time(),  # noqa: TID251  for people, and to match machines' logs
        )

    def _wait_of(self, step: Step, step_s: float) -> ProtectionWait | None:
        """Return the wait for protection if all ranks wait after this step; else None."""
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

    def _prepare_again(self, step: int, sharded: ShardedModel, extra: Mapping[str, Any]) -> None:
        """Prepare memory in the background if the state no longer fits the prepared one."""
        writer = self._writer
        if writer is None or writer.is_broken:
            return
        entries = self._state.entries if self._state is not None else sharded.state.saved()
        if not writer.is_ready_for(entries, sharded.state.guarded()):
            writer.prepare(self._state or capture(step, sharded, extra))

    def _take(self, state: Captured | None) -> bool:
        """Copy the state into memory; return whether this rank could."""
        assert self._writer is not None, "a rank without memory signals it"
        assert state is not None, "a state is captured whenever a save is due"
        if self._due.barrier:
            # This overwrites one of three buffers: every rank must have completed the newest one.
            self._writer.wait(state.step)
            # Reading the result makes the host wait, unlike a collective on a device.
            all_agree(agreed=True, device=self._device)
        is_taken = self._writer.capture(state, kept_step=self._due.kept_step)
        if is_taken:
            self._fallback.take(state.step)
        return is_taken

    def _follow(self, writer: SnapshotWriter, sharded: ShardedModel) -> None:
        """Copy snapshots off the device while a stage waits for others, from the second one on."""
        copy = writer.device_copy
        wants = copy.has_stream and (self._assignment.layout.pp > 1 or copy.leaving.passes)
        if wants and self._unfollow is None:
            blocks = cast("Iterable[nn.Module]", fsdp_modules(sharded.model))
            self._unfollow = on_passes(blocks, copy.passed)
        elif self._unfollow is not None and not wants:
            self._unfollow()
            self._unfollow = None

    def _store(self) -> None:
        """Write the state to storage, from memory if it was copied there."""
        state = self._state
        assert state is not None, "a state is captured whenever a save is due"
        begun_s = time.monotonic()
        # The buffer is free once the last checkpoint is written.
        self._storage.wait_idle()
        if self._writer is None:
            self._measure_storage()
        held = self._writer.held() if self._writer is not None and self._due.snapshot else None
        self._storage.save(
            state.step,
            tensors=held if held is not None else self._buffer.capture(state.entries),
            extra=state.extra,
            param_groups=state.param_groups,
        )
        self._meter.checkpoint(begun_s, time.monotonic() - begun_s)

    def _store_again(self, step: int, sharded: ShardedModel, extra: Mapping[str, Any]) -> None:
        """Write to storage a state whose step is over."""
        kept = {name: value for name, value in extra.items() if name != LIVE_STATE}
        self._state, self._due = capture(step, sharded, kept), Due(storage=True)
        self._store()

    def _measure_storage(self) -> None:
        """Measure how long this rank takes to write a checkpoint itself."""
        is_busy = not self._storage.is_idle
        self._meter.look(time.monotonic(), is_snapshot_busy=False, is_checkpoint_busy=is_busy)
