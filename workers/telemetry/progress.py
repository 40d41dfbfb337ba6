"""Store a worker's progress in a record that the keeper reads from outside.

A worker sends no heartbeats. It writes a small file in shared memory that stays readable while the
process is stopped and after it died. The training thread stores its progress. A separate thread
stores a beat: a stuck process still beats, a stopped or starved one does not. The kernel's state of
the beating thread distinguishes stopped from starved.

As in the record ring, every state is stored in two copies, written alternately and framed by the
number of the store, so a reader always finds a complete copy.

``workers.keeper`` reads the record.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from workers.protocol import BEAT_S, NO_FACTS, Digest, StepFacts, WorkerPhase, WorkerReport
from workers.telemetry.processes import num_runs, process_state
from workers.telemetry.ring import map_draft
from workers.telemetry.ring_reader import RingView

_MAGIC: Final = b"everpage"
_VERSION: Final = 5
# magic, version, pid, start time of the process in clock ticks since boot, worker id
_HEADER = struct.Struct("<8sQQQ32s")
_BEAT_AT: Final = 64
# The kernel's id of the thread that beats.
_BEATER_AT: Final = 72
# The kernel's id of the thread that trains.
_TRAINER_AT: Final = 80
# store, attempt, rank, phase, phase_since_ns, step, micro_batch, moved_bytes, step_s, loss, facts,
# store
_STATE = struct.Struct(f"<QQqQQQQQdd{len(StepFacts._fields)}dQ")
_STATE_AT: Final = 128
#: Length of a text, and the text.
_PLACE_AT: Final = 1024
_PLACE_BYTES_MAX: Final = 200
_PAGE_BYTES: Final = 4096
_PHASES: Final = tuple(WorkerPhase)
_PHASE_CODES: Final = {phase: code for code, phase in enumerate(_PHASES)}
_READ_TRIES_MAX: Final = 100
_WORD = struct.Struct("<Q")
#: The kernel's state letters of a process whose first thread waits for something.
_SLEEPS: Final = frozenset("SDI")
#: The kernel's state letters of a thread that waits for a processor or a page of memory.
_HELD_UP: Final = frozenset("RD")
_LATE_BEATS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressView:
    """The content of a progress record at one moment; times on the machine's monotonic clock."""

    worker: str
    pid: int  #: The worker's process.
    #: The process's start in clock ticks since boot, to distinguish later processes with this pid.
    started_ticks: int
    attempt: int  #: The worker's attempt, 0 if none.
    rank: int  #: The worker's rank in the attempt, -1 if none.
    phase: WorkerPhase
    phase_since_ns: int  #: When the phase began.
    step: int  #: Last step that the worker completed.
    micro_batch: int  #: Micro-batches done in the step under way.
    moved_bytes: int  #: Bytes read and written in this attempt, while it loads, saves or leaves.
    step_s: float  #: Duration of the last step completed in this attempt; 0.0 before the first.
    loss: float  #: Loss of that step; ``nan`` before the first.
    facts: StepFacts  #: Other figures of that step.
    beat_ns: int  #: Last beat of the process.
    beater: int  #: The kernel's id of the beating thread; 0 before its first beat.
    trainer: int  #: The id of the thread that loads, enters attempts and runs the script; 0 before.
    #: Line of the script at which the worker has long waited for others; "" if it does not wait.
    place: str


class ProgressRecord:
    """The writing end, thread-safe; a store takes about 1 us and no system call.

    ``create`` makes it. It beats until ``close``.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._stores = 0
        self._attempt, self._rank = 0, -1
        self._phase, self._since_ns = _PHASE_CODES[WorkerPhase.IDLE], time.monotonic_ns()
        self._step = self._micro_batch = self._moved_bytes = 0
        self._step_s, self._loss, self._facts = 0.0, math.nan, NO_FACTS
        self._closed = threading.Event()
        self._beat_word = memoryview(memory)[_BEAT_AT : _BEATER_AT + 8].cast("Q")
        self._beat_word[0] = self._since_ns
        self._store()

    @classmethod
    def create(cls, path: str | os.PathLike[str], *, worker: str) -> ProgressRecord:
        """Create the record of ``worker`` at ``path``; it replaces an old one atomically."""
        path = Path(path)
        draft, memory = map_draft(path, _PAGE_BYTES)
        started_ticks = process_state(os.getpid()).started_ticks
        _HEADER.pack_into(memory, 0, _MAGIC, _VERSION, os.getpid(), started_ticks, worker.encode())
        record = cls(memory)
        draft.replace(path)
        threading.Thread(target=record._beat, daemon=True, name="beat").start()
        return record

    def close(self) -> None:
        """Stop the beat. The record stays readable."""
        self._closed.set()

    def assign(self, attempt: int, rank: int) -> None:
        """Store that the worker enters ``attempt`` as ``rank``; (0, -1) when it is in none.

        Call this in the thread that trains. It resets step duration, loss and facts, except for the
        last evaluation's: the first step of an attempt has a separate time limit. The last
        completed step stays until ``resumed`` or ``completed``.
        """
        with self._lock:
            self._attempt, self._rank = attempt, rank
            self._micro_batch = self._moved_bytes = 0
            self._step_s, self._loss = 0.0, math.nan
            self._facts = NO_FACTS._replace(validation_loss=self._facts.validation_loss)
            self._store()
        self.trains_here()
        self.waits_at("")

    def trains_here(self) -> None:
        """Store that the calling thread loads and trains."""
        _WORD.pack_into(self._memory, _TRAINER_AT, threading.get_native_id())

    def enter(self, phase: WorkerPhase) -> None:
        """Store that ``phase`` begins."""
        with self._lock:
            self._phase, self._since_ns = _PHASE_CODES[phase], time.monotonic_ns()
            self._store()

    def resumed(self, step: int) -> None:
        """Store that the state after ``step`` was loaded."""
        with self._lock:
            self._step = step
            self._store()

    def micro_batch(self, num_done: int) -> None:
        """Store how many micro-batches of the current step are done."""
        with self._lock:
            self._micro_batch = num_done
            self._store()

    def moved(self, num_bytes: int) -> None:
        """Store that this many more bytes were moved. Long loading or saving must call this."""
        with self._lock:
            self._moved_bytes += num_bytes
            self._store()

    def completed(self, step: int, step_s: float, loss: float, facts: StepFacts = NO_FACTS) -> None:
        """Store that ``step`` is completed; it took ``step_s``."""
        with self._lock:
            self._step, self._step_s, self._loss, self._micro_batch = step, step_s, loss, 0
            self._facts = facts._replace(validation_loss=self._facts.validation_loss)
            self._store()

    def evaluated(self, loss: float) -> None:
        """Store the mean loss of an evaluation."""
        with self._lock:
            self._facts = self._facts._replace(validation_loss=loss)
            self._store()

    def waits_at(self, place: str) -> None:
        """Store the script's line at which the worker waits for others; "" if it does not wait."""
        text = place.encode()[:_PLACE_BYTES_MAX]
        with self._lock:
            # A reader accepts a text only if its length is equal before and after reading.
            _WORD.pack_into(self._memory, _PLACE_AT, 0)
            self._memory[_PLACE_AT + 8 : _PLACE_AT + 8 + len(text)] = text
            _WORD.pack_into(self._memory, _PLACE_AT, len(text))

    def _store(self) -> None:
        stores = self._stores = self._stores + 1
        _STATE.pack_into(
            self._memory,
            _STATE_AT + stores % 2 * _STATE.size,
            stores,
            self._attempt,
            self._rank,
            self._phase,
            self._since_ns,
            self._step,
            self._micro_batch,
            self._moved_bytes,
            self._step_s,
            self._loss,
            *self._facts,
            stores,
        )

    def _beat(self) -> None:
        self._beat_word[1] = threading.get_native_id()
        while not self._closed.wait(BEAT_S):
            self._beat_word[0] = time.monotonic_ns()


class ProgressReader:
    """The reading end, which ``open_progress`` returns. A view takes microseconds."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    def view(self) -> ProgressView | None:
        """Return the current content of the record; None if it is not one of everstep's."""
        memory = self._memory
        magic, version, pid, started_ticks, worker = _HEADER.unpack_from(memory, 0)
        if (magic, version) != (_MAGIC, _VERSION):
            return None
        state = _read_state(memory)
        if state is None:
            return None
        _, attempt, rank, phase, since_ns, step, micro_batch, moved_bytes, step_s, loss = state[:10]
        return ProgressView(
            worker=worker.rstrip(b"\0").decode(),
            pid=pid,
            started_ticks=started_ticks,
            attempt=attempt,
            rank=rank,
            phase=_PHASES[phase],
            phase_since_ns=since_ns,
            step=step,
            micro_batch=micro_batch,
            moved_bytes=moved_bytes,
            step_s=step_s,
            loss=loss,
            facts=StepFacts(*state[10:-1]),
            beat_ns=_WORD.unpack_from(memory, _BEAT_AT)[0],
            beater=_WORD.unpack_from(memory, _BEATER_AT)[0],
            trainer=_WORD.unpack_from(memory, _TRAINER_AT)[0],
            place=_read_place(memory),
        )


def open_progress(path: str | os.PathLike[str]) -> ProgressReader | None:
    """Return a reader of the record at ``path``; None if there is none.

    It works while the writer runs, is stopped, or is gone.
    """
    try:
        with Path(path).open("rb") as file:
            return ProgressReader(mmap.mmap(file.fileno(), _PAGE_BYTES, access=mmap.ACCESS_READ))
    except (FileNotFoundError, ValueError):
        # ValueError: the file is too short.
        return None


def read_progress(path: str | os.PathLike[str]) -> ProgressView | None:
    """Return the content of the record at ``path``; None if there is none."""
    reader = open_progress(path)
    return None if reader is None else reader.view()


def report_on(
    worker: str,
    view: ProgressView | None,
    ring: RingView,
    *,
    now_ns: int,
    children_s: float = 0.0,
    digest: Digest | None = None,
) -> WorkerReport:
    """Return an observation of ``worker`` from outside its process.

    Args:
        view: The worker's progress record; None counts as a process that is gone.
        ring: The content of the worker's record ring; ignored if it is from another attempt.
        now_ns: The machine's monotonic clock, up to which ages count.
        children_s: Processor time of the worker's children, if known.
        digest: The worker's own work from its record ring; ignored if it is from another attempt.
    """
    if view is None:
        return WorkerReport(
            worker=worker, pid=0, os_state="X", attempt=0, rank=-1, phase=WorkerPhase.IDLE,
            step=0, micro_batch=0, moved_bytes=0, phase_s=0.0, beat_age_s=0.0, processor_s=0.0,
            step_s=0.0, loss=math.nan, groups=(),
        )  # fmt: skip
    letter, started_ticks, processor_s, _ = process_state(view.pid)
    beat_age_ns = max(0, now_ns - view.beat_ns)
    if letter in _SLEEPS and beat_age_ns > _LATE_BEATS * BEAT_S * 1e9 and view.beater > 0:
        # The beating thread may only be waiting for a processor, or for a page of its memory.
        beater = process_state(view.pid, thread=view.beater).letter
        letter = beater if beater in _HELD_UP else letter
    is_current = ring.attempt == view.attempt
    return WorkerReport(
        worker=worker,
        pid=view.pid,
        os_state=letter if started_ticks == view.started_ticks else "X",
        attempt=view.attempt,
        rank=view.rank,
        phase=view.phase,
        step=view.step,
        micro_batch=view.micro_batch,
        moved_bytes=view.moved_bytes,
        phase_s=max(0, now_ns - view.phase_since_ns) / 1e9,
        beat_age_s=beat_age_ns / 1e9,
        processor_s=processor_s,
        step_s=view.step_s,
        loss=view.loss,
        facts=view.facts,
        groups=ring.groups if is_current else (),
        place=view.place,
        trainer_s=process_state(view.pid, thread=view.trainer).processor_s if view.trainer else 0.0,
        children_s=children_s,
        digest=digest if is_current else None,
        num_dropped=ring.num_dropped if is_current else 0,
        beater_runs=num_runs(view.pid, view.beater) if view.beater else 0,
    )


def _read_state(memory: mmap.mmap) -> tuple[Any, ...] | None:
    for _ in range(_READ_TRIES_MAX):
        copies = [memory[at : at + _STATE.size] for at in _COPIES_AT]
        again = [memory[at : at + _STATE.size] for at in _COPIES_AT]
        # The copies are read twice, because a store first zeroes a copy from its head on.
        states = [_STATE.unpack(a) for a, b in zip(copies, again, strict=True) if a == b]
        whole = [state for state in states if state[0] == state[-1] > 0]
        if whole:
            return max(whole)
    return None


def _read_place(memory: mmap.mmap) -> str:
    (length,) = _WORD.unpack_from(memory, _PLACE_AT)
    text = memory[_PLACE_AT + 8 : _PLACE_AT + 8 + min(length, _PLACE_BYTES_MAX)]
    is_whole = _WORD.unpack_from(memory, _PLACE_AT)[0] == length
    return text.decode(errors="replace") if is_whole else ""


_COPIES_AT: Final = (_STATE_AT, _STATE_AT + _STATE.size)
