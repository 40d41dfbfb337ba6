"""Compares the journal's numbers with the truth of the virtual cluster."""

from collections.abc import Sequence

from orchestrator.core import RunState, RunStats, transition_records
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from tests.simulation.history import History

NUM_HISTORIES = 300
#: Tolerance for sums of a whole run.
_ROUNDING_S = 1e-6


class _Books:
    """Folds the journal of a history, and notes whether rank 0 told of each attempt's end."""

    def __init__(self) -> None:
        self.stats = RunStats()
        self.is_told = True
        self._first: tuple[int, str] | None = None
        self._left: set[tuple[int, str]] = set()

    def take(self, event: ev.Event, state: RunState, actions: Sequence[act.Action]) -> None:
        if isinstance(event, ev.WorkerLeft | ev.WorkerRaised):
            others = event.others if isinstance(event, ev.WorkerLeft) else ()
            self._left |= {(event.attempt, worker) for worker in (event.worker, *others)}
        for action in actions:
            if isinstance(action, act.StartAttempt):
                self.is_told &= self._first in {None, *self._left}
                self._first = (action.attempt, action.members[0][0])
        for record in transition_records(event, actions, attempt=state.attempt.number):
            self.stats.add(record)
            parts_s = self.stats.parts_s.values()
            assert min(parts_s) > -_ROUNDING_S
            assert abs(sum(parts_s) - self.stats.wall_s) < _ROUNDING_S


def test_lost_steps_are_those_that_were_redone_and_the_time_adds_up() -> None:
    """Reports of steps come late or are lost, so whoever leaves has to be believed."""
    num_compared = num_lost = 0
    for seed in range(NUM_HISTORIES):
        books = _Books()
        truth = History(seed, observe=books.take).run().num_lost_steps
        stats = books.stats
        assert sum(each.lost_steps for each in stats.incidents) == stats.lost_steps, seed
        assert stats.lost_steps <= truth, seed
        if books.is_told:
            assert stats.lost_steps == truth, seed
            num_compared, num_lost = num_compared + 1, num_lost + truth

    assert num_compared > NUM_HISTORIES / 4
    assert num_lost > NUM_HISTORIES / 10
