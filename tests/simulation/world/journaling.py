"""The simulated journal and its compaction, and how a controller restarts from them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from random import Random

from orchestrator.core import (
    Compaction,
    Folded,
    JournalPlace,
    RunRules,
    RunState,
    RunStats,
    fold_on,
    transition_records,
    verify,
)
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.core.log.journal_lines import counted
from orchestrator.errors import CompactionError
from tests.simulation.violation import require

#: Chance that a compaction is written behind an event, and that it is damaged when it is needed.
_MARK = 0.2
_DAMAGE = 0.1

_TORN = b'{"v":1,"se'


@dataclass(eq=False)
class _Transition:
    event: ev.Event
    actions: Sequence[act.Action]
    attempt: int
    seq: int

    @cached_property
    def lines(self) -> list[bytes]:
        records = transition_records(self.event, self.actions, attempt=self.attempt)
        return [
            json.dumps({**record, "seq": seq, "wall_time": 0.0}).encode() + b"\n"
            for seq, record in enumerate(records, start=self.seq)
        ]


class SimJournal:
    """The journal since a run started or was resumed. Lines are made when they are read.

    Args:
        seed: Seed of the history; what is drawn here changes nothing else in it.
        is_thorough: Whether to compare every restart with a fold of the whole journal, and the
            numbers of the run too.
    """

    def __init__(self, seed: int, rules: RunRules, *, is_thorough: bool) -> None:
        self._rng = Random(f"journal {seed}")
        self._rules = rules
        self._is_thorough = is_thorough
        self.resume()

    def resume(self) -> None:
        """Begin the journal of a run that was resumed."""
        self._transitions: list[_Transition] = []
        #: Places in ``_transitions`` at which an incarnation ends.
        self._ends: list[int] = []
        self._seq = 0
        self._marked: tuple[int, RunState] | None = None

    @cached_property
    def _basis(self) -> str:
        return repr(self._rules)

    def add(self, event: ev.Event, state: RunState, actions: Sequence[act.Action]) -> None:
        """Take in an event, the state after it, and the actions that it led to."""
        if isinstance(event, ev.ControllerStarted) and self._transitions:
            self._ends.append(len(self._transitions))
        self._transitions.append(_Transition(event, actions, state.attempt.number, self._seq))
        self._seq += len(counted(event, actions))
        if self._rng.random() < _MARK:
            self._marked = len(self._transitions), state

    def restored(self) -> RunState:
        """Return the state that a new incarnation begins with."""
        folded = self._restored()
        if self._is_thorough:
            whole = fold_on(Folded(), self._segments(), self._rules)
            # Equal tables may have another order, by which the run goes.
            require(repr(folded) == repr(whole), "L1", "a compaction does not lead to the state")
        return folded.state

    def replayed(self) -> RunState:
        """Return the state at the end, with every action compared."""
        state, _ = verify(self._segments(), self._rules)
        return state

    def _restored(self) -> Folded:
        if self._marked is None:
            return fold_on(Folded(), self._segments(), self._rules)
        number, state = self._marked
        try:
            found = Compaction.read(self._document(number, state), self._basis)
            behind = found.behind(self._segments(number))
        except CompactionError:
            return fold_on(Folded(), self._segments(), self._rules)
        return fold_on(found.folded, behind, self._rules)

    def _document(self, number: int, state: RunState) -> bytes:
        """Return the compaction behind so many transitions as it is found: it may be damaged."""
        transition = self._transitions[number - 1]
        stats = RunStats()
        if self._is_thorough:
            stats = fold_on(Folded(), self._segments(to=number), self._rules).stats
        marked = Compaction(
            basis=self._basis,
            # How large the segments are is the shell's business.
            place=JournalPlace(
                segment=1, before_bytes=0, end_bytes=0, line=transition.lines[-1].decode()
            ),
            folded=Folded(
                state=state,
                stats=stats,
                seq=transition.seq + len(transition.lines) - 1,
                at_s=transition.event.at_s,
            ),
        )
        document = marked.document()
        if self._rng.random() >= _DAMAGE:
            return document
        cut = self._rng.randrange(len(document))
        return document[:cut] + self._rng.choice((b"", b"0" + document[cut + 1 :]))

    def _segments(self, number: int = 0, to: int | None = None) -> list[bytes]:
        """Return one torn segment per incarnation, from the last line before a transition."""
        to = len(self._transitions) if to is None else to
        bounds = [number, *(end for end in self._ends if number < end < to), to]
        segments = [
            b"".join(
                line for transition in self._transitions[begin:end] for line in transition.lines
            )
            + _TORN
            for begin, end in pairwise(bounds)
        ]
        if number:
            segments[0] = self._transitions[number - 1].lines[-1] + segments[0]
        return segments
