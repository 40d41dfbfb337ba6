"""The same as in ``tests/integration/test_collectives_hang.py``, often and at random moments."""

import random
from pathlib import Path

import pytest

from tests.support.ranks import running
from tests.support.training import NUM_RANKS, Watch, finish, stop_and_find, train


@pytest.mark.timeout(300)
def test_twenty_stops_are_named_right(tmp_path: Path) -> None:
    """One healthy rank named in 20 would be one healthy machine lost a day on a large cluster."""
    choose = random.Random(20)
    with running(train, NUM_RANKS, tmp_path) as ranks:
        watch = Watch(ranks)
        stopped = [choose.randrange(NUM_RANKS) for _ in range(20)]
        named = [stop_and_find(ranks, watch, rank).guilty for rank in stopped]
        steps = finish(ranks, tmp_path)

    assert named == [(f"w{rank}",) for rank in stopped]
    assert len(set(steps)) == 1
