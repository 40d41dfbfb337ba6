"""Memory that outlives the keeper and the trainer, and is gone when nobody can want it any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.node_memory import NodeProcess
from tests.support.snapshots import eventually
from workers.keeper.vault import VAULT, Vault, serve
from workers.memory import Arena
from workers.settings import Settings, SnapshotSettings

_TRAINER = """
import sys, signal
from pathlib import Path
from tests.support.snapshots import body_bytes, snapshot
path = descriptor_socket(Path(sys.argv[1]))
arena = reserve(path, "w0001.1", body_bytes=body_bytes(1), attempt=1)
for step in (1, 2, 3):
    snapshot(arena, step)
print("written", flush=True)
signal.pause()
"""


@pytest.fixture
def grace_s() -> float:
    return 20.0


@pytest.fixture
def served(tmp_path: Path, grace_s: float) -> Iterator[threading.Thread]:
    """A vault in a thread."""
    thread = threading.Thread(
        target=serve, args=(tmp_path / VAULT,), kwargs={"grace_s": grace_s}, daemon=True
    )
    thread.start()
    assert eventually(lambda: _listens(tmp_path / VAULT))
    yield thread
    thread.join(2 * grace_s)


def _listens(path: Path) -> bool:
    """Return whether connections to a socket are taken: it is there before that."""
    rows = map(str.split, Path("/proc/net/unix").read_text().splitlines())
    return any(row[-1] == str(path) and row[3] == "00010000" for row in rows)


def _kill(vault: Vault) -> None:
    """Break the connection, as the end of the keeper's process does."""
    vault._connection.close()


def test_keeper_and_trainer_die_together_and_the_next_keeper_has_the_versions(
    tmp_path: Path,
) -> None:
    """On one node there is no peer with a copy, and storage may be many steps behind."""
    settings = Settings(snapshot=SnapshotSettings(node_memory_mib=64, vault=True))
    node = NodeProcess("a" * 16, tmp_path / "node", tmp_path / "run", settings)
    command = [sys.executable, "-c", _TRAINER, str(tmp_path / "node")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "written\n"
        node.kill()
        os.kill(trainer.pid, signal.SIGKILL)
    node.start()

    held = [(part.arena, part.held.step) for part in node.inventory().parts]
    assert held == [("w0001.1", step) for step in (1, 2, 3)]
    node.kill()
    vault = Vault(tmp_path / "node")
    assert list(vault.recovered) == ["w0001.1"]
    for fd in vault.recovered.values():
        os.close(fd)
    vault.end()
    assert eventually(lambda: not (tmp_path / "node" / VAULT).exists())


def test_the_next_keeper_gets_what_is_held_and_nothing_else(
    served: threading.Thread, tmp_path: Path
) -> None:
    """Under the names of the moment at which the one before died."""
    first = Vault(tmp_path)
    assert first.recovered == {}
    arenas = [Arena.create(f"w{number}", body_bytes=4096) for number in range(3)]
    for number, arena in enumerate(arenas):
        first.note(f"w{number}.1", arena.fd)
    first.note("w0.1", None)
    first.note("w3.1", arenas[1].fd)
    first.note("w1.1", None)
    _kill(first)

    second = Vault(tmp_path)
    assert sorted(second.recovered) == ["w2.1", "w3.1"]
    assert os.path.sameopenfile(second.recovered["w3.1"], arenas[1].fd)
    for fd in [*second.recovered.values()]:
        os.close(fd)
    second.end()
    served.join(20.0)
    assert not served.is_alive()
    for arena in arenas:
        arena.close()


@pytest.mark.usefixtures("served")
def test_memory_that_was_handed_on_is_held_under_one_name(tmp_path: Path) -> None:
    """A keeper that is killed before it has let go of the old one leaves two: the next one would
    hand the same memory on again, and two workers would write into it."""
    first = Vault(tmp_path)
    arena = Arena.create("w1", body_bytes=4096)
    first.note("w1.1", arena.fd)
    first.note("w2.1", arena.fd)
    _kill(first)

    second = Vault(tmp_path)
    assert list(second.recovered) == ["w2.1"]
    os.close(second.recovered["w2.1"])
    second.end()
    arena.close()


def test_one_that_comes_late_leaves_the_place_to_the_one_that_serves(
    served: threading.Thread, tmp_path: Path
) -> None:
    """Who started it was killed before it was there, and the next keeper has started another: what
    that one holds could not be found any more once this one ends."""
    first = Vault(tmp_path)
    arena = Arena.create("w1", body_bytes=4096)
    first.note("w1.1", arena.fd)
    serve(tmp_path / VAULT, grace_s=0.2)
    _kill(first)

    second = Vault(tmp_path)
    assert list(second.recovered) == ["w1.1"]
    os.close(second.recovered["w1.1"])
    second.end()
    served.join(20.0)
    assert not served.is_alive()
    arena.close()


@pytest.mark.parametrize("grace_s", [2.0])
def test_without_a_keeper_it_ends_after_a_while(served: threading.Thread, tmp_path: Path) -> None:
    """A run that is over must not keep gigabytes."""
    vault = Vault(tmp_path)
    _kill(vault)

    assert eventually(lambda: not served.is_alive())
    assert not (tmp_path / VAULT).exists()


def test_a_vault_that_is_gone_is_a_trouble_and_not_an_error(tmp_path: Path) -> None:
    """It protects against something rare; training goes on without."""
    from workers.keeper.node_memory import NodeMemory

    memory = NodeMemory(
        node="a" * 16,
        host="127.0.0.1",
        directory=tmp_path,
        run_url=str(tmp_path / "run"),
        settings=Settings(snapshot=SnapshotSettings(node_memory_mib=64, vault=True)),
    )
    vault = memory._vault
    assert vault is not None
    os.kill(vault._pid, signal.SIGKILL)
    os.waitpid(vault._pid, 0)
    memory._slots.reserve("w0001.1", body_bytes=4096)

    assert eventually(lambda: any("holds the snapshots went" in t for t in memory.troubles()))
    memory.close()
