"""All 349 days of the outages of 400 servers, through the real machine."""

from __future__ import annotations

import logging

import pytest

from tests.simulation.test_outages import check, replay

pytestmark = pytest.mark.timeout(3600)


@pytest.mark.parametrize("num_spare", [0, 20])
def test_a_run_of_400_servers_lives_through_a_year(num_spare: int) -> None:
    """A budget by the hour must hold when 35 servers are broken at once."""
    world, faults = replay(400, 349.0, num_spare=num_spare)

    lived_s = world.now_s * (400 - num_spare)
    logging.getLogger(__name__).info(
        "%d faults, %s, at most %d failures within an hour, trained %.4f of the time",
        len(faults), dict(world.kinds), world.charged_max, world.trained_s / lived_s,
    )  # fmt: skip
    assert len(faults) == 584
    check(world, faults)
