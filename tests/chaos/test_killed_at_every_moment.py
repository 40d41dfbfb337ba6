"""A node dies at every moment of everything that it does for others, and the run loses nothing.

Each scenario is played once for every moment that it has: another change of memory, another chunk
on the wire, another call of storage. Then the rest of the nodes is asked what a run goes on from.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.doomed import Moment
from tests.support.doomed_cluster import Cluster
from tests.support.doomed_scenarios import COPY, MEMORY, SCENARIOS, Scenario, store

pytestmark = pytest.mark.timeout(900)

MOMENTS_MAX = 500


def played(directory: Path, scenario: Scenario) -> Iterator[Cluster]:
    """Yield a cluster for every moment of a scenario, in which its node died at that."""
    for after in range(MOMENTS_MAX):
        made = Cluster(directory / str(after), scenario.num_nodes, scenario.protect)
        with closing(made) as cluster:
            scenario.begin(cluster, after)
            scenario.act(cluster)
            died = not cluster.nodes[0].is_alive
            yield cluster
        if not died:
            assert after >= scenario.num_moments_min, "not every moment was counted"
            return
    pytest.fail("there are more moments than were tried")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_node_is_lost_at_every_moment(scenario: Scenario, tmp_path: Path) -> None:
    """Protected versions are loaded to the bit, and no other bytes are loaded."""
    steps = [scenario.check(cluster).step for cluster in played(tmp_path, scenario)]

    # The last one died behind all that was going on.
    assert steps[-1] == max(steps)


def test_a_version_is_committed_though_a_node_is_lost_at_any_moment_of_that(
    tmp_path: Path,
) -> None:
    """Its part may be half written, or whole without a witness: a node with a copy stores it."""
    for cluster in played(tmp_path, _storing(Moment.STORE)):
        cluster.lose(0)
        found = cluster.recover()
        cluster.begin((1, 2), resume=found.step)
        # It may be the last thing that the node did, before its part was copied.
        if found.source == MEMORY:
            assert any(node.flush(1, found.step) for node in cluster.left())

        assert cluster.stored() == (found.step, 1)


@pytest.mark.parametrize("moment", Moment)
def test_a_keeper_alone_is_killed_at_every_moment_and_its_successor_protects_again(
    moment: Moment, tmp_path: Path
) -> None:
    """Training goes on beside it; what waited to be stored is stored by the next one."""
    for cluster in played(tmp_path, _storing(moment)):
        cluster.revive(0)
        cluster.take(3)
        cluster.settle()
        assert cluster.stored() == (2, 1)
        cluster.lose(1)

        found = cluster.recover()
        assert (found.step, found.source) == (3, MEMORY)


def _storing(moment: Moment) -> Scenario:
    return Scenario(name="storing", num_nodes=3, protect=COPY, moment=moment, act=store)
