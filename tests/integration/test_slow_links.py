"""Slow links between machines made of namespaces, as keepers' transfers show them."""

from collections.abc import Iterator

import pytest

from orchestrator.diagnosis import links
from orchestrator.fault_kinds import FaultKind
from tests.support.fabric import why_not
from tests.support.link_lab import LinkLab

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be made")


@pytest.fixture(scope="module")
def lab() -> Iterator[LinkLab]:
    """Four machines with keepers; none trains."""
    with LinkLab(4) as made:
        yield made


def _timed(lab: LinkLab) -> dict[links.Pair, float]:
    return {pair: lab.rate(*pair) for pairs in links.rounds(lab.nodes) for pair in pairs}


@pytest.mark.parametrize(
    "kind", [FaultKind.SLOW_LINK, FaultKind.SLOW_SENDER, FaultKind.SLOW_RECEIVER]
)
def test_link_sender_and_receiver_are_told_apart(lab: LinkLab, kind: FaultKind) -> None:
    """Training shows that m2 sends slowly to m1."""
    if kind is FaultKind.SLOW_LINK:
        lab.slow_link("m2", "m1", 30.0)
    elif kind is FaultKind.SLOW_SENDER:
        lab.slow_sender("m2", 30.0)
    else:
        lab.slow_receiver("m1", 30.0)
    try:
        # A busy machine makes the fast ones slow, too: the better of two counts, as in a run.
        first, second = _timed(lab), _timed(lab)
    finally:
        lab.heal()
    rates = {pair: max(first[pair], second[pair]) for pair in first}

    ranks = {node: (rank,) for rank, node in enumerate(lab.nodes)}
    (found,) = links.slow(rates, [("m2", "m1")], ranks, {})

    assert found.kind is kind, rates
    if kind is FaultKind.SLOW_LINK:
        assert found.guilty.links == ((2, 1),)
    else:
        assert found.guilty.nodes == ("m2" if kind is FaultKind.SLOW_SENDER else "m1",)
