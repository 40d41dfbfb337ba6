"""The stack that shows the boards: what it mounts is there, and fits together."""

from typing import Any

import yaml

from orchestrator.shell.serve.discovery import targets_path
from tests.arch.tree import ROOT

FOLDER = ROOT / "dashboards"


def _read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def _mounts(service: dict[str, Any]) -> dict[str, str]:
    """Return the source of each mount, by its place in the container."""
    pairs = [
        (each["target"], each["source"]) if isinstance(each, dict) else each.split(":")[1::-1]
        for each in service["volumes"]
    ]
    return dict(pairs)


def test_the_stack_mounts_files_that_are_there_where_their_readers_look() -> None:
    """Docker makes an empty folder of a source that is missing, and Grafana shows no board."""
    services = _read("compose.yaml")["services"]
    prometheus, grafana = (_mounts(services[name]) for name in ("prometheus", "grafana"))
    (provider,) = _read("provisioning/dashboards/everstep.yml")["providers"]
    (source,) = _read("provisioning/datasources/prometheus.yml")["datasources"]
    rules = _read("prometheus.yml")["rule_files"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]

    for place in (*prometheus.values(), *grafana.values()):
        assert place.startswith("/tmp/") or (FOLDER / place).exists(), place  # noqa: S108
    assert [f"/etc/prometheus/{name}" in prometheus for name in rules] == [True]
    assert prometheus[str(targets_path("x").parent)] == "/tmp/everstep-metrics"  # noqa: S108
    boards = FOLDER / grafana[provider["options"]["path"]]
    assert (boards / home.rpartition("/")[2]).exists()
    assert source["isDefault"]
    assert (
        f"--web.listen-address={source['url'].removeprefix('http://')}"
        in (services["prometheus"]["command"])
    )
