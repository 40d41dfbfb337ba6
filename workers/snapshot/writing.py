"""Take snapshots: copy the state after a step into a buffer that the keeper also holds.

The training thread chooses the buffer and copies. Another thread checksums the copy and writes the
record, which completes the buffer. Nothing here waits for another process or fails the training: if
there is no memory, or a snapshot cannot be completed, that is logged once and the state goes to
storage.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ucp_core.native import LocalTensor
from ucp_core.numerics import Sums
from workers.errors import ArenaError
from workers.memory import NUM_BUFFERS, Arena, CopyStream, Credits, SnapshotMemory
from workers.protocol import Assignment
from workers.snapshot.buffer_layout import BLOCK_BYTES, BufferLayout, Captured, source_of
from workers.snapshot.device import DeviceCopy
from workers.snapshot.final import FINAL_S_MAX, Fallback, is_quick
from workers.snapshot.for_others import ForOthers
from workers.state import StateEntry

__all__ = ["BLOCK_BYTES", "Captured", "SnapshotMemory", "SnapshotWriter", "source_of"]

#: Period of checking whether the attempt was fenced.
_LOOK_S: Final = 0.02
#: Period of checking whether peers have a copy; copying takes about as long.
_COPIED_LOOK_S: Final = 0.005
#: Time limit for completing a snapshot: its record, and on a device some ms for each 100 MB.
_CLOSE_S_MAX: Final = 5.0
#: A keeper that is away for longer protects nothing, so the state goes to storage.
_KEEPER_S_MAX: Final = 30.0
#: Period of checking whether the keeper was restarted.
_KEEPER_LOOK_S: Final = 1.0
#: Pause after a refusal or failure; a restarted keeper is back in a second.
_RETRY_S: Final = 2.0

log = logging.getLogger(__name__)


class SnapshotWriter:
    """Takes the snapshots of one rank of one attempt. The training thread calls and closes it.

    First ``prepare``. Then in each step: ``is_ready``, ``is_behind`` and ``is_pinned``, from which
    all ranks agree what to do; ``capture``; ``complete``.

    Args:
        fenced: Returns whether the attempt must stop writing.
        told: Returns once the metrics of all steps so far are written, or after a time limit.

    Attributes:
        device_copy: Copies captured state off the device, and is notified of passes and updates.
    """

    def __init__(
        self,
        memory: SnapshotMemory,
        assignment: Assignment,
        *,
        fenced: Callable[[], bool],
        told: Callable[[], None],
        stream: CopyStream | None = None,
    ) -> None:
        self._memory = memory
        self._assignment = assignment
        self._fenced = fenced
        self._told = told
        self.device_copy = DeviceCopy(
            Credits(memory.directory), BLOCK_BYTES, stream, checksums=memory.checksums
        )
        self._for_others = ForOthers(memory, assignment)
        self._layout: BufferLayout | None = None
        self._arena: Arena | None = None
        self._captured: _Copied | None = None
        self._finished_step = -1
        self._took_s: float | None = None
        self._late_until_s = float("-inf")
        self._why_not = ""
        self._broken_until_s = float("-inf")
        self._is_left = self._has_ended = False
        self._ending = threading.Lock()
        self._away_since_s = float("inf")
        self._looked_s = time.monotonic()
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ready = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="snapshot", daemon=True)
        self._thread.start()

    def prepare(self, state: Captured) -> None:
        """Start to reserve memory for states like this one. ``is_ready`` says when it is there."""
        self._ready.clear()
        # A snapshot under way uses the memory; the next step tries again.
        if self._idle.is_set() and not self.is_broken:
            self._put(lambda: self._prepare(state))

    def is_ready_for(
        self,
        entries: Sequence[StateEntry],
        guarded: Sequence[tuple[int, Sequence[StateEntry]]] = (),
    ) -> bool:
        """Return whether there is memory laid out for the tensors of a ``Captured``."""
        is_laid_out = self.is_ready and self._layout is not None and self._layout.takes(entries)
        return is_laid_out and self._for_others.takes(guarded)

    @property
    def is_ready(self) -> bool:
        """Return whether a snapshot can be taken."""
        return self._ready.is_set()

    @property
    def is_broken(self) -> bool:
        """Return whether it is too early to retry after a failure."""
        return time.monotonic() < self._broken_until_s

    def is_behind(self) -> bool:
        """Return whether the last snapshot is under way, or a peer has not copied it yet."""
        if not self._idle.is_set():
            return True
        if self._arena is None or not self._arena.copy_behind():
            return False
        # A restarted keeper does not know this memory, or that no peer copies it.
        self._put(self._tell)
        return True

    def look_after(self) -> None:
        """Hand the memory to a restarted keeper, at the end of a step without a snapshot.

        Until then only the worker holds it, so it would be lost with the worker.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s < _KEEPER_LOOK_S or not self._idle.is_set():
            return
        self._looked_s = now_s
        if self.is_ready and not self._memory.is_told():
            self._put(self._tell)

    def is_pinned(self) -> bool:
        """Return whether a snapshot waits for storing."""
        return self._arena is not None and self._arena.pinned() is not None

    def capture(self, state: Captured, *, kept_step: int = -1) -> bool:
        """Copy the state into a buffer; return whether that was possible.

        The previous snapshot must be complete, as ``is_behind`` and ``wait`` report. Every rank and
        its peers have the snapshot of ``kept_step``, which is not overwritten.
        """
        assert self._idle.is_set(), "one snapshot at a time"
        self._captured = None
        if not self.is_ready_for(state.entries, state.guarded):
            return False
        assert self._arena is not None
        kept = (self._assignment.attempt, kept_step)
        self._capture(self._arena.choose(self._assignment.lineage, kept=kept), state, kept)
        return True

    def _capture(self, buffer: int, state: Captured, kept: tuple[int, int]) -> None:
        assert self._arena is not None
        assert self._layout is not None
        begun_s, assignment = time.monotonic(), self._assignment
        self._arena.keep(kept)
        self._arena.begin(
            buffer,
            attempt=assignment.attempt,
            step=state.step,
            rank=assignment.rank,
            world_size=assignment.layout.world_size,
        )
        sums = self._layout.copy(buffer)
        targets, sources = self._for_others.capture(state.step, kept)
        mine = self._layout.sources if sums is None else []
        if mine:
            targets = [*self._layout.views[buffer], *targets]
        self.device_copy.begin(targets, [*mine, *sources], num_checked=len(mine))
        self._captured = _Copied(buffer, state, begun_s, sums or [])

    def complete(self, *, pin: bool) -> None:
        """Complete the captured snapshot in the background; with ``pin`` the keeper stores it."""
        assert self._captured is not None, "nothing was captured"
        copied = self._captured
        self._put(lambda: self._complete(copied, pin=pin))

    def wait(self, step: int) -> bool:
        """Wait until no snapshot is under way; return whether that of ``step`` is complete."""
        self.device_copy.hurry()
        while not self._idle.wait(_LOOK_S):
            if self._fenced():
                return False
        return self._finished_step == step

    def get_ready(self, state: Captured, until_s: float) -> bool:
        """Wait until a snapshot of ``state`` can be taken; return whether it was by ``until_s``."""
        while not (self._idle.is_set() and self.is_ready_for(state.entries, state.guarded)):
            left_s = until_s - time.monotonic()
            if left_s <= 0 or self._fenced():
                return False
            if self._idle.is_set():
                if self.is_broken:
                    return False
                self.prepare(state)
            self._idle.wait(min(_LOOK_S, left_s))
        return True

    def wait_copied(self, step: int, until_s: float) -> bool:
        """Wait until other nodes have the snapshot of ``step``; return False after ``until_s``."""
        self.device_copy.hurry()
        while True:
            if self._idle.is_set():
                if self._finished_step != step or self._arena is None:
                    return False
                if self._assignment.guards is not None:
                    return self._for_others.are_whole
                if self._arena.is_followed() and self._arena.is_copied():
                    return self._for_others.are_whole
            if time.monotonic() >= until_s or self._fenced():
                return False
            time.sleep(_COPIED_LOOK_S)

    def take_final(self, state: Captured, fallback: Fallback) -> bool:
        """Take a snapshot of the state with which this rank leaves, even if it is fenced.

        Call this before the rank reports that it has left, because until then the attempt is not
        over. ``fallback`` says which buffer is not needed. Return whether the snapshot is complete.
        If not, no version that counted is lost.
        """
        if not self.is_ready:
            # The memory may still be being reserved, which takes longer.
            return False
        self._late_until_s = time.monotonic() + FINAL_S_MAX
        self.device_copy.hurry()
        try:
            # The snapshot under way may be of this step, and may be completed now.
            if not self._idle.wait(FINAL_S_MAX):
                return False
            if self._captured is None or self._captured.state.step != state.step:
                self._captured = None
                self._capture_spare(state, fallback)
            if self._finished_step != state.step and self._captured is not None:
                self.complete(pin=False)
                self._idle.wait(max(0.0, self._late_until_s - time.monotonic()))
            return self._finished_step == state.step
        finally:
            self._late_until_s = float("-inf")

    def _capture_spare(self, state: Captured, fallback: Fallback) -> None:
        """Copy the state into an unneeded buffer, if there is one."""
        if not self.is_ready_for(state.entries, state.guarded):
            return
        assert self._arena is not None
        assert self._layout is not None
        buffer = fallback.buffer(
            [self._arena.held(buffer) for buffer in range(NUM_BUFFERS)],
            pinned=self._arena.pinned(),
            lineage=self._assignment.lineage,
        )
        if buffer is not None and is_quick(self._layout.body_bytes, self._took_s):
            self._capture(buffer, state, fallback.safe)

    def held(self) -> list[LocalTensor] | None:
        """Return the tensors captured last, in place; None if they are not complete.

        They do not change until the next ``capture``.
        """
        if self._captured is None or self._layout is None:
            return None
        try:
            self.device_copy.wait()
        except Exception:  # noqa: BLE001  who completes it says so, and storage takes over
            return None
        return self._layout.tensors(self._captured.buffer)

    def close(self) -> bool:
        """End the thread; return whether the memory can be released.

        If the thread is stuck, it releases the memory itself once it can. Memory that a stuck
        device may still write to is never released.
        """
        self.device_copy.hurry()
        self._tasks.put(None)
        self._thread.join(_CLOSE_S_MAX)
        with self._ending:
            self._is_left = not self._has_ended
        try:
            is_ended = self.device_copy.end(_CLOSE_S_MAX)
        except Exception as error:  # noqa: BLE001  the failure of the device is already known
            log.warning("the last snapshot is lost because its device failed: %s", error)
            is_ended = True
        return is_ended and not self._is_left

    def leave(self) -> None:
        """Release the memory, which a reader may still hold. Call this after ``close``."""
        self._for_others.leave()
        self._memory.leave()

    def _prepare(self, state: Captured) -> None:
        layout = BufferLayout(state, self._assignment)
        shares = (state.entries, *(entries for _, entries in state.guarded))
        for_cuda = any(entry.tensor.is_cuda for entries in shares for entry in entries)
        arena = self._memory.ensure(
            layout.body_bytes, attempt=self._assignment.attempt, for_cuda=for_cuda
        )
        layout.lay_out(arena)
        self._for_others.prepare(state, for_cuda=for_cuda)
        self._arena, self._layout = arena, layout
        self._tell()
        self._why_not = ""
        self._ready.set()

    def _put(self, task: Callable[[], None]) -> None:
        self._idle.clear()
        self._tasks.put(task)

    def _give_up(self, why: str) -> None:
        """Take no snapshots for a while; the state goes to storage."""
        self._ready.clear()
        self._broken_until_s = time.monotonic() + _RETRY_S
        if why != self._why_not:
            log.warning("snapshots pause, and storage serves instead: %s", why)
        self._why_not = why

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except _FencedError:
                log.info("snapshot_refused", extra={"attempt": self._assignment.attempt})
            except Exception as error:  # noqa: BLE001  the edge of a thread: storage takes over
                self._give_up(f"{type(error).__name__}: {error}")
            finally:
                self._idle.set()
        with self._ending:
            self._has_ended = True
        if self._is_left:
            self.leave()

    def _complete(self, copied: _Copied, *, pin: bool) -> None:
        assert self._arena is not None
        assert self._layout is not None
        hurries = time.monotonic() < self._late_until_s
        data = self._layout.data[copied.buffer]
        sums = self.device_copy.run(data, known=copied.sums, hurries=hurries)
        # The metrics of a version's steps are written before it counts.
        self._told()
        buffer, state = copied.buffer, copied.state
        # This comes before the rank's own record: a reader that finds that record may expect the
        # copies for other ranks.
        self._for_others.complete(state, check=self._check)
        # The buffer may be complete already, if the fence came while another share was completed.
        if self._arena.held(buffer) is None:
            self._layout.complete(self._arena, buffer, state, sums, self._check)
        if pin:
            # This comes after the record, because a pinned buffer is complete.
            self._arena.pin(buffer)
        self._finished_step = state.step
        self._took_s = time.monotonic() - copied.begun_s - self.device_copy.waited_s
        self._tell()
        self._for_others.reserve()

    def _check(self) -> None:
        is_late = time.monotonic() > self._late_until_s
        if self._is_left or (self._fenced() and is_late):
            raise _FencedError

    def _tell(self) -> None:
        """Notify the keeper. A dead keeper is back in a second; the memory is safe until then."""
        now_s = time.monotonic()
        if self._memory.tell():
            self._away_since_s = float("inf")
            return
        self._away_since_s = min(self._away_since_s, now_s)
        if now_s - self._away_since_s > _KEEPER_S_MAX:
            raise ArenaError(f"the keeper of this node is away for {_KEEPER_S_MAX:.0f} s")


class _FencedError(Exception):
    """The attempt was fenced, so the buffer stays incomplete."""


@dataclass(frozen=True, slots=True)
class _Copied:
    """A captured state: its buffer and step, and its known checksums."""

    buffer: int
    state: Captured
    begun_s: float
    sums: Sequence[Sums]
