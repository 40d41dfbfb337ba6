"""Hurts a job from outside: by the pids and nodes of its lines, without a word to the peer."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from tests.benchmarks.peers.events import Event, Follower, Outside
from tests.benchmarks.peers.processes import NODES, Job, kill
from tests.benchmarks.peers.progress import Done, first_after, whole_steps

FAULTS: Final = {
    "none": "no fault",
    "kill": "SIGKILL for a worker",
    "stop": "SIGSTOP for a worker",
    "node": "SIGKILL for all processes of a node, which comes back once the job goes on",
    "second": "SIGKILL for a worker, and for another one as soon as a process begins again",
    "restart": "the whole job is stopped in order, and started again",
    "power-off": "a node falls silent in its network namespace",
}
NOT_RUN: Final = {"power-off": "not run: the arms' nodes are processes, not namespaces"}
WORKERS: Final = 4
#: Steps with all workers before a fault; and as many more as chance says, fewer than ``SPREAD``:
#: right behind a checkpoint a fault would cost more or fewer steps.
SETTLED, SPREAD = 5, 10
#: So many steps behind the newest one the job ends, once all faults are done.
AHEAD: Final = 30
START_S_MAX, SECOND_S_MAX = 180.0, 1.0
_POLL_S: Final = 0.05
_T = TypeVar("_T")


@dataclass(slots=True)
class Victims:
    """Chooses whom to hurt: on each node alike, since some peers avoid a node that fails more."""

    seed: int
    hurt: Counter[str] = field(default_factory=Counter)

    def worker(self, members: Sequence[tuple[int, str]], *, but: int = 0) -> tuple[int, str]:
        """Return pid and node of a worker on the node that was hurt least so far.

        Args:
            members: Pid and node of all.
            but: This one is hurt already.
        """
        chance = random.Random(f"{self.seed} {self.hurt.total()}")
        others = [one for one in sorted(members) if one[0] != but]
        chosen = min(others, key=lambda one: (self.hurt[one[1]], chance.random()))
        self.hurt[chosen[1]] += 1
        return chosen

    def node(self) -> str:
        """Return the node that was hurt least so far."""
        chosen = min(NODES, key=lambda one: (self.hurt[one], one))
        self.hurt[chosen] += 1
        return chosen


class Injector:
    """Plays one cell: starts a job, hurts it some times, and waits until it is over.

    Args:
        steps: Steps of a job without a fault.
        faults: How many faults at most.
        limit_s: A job that has not gone on by then is helped, and the fault counts as not survived.
    """

    def __init__(
        self, job: Job, outside: Outside, *, seed: int, steps: int, faults: int, limit_s: float
    ) -> None:
        self._job, self._outside = job, outside
        self._steps, self._faults, self._limit_s = steps, faults, limit_s
        self._victims, self._chance = Victims(seed), random.Random(seed)
        self._lines = Follower(job.events)
        self._settled_s = 0.0

    def play(self, fault: str) -> None:
        """Run the job to its end, with ``fault`` as often as there is room for it."""
        self._outside.write("launch")
        if fault == "none":
            self._job.end_at(self._steps)
        self._job.start()
        for _ in range(0 if fault == "none" else self._faults):
            begin = self._wait(self._settle(self._chance.randrange(SPREAD)), START_S_MAX)
            if begin is None:
                break
            self._hurt(fault, begin)
        if fault != "none":
            self._wait(self._settle(0))
            steps = (x["step"] for x in self._lines.lines() if x["event"] == "committed")
            self._job.end_at(max(steps, default=0) + AHEAD)
        self._finish()

    def _hurt(self, fault: str, before: Done) -> None:
        """Inject a fault and wait until the job goes on; help it if it does not."""
        stopped, node = self._inject(fault, before)
        harmed_s = time.time()
        self._outside.write("harmed")
        after = self._wait(lambda: first_after(whole_steps(self._lines.lines(harmed_s)), harmed_s))
        is_over = after is None and self._job.poll() is not None
        if after is None:
            self._outside.write("helped", fault=fault)
        kill(stopped)
        if node and (self._job.arm.job or not is_over):
            self._job.start_node(node)
        if is_over:
            self._job.resume()
        self._settled_s = time.time()

    def _inject(self, fault: str, before: Done) -> tuple[list[int], str]:
        """Do it; return processes that must be killed afterwards and the node to bring back."""
        if fault == "restart":
            self._tell(fault, before)
            self._job.stop()
            self._job.resume()
            return [], ""
        if fault == "node":
            node = self._victims.node()
            # Looking for them takes a while, in which the fault has not come yet.
            found = self._job.owned(node)
            self._tell(fault, before, node)
            kill(found)
            self._job.kill_node(node)
            return [], node
        pid, _ = self._victims.worker(before.pids)
        fault_s = self._tell(fault, before, pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
        if fault == "second":
            self._wait(lambda: self._began(fault_s), SECOND_S_MAX)
            second, _ = self._victims.worker(before.pids, but=pid)
            kill([second])
        return [pid] if fault == "stop" else [], ""

    def _tell(self, fault: str, before: Done, *victims: Any) -> float:
        """Put on record that a fault comes now; return the time."""
        fault_s = time.time()
        self._outside.write("fault", fault=fault, step=before.step, victims=victims, at_s=fault_s)
        return fault_s

    def _began(self, fault_s: float) -> Event | None:
        lines = self._lines.lines(fault_s)
        return next((x for x in lines if x["event"] == "start"), None)

    def _settle(self, more: int) -> Callable[[], Done | None]:
        def settled() -> Done | None:
            done = whole_steps(self._lines.lines(self._settled_s))
            whole = [one for one in done if one.world == WORKERS]
            if not whole or done[-1].world != WORKERS:
                return None
            last = done[-1]
            same = [one for one in whole if one.group == last.group]
            return last if len(same) >= SETTLED + more else None

        return settled

    def _wait(self, found: Callable[[], _T | None], limit_s: float | None = None) -> _T | None:
        """Return the first answer; None if the job is over, or the limit has passed."""
        deadline_s = time.monotonic() + (self._limit_s if limit_s is None else limit_s)
        while True:
            is_over = self._job.poll() is not None
            answer = found()
            if answer is not None or is_over or time.monotonic() > deadline_s:
                return answer
            time.sleep(_POLL_S)

    def _finish(self) -> None:
        """Wait for the end as long as the job makes progress."""
        seen, since_s = 0, time.monotonic()
        while (code := self._job.poll()) is None:
            done = len(self._lines.lines())
            if done > seen:
                seen, since_s = done, time.monotonic()
            if time.monotonic() - since_s > (self._limit_s if seen else START_S_MAX):
                break
            time.sleep(0.2)
        self._outside.write("over", exit_code=code)
