"""Represent each collective of a recorded group by a work that an abort can wake.

gloo's own ``abort`` leaves a waiter asleep until the timeout (torch 2.13; pytorch#130345), so no
thread may wait inside gloo for long. Waits for a collective are cut into slices, and between two
slices the waiter checks whether its attempt was aborted. A slice costs nothing if the collective
ends within it. A slice that runs out costs about 70 us, 1 % of a core while a rank waits. gloo
closes the connection when a slice of a point-to-point work runs out. So a helper thread waits for
such a work, and the caller waits for the helper or the abort.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from workers.collectives import nccl
from workers.collectives.attempt import Attempt
from workers.collectives.errors import AbortedError, CollectiveError
from workers.collectives.waiting import helpers
from workers.telemetry import ABORTED, FAILED, FINISHED

#: torch's ``WorkResult::SUCCESS``.
_SUCCESS: Final = 0
#: Time between two checks of the abort flag; it bounds the delay of an abort.
_SLICE: Final = timedelta(milliseconds=5)


class Call:
    """One collective, as records and errors name it.

    ``start`` is the position at which a device reaches the call; None on the host.
    """

    __slots__ = ("attempt", "group", "name", "number", "op", "seq", "start")

    def __init__(
        self,
        attempt: Attempt,
        group: int,
        name: str,
        op: str,
        number: int,
        seq: int,
        start: nccl.Start | None = None,
    ) -> None:
        self.attempt = attempt
        self.group = group
        self.name = name
        self.op = op
        self.number = number
        self.seq = seq
        self.start = start

    def wait(self) -> None:
        """Record that a thread waits for the collective."""
        self.attempt.ring.wait(self.group, self.seq)

    def reach(self) -> None:
        """Record that the device has reached the collective."""
        self.start = None
        self.attempt.ring.reach(self.group, self.seq)

    def end(self, flags: int, blocked_ns: int = 0) -> None:
        """Record how the collective ended, and how long it blocked this thread."""
        self.attempt.ring.leave(self.group, self.seq, self.number, flags, blocked_ns)

    def aborted(self) -> CollectiveError | AbortedError:
        """Record the abort of the attempt; return the error to raise."""
        self.end(ABORTED)
        return self.attempt.error(
            f" during {self.op} number {self.seq} of group {self.name}", self.op
        )

    def failed(self, error: Any) -> CollectiveError | AbortedError:
        """Record a failure of the transport; return the error to raise."""
        if self.attempt.aborted.is_set():
            return self.aborted()
        self.end(FAILED)
        return CollectiveError(
            f"{self.op} number {self.seq} of group {self.name} failed in attempt "
            f"{self.attempt.number}: {_first_line(error)}",
            attempt=self.attempt.number,
            group=self.name,
            op=self.op,
            seq=self.seq,
        )


class RecordedWork(dist.Work):
    """A collective in flight on the CPU.

    Args:
        inner: gloo's works; several for a coalesced collective.
        finish: Called once, in the waiting thread, when all of ``inner`` are done.
        keep: Objects that must live as long as the transport may use them.
        sliced: Whether a wait for ``inner`` can be cut into slices.
    """

    def __init__(
        self,
        call: Call,
        inner: list[Any],
        *,
        finish: Callable[[], None] | None = None,
        keep: Any = None,
        sliced: bool = True,
    ) -> None:
        super().__init__()
        self._call = call
        self._inner = inner
        self._finish = finish
        self._keep = keep
        self._sliced = sliced
        self._done = False
        self._error: Exception | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the collective is done; return True.

        Raise ``AbortedError`` if the attempt was aborted, and ``CollectiveError`` if the transport
        failed. If ``timeout`` passes, raise RuntimeError; the collective continues.
        """
        if self._error is not None:
            raise self._error
        if self._done:
            return True
        # c10d passes 0 for the default timeout.
        limit_s = timeout.total_seconds() if timeout else None
        since_ns = time.monotonic_ns()
        try:
            wait = self._wait_in_slices if self._sliced else self._wait_by_helper
            wait(None if limit_s is None else time.monotonic() + limit_s)
        except (AbortedError, CollectiveError) as error:
            self._error = error
            self._call.attempt.keep_alive((self._inner, self._keep))
            raise
        blocked_ns = time.monotonic_ns() - since_ns
        if self._finish is not None:
            self._finish()
        self._done = True
        self._call.end(FINISHED, blocked_ns)
        self._keep = None
        return True

    def is_completed(self) -> bool:
        """Return whether ``wait`` would return at once."""
        return self._done or (self._sliced and all(work.is_completed() for work in self._inner))

    def is_success(self) -> bool:
        """Return whether a wait has ended and the collective is done."""
        return self._done

    def exception(self) -> Any:
        """Return the error that ``wait`` raised, or None."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return nothing, because every collective writes into its caller's tensors."""
        return []

    def _source_rank(self) -> int:
        """Return the sender of a receive from any member, by its place in the group."""
        return int(self._inner[0]._source_rank())  # noqa: SLF001 - torch's name

    def synchronize(self) -> None:
        """Wait, because there is no stream to order."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that a helper thread completes when the collective is done."""
        future: torch.futures.Future[Any] = torch.futures.Future()

        def complete() -> None:
            try:
                self.wait()
            except (AbortedError, CollectiveError) as error:
                future.set_exception(error)
            else:
                future.set_result([])

        helpers.submit(complete)
        return future

    def _wait_in_slices(self, until_s: float | None) -> None:
        aborted = self._call.attempt.aborted
        for work in self._inner:
            was_completed = waits = False
            while True:
                if aborted.is_set():
                    raise self._call.aborted()
                try:
                    work.wait(_SLICE)
                    break
                except RuntimeError as error:
                    # The slice ran out, perhaps just before completion, or the work failed. If the
                    # work is complete, the slice did not run out: the work failed.
                    if was_completed:
                        raise self._call.failed(error) from error
                    was_completed = work.is_completed()
                    if not was_completed:
                        if until_s is not None and time.monotonic() >= until_s:
                            raise
                        if not waits:
                            waits = True
                            self._call.wait()

    def _wait_by_helper(self, until_s: float | None) -> None:
        ended = self._call.attempt.waiter()
        self._call.wait()
        failures: list[BaseException] = []
        # gloo's works hold tensors, and the thread may end late.
        inner = list(self._inner)

        def wait() -> None:
            try:
                while inner:
                    inner[-1].wait()
                    inner.pop()
            except RuntimeError as error:
                failures.append(error)
            ended.set()

        helpers.submit(wait)
        if not ended.wait(None if until_s is None else until_s - time.monotonic()):
            raise RuntimeError("the wait's own timeout passed")
        if failures:
            raise self._call.failed(failures[0]) from failures[0]
        if not ended.finished:
            raise self._call.aborted()


class InFlight:
    """Collectives that a device has not passed; the attempt polls ``is_reached`` and ``settle``.

    NCCL's work holds the outputs of its collective, and the host is some forty layers ahead of the
    device. So ``give_up`` releases the work if a mark in the caller's stream carries the same
    information. The newest work of a group is kept, because an error belongs to the communicator
    but only a work can describe it.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.inner: Any = None
        #: Position at which the caller's stream continues after them; None if that may be later
        #: than their end.
        self.end: nccl.Start | None = None
        self.is_refused = False

    def give_up(self) -> None:
        """Release NCCL's work, if a mark shows the end."""
        if self.end is not None:
            self.inner = None

    def is_reached(self) -> bool:
        """Record which calls the device has reached, and return whether it has reached all."""
        try:
            for call in self.calls:
                if call.start is not None:
                    if not call.start.is_reached():
                        return False
                    call.reach()
        except RuntimeError:
            # The device has failed. ``settle`` also notices this, and reports it.
            return False
        return True

    def has_begun(self) -> bool:
        """Return whether the device was seen to reach the first call."""
        return self.calls[0].start is None

    def failure(self) -> BaseException | None:
        """Return the error of the group from its work, if it has failed."""
        inner = self.inner
        try:
            return _failure(inner) if inner is not None and inner.is_completed() else None
        except RuntimeError as error:
            return error

    def settle(self, error: BaseException | None) -> bool:
        """Record the end if the device is done or its group has failed; return whether it has.

        A failure aborts the attempt, because nothing else would end the device's wait.
        """
        # This order matters: the training thread sets the mark before it releases the work.
        inner, end = self.inner, self.end
        if inner is None and end is None:
            return self.is_refused
        if error is None:
            try:
                if not (inner.is_completed() if end is None else end.is_reached()):
                    return False
            except RuntimeError as failure:
                error = failure
            else:
                error = self.failure()
        aborted = self.calls[-1].attempt.aborted.is_set()
        for call in self.calls:
            if error is None:
                call.end(ABORTED if aborted else FINISHED)
            elif isinstance(found := call.failed(error), CollectiveError):
                call.attempt.fail(found)
        return True


class StreamWork(dist.Work):
    """Collectives in flight on a device. ``wait`` only orders streams, as NCCL's does.

    ``wait`` does not give the host the device's position, so the attempt polls ``in_flight``,
    starting before ``begin``. ``waits_at_once`` says whether torch waits in the call, so that the
    caller's stream has no work between the collectives' start and their end.
    """

    def __init__(self, calls: Sequence[Call], *, waits_at_once: bool = False) -> None:
        super().__init__()
        self.in_flight = InFlight(calls)
        self._last = calls[-1]
        self._waits_at_once = waits_at_once
        self._inner: Any = None

    def begin(self, begin: Callable[[], Any]) -> None:
        """Call NCCL, which returns its work."""
        try:
            self._inner = self.in_flight.inner = begin()
        except RuntimeError as error:
            self.in_flight.is_refused = True
            if self._last.attempt.aborted.is_set():
                raise self._last.aborted() from error
            raise

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait for the collective; return True."""
        call = self._last
        if call.attempt.aborted.is_set():
            raise call.aborted()
        call.attempt.note_call()
        try:
            done = bool(self._inner.wait(timeout) if timeout else self._inner.wait())
        except RuntimeError as error:
            raise call.failed(error) from error
        # The work may only be released after the caller's own wait. torch drops the inputs that it
        # keeps for NCCL as soon as any stream has waited, and the caller's stream could then reuse
        # their memory.
        if self._waits_at_once and self.in_flight.end is None:
            self.in_flight.end = nccl.Start()
        return done

    def is_completed(self) -> bool:
        """Return whether the device is done."""
        return bool(self._inner.is_completed())

    def is_success(self) -> bool:
        """Return whether the device is done and nothing failed."""
        return self.is_completed() and _failure(self._inner) is None

    def exception(self) -> Any:
        """Return the device's error, or None."""
        return _failure(self._inner) if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        """Return the inner work's tensors."""
        return list(self._inner.result())

    def synchronize(self) -> None:
        """Order the current stream after the collective."""
        self._last.attempt.note_call()
        self._inner.synchronize()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the inner work's future, which orders streams as NCCL's does."""
        future: torch.futures.Future[Any] = self._inner.get_future()
        return future


def _failure(inner: Any) -> BaseException | None:
    """Return the error of a finished NCCL work, or None.

    A work also has ``exception`` and ``is_success``, but a call from Python always raises an error.
    """
    result = inner.get_future_result()
    if not result.done() or result.value() == _SUCCESS:
        return None
    try:
        inner.wait()
    except RuntimeError as error:
        return error
    return RuntimeError(f"NCCL says {result.value()}")


def _first_line(error: Any) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
