from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from orchestrator.shell.nodes import hung_up, view_of

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

ROW = {
    "NodeID": "a1b2",
    "NodeManagerAddress": "10.0.0.7",
    "NodeManagerPort": 4711,
    "Labels": {"ray.io/node-id": "a1b2", "rack": "r7"},
}


@pytest.mark.parametrize(("label", "rack"), [("rack", "r7"), ("zone", ""), ("", "")])
def test_a_label_says_what_a_node_fails_together_with(label: str, rack: str) -> None:
    """A cluster of which only some nodes are labelled is common; those without fail alone."""
    view = view_of(ROW, label)

    assert (view.rack, view.raylet_address) == (rack, ("10.0.0.7", 4711))


def test_a_process_that_is_killed_hangs_up() -> None:
    """Neither before, nor for what it says."""

    async def play(server: subprocess.Popen[str]) -> bool:
        assert server.stdout is not None
        address = "127.0.0.1", int(await asyncio.to_thread(server.stdout.readline))
        heard = asyncio.create_task(hung_up(address))
        assert await asyncio.to_thread(server.stdout.readline) == "taken\n"
        was_early = heard.done()
        server.kill()
        await asyncio.wait_for(heard, 60.0)
        # Nobody is there any more.
        await asyncio.wait_for(hung_up(address), 60.0)
        return was_early

    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert not asyncio.run(play(server))
