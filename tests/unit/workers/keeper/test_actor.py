"""The keeper's actor; Ray is not started for it."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from workers.keeper import Keeper, progress_path
from workers.keeper.reach import Reach
from workers.protocol import LEASE_S, KeeperOrder
from workers.telemetry import has_run_out

#: No connection is ever made to these addresses, which are of many machines.
HEAD, OTHER = ("224.0.0.1", 9), ("224.0.0.2", 9)

TRAINER = """
import signal, sys
from workers.telemetry import ProgressRecord
ProgressRecord.create(sys.argv[1], worker="w0001")
print("ready", flush=True)
signal.pause()
"""


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Return a living trainer of the node."""
    command = [sys.executable, "-c", TRAINER, str(progress_path(tmp_path, "w0001"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keeper:
    """Return a keeper that hears neither the head nor another node."""
    context = SimpleNamespace(get_node_id=lambda: "here", gcs_address=f"{HEAD[0]}:{HEAD[1]}")
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    monkeypatch.setattr("workers.keeper.actor.end_with_parent", lambda: None)
    reports = SimpleNamespace(observe=SimpleNamespace(remote=lambda _report: None))
    return Keeper(directory=str(tmp_path), controller=reports)


def test_a_node_that_reaches_no_other_ends_its_trainers(
    keeper: Keeper, trainer: subprocess.Popen[str]
) -> None:
    """The run has gone on without them, and their device is wanted when the network is back."""

    async def play() -> int:
        await keeper.hello()
        await keeper.order(KeeperOrder(attempt=1, lineage=(), copies_of=(), others=(OTHER,)))
        return await asyncio.wait_for(asyncio.to_thread(trainer.wait), 120.0)

    assert asyncio.run(play()) == -signal.SIGKILL


def test_a_run_on_one_node_does_without_the_head_until_its_lease_has_run_out(
    keeper: Keeper, trainer: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trainers reach each other, and a head that is booted again takes them back."""

    async def play() -> None:
        await keeper.hello()
        await keeper.order(KeeperOrder(attempt=1, lineage=(), copies_of=()))
        # A keeper that began later has found it out.
        cut_off = asyncio.Event()
        Reach(cut_off.set).follow(frozenset((HEAD, OTHER)))
        await asyncio.wait_for(cut_off.wait(), 120.0)

    asyncio.run(play())
    assert trainer.poll() is None
    assert not has_run_out(tmp_path)
    later_ns = time.monotonic_ns() + int(LEASE_S * 1e9)
    monkeypatch.setattr(time, "monotonic_ns", lambda: later_ns)
    assert has_run_out(tmp_path)
    asyncio.run(keeper.hello())
    assert not has_run_out(tmp_path), "the controller is back"


def test_a_kill_is_answered_with_what_became_of_the_process(
    keeper: Keeper, trainer: subprocess.Popen[str]
) -> None:
    """Also for an unknown one, or one that had died."""

    async def play() -> list[bool]:
        await keeper.hello()
        keeper._watch.look()
        was_gone = not keeper._watch.lives("w0001")
        return [was_gone, *[await keeper.kill(each) for each in ("w0001", "w0001", "w0009")]]

    assert asyncio.run(play()) == [False, True, True, True]
    assert trainer.wait(120) == -signal.SIGKILL
