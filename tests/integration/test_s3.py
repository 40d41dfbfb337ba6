"""S3 as it is used: a server process that speaks the protocol, and a proxy that spoils it."""

import subprocess
import sys
import threading
import tracemalloc
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.shell.local import is_over
from tests.support.checkpoints import assert_loaded, save, small_state, whole_need
from tests.support.commands import ucp
from tests.support.crash_scripts import SCRIPTS, Commit, Save, Script
from tests.support.failing_store import Fate, How
from tests.support.object_servers import Fault, Proxy, use_s3
from tests.support.store_conformance import StoreConformance
from ucp_core.errors import StorageError, SupersededError
from ucp_core.inspection import verify
from ucp_core.native import find_committed, load, open_checkpoint
from ucp_core.storage import (
    Owner,
    PieceWriter,
    Store,
    claim,
    join,
    open_store,
    passing,
    read_appended,
)
from ucp_core.storage.passing import Retries
from ucp_core.storage.s3 import S3Store

pytest.importorskip("moto", reason="moto is not installed: pip install 'everstep[dev]'")
s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'everstep[s3]'")

_QUICK = Retries(attempts=4, first_s=0.001)
_PART = 16 << 20


@pytest.fixture
def bucket(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a bucket and say where it is."""
    use_s3(monkeypatch, s3_url)
    name = f"b-{uuid.uuid4().hex}"
    s3fs.S3FileSystem().mkdir(name)
    return name


@pytest.fixture
def proxy(begin_proxy: Callable[[], Proxy], bucket: str, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """Stand between the server, where ``bucket`` is, and whoever opens a store after this."""
    del bucket
    proxy = begin_proxy()
    use_s3(monkeypatch, proxy.url)
    return proxy


def quick_store(bucket: str) -> tuple[S3Store, str]:
    """Return the store that ``open_store`` gives, but for shorter pauses."""
    store, root = open_store(f"s3://{bucket}/root")
    assert isinstance(store, S3Store)
    return S3Store(store._fs, retries=_QUICK), root


class TestS3(StoreConformance):
    @pytest.fixture(autouse=True)
    def _bucket(self, bucket: str) -> None:
        self.bucket = bucket

    def make(self, tmp_path: Path) -> tuple[Store, str]:
        del tmp_path
        return open_store(f"s3://{self.bucket}/root")


def test_the_commands_take_urls(bucket: str) -> None:
    """Convert from one bucket's directory to another, and verify what came out."""
    store, root = open_store(f"s3://{bucket}/run/checkpoints")
    state = small_state()
    save(store, state, step=7, root=root)
    source, made = f"s3://{bucket}/run/checkpoints/step-00000007", f"s3://{bucket}/made"

    for arguments in (("convert", source, made), ("verify", made), ("inspect", made)):
        done = ucp(*arguments)
        assert done.returncode == 0, done.stderr

    need = whole_need(state)
    load(open_checkpoint(store, f"{bucket}/made"), need)
    assert_loaded(state, need)


def test_every_tool_works_from_bucket_to_bucket(bucket: str) -> None:
    """Files whose names begin with a dot, ranges of large files, and a listing for each format."""
    store, root = open_store(f"s3://{bucket}/checkpoints")
    save(store, small_state(), step=7, root=root)
    checkpoint = f"s3://{bucket}/checkpoints/step-00000007"
    for target, options in (("dcp", []), ("huggingface", ["--slots", "weight"]), ("universal", [])):
        there = f"s3://{bucket}/{target}"
        done = ucp("export", checkpoint, there, "--format", target)
        assert done.returncode == 0, done.stderr
        again = ucp("export", checkpoint, there, "--format", target)
        assert again.returncode == 1
        compared = ucp("diff", checkpoint, there, "--read-all", *options)
        assert "0 differ" in compared.stdout, compared

    part = f"s3://{bucket}/part.safetensors"
    done = ucp("extract", f"s3://{bucket}/dcp", "wte", "--box", "2:5", "--out", part)
    assert done.returncode == 0, done.stderr
    assert ucp("inspect", part).returncode == 0


class BucketWorld:
    """A process between which and its bucket the line breaks for good, at a change."""

    def __init__(self, bucket: str, proxy: Proxy) -> None:
        store, self.root = open_store(f"s3://{bucket}/{uuid.uuid4().hex}")
        assert isinstance(store, S3Store)
        self.store: Store = S3Store(store._fs, retries=Retries(attempts=1))
        self.fate = proxy.fate = Fate()

    def run(self, act: Callable[[], object]) -> bool:
        """Do it here."""
        try:
            act()
        except StorageError:
            assert self.fate.is_dead
            return False
        return True


@pytest.mark.parametrize(
    "script",
    [
        # Hundreds of requests each: the server, in Python, takes a minute for them.
        pytest.param(script, marks=[] if isinstance(script, Save | Commit) else pytest.mark.chaos)
        for script in SCRIPTS
    ],
    ids=type,
)
def test_death_at_any_request_loses_nothing(script: Script, bucket: str, proxy: Proxy) -> None:
    """A bucket's content is as safe from a killed machine as a local directory.

    Requests have no middle, and to die after one is to die before the next.
    """
    for num_changes in range(100):
        world = BucketWorld(bucket, proxy)
        script.prepare(world)
        world.fate.die(num_changes, How.AFTER)
        lived = world.run(partial(script.act, world))
        world.fate.revive()

        script.check(world, done=lived)
        script.act(world)
        script.check(world, done=True)
        if lived:
            return
    pytest.fail("the script has more changes than were tried")


@pytest.mark.parametrize("size", [_PART - 1, _PART, _PART + 1, 2 * _PART + 5])
def test_large_files_go_up_in_parts(size: int, bucket: str, proxy: Proxy) -> None:
    """Sizes around a part are where the last one is empty or forgotten."""
    store, root = quick_store(bucket)
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    chunks = [data[low : low + 999_999] for low in range(0, size, 999_999)]

    assert store.write_file(join(root, "f"), chunks, fsync=True) == size

    assert store.read(join(root, "f")) == data
    assert store.read_range(join(root, "f"), 1, size - 2) == data[1:-1]
    assert proxy.count("PUT", "partNumber") == (0 if size <= _PART else -(-size // _PART))


def test_memory_does_not_grow_with_the_file(bucket: str) -> None:
    """A rank's file is as large as its share of the state, and that fills the machine."""
    store, root = open_store(f"s3://{bucket}/root")
    chunk = b"\5" * (1 << 20)
    tracemalloc.start()
    try:
        store.write_file(join(root, "f"), (chunk for _ in range(200)), fsync=False)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert store.size(join(root, "f")) == 200 << 20
    # Seven parts, each with the room that it grew in, and the client's own tables.
    assert peak_bytes < 9 * _PART


def test_a_part_that_cannot_be_sent_leaves_nothing(bucket: str, proxy: Proxy) -> None:
    """Neither a file nor parts that are invisible and paid for."""
    store, root = quick_store(bucket)
    proxy.faults = [Fault(method="PUT", within="partNumber=2", times=99, status=503)]

    with pytest.raises(StorageError, match=r"root/f could not be reached in 4 attempts.*injected"):
        store.write_file(join(root, "f"), [bytes(_PART)] * 3, fsync=False)

    assert not store.exists(join(root, "f"))
    uploads = store._fs.call_s3("list_multipart_uploads", Bucket=bucket)
    assert uploads.get("Uploads", []) == []


@pytest.mark.parametrize(
    "fault",
    [
        Fault(method="GET", within="root/f", times=3, status=503),
        Fault(method="GET", within="root/f", times=3, status=500, code="InternalError"),
        Fault(method="GET", within="root/f", times=3, status=429, code="TooManyRequests"),
        Fault(method="GET", within="root/f", times=3),
        Fault(method="HEAD", within="root/f", times=3, status=503),
        Fault(method="PUT", within="root/f", times=3, status=503),
        Fault(method="PUT", within="root/f", times=3),
        Fault(method="GET", within="list-type", times=3, status=503),
    ],
    ids=lambda fault: f"{fault.method}-{fault.within}-{fault.status or 'reset'}",
)
def test_what_fails_for_a_moment_is_repeated(fault: Fault, bucket: str, proxy: Proxy) -> None:
    """Throttling is daily bread there, and must not cost a run a recovery."""
    store, root = quick_store(bucket)
    proxy.faults = [fault]
    path = join(root, "f")

    store.write_file(path, [b"0123456789"], fsync=False)
    buffer = bytearray(4)
    store.read_ranges(path, [(3, (memoryview(buffer),))])

    assert bytes(buffer) == b"3456"
    assert store.size(path) == 10
    assert store.list(root) == ("f",)
    assert store.read(path) == b"0123456789"
    within = fault.within or "root"
    assert proxy.count(fault.method, within) > fault.times


@pytest.mark.chaos
def test_ranks_save_while_the_service_slows_them_down(
    bucket: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses 30 % of all writes: nothing is lost, and ranks do not retry together."""
    paused_s: list[float] = []
    # Pauses are as long as in a run, and not waited for.
    monkeypatch.setattr(passing, "time", SimpleNamespace(sleep=paused_s.append))
    proxy.faults = [Fault(method="PUT", times=100_000, share=0.3, status=503)]
    store, root = open_store(f"s3://{bucket}/run/checkpoints")
    states = {step: small_state(step) for step in range(1, 6)}
    with ThreadPoolExecutor(4) as ranks:
        for step, state in states.items():
            saving = partial(save, store, state, step=step, root=root, world_size=4)
            results = [ranks.submit(saving, ranks=[rank]) for rank in range(4)]
            assert any(each.result()[0].committed for each in results)

    first_s = [pause_s for pause_s in paused_s if pause_s <= 0.2]
    assert len(set(first_s)) == len(first_s) > 5
    assert all(0.1 <= pause_s <= 8.0 for pause_s in paused_s)
    for step, state in states.items():
        checkpoint = open_checkpoint(store, join(root, f"step-{step:08d}"))
        need = whole_need(state)
        load(checkpoint, need)
        assert_loaded(state, need)
        assert verify(checkpoint) == []


def test_repeating_ends(bucket: str, proxy: Proxy) -> None:
    """Once more than allowed, not five times by each of three layers."""
    store, root = quick_store(bucket)
    proxy.faults = [Fault(method="GET", within="root/f", times=99, status=503)]

    with pytest.raises(StorageError, match=r"root/f could not be reached in 4 attempts"):
        store.read_range(join(root, "f"), 0, 1)

    assert proxy.count("GET", "root/f") == 4


def test_only_the_range_that_failed_is_read_again(bucket: str, proxy: Proxy) -> None:
    """To repeat a whole batch would double the load on a service that asks for less."""
    store, root = quick_store(bucket)
    path = join(root, "f")
    store.write_file(path, [bytes(range(250))], fsync=False)
    proxy.seen.clear()
    proxy.faults = [Fault(method="GET", within="root/f", times=2, status=503)]
    buffers = [bytearray(10) for _ in range(5)]

    ranges = [(50 * i, (memoryview(b),)) for i, b in enumerate(buffers)]
    store.read_ranges(path, ranges)

    assert [b[0] for b in buffers] == [0, 50, 100, 150, 200]
    assert proxy.count("GET", "root/f") == 7


def test_ranges_are_read_at_once(bucket: str, proxy: Proxy) -> None:
    """One after the other, each would wait for the answer to the one before."""
    store, root = quick_store(bucket)
    path = join(root, "f")
    store.write_file(path, [bytes(range(80))], fsync=False)
    # None is answered before all have come.
    proxy.meeting = threading.Barrier(8, timeout=30.0)
    buffers = [bytearray(10) for _ in range(8)]

    ranges = [(10 * i, (memoryview(b),)) for i, b in enumerate(buffers)]
    store.read_ranges(path, ranges)

    assert b"".join(buffers) == bytes(range(80))


def test_a_writer_that_was_killed_leaves_the_old_file(bucket: str) -> None:
    """SIGKILL runs no cleanup: what was sent must never be taken for the file."""
    store, root = quick_store(bucket)
    store.write_file(join(root, "f"), [b"old"], fsync=False)
    script = f"""
import os
from ucp_core.storage import open_store

def chunks():
    for _ in range(40):
        yield bytes(1 << 20)
    os._exit(9)

store, root = open_store("s3://{bucket}/root")
store.write_file(root + "/f", chunks(), fsync=False)
"""

    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=240)

    assert done.returncode == 9
    uploads = store._fs.call_s3("list_multipart_uploads", Bucket=bucket)
    assert len(uploads["Uploads"]) == 1
    assert store.list(root) == ("f",)
    assert store.read(join(root, "f")) == b"old"


def test_a_commit_whose_answer_was_lost_is_known_as_done(bucket: str, proxy: Proxy) -> None:
    """The second attempt finds the name taken: by the first one, not by a rival."""
    store, root = quick_store(bucket)
    proxy.faults = [Fault(method="PUT", within="root/m", after=True)]

    assert store.write_atomic(join(root, "m"), b"mine", fsync=False, exclusive=True)
    assert proxy.count("PUT", "root/m") == 2
    assert not store.write_atomic(join(root, "m"), b"another's", fsync=False, exclusive=True)
    assert store.read(join(root, "m")) == b"mine"


def test_a_look_at_the_owner_of_a_run_is_one_request(bucket: str, proxy: Proxy) -> None:
    """Every commit asks it; and of two claims of one number the service lets one through."""
    store, root = quick_store(bucket)
    claim(store, root, 1, {"token": "a"})
    owner = Owner(store, root, 1)
    before = len(proxy.seen)
    owner.require()
    assert [seen.split()[0] for seen in proxy.seen[before:]] == ["GET"]

    claim(store, root, 2, {"token": "b"})
    with pytest.raises(SupersededError):
        claim(store, root, 2, {"token": "c"})
    with pytest.raises(SupersededError):
        owner.require()


def test_an_upload_whose_last_answer_was_lost_is_known_as_done(bucket: str, proxy: Proxy) -> None:
    """A completed upload has lost its name, and the second attempt does not find it."""
    store, root = quick_store(bucket)
    proxy.faults = [Fault(method="POST", within="uploadId", after=True)]

    store.write_file(join(root, "f"), [bytes(_PART), b"end"], fsync=False)

    assert store.size(join(root, "f")) == _PART + 3


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "AccessDenied", r"root(/f)? is not permitted.*policy"),
        (403, "InvalidAccessKeyId", r"root(/f)? cannot be reached with these credentials"),
        (403, "SignatureDoesNotMatch", r"root(/f)? cannot be reached with these credentials"),
        (400, "ExpiredToken", r"root(/f)? cannot be reached with these credentials"),
        (403, "RequestTimeTooSkewed", r"root(/f)? cannot be reached.*and the clock"),
    ],
)
def test_a_refusal_says_what_to_check(
    status: int, code: str, message: str, bucket: str, proxy: Proxy
) -> None:
    """It is not repeated, and it is not taken for a file that is not there."""
    store, root = quick_store(bucket)
    proxy.faults = [
        Fault(method=method, within="root", times=99, status=status, code=code)
        for method in ("GET", "PUT")
    ]

    for act in (
        lambda: store.read(join(root, "f")),
        lambda: store.read_range(join(root, "f"), 0, 1),
        lambda: store.write_file(join(root, "f"), [b"x"], fsync=False),
        lambda: store.append(join(root, "f"), b"x"),
    ):
        with pytest.raises(StorageError, match=message) as caught:
            act()
        assert not caught.value.facts["missing"]
    assert proxy.count("PUT", "root/f") == 1


def test_a_refused_look_is_no_answer(bucket: str, proxy: Proxy) -> None:
    """A run that takes "forbidden" for "nothing there" begins from step 0."""
    store, root = quick_store(bucket)
    proxy.faults = [
        Fault(method=method, times=99, status=403, code="AccessDenied")
        for method in ("HEAD", "GET")
    ]

    for act in (store.exists, store.size, store.list):
        with pytest.raises(StorageError, match="root is not permitted"):
            act(root)
    with pytest.raises(StorageError, match="root is not permitted"):
        find_committed(store, root, lineage=[(1, 0)])


def test_a_missing_bucket_is_not_made(bucket: str) -> None:
    """Its name may be a slip; and for a reader it is no empty directory."""
    store, path = open_store(f"s3://{bucket}-slip/run")

    with pytest.raises(StorageError, match=r"run/f is in a bucket that does not exist"):
        store.write_file(join(path, "f"), [b"x"], fsync=False)
    with pytest.raises(StorageError, match=r"run/f is in a bucket that does not exist"):
        store.write_atomic(join(path, "f"), b"x", fsync=False, exclusive=True)
    for act in (store.read, store.list):
        with pytest.raises(StorageError, match="in a bucket that does not exist") as caught:
            act(path)
        assert not caught.value.facts["missing"]


def test_no_credentials_are_an_error_of_ours(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's own class knows nothing of the path and is no OSError."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    s3fs.S3FileSystem.clear_instance_cache()
    store, path = open_store(f"s3://{bucket}/root")

    with pytest.raises(StorageError, match="root/f cannot be reached with these credentials"):
        store.read(join(path, "f"))
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_service_that_is_not_there_is_named(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong endpoint is the commonest mistake of a first run."""
    use_s3(monkeypatch, "http://127.0.0.1:9")
    store, root = quick_store(bucket)

    with pytest.raises(StorageError, match=r"root/f could not be reached in 4 .*127\.0\.0\.1:9"):
        store.read(join(root, "f"))


@pytest.mark.chaos
def test_directories_longer_than_a_page_are_listed_and_deleted(bucket: str) -> None:
    """S3 gives 1,000 names at a time: a run of 1,001 ranks must not lose one."""
    store, root = quick_store(bucket)
    store._fs.pipe({join(root, f"d/{index:04d}"): b"x" for index in range(1001)})

    assert len(store.list(join(root, "d"))) == 1001
    assert len(store.sizes(join(root, "d"))) == 1001
    store.delete(join(root, "d"))
    assert not store.exists(join(root, "d"))


def test_a_detached_cluster_sees_that_its_run_in_a_bucket_is_over(bucket: str) -> None:
    """Its summary is no file of this machine: simulated nodes stayed for ever."""
    store, root = open_store(f"s3://{bucket}/run")
    old = b"of the run before"
    store.write_atomic(join(root, "summary.json"), old, fsync=False)
    assert not is_over(f"s3://{bucket}/run", old)

    store.delete(join(root, "summary.json"))
    assert not is_over(f"s3://{bucket}/run", old)
    store.write_atomic(join(root, "summary.json"), b"of this one", fsync=False)
    assert is_over(f"s3://{bucket}/run", old)


def test_an_append_costs_one_request_however_long_the_file_is(bucket: str, proxy: Proxy) -> None:
    """A run of a week appends a million times: no reading, no writing again, no listing."""
    store, root = quick_store(bucket)
    path = join(root, "metrics/rank0.jsonl")
    store.append(path, b"0\n")
    costs: list[int] = []
    for number in range(1, 200):
        proxy.seen.clear()
        store.append(path, b"%d\n" % number)
        costs.append(len(proxy.seen))

    # Every 64th time the pieces are merged and deleted.
    assert sorted(costs) == [1] * 196 + [3] * 3
    assert not proxy.count("GET")
    reader, _ = quick_store(bucket)
    proxy.seen.clear()
    assert read_appended(reader, path) == b"".join(b"%d\n" % number for number in range(200))
    # One listing, three merged pieces and the eight behind them.
    assert len(proxy.seen) == 12


@pytest.mark.parametrize(
    "fault",
    [
        Fault(method="PUT", within="-000002", times=2, status=503),
        Fault(method="PUT", within="-000002", times=2),
        Fault(method="PUT", within="-000002", times=2, after=True),
        Fault(method="PUT", within="-000002", times=1, doubles=True),
        Fault(method="PUT", within="-000002", times=1, status=409, after=True),
    ],
    ids=["throttled", "reset", "answer-lost", "doubled", "conflict"],
)
def test_what_is_appended_is_there_once(fault: Fault, bucket: str, proxy: Proxy) -> None:
    """A request that was repeated is not taken for another writer, and its line not for two."""
    store, root = quick_store(bucket)
    path = join(root, "journal/000001.jsonl")
    proxy.faults = [fault]

    writer = PieceWriter(store, path, number=1)
    for number in range(4):
        writer.append(b"%d\n" % number)

    assert read_appended(store, path) == b"0\n1\n2\n3\n"


def test_a_second_writer_is_noticed(bucket: str) -> None:
    """Two controllers that both believe to be the third must not mix their lines."""
    store, root = quick_store(bucket)
    other, _ = quick_store(bucket)
    path = join(root, "journal/000003.jsonl")
    mine, theirs = (PieceWriter(each, path, number=1) for each in (store, other))
    mine.append(b"mine\n")

    with pytest.raises(StorageError, match="two processes write the same file") as caught:
        theirs.append(b"theirs\n")

    assert caught.value.facts["taken"]
    # A writer that only appends continues after the other: a late line of a fenced attempt.
    other.append(path, b"late\n")
    store.append(path, b"next\n")
    assert read_appended(store, path) == b"mine\nlate\nnext\n"


def test_pieces_that_are_merged_while_they_are_read_are_found(bucket: str) -> None:
    """A report is made of a run that is under way."""
    store, root = quick_store(bucket)
    path = join(root, "journal/000001.jsonl")
    for number in range(63):
        store.append(path, b"%d\n" % number)
    reader, _ = quick_store(bucket)
    listed, merged = threading.Event(), threading.Event()
    sizes = reader.sizes

    def slow_sizes(directory: str) -> dict[str, int]:
        found = sizes(directory)
        listed.set()
        assert merged.wait(60)
        return found

    reader.sizes = slow_sizes  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(read_appended, reader, path)
        assert listed.wait(60)
        store.append(path, b"63\n")
        merged.set()
        assert read.result() == b"".join(b"%d\n" % number for number in range(64))
