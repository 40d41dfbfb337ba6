"""everstep installed without the extra ``ray``."""

from pathlib import Path

import pytest

from tests.support.installed import Installed, build_wheel

pytest.importorskip("hatchling", reason="hatchling is not installed: pip install 'everstep[dev]'")

CHECKPOINT = Path(__file__).parents[1] / "golden/v1/universal"
TRAINING = ("ray", "torch", "aiohttp", "prometheus_client", "psutil")


def test_without_torch_and_ray_checkpoints_are_read_and_training_says_what_is_missing(
    tmp_path: Path,
) -> None:
    """Two gigabytes are much for whoever only inspects or converts checkpoints."""
    installed = Installed(build_wheel(tmp_path), tmp_path, without=TRAINING)

    inspected = installed.run("ucp", "inspect", str(CHECKPOINT))
    trained = installed.run("everstep", "run", "local/small")
    imported = installed.run("python", "-c", "import everstep; everstep.Settings; everstep.run")

    assert inspected.returncode == 0, inspected.stderr
    assert trained.returncode == 2
    assert len(trained.stderr.splitlines()) == 1
    assert "pip install 'everstep[ray]'" in trained.stderr
    assert "pip install 'everstep[ray]'" in imported.stderr.splitlines()[-1]
