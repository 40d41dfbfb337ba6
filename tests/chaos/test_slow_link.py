"""A link that gets slow under a run: who says so, and what becomes of it."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.network_cluster import NetworkCluster, why_not
from tests.support.network_runs import NetworkRun

log = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be made"),
]


def test_members_change_places_around_a_slow_link_that_was_suspected(tmp_path: Path) -> None:
    """In a ring of three each rank sends to one other, and the other way round avoids the link."""
    with NetworkCluster(3) as cluster:
        for machine in cluster.machines():
            cluster.limit(machine, "1gbit")
        run = NetworkRun(cluster, tmp_path / "run", "workers.max=3", "train.global_batch=12")
        run.settle(workers=3, steps=30)
        target, source, _ = run.ranks()

        cluster.slow_link(source, target, "4mbit")
        slowed_s = time.time()
        suspected = run.wait("a suspicion", lambda: _first(run, "Suspected", slowed_s))
        moved = run.wait("another order", lambda: _first(run, "ReportIncident", slowed_s))
        line = run.settle(workers=3)
        folders = sorted((tmp_path / "run/incidents").glob("*/incident.json"))

    log.info("suspected after %.1f s", suspected["wall_time"] - slowed_s)
    log.info("in another order after %.1f s, then %s", moved["wall_time"] - slowed_s, line)
    (one,) = suspected["suspects"]
    assert (one["kind"], one["guilty"]["links"]) == ("slow_link", [[1, 0]])
    assert (moved["incident"], moved["verdict"], moved["guilty"]) == ("move", "slow_link", [])
    assert [each["guilty"] for each in json.loads(folders[-1].read_text())["suspects"]] == [
        one["guilty"]
    ]
    # Generous: the machine of a test is shared. The bar is ten.
    assert suspected["wall_time"] - slowed_s < 25.0


def _first(run: NetworkRun, kind: str, since_s: float) -> dict[str, Any] | None:
    found = (record for record in run.journal() if record["kind"] == kind)
    return next((record for record in found if record["wall_time"] > since_s), None)
