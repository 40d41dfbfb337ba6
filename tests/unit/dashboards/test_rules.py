"""The rules and the scrape configuration, as Prometheus's own tool judges them."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

DASHBOARDS = Path(__file__).parents[3] / "dashboards"


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "rules.yml"),
        ("test", "rules", "rules_test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_accepts(arguments: tuple[str, ...]) -> None:
    """Its tests say of each alert that it fires when it should, and not before."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; it comes with Debian's prometheus")

    done = subprocess.run(
        [promtool, *arguments], cwd=DASHBOARDS, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_made_to_fire() -> None:
    """One that no test fires may be one that never does."""
    rules = yaml.safe_load((DASHBOARDS / "rules.yml").read_text())["groups"][0]["rules"]
    *_, last = yaml.safe_load((DASHBOARDS / "rules_test.yml").read_text())["tests"]
    fired = [sample["labels"] for sample in last["promql_expr_test"][0]["exp_samples"]]

    alerts = [rule["alert"] for rule in rules if "alert" in rule]
    assert fired == [f'{{alertname="{alert}"}}' for alert in alerts]
