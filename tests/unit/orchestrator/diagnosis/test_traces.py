"""Generated traces: only the planted rank or link is named; unevenness is no fault."""

import pytest

from tests.support.traces import CLEAN, PLANTED, answer, clean, planted


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_fault_is_named_and_no_other(kind: str) -> None:
    trace = planted(kind, seed=0)

    assert answer(trace) == [(trace.kind, trace.ranks, trace.links)], trace.what


@pytest.mark.parametrize("kind", CLEAN)
def test_a_run_without_a_fault_names_no_rank(kind: str) -> None:
    trace = clean(kind, seed=0)

    assert answer(trace) == [], trace.what


def test_transfers_of_uneven_tokens_are_no_slow_links() -> None:
    """They cost next to nothing of a step, so their sizes say nothing about it."""
    trace = clean("tokens_unsaid", seed=77017)

    assert answer(trace) == [], trace.what
