"""A cluster without processes: workers do what they are told, on nodes of two. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.core import RunRules, RunState, step
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from ucp_core.layout import ParallelLayout

#: Returns the error and what it says of the layout, if a layout cannot train.
Refuses = Callable[[ParallelLayout], tuple[str, str] | None]


def nothing(_: ParallelLayout) -> None:
    """Refuse no layout."""


def fold(state: RunState, *events: ev.Event, rules: RunRules) -> tuple[RunState, list[act.Action]]:
    """Return the state after all events, and the actions of all of them."""
    ordered: list[act.Action] = []
    for event in events:
        state, actions = step(state, event, rules=rules)
        ordered += actions
    return state, ordered


@dataclass
class Cluster:
    """Workers that do what they are told, but refuse some layouts."""

    rules: RunRules
    refuses: Refuses = nothing
    step_s: Callable[[ParallelLayout], float] = lambda _: 0.1
    state: RunState = field(default_factory=RunState)
    at_s: float = 0.0
    started: list[act.StartAttempt] = field(default_factory=list)
    incidents: list[act.ReportIncident] = field(default_factory=list)
    finished: act.FinishRun | None = None

    def start(self, num_workers: int) -> None:
        """Start a run on so many workers."""
        self.send(ev.ControllerStarted(at_s=self.at_s, incarnation=1))
        self.add(*range(1, num_workers + 1))
        self.tick(self.rules.bounds.grace_s)

    def add(self, *workers: int) -> None:
        """Let workers join, by number."""
        for number in workers:
            node = f"n{(number - 1) // 2}"
            self.send(ev.ReservationGranted(at_s=self.at_s, reservation=number, node=node))
            worker = f"w{number:04d}"
            self.send(ev.WorkerReady(at_s=self.at_s, worker=worker, node=node, pid=number))

    def tick(self, seconds: float) -> None:
        """Let time pass."""
        self.at_s += seconds
        self.send(ev.Ticked(at_s=self.at_s))

    def train(self, num_steps: int) -> None:
        """Make steps in the attempt."""
        for _ in range(num_steps):
            attempt = self.state.attempt
            assert attempt.layout is not None
            self.at_s += self.step_s(attempt.layout)
            self.send(self._step(attempt.number, attempt.step + 1, attempt.layout))

    def lose(self, node: str) -> None:
        """Lose a node."""
        self.send(ev.NodeLost(at_s=self.at_s, node=node, cause="gone"))

    def send(self, *events: ev.Event) -> None:
        """Fold events, and what the cluster answers to the actions that follow."""
        todo = list(events)
        while todo:
            self.state, actions = step(self.state, todo.pop(0), rules=self.rules)
            for action in actions:
                todo += self._answer(action)

    def _answer(self, action: act.Action) -> list[ev.Event]:
        if isinstance(action, act.StartAttempt):
            self.started.append(action)
            return self._train(action)
        if isinstance(action, act.FenceAttempt | act.YieldAttempt):
            number, done, at_s = action.attempt, self.state.attempt.step, self.at_s
            is_asked = isinstance(action, act.YieldAttempt)
            how = ev.Leaving.YIELDED if is_asked else ev.Leaving.FENCED
            return [
                ev.WorkerLeft(
                    at_s=at_s, attempt=number, worker=worker, how=how, step=done, detail=""
                )
                for worker in action.workers
            ]
        if isinstance(action, act.ReadCommitted):
            committed = self.state.attempt.step, action.attempt
            read = ev.CommittedRead(
                at_s=self.at_s,
                attempt=action.attempt,
                step=committed[0],
                committed_by=committed[1] if committed[0] else 0,
                skipped=(),
                number=action.number,
            )
            return [read]
        if isinstance(action, act.ReportIncident):
            self.incidents.append(action)
        if isinstance(action, act.FinishRun):
            self.finished = action
        return []

    def _train(self, start: act.StartAttempt) -> list[ev.Event]:
        refusal = self.refuses(start.layout)
        workers = [worker for worker, _, _ in start.members]
        if refusal is None:
            formed = [
                ev.WorkerFormed(at_s=self.at_s, attempt=start.attempt, worker=worker)
                for worker in workers
            ]
            number = start.resume_step + 1
            return [*formed, self._step(start.attempt, number, start.layout)]
        error, refuses = refusal
        return [
            ev.WorkerRaised(
                at_s=self.at_s,
                attempt=start.attempt,
                worker=worker,
                step=start.resume_step + 1,
                error=error,
                traceback=error,
                refuses=refuses,
            )
            for worker in workers
        ]

    def _step(self, attempt: int, step: int, layout: ParallelLayout) -> ev.StepCompleted:
        step_s = self.step_s(layout)
        return ev.StepCompleted(at_s=self.at_s, attempt=attempt, step=step, step_s=step_s)

    @property
    def layouts(self) -> list[str]:
        """Return the layouts of all attempts."""
        return [str(start.layout) for start in self.started]
