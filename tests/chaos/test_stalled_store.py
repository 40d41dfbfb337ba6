"""The object store behind a run stops answering: snapshots go on, it is said, and it is made up."""

import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.object_servers import s3_process, use_s3
from tests.support.snapshot_rank import Rank, state
from tests.support.snapshots import eventually
from workers.keeper.node_memory import NodeMemory
from workers.settings import CheckpointSettings, Settings, SnapshotSettings
from workers.snapshot import SnapshotMemory

pytest.importorskip("moto", reason="a server to stop")
pytest.importorskip("s3fs", reason="what talks to it")

pytestmark = pytest.mark.timeout(180)

NUM_STEPS = 50


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The process of a store with a bucket."""
    with s3_process(tmp_path / "server.log") as (url, pid):
        use_s3(monkeypatch, url)
        request = urllib.request.Request(f"{url}/bucket", method="PUT")  # noqa: S310
        urllib.request.urlopen(request, timeout=20).close()  # noqa: S310
        yield pid
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def memory(server: int, tmp_path: Path) -> Iterator[NodeMemory]:
    del server
    made = NodeMemory(
        node="a" * 16,
        host="127.0.0.1",
        directory=tmp_path / "node",
        run_url="s3://bucket/run",
        settings=Settings(
            snapshot=SnapshotSettings(node_memory_mib=64), checkpoint=CheckpointSettings(keep=2)
        ),
    )
    yield made
    made.close()


def test_training_never_waits_for_a_store_that_stopped(
    server: int, memory: NodeMemory, tmp_path: Path
) -> None:
    """Connections stay open without answers: no call fails, and so none is tried again."""
    rank = Rank(SnapshotMemory(tmp_path / "node", "w0001"))
    entries = state()
    assert rank.ready(entries)

    def take(step: int, *, pin: bool = False) -> None:
        assert rank.take(step, entries, pin=pin)
        assert rank.writer.wait(step)

    take(1, pin=True)
    assert eventually(lambda: memory.stored[1] == 1)
    os.kill(server, signal.SIGSTOP)
    take(2, pin=True)
    for step in range(3, NUM_STEPS):
        take(step)
        assert rank.writer.is_pinned(), "the store is stopped"
    assert eventually(lambda: any("silent" in line for line in memory.problems()))
    assert memory.stored[1] == 1
    os.kill(server, signal.SIGCONT)

    assert eventually(lambda: memory.stored[1] == 2, within_s=90.0)
    take(NUM_STEPS, pin=True)
    assert eventually(lambda: memory.stored[1] == NUM_STEPS)
    assert eventually(lambda: memory.problems() == ())
    assert rank.writer.close()
