"""The run directory is in a bucket: what a run asks of it, and what it does while it fails."""

import subprocess
import sys
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import pytest

from orchestrator.driver import replay_run
from orchestrator.shell.storage.journal import segment_sizes
from tests.support.journals import Journaled, config_at
from tests.support.made import assignment_of
from tests.support.object_servers import Fault, Proxy, use_s3
from tests.support.snapshots import body_bytes, eventually, snapshot
from ucp_core.layout import ParallelLayout
from ucp_core.storage import claim, open_store, read_appended
from ucp_core.storage.passing import Retries
from workers.keeper.arena_table import ArenaTable
from workers.keeper.node_memory import Problems
from workers.keeper.persister import Persister
from workers.memory import Arena
from workers.protocol import Assignment
from workers.settings import CheckpointSettings
from workers.train.boundary import StorageWriter

pytest.importorskip("moto", reason="moto is not installed: pip install 'everstep[dev]'")
s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'everstep[s3]'")


@pytest.fixture
def proxy(begin_proxy: Callable[[], Proxy], monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """Stand between the server and all stores, whose retries are quick."""
    monkeypatch.setattr(
        Retries.__init__, "__kwdefaults__", {"attempts": 3, "first_s": 0.001, "longest_s": 0.01}
    )
    proxy = begin_proxy()
    use_s3(monkeypatch, proxy.url)
    return proxy


@pytest.fixture
def url(proxy: Proxy) -> str:
    """Return a run directory in a bucket of its own."""
    del proxy
    bucket = f"b-{uuid.uuid4().hex}"
    s3fs.S3FileSystem().mkdir(bucket)
    return f"s3://{bucket}/run"


def assignment(*, attempt: int, num_ranks: int) -> Assignment:
    return assignment_of(
        attempt=attempt, layout=ParallelLayout(dp_shard=num_ranks), lineage=((1, 0),)
    )


def _is_stored(arena: Arena) -> bool:
    return arena.pinned() is None


def test_a_journal_costs_no_more_the_longer_it_is(url: str, proxy: Proxy, tmp_path: Path) -> None:
    """Its writer knows its next piece: it reads, lists and looks at nothing."""
    run = Journaled(config_at(url), spool=str(tmp_path / "spool"))
    run.is_compacting = False
    assert run.sender is not None
    proxy.seen.clear()
    run.grow(4000)
    run.sender.close()

    assert {each.split()[0] for each in proxy.seen} <= {"PUT", "POST"}
    # Some hundred decisions, and what happened in between goes with them.
    assert proxy.count("PUT") < 300
    assert sum(segment_sizes(*open_store(url))) == run.journal.journal_bytes
    assert replay_run(url)["records"] == run.seq
    assert not (tmp_path / "spool").exists()


@pytest.mark.parametrize(
    "fault",
    [
        Fault(method="PUT", within="journal", times=15, status=503),
        Fault(method="PUT", within="journal", times=15),
        Fault(method="PUT", within="journal", times=5, after=True),
        Fault(method="PUT", within="journal", times=5, doubles=True),
        Fault(method="PUT", within="journal", times=2, delay_s=1.0),
    ],
    ids=["throttled", "refused", "answers-lost", "doubled", "slow"],
)
def test_decisions_do_not_wait_for_storage(
    fault: Fault, url: str, proxy: Proxy, tmp_path: Path
) -> None:
    """A fault during an outage is recovered from memory; the journal is made up afterwards."""
    run = Journaled(config_at(url), fault_every=50, spool=str(tmp_path / "spool"))
    run.is_compacting = False
    assert run.sender is not None
    proxy.faults = [fault]
    run.grow(10)
    # Otherwise all of it may be in one piece.
    assert eventually(lambda: proxy.count("PUT", "journal") > 0)
    run.grow(600)
    run.sender.close()

    assert proxy.count("PUT", "journal") > (fault.times if fault.status else 1)
    assert replay_run(url)["records"] == run.seq


_DIES = """
import os, sys
from tests.support.journals import Journaled, config_at

run = Journaled(config_at(sys.argv[1]), fault_every=50, spool=sys.argv[2])
run.is_compacting = False
run.grow(400)
print(run.seq, run.state.attempt.number, flush=True)
os._exit(9)
"""


def test_a_controller_that_dies_in_an_outage_leaves_its_lines(
    url: str, proxy: Proxy, tmp_path: Path
) -> None:
    """Its decisions were carried out, so its successor must know of them."""
    spool = str(tmp_path / "spool")
    proxy.faults = [Fault(method="PUT", within="journal", times=10_000, status=503)]
    dead = subprocess.run(
        [sys.executable, "-c", _DIES, url, spool],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert dead.returncode == 9, dead.stderr
    num_records, attempt = map(int, dead.stdout.split())
    assert not segment_sizes(*open_store(url))
    proxy.faults = []

    successor = Journaled(config_at(url), spool=spool)

    assert successor.number == 2
    assert successor.state.attempt.number >= attempt > 1
    assert successor.sender is not None
    successor.sender.close()
    assert replay_run(url)["records"] >= num_records


def test_no_two_claimants_give_one_number_to_an_attempt(
    url: str, proxy: Proxy, tmp_path: Path
) -> None:
    """The journal lags, and the head is lost: the next one hears nothing of the last attempt."""
    older = Journaled(config_at(url), fault_every=50, spool=str(tmp_path / "lost"))
    older.grow(200)
    eventually(lambda: sum(segment_sizes(*open_store(url))) == older.journal.journal_bytes)
    sent = older.state.attempt.number
    proxy.faults = [Fault(method="PUT", within="journal", times=10_000, status=503)]
    while older.state.attempt.number < sent + 2:
        older.grow(older.seq + 60)
    proxy.faults = [Fault(method="PUT", within="journal/000001", times=10_000, status=503)]

    newer = Journaled(config_at(url), claim=2, spool=str(tmp_path / "other"))
    newer.grow(newer.seq + 60)

    before = {number for number, _ in older.state.lineage}
    assert len(before) >= sent + 2
    assert {number for number, _ in newer.state.lineage} & before == set(range(1, sent + 1))
    assert newer.sender is not None
    newer.sender.close()
    # At last the older one's lines come through.
    proxy.faults = []
    assert older.sender is not None
    older.sender.close()
    assert replay_run(url)["same_decisions"]


def test_a_checkpoint_costs_four_requests_a_rank(url: str, proxy: Proxy) -> None:
    """Data, record, one look and its record read by who commits; little beside, for each step."""
    num_ranks, num_versions, steps_each = 4, 8, 10
    store, path = open_store(url)
    table = ArenaTable(budget_bytes=1 << 30)
    table.fence(1, ((1, 0),))
    claim(store, path, 1, {"token": "of-claim-1"})
    table.claim = 1
    arenas = [table.reserve(f"w{rank:04d}.1", body_bytes=body_bytes(4)) for rank in range(4)]
    problems = Problems()
    persister = Persister(table, store, path, CheckpointSettings(keep=2), problems.note)
    lines = StorageWriter(
        store=store,
        directory=path,
        assignment=assignment(attempt=1, num_ranks=num_ranks),
        settings=CheckpointSettings(keep=0),
        fenced=lambda: False,
        moved=lambda _: None,
    )
    for version in range(num_versions + 1):
        if version == 1:
            # The first one looks for what is there.
            proxy.seen.clear()
        step = (version + 1) * steps_each
        for number in range(step - steps_each + 1, step + 1):
            lines.append("metrics/rank0.jsonl", {"step": number, "loss": 1.0})
        for rank, arena in enumerate(arenas):
            snapshot(arena, step, rank=rank, world=num_ranks, pin=True, lineage=table.lineage)
            table.tell()
            assert eventually(partial(_is_stored, arena))
        assert persister.stored[1] == step
    assert lines.close()
    persister.close()

    versions = [each for each in proxy.seen if "checkpoints" in unquote(each)]
    beside = len(proxy.seen) - len(versions)
    assert len(versions) <= 4 * num_ranks * num_versions
    assert beside <= 0.2 * num_ranks * num_versions * steps_each
    assert proxy.count("GET", "claims") <= num_versions + 1, "one look at the owner for each commit"
    assert proxy.count("HEAD") == 0
    assert not problems.lines()
    assert len(read_appended(store, f"{path}/metrics/rank0.jsonl").splitlines()) == step
