"""Simulated nodes are processes of this machine: none may stay when they are not wanted."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.snapshots import eventually

pytestmark = pytest.mark.chaos

_SCRIPT = """
import os, signal
from orchestrator.shell.local.cluster import HostedCluster

hosted = HostedCluster(num_nodes=0, cpus_per_node=1)
os.kill(hosted._process.pid, signal.SIGKILL)
hosted._process.wait()
print(hosted._process.pid, flush=True)
input()
hosted.shutdown()
"""

_KILLED = """
import os, signal
from orchestrator.shell.local.cluster import HostedCluster

class Killed(HostedCluster):
    def _wait_ready(self, deadline_s):
        print(self._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

Killed(num_nodes=0, cpus_per_node=1)
"""


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


def test_nothing_is_left_of_a_cluster_whose_host_died() -> None:
    """Ray's daemons outlive their host: one whose own shutdown failed left all of them.

    It needs a program of its own: shutting a cluster down disconnects from any other one.
    """
    command = [sys.executable, "-c", _SCRIPT]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        host = int(program.stdout.readline())
        assert _running(host), "the daemons went by themselves: this shows nothing"
        program.communicate("\n")

    assert program.returncode == 0
    assert eventually(lambda: not _running(host)), _running(host)


def test_nothing_is_left_of_a_cluster_whose_starter_was_killed_meanwhile() -> None:
    """No command has its address yet, so it would wait for one for ever."""
    program = subprocess.run(
        [sys.executable, "-c", _KILLED], stdout=subprocess.PIPE, text=True, check=False
    )
    host = int(program.stdout)

    assert program.returncode == -signal.SIGKILL
    assert eventually(lambda: not _running(host)), _running(host)
