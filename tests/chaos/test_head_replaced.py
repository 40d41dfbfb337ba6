"""The head loses its state and is started again at the same address, as by systemd."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.network_cluster import HEAD, NetworkCluster, why_not
from tests.support.network_runs import NetworkRun

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be made"),
]

#: Ray needs up to a minute to notice that its head is another one.
ENDS_S = 150.0


@pytest.fixture
def cluster() -> Iterator[NetworkCluster]:
    """Two nodes and a head."""
    with NetworkCluster(2) as made:
        yield made


def test_a_command_ends_when_its_head_is_another_one(
    cluster: NetworkCluster, tmp_path: Path
) -> None:
    """Something answers at the head's address all the time, but it knows of no controller."""
    run = NetworkRun(cluster, tmp_path / "run", "workers.max=2")
    run.settle(workers=2)
    store = next(pid for pid in cluster.pids(HEAD) if b"gcs_server" in _program(pid))

    os.kill(store, signal.SIGKILL)

    assert run.driver.wait(ENDS_S) != 0
    assert "lost its state" in run.said()


def _program(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
