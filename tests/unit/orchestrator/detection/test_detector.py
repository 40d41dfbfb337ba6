"""What the detector keeps of nodes, and for how long."""

from __future__ import annotations

from orchestrator.detection import without_silent
from tests.support.histories import WORKERS, calm, watch

ON_TWO_NODES = dict(zip(WORKERS, ("n0", "n0", "n1", "n1"), strict=True))


def test_a_silent_node_without_a_member_is_forgotten() -> None:
    """On spot capacity nodes come and go for weeks, and every report would go through them all."""
    rows = [calm(worker, rank) for rank, worker in enumerate(WORKERS)]
    state, at_s = watch(rows, for_s=1.0, node_of=ON_TWO_NODES)
    state, _ = watch(rows[:2], for_s=5.0, state=state, from_s=at_s + 0.25)

    assert set(without_silent(state, WORKERS[:2], 5.0).nodes) == {"n0"}
    assert set(without_silent(state, WORKERS[:2], 6.0).nodes) == {"n0", "n1"}
    assert set(without_silent(state, WORKERS[:3], 5.0).nodes) == {"n0", "n1"}
