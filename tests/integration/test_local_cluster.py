"""Simulated nodes are processes of this machine: none may stay when they are not wanted."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from orchestrator.shell.local_cluster import HostedCluster
from tests.support.snapshots import eventually


def _running(group: int) -> list[str]:
    """Return the processes of a group that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            stat = (entry / "stat").read_text() if entry.name.isdecimal() else ""
        except OSError:
            continue
        fields = stat[stat.rfind(")") + 2 :].split()
        if fields and int(fields[2]) == group and fields[0] != "Z":
            found.append(stat)
    return found


@pytest.mark.timeout(180)
def test_nothing_is_left_of_a_cluster_whose_host_died() -> None:
    """Ray's daemons outlive who started them: a host whose own shutdown failed left all of them."""
    hosted = HostedCluster(num_nodes=0, cpus_per_node=1)
    host = hosted._process.pid
    os.kill(host, signal.SIGKILL)
    hosted._process.wait()
    assert _running(host), "the daemons went by themselves: this shows nothing"

    hosted.shutdown()

    assert eventually(lambda: not _running(host)), _running(host)
