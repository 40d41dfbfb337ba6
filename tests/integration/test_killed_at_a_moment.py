"""Some of the moments of ``tests/chaos/test_killed_at_every_moment.py``, which tries them all."""

from contextlib import closing
from pathlib import Path

import pytest

from tests.support.doomed_cluster import Cluster
from tests.support.doomed_scenarios import SCENARIOS

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("copying", 3),
        ("making two parities, with another of its group", 2),
        ("loaded from, beside parities", 1),
        ("protecting again by two parities", 2),
        ("storing", 8),
    ],
)
def test_a_node_is_lost_in_the_middle(name: str, after: int, tmp_path: Path) -> None:
    """Half a copy, half a parity, half a file, half a load: none of them is ever taken."""
    scenario = BY_NAME[name]
    with closing(Cluster(tmp_path, scenario.num_nodes, scenario.protect)) as cluster:
        scenario.begin(cluster, after)
        scenario.act(cluster)
        assert not cluster.nodes[0].is_alive, "it did not come to that"
        scenario.check(cluster)
