"""The parts of a controller on one loop, where names are not resolved and storage stands still."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.shell.capacity import Rendezvous

#: Longer than a loaded machine keeps a thread from a processor, shorter than any of the stalls.
PAUSE_S_MAX = 1.5
STALL_S = 4.0

#: A network that leads nowhere, with a name server in it.
MACHINE = """
ip link set lo up && ip link add net0 type veth peer name net1 && ip addr add 10.77.0.5/24 dev net0
ip link set net1 up && ip link set net0 up && ip route add default dev net0 || exit 1
printf 'nameserver 10.77.0.9\\noptions timeout:4 attempts:1\\n' > "$1/resolv.conf"
printf 'hosts: files dns\\n' > "$1/nsswitch.conf"
mount --bind "$1/resolv.conf" /etc/resolv.conf || exit 1
mount --bind "$1/nsswitch.conf" /etc/nsswitch.conf || exit 1
shift
exec "$@"
"""

CONTROLLER = """
import asyncio, json, sys, threading, time
from orchestrator.shell.capacity import Rendezvous
from orchestrator.shell.storage import JournalFile
from orchestrator.shell.threads import JOURNAL, RAY, STORAGE, LoopWatch, in_thread
from ucp_core.storage import LocalStore

directory, stall_s = sys.argv[1], float(sys.argv[2])

class SlowDisk(LocalStore):
    def append(self, path, data, *, fsync=False):
        time.sleep(stall_s)
        super().append(path, data, fsync=fsync)

async def timed(waiting):
    began_s = time.monotonic()
    await waiting
    return time.monotonic() - began_s

async def main():
    watch = LoopWatch()
    watching = asyncio.ensure_future(watch.watch_forever())
    over = threading.Event()
    hung = [asyncio.ensure_future(in_thread(STORAGE, over.wait)) for _ in range(20)]
    journal = JournalFile(SlowDisk(), directory, incarnation=1, before_bytes=0)
    took_s = await asyncio.gather(
        timed(Rendezvous("10.77.0.5").open()),
        timed(in_thread(JOURNAL, journal.append, [{"kind": "Ticked"}])),
        timed(in_thread(RAY, threading.get_ident)),
    )
    paused_s = watch.longest_pause_s
    is_hung = not any(each.done() for each in hung)
    over.set()
    await asyncio.gather(*hung)
    watching.cancel()
    print(json.dumps({"paused_s": paused_s, "took_s": took_s, "is_hung": is_hung}), flush=True)

asyncio.run(main())
import os
os._exit(0)
"""


def _on_a_lost_machine(directory: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", MACHINE, "sh", str(directory), *command],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    if os.geteuid() or not (shutil.which("unshare") and shutil.which("ip")):
        pytest.skip("needs root, unshare and ip for a network without a name server")
    tried = _on_a_lost_machine(tmp_path, "true")
    if tried.returncode:
        pytest.skip(f"this kernel makes no such network: {tried.stderr.strip()}")
    return tmp_path


def test_the_loop_goes_on_while_names_disk_and_store_stand_still(directory: Path) -> None:
    """Each of them held it up: 10 s at every start where no name server answers."""
    child = _on_a_lost_machine(
        directory, sys.executable, "-c", CONTROLLER, str(directory / "run"), str(STALL_S)
    )
    assert child.returncode == 0, child.stderr
    told: dict[str, Any] = json.loads(child.stdout)

    opening_s, journaling_s, polling_s = told["took_s"]
    assert min(opening_s, journaling_s) > PAUSE_S_MAX, "nothing stood still"
    assert told["is_hung"]
    assert polling_s < STALL_S
    assert told["paused_s"] < PAUSE_S_MAX


def test_members_meet_again_after_what_served_their_store_was_killed() -> None:
    """It is a process beside the controller, and ends with it."""

    async def play() -> subprocess.Popen[str]:
        rendezvous = Rendezvous("127.0.0.1")
        first = await rendezvous.open()
        served = rendezvous._process
        assert served is not None
        served.kill()
        served.wait()
        second = await rendezvous.open()
        assert first != second
        socket.create_connection(second, timeout=60.0).close()
        assert rendezvous._process is not None
        return rendezvous._process

    asyncio.run(play()).communicate(timeout=120.0)
