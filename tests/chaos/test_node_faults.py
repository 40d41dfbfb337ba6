"""All 349 days of the outages of a cluster, through the real machine."""

import logging

import pytest

from tests.simulation.test_outages import check, replay

pytestmark = pytest.mark.timeout(3600)


@pytest.mark.parametrize(("num_servers", "num_spare"), [(400, 40), (100, 0)])
def test_a_run_lives_through_a_year_of_real_outages(num_servers: int, num_spare: int) -> None:
    """A budget by the hour must hold when 35 of 400 servers are broken at once."""
    world, faults = replay(num_servers, 349.0, num_spare=num_spare)

    lived_s = world.now_s * (num_servers - num_spare)
    logging.getLogger(__name__).info(
        "%d faults; incidents %s, at most %d failures within an hour; trained %.4f of the time",
        len(faults), dict(world.kinds), world.charged_max, world.trained_s / lived_s,
    )  # fmt: skip
    assert len(faults) > num_servers
    check(world, faults)
