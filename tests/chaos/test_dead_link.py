"""A link that dies while steps take long: its packets tell, not the length of a step."""

import logging
import time
from pathlib import Path

import pytest

from tests.support.network_cluster import NetworkCluster, why_not
from tests.support.network_runs import NetworkRun
from workers.telemetry import FINISHED, read_ring

log = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be made"),
]


@pytest.mark.parametrize("step_s", [10.0, 60.0])
def test_a_cut_pair_is_found_in_seconds(tmp_path: Path, step_s: float) -> None:
    """Time counts from the first call after the cut: before that nothing is sent.

    Ranks compute for long between two calls. Their rings are in the incident, and all machines have
    the clock of this one.
    """
    with NetworkCluster(2) as cluster:
        run = NetworkRun(cluster, tmp_path / "run", "workers.min=1", pace_s=step_s / 2)
        line = run.settle(workers=2, steps=1)
        one, other = run.ranks()

        cluster.cut(one, other)
        cut_s, cut_ns = time.time(), time.monotonic_ns()
        fenced_s = run.wait("a fence", lambda: _fenced_s(run, cut_s), 3 * step_s + 60.0)
        evidence = run.wait("an incident", lambda: _evidence(run, cut_s))
        sent_ns = run.wait("the rings of both", lambda: _sent_ns(tmp_path / "run", cut_ns))

    sent_s = cut_s + (sent_ns - cut_ns) / 1e9
    log.info("steps of %.1f s: %.2f s after the first bytes", line["step_s"], fenced_s - sent_s)
    assert line["step_s"] > 0.9 * step_s
    assert "no connection between nodes" in evidence
    # Generous: the machine of a test is shared. With steps of a minute it took two.
    assert fenced_s - sent_s < 15.0


def _sent_ns(directory: Path, cut_ns: int) -> int | None:
    """Return when the first call was made that did not end, or the time of the cut if later."""
    rings = [read_ring(path) for path in directory.glob("incidents/0001/rings/*.ring")]
    if len(rings) < 2:
        return None
    calls = (one for ring in rings for one in ring.records if one.group >= 0)
    return max(cut_ns, min(one.enter_ns for one in calls if not one.flags & FINISHED))


def _fenced_s(run: NetworkRun, since_s: float) -> float | None:
    times = (r["wall_time"] for r in run.journal() if r["kind"] == "FenceAttempt")
    return next((each for each in times if each > since_s), None)


def _evidence(run: NetworkRun, since_s: float) -> str | None:
    found = (r for r in run.journal() if r["kind"] == "ReportIncident")
    return next((r["evidence"] for r in found if r["wall_time"] > since_s), None)
