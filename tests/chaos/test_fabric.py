"""Keepers' copies over a fabric of two spines: both are used, and a slow one holds up no other."""

import time
from collections.abc import Iterator

import pytest

from tests.support.fabric import Fabric, why_not
from tests.support.fabric_copies import COPIER, HOLDER, Copies

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

MBIT_S = 100.0


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric(mbit_s=MBIT_S) as made:
        yield made


def _await_rate(fabric: Fabric, least_mbit_s: float, within_s: float) -> None:
    end_s = time.monotonic() + within_s
    while sum(rates := fabric.rate(COPIER, 0.5)) < least_mbit_s:
        assert time.monotonic() < end_s, rates


def test_copies_take_both_spines_and_what_is_left_of_a_slow_one(fabric: Fabric) -> None:
    """One hash would give the rate of one spine, or a tenth of it."""
    Copies(fabric)
    _await_rate(fabric, 1.7 * MBIT_S, 20.0)

    fabric.limit(0, MBIT_S / 10)
    _await_rate(fabric, 0.9 * 1.1 * MBIT_S, 5.0)
    fabric.limit(1, MBIT_S / 10)
    fabric.limit(0, MBIT_S)
    _await_rate(fabric, 0.9 * 1.1 * MBIT_S, 10.0)


def test_connections_are_hashed_over_the_spines_and_one_takes_one(fabric: Fabric) -> None:
    """The fabric itself: without this the other test shows nothing."""
    spines = {fabric.spine_of(HOLDER, COPIER, port, 4000) for port in range(20_000, 20_020)}
    assert spines == {0, 1}
    for spine in (0, 1):
        copies = Copies(fabric, spine)
        rates = fabric.rate(COPIER, 2.0)
        assert rates[spine] > 0.7 * MBIT_S
        assert rates[1 - spine] < 0.1 * MBIT_S
        copies.end()
