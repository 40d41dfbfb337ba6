"""Each port of the guide through ten random deaths, without a controller that is slow to start."""

from pathlib import Path

import pytest

from tests.integration.test_ports import NEEDS, compare_with_calm_run


@pytest.mark.parametrize("port", NEEDS)
def test_ten_workers_of_a_port_die_and_nothing_shows(port: str, tmp_path: Path) -> None:
    """Curve, weights and registered state of a calm run, to the last bit."""
    pytest.importorskip(NEEDS[port], reason="an extra is not installed: hf or interop")

    compare_with_calm_run(port, tmp_path, steps=100, num_faults=10)
