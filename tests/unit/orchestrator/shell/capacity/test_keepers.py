"""Keepers that are up but of no use: stopped ones, and ones whose reports do not arrive."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.core import Bounds
from orchestrator.core import events as ev
from orchestrator.shell.capacity import ActorPool
from orchestrator.shell.capacity import keepers as room
from orchestrator.shell.capacity.keepers import _kill_stopped
from tests.support.keeper_handles import Call, ClusterTable, keepers_of, nodes_of
from tests.support.snapshots import eventually
from workers.telemetry import Lease, holders, process_state

NODE = "a1b2" * 14
HELLO = {
    "raylet_pid": 1, "pid": 2, "lease_s": 60.0, "wall_time": 0.0,
    "host": "", "port": 0, "secret": b"",
}  # fmt: skip
_NUM_ASKED = 50
_HOLD = "import sys, time, pathlib; from workers.telemetry import Lease; "
_HOLD += "lease = Lease(pathlib.Path(sys.argv[1])); print(flush=True); time.sleep(600)"


def test_a_stopped_keeper_is_killed_and_no_other_process(tmp_path: Path) -> None:
    """Ray does not kill it if the head restarted while it was stopped."""
    directories = [tmp_path / name for name in ("own", "other")]
    with contextlib.ExitStack() as stack:
        stopped, other = (_holding(stack, each) for each in directories)
        _kill_stopped(str(directories[0]))
        assert (holders(directories[0]), stopped.poll()) == ([stopped.pid], None)
        for each in (stopped, other):
            os.kill(each.pid, signal.SIGSTOP)
        assert eventually(
            lambda: all(process_state(each.pid).letter == "T" for each in (stopped, other))
        )

        _kill_stopped(str(directories[0]))

        assert stopped.wait(60.0) == -signal.SIGKILL
        assert holders(directories[1]) == [other.pid]


def _holding(stack: contextlib.ExitStack, directory: Path) -> subprocess.Popen[bytes]:
    """Start a process that maps the lease in ``directory``."""
    Lease(directory)
    command = [sys.executable, "-c", _HOLD, str(directory)]
    process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
    stack.callback(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    return process


@pytest.mark.parametrize("reports", [False, True])
def test_a_keeper_whose_reports_do_not_arrive_is_silent(
    monkeypatch: pytest.MonkeyPatch, *, reports: bool
) -> None:
    """It was stopped while the head restarted; the run never learned that its workers trained."""
    monkeypatch.setattr(room, "ASK_S", 0.01)
    posted: list[ev.Event] = []
    table = ClusterTable()
    table.add(NODE)
    nodes = nodes_of(table, posted.append)

    async def hold() -> None:
        await asyncio.Event().wait()

    async def play() -> None:
        is_asked = asyncio.Event()

        async def hello() -> dict[str, Any]:
            num_asked.append(1)
            if reports:
                nodes.on_report(NODE)
            if len(num_asked) == _NUM_ASKED:
                is_asked.set()
            return HELLO

        num_asked: list[int] = []
        handle = SimpleNamespace(hello=Call(hello), hold=Call(hold))
        monkeypatch.setattr(ActorPool, "start", lambda *_: asyncio.sleep(0, handle))
        await nodes.look()
        keepers_of(nodes, posted.append, bounds=Bounds(keeper_silent_s=10 * room.ASK_S)).start(NODE)
        await asyncio.wait_for(is_asked.wait(), 60.0)
        for task in nodes.views[NODE].tasks:
            task.cancel()

    asyncio.run(play())
    assert any(isinstance(each, ev.KeeperSilent) for each in posted) is not reports
