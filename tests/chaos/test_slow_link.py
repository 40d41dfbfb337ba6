"""A link that gets slow under a run: who says so, and what becomes of it."""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
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
    """Weights are gathered around the ring of ranks: in another order no neighbours have the link.

    gloo's all-to-all of gradients goes over all links, also then: a quarter of a rank's gradients.
    """
    with NetworkCluster(4) as cluster:
        for machine in cluster.machines():
            cluster.limit(machine, "1gbit")
        run = NetworkRun(cluster, tmp_path / "run")
        run.settle(steps=30)
        source, target, *_ = run.ranks()

        cluster.slow_link(source, target, "8mbit")
        slowed_s = time.time()
        suspected = run.wait("a suspicion", lambda: _first(run, "Suspected", slowed_s))
        moved = run.wait("another order", lambda: _first(run, "ReportIncident", slowed_s))
        run.first(lambda line: line["attempt"] == 2, 60.0)
        run.settle(steps=30)
        order, lines = run.ranks(), run.lines()
        folders = sorted((tmp_path / "run/incidents").glob("*/incident.json"))

    before_s = _step_s(lines, lambda line: line["wall_time"] < slowed_s)
    slow_s = _step_s(lines, lambda line: slowed_s < line["wall_time"] and line["attempt"] == 1)
    after_s = _step_s(lines, lambda line: line["attempt"] == 2)
    log.info("suspected after %.1f s", suspected["wall_time"] - slowed_s)
    log.info("in another order after %.1f s", moved["wall_time"] - slowed_s)
    log.info("steps of %.3f s, %.3f s with a slow link, then %.3f s", before_s, slow_s, after_s)
    (one,) = suspected["suspects"]
    assert (one["kind"], one["guilty"]["links"]) == ("slow_link", [[0, 1]])
    assert (moved["incident"], moved["verdict"], moved["guilty"]) == ("move", "slow_link", [])
    assert [each["guilty"] for each in json.loads(folders[-1].read_text())["suspects"]] == [
        one["guilty"]
    ]
    assert abs(order.index(source) - order.index(target)) == 2, order
    assert {line["attempt"] for line in lines} == {1, 2}
    # Generous: the machine of a test is shared. The bars are ten, and 1.2 times as long.
    assert suspected["wall_time"] - slowed_s < 25.0
    assert after_s < 1.5 * before_s


def _first(run: NetworkRun, kind: str, since_s: float) -> dict[str, Any] | None:
    found = (record for record in run.journal() if record["kind"] == kind)
    return next((record for record in found if record["wall_time"] > since_s), None)


def _step_s(lines: list[dict[str, Any]], is_one: Callable[[dict[str, Any]], bool]) -> float:
    return median(float(line["step_s"]) for line in lines if is_one(line))
