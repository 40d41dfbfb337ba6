"""Keepers that are up but of no use, and ones that Ray restarted without a word."""

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
from ray.exceptions import ActorUnavailableError

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
    "host": "", "port": 0, "secret": b"secret",
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


class _Restarts:
    """A keeper's handle whose calls to the first process fail only when ``ends_late`` is set."""

    def __init__(self) -> None:
        self.is_next, self.ends_late = False, asyncio.Event()
        self.is_held = [asyncio.Event(), asyncio.Event()]  # by process
        self.hello, self.hold = Call(self._hello), Call(self._hold)
        self._is_stuck = False

    async def _hello(self) -> dict[str, Any]:
        if self.is_next and not self._is_stuck:
            self._is_stuck = True  # Ray got it before the next process was up
            await self.ends_late.wait()
        return HELLO | ({"pid": 3, "port": 8} if self.is_next else {"port": 7})

    async def _hold(self) -> None:
        self.is_held[self.is_next].set()
        await (asyncio.Event() if self.is_next else self.ends_late).wait()
        raise ActorUnavailableError("the process died", None)


def test_a_restarted_keeper_is_greeted_although_calls_to_the_last_one_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock was set back: peers got the address of the dead process for half a minute."""
    monkeypatch.setattr(room, "ASK_S", 0.01)
    monkeypatch.setattr(room, "MEET_S", 0.05)
    posted: list[ev.Event] = []
    table = ClusterTable()
    table.add(NODE)

    async def play() -> None:
        keeper, nodes = _Restarts(), nodes_of(table, posted.append)
        keepers = keepers_of(nodes, posted.append)
        monkeypatch.setattr(ActorPool, "start", lambda *_: asyncio.sleep(0, keeper))
        for name in ("kill", "run_on"):
            monkeypatch.setattr(ActorPool, name, lambda *_, **__: asyncio.sleep(0))
        await nodes.look()
        view = nodes.views[NODE]
        keepers.start(NODE)
        await asyncio.wait_for(keeper.is_held[0].wait(), 60.0)

        keepers.restart(NODE)
        left_out = view.is_returning, view.secret
        view.greeted.clear()
        keeper.is_next = True
        await asyncio.wait_for(view.greeted.wait(), 60.0)
        keeper.ends_late.set()
        await asyncio.wait_for(keeper.is_held[1].wait(), 60.0)
        for task in view.tasks:
            task.cancel()
        assert left_out == (True, b"")
        assert (view.is_returning, view.keeper_pid, view.port) == (False, 3, 8)

    asyncio.run(play())
    kinds = [type(each) for each in posted]
    assert (kinds.count(ev.KeeperReady), kinds.count(ev.KeeperDied)) == (2, 0)
