"""Which machines answer, by real kernels: what is stopped does, what is cut off does not."""

import asyncio
import contextlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.network_cluster import why_not
from workers.keeper import hung_up, silent
from workers.keeper.reach import Reach

#: No connection is ever made to these addresses, which are of many machines.
NOWHERE = ("224.0.0.1", 9), ("224.0.0.2", 9)

#: Listens, says something, and then nothing for ever.
SERVER = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
taken = listener.accept()[0]
taken.sendall(b"hello" * 1000)
print("taken", flush=True)
taken.recv(1)
"""

#: In a network of its own: two listeners that never run are answered for by the kernel, until
#: their network is gone.
CUT_OFF = """
import asyncio, os, signal, socket, subprocess, time
from workers.keeper.reach import SILENT_S, Reach

def listen(host):
    listener = socket.create_server((host, 0))
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    address = listener.getsockname()
    listener.close()
    return pid, address

async def main(addresses):
    cut_off = asyncio.Event()
    reach = Reach(cut_off.set)
    reach.follow(frozenset(addresses))
    await asyncio.sleep(SILENT_S + 1.0)
    print("before", cut_off.is_set(), flush=True)
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    await asyncio.wait_for(cut_off.wait(), 120.0)
    print("after", cut_off.is_set(), flush=True)

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
listeners = [listen("127.0.0.1"), listen("127.0.0.2")]
try:
    asyncio.run(main([address for _, address in listeners]))
finally:
    for pid, _ in listeners:
        os.kill(pid, signal.SIGKILL)
"""


def test_a_process_that_is_killed_hangs_up() -> None:
    """Neither before, nor for what it says."""

    async def play(server: subprocess.Popen[str]) -> bool:
        assert server.stdout is not None
        address = "127.0.0.1", int(await asyncio.to_thread(server.stdout.readline))
        heard = asyncio.create_task(hung_up(address))
        assert await asyncio.to_thread(server.stdout.readline) == "taken\n"
        was_early = heard.done()
        server.kill()
        assert await asyncio.wait_for(heard, 60.0), "its machine answered to the end"
        # The machine says that the listener is gone.
        assert await asyncio.wait_for(hung_up(address), 60.0)
        return was_early

    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert not asyncio.run(play(server))


def test_what_is_nowhere_is_silent_and_what_refuses_is_not() -> None:
    with _listener() as here:
        free = socket.create_server(("127.0.0.1", 0))
        refuses = free.getsockname()
        free.close()
        machines = {"here": here, "refuses": refuses, "nowhere": NOWHERE[0]}
        assert asyncio.run(silent(machines)) == {"nowhere"}
    assert asyncio.run(hung_up(NOWHERE[0])) is False


@pytest.mark.parametrize("num_answer", [0, 1])
def test_only_a_node_that_reaches_no_other_is_cut_off(num_answer: int) -> None:
    """Where the head is gone and others are there, the controller comes back."""

    async def play(here: tuple[str, int]) -> int:
        cut_off: list[str] = []
        first = asyncio.Event()

        def note() -> None:
            cut_off.append("cut off")
            first.set()

        reach = Reach(note)
        reach.follow(frozenset((*NOWHERE, *[here][:num_answer])))
        # One that is alone, and has no other to compare with.
        alone = Reach(lambda: cut_off.append("alone"))
        alone.follow(frozenset(NOWHERE[:1]))
        other = asyncio.Event()
        later = Reach(other.set)
        later.follow(frozenset(NOWHERE))
        await asyncio.wait_for(other.wait(), 120.0)
        # Those that began before have looked as well, and look again.
        if not num_answer:
            await asyncio.wait_for(first.wait(), 120.0)
        assert set(cut_off) <= {"cut off"}
        return len(cut_off)

    with _listener() as here:
        assert asyncio.run(play(here)) == 1 - num_answer


def test_a_stopped_process_answers_and_a_lost_network_does_not() -> None:
    unshare = shutil.which("unshare")
    if why_not() or unshare is None:
        pytest.skip(why_not())
    done = subprocess.run(
        [unshare, "--net", sys.executable, "-c", CUT_OFF],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[4],
    )  # fmt: skip
    assert done.stdout.split() == ["before", "False", "after", "True"], done.stderr


@contextlib.contextmanager
def _listener() -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.2", 0)) as listener:
        yield listener.getsockname()
