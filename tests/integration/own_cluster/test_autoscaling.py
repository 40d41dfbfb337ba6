"""Runs on a cluster whose nodes Ray's own autoscaler buys and gives back."""

import logging
import time
from pathlib import Path
from typing import cast

import pytest

from orchestrator.driver.status import read_status
from tests.support.autoscaled_cluster import IDLE_S, AutoscaledCluster
from tests.support.network_cluster import HEAD, NetworkCluster
from tests.support.network_runs import NetworkRun

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

log = logging.getLogger(__name__)

_NUM_NODES, _NUM_WORKERS = 16, 4
#: Ray starts them one after the other.
_BUY_S_MAX = 240.0
#: More than what Ray needs beyond the time that a node has to be idle.
_SCALE_DOWN_S_MAX = 60.0
#: The autoscaler tries a type again that was sold out.
_MOVE_S_MAX = 240.0
_MORE = """
import ray, sys
from ray.autoscaler.sdk import request_resources
ray.init(address=sys.argv[1], log_to_driver=False)
request_resources(bundles=[{"CPU": 1}] * int(sys.argv[2]))
"""


def _ask_for(cluster: AutoscaledCluster, num_nodes: int) -> None:
    """Have the autoscaler keep so many nodes for somebody else, whoever uses them."""
    cluster.run(HEAD, ["python", "-c", _MORE, cluster.address, str(num_nodes)], timeout_s=120)


def _num(cluster: AutoscaledCluster) -> int:
    return len(cluster.bought())


def _begin(cluster: AutoscaledCluster, directory: Path, *settings: str) -> NetworkRun:
    """Begin a run; the cluster has all that it needs of one."""
    network = cast("NetworkCluster", cluster)
    return NetworkRun(network, directory, "workers.min=1", "checkpoint.every_steps=20", *settings)


def test_a_run_has_the_nodes_that_it_uses_and_no_others(tmp_path: Path) -> None:
    """Pending placement groups are the demand; a node where a process of ours is never is idle."""
    spot = {"resources": {"CPU": 1}, "max_workers": _NUM_NODES}
    with AutoscaledCluster({"spot": spot}) as cluster:
        began_s = time.time()
        run = _begin(cluster, tmp_path / "run", f"workers.max={_NUM_WORKERS}")
        run.settle(_NUM_WORKERS)
        settled_s = run.lines()[-1]["wall_time"] - began_s
        log.info("from nothing to %d workers: %.1f s", _NUM_WORKERS, settled_s)

        _ask_for(cluster, _NUM_NODES)
        cluster.wait("nodes for somebody else", lambda: _num(cluster) == _NUM_NODES, _BUY_S_MAX)
        let_go_s = time.monotonic()
        _ask_for(cluster, 0)
        cluster.wait("the rest goes", lambda: _num(cluster) == _NUM_WORKERS)
        left_s = time.monotonic() - let_go_s
        log.info("of %d nodes the rest is gone after %.1f s", _NUM_NODES, left_s)
        assert left_s < _SCALE_DOWN_S_MAX

        cluster.sell_out("spot")
        attempt, used = run.settle(_NUM_WORKERS)["attempt"], run.nodes()
        fault_s = time.time()
        cluster.take(used[0])
        taken = run.outcome(fault_s, attempt)
        run.settle(_NUM_WORKERS - 1)
        cluster.sell_out()
        back_s = time.time()
        whole_s = run.whole_again(back_s, _NUM_WORKERS)
        log.info("a node is taken: next step after %s s; back after %s s", taken.step_s, whole_s)

        summary = run.stop()
        gone_s = cluster.wait("everything is given back", lambda: not cluster.bought())
        log.info("all are gone %.1f s after the end, of which %g s idle", gone_s, IDLE_S)
        assert gone_s < _SCALE_DOWN_S_MAX

    assert summary["outcome"] == "stopped", summary
    kinds = [each["kind"] for each in summary["incidents"]]
    assert kinds.count("node_loss") == 1, kinds
    assert set(kinds) <= {"node_loss", "growth", "stop"}, kinds


def test_what_is_sold_out_is_replaced_until_it_returns(tmp_path: Path) -> None:
    """Spot first, then an unavailable type, then a dearer one; and back to spot in the end."""
    types = {
        market: {
            "resources": {"CPU": 1},
            "labels": {"ray.io/market-type": market},
            "max_workers": 2,
        }
        for market in ("spot", "on-demand")
    }
    wanted = (
        "capacity=[{spot: true, usd_per_hour: 0.4}, {zone: mars, usd_per_hour: 0.1}, "
        "{spot: false, usd_per_hour: 1.2}]"
    )
    with AutoscaledCluster(types) as cluster:
        words = ["everstep", "doctor", "local/small", f"cluster.address={cluster.address}"]
        found = tmp_path / "doctor.log"
        doctor = cluster.start(HEAD, [*words, f"run.directory={tmp_path}/run", wanted], found)
        assert doctor.wait() != 0
        assert "fail  capacity.1: no node has CPU 1" in found.read_text()
        assert found.read_text().count("capacity.") == 2  # and what to do

        cluster.sell_out("spot")
        run = _begin(cluster, tmp_path / "run", "workers.max=2", wanted)
        run.settle(workers=2)
        assert sorted(cluster.bought().values()) == ["on-demand"] * 2
        spot, mars, other = read_status(str(run.directory))["capacity"]
        assert (spot["refused"], mars["refused"], other["granted"]) == (2, 2, 2)
        assert "no node of type spot" in spot["why"]
        assert "no type of node" in mars["why"]
        log.info("2 workers after %.1f s", run.journal()[-1]["at_s"])

        attempt = run.lines()[-1]["attempt"]
        cluster.sell_out()
        back_s = time.time()
        run.first(lambda line: line["attempt"] > attempt and line["num_workers"] == 2, _MOVE_S_MAX)
        run.wait(
            "both workers are on spot",
            lambda: {cluster.bought().get(node) for node in run.nodes()} == {"spot"} or None,
        )
        log.info("moved %.1f s after spot returned", time.time() - back_s)
        gone_s = cluster.wait(
            "what costs more is given back", lambda: set(cluster.bought().values()) == {"spot"}
        )
        log.info("what costs more is gone %.1f s later", gone_s)
        summary = run.stop()

    assert summary["outcome"] == "stopped", summary
    assert {each["kind"] for each in summary["incidents"]} <= {"growth", "move", "stop"}, summary
    assert summary["lost_steps"] == 0
    assert summary["cost_usd"] > 0.0
