"""A real Prometheus scrapes a real run with faults in it; every panel must show something."""

import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from orchestrator.driver.faults import signal_rank, wait_for
from orchestrator.driver.launch import Launched
from orchestrator.shell.serve import targets_path
from tests.support.reach import SLOW

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="prometheus is not installed (Debian's package)"
    ),
]

DASHBOARDS = Path(__file__).parents[3] / "dashboards"
ACT_S_MAX = 240.0
#: Only a device tells its memory.
WITHOUT_DEVICE = {"Device memory in use"}


class Prometheus:
    """A server with our configuration that looks every second at one run."""

    def __init__(self, directory: Path, run_id: str) -> None:
        config = yaml.safe_load((DASHBOARDS / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        (job,) = config["scrape_configs"]
        (discovery,) = job["file_sd_configs"]
        (pattern,) = map(Path, discovery["files"])
        assert targets_path(run_id).match(f"{pattern.parent.name}/{pattern.name}")
        discovery["files"] = [str(targets_path(run_id))]
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        shutil.copy(DASHBOARDS / "rules.yml", directory)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self._log = (directory / "prometheus.log").open("w")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={directory}/prometheus.yml",
                f"--storage.tsdb.path={directory}/data",
                f"--web.listen-address={self.url.partition('://')[2]}",
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def ask(self, what: str, **parameters: str) -> Any:
        """Return the data of an answer of its API; None while it does not answer."""
        try:
            url = f"{self.url}/api/v1/{what}?{urlencode(parameters)}"
            with urlopen(url, timeout=ACT_S_MAX) as answer:  # noqa: S310  our own server
                return json.load(answer)["data"]
        except OSError:
            return None

    def found(self, expression: str) -> list[dict[str, Any]]:
        """Return the series that a query has now."""
        data = self.ask("query", query=expression)
        return data["result"] if data else []

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()


@pytest.fixture
def endless_run(begin_endless: Callable[..., Launched]) -> Launched:
    """Return a run with a price: without one nothing is known of what it costs."""
    return begin_endless(
        capacity="[{usd_per_hour: 0.5}]",
        workers__max=2,
        workers__standby_per_node=0,
        train__validation_every=4,
        data__validation_samples=2,
        model__preset="tiny",
        **SLOW,
    )


@pytest.fixture
def prometheus(endless_run: Launched, tmp_path: Path) -> Iterator[Prometheus]:
    server = Prometheus(tmp_path, endless_run.names.run_id)
    yield server
    server.close()


def test_every_panel_has_data(endless_run: Launched, prometheus: Prometheus) -> None:
    """A panel whose metric was renamed would stay empty for no visible reason."""
    run_id = endless_run.names.run_id
    reached = wait_for(
        endless_run,
        lambda status: status["phase"] == "training" and status["step"] > 5,
        timeout_s=ACT_S_MAX,
    )
    assert reached is not None
    signal_rank(endless_run, 1, signal.SIGKILL)
    recovered = wait_for(
        endless_run,
        lambda status: status["phase"] == "training" and status["attempt"] > reached["attempt"],
        timeout_s=ACT_S_MAX,
    )
    assert recovered is not None

    queries = {
        what: query.replace("$run_id", run_id)
        for what, query in _queries()
        if what[1] not in WITHOUT_DEVICE
    }
    empty = _until(lambda: [what for what, query in queries.items() if not prometheus.found(query)])
    rules = [
        rule
        for group in prometheus.ask("rules")["groups"]
        for rule in group["rules"]
        if rule["health"] != "ok"
    ]

    assert len(queries) > 60
    assert empty == []
    assert rules == []
    (up,) = prometheus.found("up == 1")
    assert up["metric"].items() >= {"run": endless_run.config.run.name, "run_id": run_id}.items()
    assert prometheus.found('{exported_run_id!=""}') == []
    endless_run.stop("all is seen")
    wait_for(endless_run, lambda _: False, timeout_s=ACT_S_MAX)
    assert _until(lambda: [] if not targets_path(run_id).exists() else [1]) == []


def _queries() -> Iterator[tuple[tuple[str, str, str], str]]:
    """Yield the queries of all boards, under board, panel and number."""
    for path in (DASHBOARDS / "grafana").glob("*.json"):
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield (path.stem, panel["title"], target["refId"]), target["expr"]
        for mark in board["annotations"]["list"]:
            yield (path.stem, mark["name"], "annotation"), mark["expr"]
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                metric, _, label = variable["definition"][len("label_values(") : -1].rpartition(",")
                expression = f"count by ({label.strip()}) ({metric})"
                yield (path.stem, variable["name"], "variable"), expression


def _until(left: Callable[[], list[Any]]) -> list[Any]:
    """Return what is left when nothing is, or at the end of our patience."""
    deadline_s = time.monotonic() + ACT_S_MAX
    while (found := left()) and time.monotonic() < deadline_s:
        time.sleep(0.5)
    return found
