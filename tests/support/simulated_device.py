"""A device with a queue for computation and one for copies, worked off as chance has it."""

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.memory import Mark

WAIT_S_MAX = 20.0


@dataclass(eq=False)
class Task:
    """The work that the device got, and a mark after it."""

    run: Callable[[], object]
    after: tuple[Mark, ...] = ()
    done: threading.Event = field(default_factory=threading.Event)
    done_s: float = 0.0

    def wait(self) -> None:
        assert self.done.wait(WAIT_S_MAX), "the device never came there"

    def is_reached(self) -> bool:
        return self.done.is_set()

    def since(self, other: Mark) -> float:
        assert isinstance(other, Task)
        assert self.is_reached()
        assert other.is_reached()
        return self.done_s - other.done_s

    @property
    def may_run(self) -> bool:
        return all(isinstance(mark, Task) and mark.done.is_set() for mark in self.after)


class SimulatedDevice:
    """Runs one task at a time; which queue's, a seed says. A ``workers.memory.cuda.CopyStream``.

    Attributes:
        num_copies_max: The most copies that were under way at once.
        num_asked: How many copies were asked for.
        num_marks: How many marks.
        fails_at: Which of them is refused.
        bytes_copied: By all copies.
        history: "copy" and "gap" for each one done, in order, beside what computations put there.
        now_s: The time by its clock, which computations move.
    """

    def __init__(self, seed: int, *, computes_first: bool = False) -> None:
        self._random = random.Random(seed)
        self._computes_first = computes_first
        self._changed = threading.Condition()
        self._computation: deque[Task] = deque()
        self._copies: deque[Task] = deque()
        self._held: tuple[Mark, ...] = ()
        self._ends = False
        self.history: list[str] = []
        self.now_s = 0.0
        self.num_copies_max = self.num_asked = self.fails_at = self.bytes_copied = 0
        self.num_marks = 0
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def compute(self, run: Callable[[], object]) -> Task:
        """Ask for a computation, behind those before and what ``hold`` named."""
        with self._changed:
            task = Task(run, self._held)
            self._held = ()
            self._computation.append(task)
            self._changed.notify()
            return task

    def mark(self) -> Mark:
        self.num_marks += 1
        return self.compute(lambda: None)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Mark | None) -> Mark:
        self.num_asked += 1
        if self.num_asked == self.fails_at:
            raise torch.OutOfMemoryError("no memory")

        def run() -> None:
            self.history.append("copy")
            for target, source in pairs:
                target.copy_(source)
                self.bytes_copied += target.numel() * target.element_size()

        with self._changed:
            task = Task(run, () if after is None else (after,))
            self._copies.append(task)
            self.num_copies_max = max(self.num_copies_max, len(self._copies))
            self._changed.notify()
            return task

    def hold(self, mark: Mark) -> None:
        self._held = (*self._held, mark)

    def gap(self) -> None:
        with self._changed:
            self._copies.append(Task(lambda: self.history.append("gap")))
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._ends = True
            self._changed.notify()
        self._thread.join(WAIT_S_MAX)

    def _work(self) -> None:
        while (found := self._next()) is not None:
            queue, task = found
            task.run()
            with self._changed:
                queue.popleft()
            task.done_s = self.now_s
            task.done.set()

    def _next(self) -> tuple[deque[Task], Task] | None:
        with self._changed:
            while True:
                queues = (self._computation, self._copies)
                ready = [queue for queue in queues if queue and queue[0].may_run]
                if ready:
                    queue = ready[0] if self._computes_first else self._random.choice(ready)
                    return queue, queue[0]
                if self._ends:
                    return None
                self._changed.wait()
