"""The rules and the scrape configuration, as Prometheus's own tool judges them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

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
