"""Some of the moments of ``tests/chaos/test_killed_at_every_moment.py``, which tries them all."""

from contextlib import closing
from pathlib import Path

import pytest

from tests.support.doomed_cluster import Cluster
from tests.support.doomed_scenarios import COPY, SCENARIOS
from tests.support.snapshots import eventually

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("copying", 3),
        ("being copied", 2),
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


def test_ranks_go_on_soon_after_the_keeper_that_copied_them_was_killed(tmp_path: Path) -> None:
    """Or after their own was: neither is there to say that copying has stopped.

    The last word of their own keeper expires by the clock, whatever else happens.
    """
    with closing(Cluster(tmp_path, 2, COPY)) as cluster:
        cluster.begin(range(2), resume=0)
        own, other = cluster.arenas[0], cluster.arenas[1]
        assert eventually(lambda: own.is_followed() and other.is_followed())
        cluster.nodes[1].kill()
        cluster.take(1)

        assert eventually(lambda: not own.copy_behind())
        assert eventually(lambda: not other.copy_behind(), within_s=3.0)
