"""The traces of the spot market, and the arithmetic beside the benchmark that replays them."""

import pytest

from tests.support.spot_traces import (
    TRACES,
    Change,
    Costs,
    node_hours,
    piece,
    replayed,
    scaled,
    spot_trace,
)

FREE = Costs(loss=0.0, growth=0.0)
#: Four nodes; two are lost after 10, and one comes after 20.
TRACE = [Change(0.0, 4), Change(10.0, 2), Change(20.0, 3)]


@pytest.mark.parametrize(
    ("name", "hours", "most"),
    [("p3", 11, 32), ("g4dn", 10, 24), ("v100", 22, 80), ("a100", 26, 64)],
)
def test_a_trace_has_the_nodes_that_its_source_tells_of(name: str, hours: int, most: int) -> None:
    """A sample that is noted twice must not count as two changes."""
    trace = spot_trace(name)
    eight = scaled(trace, 8)

    assert int(trace[-1].at) == hours
    assert max(change.num_nodes for change in trace) == most
    assert {change.num_nodes for change in eight} <= set(range(1, 9))
    assert max(change.num_nodes for change in eight) == 8
    assert len(TRACES) == 4


def test_a_piece_begins_with_the_nodes_that_are_there_then() -> None:
    """The change before it counts, and no later one is moved."""
    assert piece(TRACE, 5.0, 20.0) == [Change(0.0, 4), Change(5.0, 2)]
    assert piece(TRACE, 10.0, 21.0) == [Change(0.0, 2), Change(10.0, 3)]


def test_a_policy_without_costs_uses_all_nodes_all_the_time() -> None:
    """Otherwise the arithmetic loses time that no cost explains."""
    assert node_hours(TRACE, 30.0) == 40 + 20 + 30
    assert replayed(TRACE, 30.0, FREE) == 1.0


@pytest.mark.parametrize(
    ("costs", "lost"),
    [
        (Costs(loss=3.0, growth=0.0), 2 * 3.0),
        (Costs(loss=0.0, growth=3.0), 3 * 3.0),
        (Costs(loss=0.0, growth=0.0, join=4.0), 4.0),
        (Costs(loss=0.0, growth=1.0, join=4.0), 4.0 + 3 * 1.0),
        # All stand still until the newcomer is ready, and longer.
        (Costs(loss=15.0, growth=0.0), 2 * 10.0 + 3 * 5.0),
        (Costs(loss=12.0, growth=0.0, join=1.0), 2 * 10.0 + 3 * 2.0),
    ],
)
def test_each_cost_is_paid_by_the_nodes_that_wait(costs: Costs, lost: float) -> None:
    """A peer would look worse, or better, than its measured times make it."""
    assert replayed(TRACE, 30.0, costs) == pytest.approx(1 - lost / 90)


def test_growths_keep_their_interval() -> None:
    """Two newcomers 5 apart, and growths only every 8: the second waits for 3."""
    trace = [Change(0.0, 1), Change(10.0, 2), Change(15.0, 3)]

    costs = Costs(loss=0.0, growth=0.0, interval=8.0)

    assert replayed(trace, 20.0, costs) == pytest.approx(1 - 3.0 / node_hours(trace, 20.0))
