"""Copy a state off a device in buckets beside the computation, before the next update.

Between two updates the state does not change. In this time a separate stream copies it in buckets,
and each bucket is checksummed while the next ones are copied. Only a few are under way at once, and
only while the rank holds one of the node's credits, so other users of the bus wait for a bucket and
not for a state. When the update comes, the remaining buckets are enqueued at once, and the device
delays the update until they are copied. The training thread does not wait.

In a pipeline the step releases the buckets: a few after the update, the others after marks that the
stage's blocks set at the beginning and end of passes (``workers.snapshot.passes``,
``bucket_releases``). The device reaches the marks, while the processor enqueues a pass long before;
the device also measures its gaps between passes, for the releases of a later step. Without marks,
and when a caller waits for the snapshot, buckets leave as fast as they can. Without marks there are
few buckets: a device has gaps to fill only if it waits for other stages, and each mark and each
bucket takes the interpreter from training (``tests/benchmarks/RESULTS.md``).

Tensors in this machine's memory were copied already (``workers.snapshot.buffer_layout``), and only
missing checksums are computed here, also by credits. The thread has normal priority: with a lower
one it could be interrupted while it holds the interpreter's lock, and delay training.

Source: the device level of REFT's hierarchical snapshots (arXiv 2310.12670).
"""

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ucp_core.numerics import NO_SUMS, Sums, joined
from workers.collectives import is_within_collective
from workers.memory import (
    PATIENCE_S,
    Checksums,
    CopyStream,
    Credits,
    CudaStream,
    Mark,
    Question,
)
from workers.snapshot.buckets import BUCKET_BYTES, Asked, Plan, TensorRange, into_buckets

#: Buckets under way: one is copied while the next one waits.
IN_FLIGHT_MAX: Final = 2
#: Bytes that leave on one credit, which takes some 10 ms, before it is another rank's turn.
_TURN_BYTES: Final = 512 << 20
#: Minimum number of buckets in a turn: each turn takes the interpreter from training, and the bus
#: waits.
_TURN_BUCKETS_MIN: Final = 4
#: Bound on the number of buckets of a state, with marks and without. Division at blocks adds a few,
#: and so does a state of more GiB than this.
_BUCKETS_MAX: Final = 16
_FEW_BUCKETS: Final = 4
#: A bucket of this size takes 20 ms on a bus of 50 GB/s; other ranks wait for that long.
_BUCKET_BYTES_MAX: Final = 1 << 30
#: The device's gaps are measured in one of this many snapshots, and in the first ones. Measuring
#: takes an event at every mark, and a first step is unlike later ones.
_MEASURED_EVERY: Final = 16
_MEASURED_FIRST: Final = 2

#: Period of checking whether the last copy has ended.
_END_LOOK_S: Final = 0.001
#: Period of checking whether a collective has ended; a bucket takes about as long.
_YIELD_LOOK_S: Final = 0.0005

#: Share of a step's marks over which buckets are spread, which is most of the forward passes of a
#: single micro-batch. The sooner a snapshot is complete, the less a failure loses.
SPREAD: Final = 0.5


def bucket_releases(num_buckets: int, gaps_s: Sequence[float], bucket_s: float) -> list[int]:
    """Return how many buckets may have left by each mark of a step. Pure.

    Copies in a gap of the device delay nothing. Pipeline stages have their gaps at different times
    (under 1F1B the last stages at the beginning of a step, the first stages before the first
    backward pass), so using the gaps of the previous step also staggers the stages. Buckets that do
    not fit are spread over the first half of the step.

    ``gaps_s`` has the device's idle time after each mark, from the beginning of a snapshot;
    ``bucket_s`` is the time that a bucket takes to leave.
    """
    fits = [int(gap_s / bucket_s) for gap_s in gaps_s]
    num_in_gaps = min(num_buckets, sum(fits))
    num_beside = num_buckets - num_in_gaps
    spread = len(gaps_s) * SPREAD
    found = []
    for index, fit in enumerate(accumulate(fits)):
        part = min(1.0, index / spread) if spread else 1.0
        found.append(min(num_in_gaps, fit) + math.ceil(num_beside * part))
    return found


@dataclass(frozen=True, slots=True)
class Leaving:
    """How a state leaves a device. No measurement on a GPU has shown yet which way costs least."""

    #: Whether buckets leave in pieces, with a small computation between any two. A copy engine
    #: takes copies in the order in which they are ready, whatever the priority of their streams; in
    #: such a gap it takes those of other streams (meta-pytorch/torchrec, issues 4303, 4315 and
    #: 4339).
    pieces: bool = False
    #: Whether buckets wait for the passes of any model, not only for those of a pipeline stage.
    passes: bool = False
    #: Whether buckets are small, and each waits while the device is within a collective. On
    #: machines with NVLink a copy to the host takes 8 to 11 % of an all-gather's bandwidth
    #: (NVIDIA/nccl, issue 2218).
    yields: bool = False


@dataclass(slots=True)
class Counts:
    """Figures of the copies so far."""

    num_bytes: int = 0  #: Bytes of the states.
    num_pieces: int = 0  #: Copies that were enqueued.
    num_pauses: int = 0  #: Waits for the device to reach a pass.
    num_yields: int = 0  #: Waits for a collective on the device to end.
    yielding_s: float = 0.0  #: Duration of those.
    copying_s: float = 0.0  #: Waits for copies that were under way.
    #: Processor time of ``run``: the longest that it can have kept the interpreter from training.
    held_s: float = 0.0


class _Gate(NamedTuple):
    """The first ``num_buckets`` may leave once the device is at the mark."""

    num_buckets: int
    mark: Mark


class _Told(NamedTuple):
    """A mark of a step, and whether it ends a pass, so that the device is idle until the next."""

    mark: Mark
    ends: bool


def _views(ranges: Sequence[TensorRange], data: Sequence[memoryview]) -> list[memoryview]:
    return [data[tensor][low:high] for tensor, low, high in ranges]


def _note(ranges: Sequence[TensorRange], sums: Sequence[Sums], found: list[Sums]) -> None:
    for (tensor, low, high), each in zip(ranges, sums, strict=True):
        found[tensor] = joined(found[tensor], each, high - low) if low else each


class DeviceCopy:
    """Copies of a state off its device, one at a time.

    The training thread calls ``begin``, ``passed`` and ``hold_update``, another thread ``run``. If
    a source is on a device, copies use ``stream``, by default a CUDA stream; otherwise they are
    made at once.
    """

    def __init__(
        self,
        node: Credits,
        block_bytes: int,
        stream: CopyStream | None = None,
        checksums: Checksums | None = None,
        is_within_collective: Callable[[], bool] = is_within_collective,
    ) -> None:
        self._node = node
        self._block_bytes = block_bytes
        #: It applies from the next ``begin`` on.
        self.leaving = Leaving()
        self.counts = Counts()
        self._checksums = checksums or Checksums()
        self._is_within_collective = is_within_collective
        self._stream = stream
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._plan = Plan((), (), (), [])
        self._plans: dict[tuple[int, int], Plan] = {}
        self._todo: deque[int] = deque()
        self._under_way: deque[tuple[Plan, int, Mark]] = deque()
        self._gates: deque[_Gate] = deque()
        self._num_buckets = self._num_released = self._num_reached = self._num_queued = 0
        self._num_told = self._told_a_step = self._num_begun = 0
        self._told: list[_Told] | None = None
        self._measures = False
        self._told_before: deque[list[_Told]] = deque(maxlen=2)
        self._gaps_s: list[float] = []
        self._leave_s: list[float] = []
        self._shares: list[int] = []
        self._updated_s, self._step_s, self._late_s = time.monotonic(), 0.0, 0.0
        self._waited_s = 0.0
        self._last: Mark | None = None
        self._failed: Exception | None = None
        self._num_checked = 0
        self._sizes: list[int] = []
        self._buckets: list[tuple[TensorRange, ...]] = []

    def begin(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor], *, num_checked: int
    ) -> None:
        """Note the tensors to copy, in their state after all work that the device has enqueued.

        ``targets`` are contiguous tensors in this machine's memory. ``run`` checksums the first
        ``num_checked`` of them.
        """
        with self._lock:
            self._todo.clear()
            self._under_way.clear()
            self._gates.clear()
            self._last = self._failed = self._told = None
            self._num_checked = self._num_buckets = 0
            self._num_released = self._num_reached = self._num_queued = 0
            self._waited_s = 0.0
            if not sources:
                return
            stream = self._stream_for(sources)
            if stream is None:
                with torch.no_grad():
                    torch._foreach_copy_(list(targets), list(sources))
                return
            self._plan = self._plan_of(targets, sources)
            self._todo.extend(range(len(self._plan.buckets)))
            self._num_checked = num_checked
            self._num_buckets = len(self._todo)
            self.counts.num_bytes += self._plan.num_bytes
            self._late_s = time.monotonic() + self._step_s
            self._share()
            self._num_begun += 1
            self._told = []
            self._release(stream, ends=True)

    @property
    def has_stream(self) -> bool:
        """Return whether any copy was made beside the computation so far."""
        return self._stream is not None

    @property
    def waited_s(self) -> float:
        """Return the time that the last ``run`` waited for passes and credits."""
        return self._waited_s

    def passed(self, *, ends: bool) -> None:
        """Mark the beginning or end of a pass in the device's work.

        Any thread may call this. After an end the device is idle until the next pass begins.
        """
        with self._lock:
            self._num_told += 1
            if self._told is not None and self._stream is not None:
                self._release(self._stream, ends=ends)

    def hurry(self) -> None:
        """Stop waiting for passes and collectives, because a caller waits for the copy."""
        with self._lock:
            self._late_s = 0.0
            self._release_all()

    def hold_update(self) -> None:
        """Make the device run later work of the training thread after the copy."""
        with self._lock:
            self._told_a_step, self._num_told = self._num_told, 0
            if self._told is not None:
                if self._measures:
                    self._told_before.append(self._told)
                self._told = None
            before_s, self._updated_s = self._updated_s, time.monotonic()
            self._step_s = self._updated_s - before_s
            self._queue_all()
            if self._last is not None and self._stream is not None:
                self._stream.hold(self._last)

    def run(
        self,
        data: Sequence[memoryview],
        *,
        known: Sequence[Sums] = (),
        hurries: bool = False,
    ) -> list[Sums]:
        """Copy the tensors of ``begin``; return the checksums of each of ``data`` afterwards.

        Raise the device's error if it failed, or lacks memory for copying, and RuntimeError if the
        copy was stopped.

        Args:
            data: Memory of the targets to checksum; other memory, if there are none.
            known: The checksums, or none, of each part of such other memory.
            hurries: Whether to copy without credits.
        """
        used_s = time.thread_time()
        found = list(known) or [NO_SUMS] * len(data)
        # A second call finds nothing left to copy.
        num_checked, self._num_checked = self._num_checked, 0
        patience_s = 0.0 if hurries else PATIENCE_S
        if hurries:
            self.hurry()
        mine = data[:num_checked]
        asked: list[Asked] = []
        turn = max(_TURN_BUCKETS_MIN, _TURN_BYTES // self._plan.bucket_bytes)
        self._in_turns(
            self._has_next,
            lambda left: self._next(left, mine, asked),
            turn=turn,
            patience_s=patience_s if self._num_buckets > 1 else None,
        )
        with self._lock:
            self._raise_failed()
        for ranges, question in asked:
            _note(ranges, self._checksums.answer(question), found)
        if not num_checked:
            sizes = (0 if s[1] else len(view) for view, s in zip(data, found, strict=True))
            rest = deque(self._buckets_of(sizes))
            self._in_turns(
                lambda: bool(rest),
                lambda _: bool(rest) and self._check(rest.popleft(), data, found),
                turn=_TURN_BYTES // BUCKET_BYTES,
                patience_s=patience_s if len(rest) > 1 else None,
            )
        self.counts.held_s += time.thread_time() - used_s
        return found

    def _in_turns(
        self,
        has_next: Callable[[], bool],
        go_on: Callable[[int], bool],
        *,
        turn: int,
        patience_s: float | None,
    ) -> None:
        """While ``has_next``, call ``go_on`` with the rest of a turn until it returns False.

        Each turn holds a credit, and waits for it up to ``patience_s``. None means no credit, as
        for a single bucket: copying it is faster than waiting.
        """
        begun_s = time.monotonic()
        while has_next():
            credit = nullcontext(True) if patience_s is None else self._node.one(patience_s)
            with credit as has_one:
                self._waited_s += time.monotonic() - begun_s
                all(go_on(left) for left in range(turn, 0, -1))
                begun_s = time.monotonic()
            if not has_one:
                # The holder may be stopped, so one wait is enough.
                patience_s = 0.0

    def _has_next(self) -> bool:
        """Wait until a bucket may leave, without a credit; return whether there is one."""
        with self._lock:
            # Wait at most as long as a step, because training may be doing something else.
            if not self._changed.wait_for(self._is_released, self._late_s - time.monotonic()):
                self._release_all()
            gate = None if self._under_way else self._gate()
        if gate is not None:
            self.counts.num_pauses += 1
            gate.mark.wait()
        with self._lock:
            self._num_reached = self._num_released if gate is None else gate.num_buckets
            return bool(self._under_way or self._todo)

    def _is_released(self) -> bool:
        return bool(self._under_way) or not self._todo or self._num_queued < self._num_released

    def _next(
        self,
        left: int,
        data: Sequence[memoryview],
        asked: list[Asked],
    ) -> bool:
        """Wait for the next bucket and request its checksums; return whether there was one.

        Checksumming a bucket takes longer than copying the next one, which does not wait for it.
        """
        yields = self.leaving.yields
        if yields:
            self._yield()
        begun_s = time.monotonic()
        with self._lock:
            self._queue_few(min(1, left) if yields else left)
            if not self._under_way:
                return False
            plan, number, mark = self._under_way[0]
        mark.wait()
        with self._lock:
            self._under_way.popleft()
            self._queue_few(0 if yields else left - 1)
            self._leave_s.append(time.monotonic() - begun_s)
            self.counts.copying_s += self._leave_s[-1]
        asked.append(self._asked_of(plan, number, data))
        self._checksums.ask(asked[-1].question)
        return True

    def _yield(self) -> None:
        """Wait until the device is within no collective, but not longer than a step takes.

        A collective whose member is lost does not end. Once the update comes, no bucket is left.
        """
        begun_s = now_s = time.monotonic()
        while self._todo and now_s < self._late_s and self._is_within_collective():
            time.sleep(_YIELD_LOOK_S)
            now_s = time.monotonic()
        if now_s > begun_s:
            self.counts.num_yields += 1
            self.counts.yielding_s += now_s - begun_s

    def _asked_of(self, plan: Plan, number: int, data: Sequence[memoryview]) -> Asked:
        """Return the checksum request for a bucket; reuse the last one for this memory."""
        known = plan.asked.get(number)
        if known is None:
            ranges = [one for one in plan.buckets[number] if one.tensor < len(data)]
            known = Asked(ranges, Question(_views(ranges, data), self._block_bytes))
            plan.asked[number] = known
        return known

    def _check(
        self, ranges: Sequence[TensorRange], data: Sequence[memoryview], found: list[Sums]
    ) -> bool:
        """Checksum ranges, and return whether there were any."""
        _note(ranges, self._checksums.of(_views(ranges, data), self._block_bytes), found)
        return bool(ranges)

    def wait(self) -> None:
        """Wait until the copy is complete; raise the error of ``run`` if it failed.

        Any thread may call this.
        """
        with self._lock:
            self._queue_all()
            self._raise_failed()
            last = self._last
        if last is not None:
            last.wait()

    def end(self, limit_s: float) -> bool:
        """Stop copying; return whether all copies have ended within ``limit_s``.

        If a device is stuck in a computation, it never reaches the copies after it.
        """
        with self._lock:
            if self._todo:
                self._failed = RuntimeError("the copy was stopped before it was complete")
            self._todo.clear()
            self._plan, self._plans = Plan((), (), (), []), {}
            self._changed.notify_all()
            last = self._last
        until_s = time.monotonic() + limit_s
        while last is not None and not last.is_reached():
            if time.monotonic() >= until_s:
                return False
            time.sleep(_END_LOOK_S)
        return True

    def _share(self) -> None:
        """Distribute the buckets over a step's marks, assuming as many as in the last step."""
        while self._told_before and self._told_before[0][-1].mark.is_reached():
            told = self._told_before.popleft()
            self._gaps_s = [
                later.mark.since(mark) if ends and not later.ends else 0.0
                for (mark, ends), later in pairwise(told)
            ]
        bucket_s = median(self._leave_s) if self._leave_s else math.inf
        is_known = len(self._gaps_s) == self._told_a_step
        is_first = self._num_begun < _MEASURED_FIRST
        self._measures = not is_known or is_first or self._num_begun % _MEASURED_EVERY == 0
        gaps_s = self._gaps_s if is_known else [0.0] * self._told_a_step
        self._shares = bucket_releases(self._num_buckets, gaps_s, bucket_s)
        self._leave_s = []

    def _release(self, stream: CopyStream, *, ends: bool) -> None:
        """Release the buckets that may leave after all enqueued work."""
        assert self._told is not None
        place, num = self._num_told, self._num_buckets
        if place < len(self._shares):
            num = min(num, max(IN_FLIGHT_MAX, self._shares[place]))
        releases = num > self._num_released
        if not (releases or self._measures):
            return
        mark = stream.mark()
        if self._measures:
            self._told.append(_Told(mark, ends))
        if releases:
            self._gates.append(_Gate(num, mark))
            self._num_released = num
            self._changed.notify_all()

    def _release_all(self) -> None:
        self._num_released = self._num_buckets
        self._changed.notify_all()

    def _gate(self) -> _Gate | None:
        """Return the gate of the next bucket; None if it only waits for the previous bucket."""
        while self._gates and self._gates[0].num_buckets <= self._num_queued:
            self._gates.popleft()
        return self._gates[0] if self._gates else None

    def _queue_all(self) -> None:
        self._release_all()
        self._queue(len(self._todo))

    def _queue_few(self, left: int) -> None:
        """Enqueue as many of the turn's remaining buckets as may be under way."""
        num = min(IN_FLIGHT_MAX, left) - len(self._under_way)
        self._queue(min(num, self._num_reached - self._num_queued))

    def _queue(self, num: int) -> None:
        """Enqueue buckets. Keep a failure for the caller that waits for the copy."""
        for _ in range(min(num, len(self._todo))):
            assert self._stream is not None
            number = self._todo.popleft()
            gate = self._gate()
            after = None if gate is None else gate.mark
            try:
                self._enqueue(self._stream, number, after)
            except Exception as error:  # noqa: BLE001  the training thread continues
                self._failed = error
                self._todo.clear()
                return
            self._num_queued += 1
            assert self._last is not None
            self._under_way.append((self._plan, number, self._last))

    def _enqueue(self, stream: CopyStream, number: int, after: Mark | None) -> None:
        is_whole = not self.leaving.pieces
        parts = self._plan.parts[number]
        for piece in [parts] if is_whole else self._plan.pieces(number, self._block_bytes):
            self._last = stream.copy(piece, after)
            self.counts.num_pieces += 1
            if not is_whole:
                stream.gap()

    def _raise_failed(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _plan_of(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Plan:
        """Return the plan for copying these tensors; reuse a buffer's last if none has moved."""
        places = [source.data_ptr() for source in sources]
        most = _BUCKETS_MAX if self._told_a_step else _FEW_BUCKETS
        if self.leaving.yields:
            most = sys.maxsize
        key = (id(targets[0]), most)
        plan = self._plans.get(key)
        if plan is None or not plan.fits(targets, sources, places):
            if any(not known.copies(sources, places) for known in self._plans.values()):
                # The old plans would keep memory that training has released.
                self._plans = {}
            sizes = [target.numel() * target.element_size() for target in targets]
            num_blocks = -(-sum(sizes) // (self._block_bytes * most))
            size = max(BUCKET_BYTES, min(num_blocks * self._block_bytes, _BUCKET_BYTES_MAX))
            buckets = into_buckets(sizes, bucket_bytes=size, block_bytes=self._block_bytes)
            plan = Plan(targets, sources, places, buckets, size)
            self._plans[key] = plan
        return plan

    def _buckets_of(self, sizes_bytes: Iterable[int]) -> list[tuple[TensorRange, ...]]:
        """Return the buckets for these sizes; reuse the last result if the sizes are unchanged."""
        sizes = list(sizes_bytes)
        if sizes != self._sizes:
            self._sizes = sizes
            self._buckets = into_buckets(
                sizes, bucket_bytes=BUCKET_BYTES, block_bytes=self._block_bytes
            )
        return self._buckets

    def _stream_for(self, sources: Sequence[Tensor]) -> CopyStream | None:
        if self._stream is None:
            device = next((source.device for source in sources if source.is_cuda), None)
            if device is not None:
                self._stream = CudaStream(device)
        return self._stream
