"""Faults of every kind in one run on a real network that nobody looks after: the same weights.

Machines are namespaces, and storage is an S3 server on a machine of its own. What an operator's
tools do by themselves is done here: a machine that was lost is booted again, and ``everstep run``
is begun again where its head was.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.driver.run import Run
from orchestrator.errors import RunNotFoundError
from tests.support import train_paced
from tests.support.history import read_history
from tests.support.network_cluster import HEAD, NetworkCluster, host_of, why_not
from tests.support.snapshots import eventually

pytest.importorskip("moto", reason="storage that can be cut off")
pytest.importorskip("s3fs", reason="what talks to it")

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be made"),
]

_say = logging.getLogger(__name__)

NUM_NODES, STORE = 4, 9
#: Each kind three times. As many as there are kinds are one of each.
NUM_FAULTS = int(os.environ.get("EVERSTEP_CHAOS_FAULTS", "30"))
KINDS = (
    "kill", "stop", "partition", "pair", "one-way", "power-off", "flapping", "storage",
    "controller", "head",
)  # fmt: skip
#: Ray notices some losses after a minute, and a machine that it gave up comes back after that.
ACT_S_MAX = 300.0
#: How long storage does not answer.
OUTAGE_S = 15.0
_LOOK_S = 0.2


class Operator:
    """Begins runs on the machines, keeps those on, and sees what a run tells of itself."""

    def __init__(self, cluster: NetworkCluster, url: str, log: Path) -> None:
        self.cluster = cluster
        self.url = url
        self.files = Run(url)
        self._log = log

    def begin(self, steps: int, pace_s: float) -> None:
        """Begin the run, or begin it again."""
        self.cluster.start(HEAD, [
            "everstep", "run", "local/small", "--address", self.cluster.address,
            f"run.directory={self.url}", f"run.script={train_paced.__file__}",
            f"run.arguments=['{pace_s}']", f"train.steps={steps}", "train.schedule=constant",
            "workers.min=2", f"workers.max={NUM_NODES}", "workers.standby_per_node=0",
        ], self._log)  # fmt: skip

    def until(self, what: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first status that meets ``condition``."""
        deadline_s = time.monotonic() + ACT_S_MAX
        status: dict[str, Any] | None = None
        while time.monotonic() < deadline_s:
            self.cluster.nodes()
            with contextlib.suppress(RunNotFoundError):
                status = self.files.ask("status")
                if status is not None and condition(status):
                    return status
            time.sleep(_LOOK_S)
        raise TimeoutError(f"not seen: {what}; {status}; {self._log.read_text()[-2000:]}")

    def training(self, workers: int = 3) -> dict[str, Any]:
        """Wait until so many workers have made a few steps from now on."""
        enough = lambda s: s["phase"] == "training" and len(_ranks(s)) >= workers  # noqa: E731
        begun = self.until(f"{workers} workers", enough)
        goal = begun["step"] + 4
        return self.until("some steps", lambda s: enough(s) and s["step"] >= goal)

    def recovered(self, before: dict[str, Any]) -> None:
        """Wait for steps of an attempt after that of ``before``."""
        self.until(
            "a later attempt",
            lambda s: s["attempt"] > before["attempt"] and s["phase"] == "training" and s["step"],
        )

    def ended(self, outcome: str) -> dict[str, Any]:
        """Wait until the run has ended with ``outcome``; return its summary."""
        deadline_s = time.monotonic() + ACT_S_MAX
        summary: dict[str, Any] = {}
        while time.monotonic() < deadline_s and summary.get("outcome") != outcome:
            summary = self.files.summary() or {}
            time.sleep(_LOOK_S)
        assert summary.get("outcome") == outcome, (summary, self._log.read_text()[-2000:])
        return summary


def _ranks(status: dict[str, Any]) -> list[dict[str, Any]]:
    return [worker for worker in status["workers"] if worker["rank"] >= 0]


def _hurt(operator: Operator, kind: str, draw: random.Random) -> None:
    """Do a fault of a kind to a machine, and undo it once the run trains without that."""
    cluster = operator.cluster
    before = operator.training()
    one, other = draw.sample(_ranks(before), 2)
    nodes = cluster.nodes()
    here, there = nodes[one["node"]], nodes[other["node"]]
    match kind:
        case "kill" | "stop":
            number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
            os.kill(cluster.pid(here, one["pid"]), number)
            operator.recovered(before)
        case "partition" | "one-way":
            faults = [cluster.deafen, cluster.silence]
            (cluster.partition if kind == "partition" else draw.choice(faults))(here)
            operator.recovered(before)
            cluster.heal(here)
        case "pair":
            cluster.cut(here, there)
            operator.recovered(before)
            cluster.mend(here, there)
        case "power-off":
            cluster.power_off(here)
            operator.recovered(before)
            cluster.boot(here)
        case "flapping":
            for _ in range(3):
                cluster.partition(here)
                time.sleep(2.0)
                cluster.heal(here)
                time.sleep(3.0)
        case "storage":
            cluster.freeze(STORE)
            time.sleep(OUTAGE_S)
            cluster.thaw(STORE)
        case "controller":
            os.kill(cluster.pid(HEAD, operator.files.contact()["pid"]), signal.SIGKILL)
        case "head":
            cluster.kill(HEAD)
            cluster.boot(HEAD)
            cluster.await_ray(HEAD)
            operator.begin(ENDLESS, PACE_S)


ENDLESS, PACE_S = 1_000_000, 0.2


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[NetworkCluster]:
    """Four nodes and a head, and a machine that stores what they are given."""
    # Before the machines are booted, whose processes are to find it.
    endpoint = f"http://{host_of(STORE)}:5000"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "anyone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with NetworkCluster(NUM_NODES) as made:
        made.plug_in_host()
        made.boot(
            STORE, [sys.executable, "-m", "moto.server", "-H", made.host(STORE), "-p", "5000"]
        )
        eventually(lambda: _make_bucket(endpoint), within_s=ACT_S_MAX)
        yield made


def _make_bucket(endpoint: str) -> bool:
    request = urllib.request.Request(f"{endpoint}/bucket", method="PUT")  # noqa: S310  http
    try:
        urllib.request.urlopen(request, timeout=20).close()  # noqa: S310
    except OSError:
        return False
    return True


def test_thirty_mixed_faults_leave_the_same_weights(
    cluster: NetworkCluster, tmp_path: Path
) -> None:
    """One of each kind after the other, in orders that a seed draws; then it ends as a calm run."""
    rough = Operator(cluster, "s3://bucket/rough", tmp_path / "rough.log")
    rough.begin(ENDLESS, PACE_S)
    draw = random.Random(30)
    rounds = range(math.ceil(NUM_FAULTS / len(KINDS)))
    kinds = [kind for _ in rounds for kind in draw.sample(KINDS, len(KINDS))][:NUM_FAULTS]
    begun_s = time.monotonic()
    for number, kind in enumerate(kinds, start=1):
        _say.info("%.0f s: %d of %d, %s", time.monotonic() - begun_s, number, len(kinds), kind)
        _hurt(rough, kind, draw)
    paused_s = rough.training()["longest_pause_s"]
    _say.info(
        "%.0f s: done; the newest controller paused %s s", time.monotonic() - begun_s, paused_s
    )
    cluster.run(HEAD, ["everstep", "stop", rough.url], timeout_s=ACT_S_MAX)
    steps = rough.ended("stopped")["steps"] + 20

    calm = Operator(cluster, "s3://bucket/calm", tmp_path / "calm.log")
    digests = []
    for operator in (rough, calm):
        operator.begin(steps, pace_s=0.0)
        summary = operator.ended("completed")
        _say.info("%s", {key: each for key, each in summary.items() if key != "incidents"})
        digests.append(summary["weights_digest"])

    assert digests[0] == digests[1], kinds
    read_history(rough.url).check_exactly_once(rough.files.settings())
