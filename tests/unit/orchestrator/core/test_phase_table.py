import pytest

from orchestrator.core import Phase, RunRules, consequences
from orchestrator.core import events as ev
from orchestrator.core.phase_table import TABLE, row
from orchestrator.core.state import EDGES, TERMINAL, MutableRunState
from orchestrator.core.transition import Handler, Transition
from orchestrator.core.values import kinds
from tests.support import phase_table


def test_every_event_and_consequence_has_a_row() -> None:
    """The dispatch is a table, so the type checker does not see a kind that was forgotten."""
    within = {each for each in vars(consequences).values() if hasattr(each, "_fields")}
    assert set(TABLE) == {*kinds(ev, ev.Event).values(), *within}
    assert len(within) == 11


def test_the_document_shows_the_table() -> None:
    """Readers look there for what a partition or a notice does in each phase."""
    assert phase_table.written() == phase_table.markdown(), (
        "run `python -m tests.support.phase_table`"
    )


def test_the_more_special_word_counts() -> None:
    def handlers(name: str) -> Handler:
        def handle(_transition: Transition, _what: object) -> None: ...

        handle.__name__ = name
        return handle

    found = row(handlers("every"), active=handlers("active"), training=handlers("training"))

    assert {phase.value: handler.__name__ for phase, handler in found.items()} == {
        "waiting": "every",
        "forming": "active",
        "training": "training",
        "yielding": "active",
        "fencing": "every",
        "reading": "every",
    }


@pytest.mark.parametrize("phase", sorted(TERMINAL))
def test_a_run_that_is_over_stays_so(phase: Phase) -> None:
    assert not EDGES[phase]
    run = MutableRunState(phase=phase)
    transition = Transition(
        run, RunRules(run="r", min_workers=1, max_workers=1, total_steps=1), 0.0, TABLE
    )

    with pytest.raises(AssertionError, match="-> forming"):
        transition.enter(Phase.FORMING, 1.0)
