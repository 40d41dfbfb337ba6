"""Snapshot memory: what is in it survives whoever wrote it, and half a version is none."""

import contextlib
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.no_descriptors import no_descriptors
from tests.support.snapshots import eventually
from workers.errors import ArenaError
from workers.keeper import descriptor_server
from workers.keeper.arena_table import ArenaTable, available_bytes
from workers.keeper.descriptor_server import DescriptorServer
from workers.memory import (
    Arena,
    SnapshotMemory,
    adopt,
    descriptor_socket,
    notify,
    open_arena,
    reserve,
)
from workers.protocol import Held


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create("test", body_bytes=10_000)
    yield made
    made.close()


@pytest.fixture
def held() -> ArenaTable:
    return ArenaTable(budget_bytes=1 << 20)


@pytest.fixture
def served(tmp_path: Path, held: ArenaTable) -> Iterator[Path]:
    path = descriptor_socket(tmp_path)
    server = DescriptorServer(path, held)
    yield path
    server.close()


def _write(arena: Arena, step: int, data: bytes, *, attempt: int = 1) -> int:
    buffer = arena.choose(())
    arena.begin(buffer, attempt=attempt, step=step, rank=0, world_size=1)
    arena.body(buffer)[: len(data)] = data
    arena.finish(buffer, data_bytes=len(data), record_bytes=0)
    return buffer


def test_a_version_that_is_under_way_is_none(arena: Arena) -> None:
    """Its writer may be dead: what it left is half of one version and half of another."""
    _write(arena, 1, b"one")
    arena.begin(arena.choose(()), attempt=1, step=2, rank=0, world_size=1)

    assert [held.step for held in arena.versions()] == [1]


def test_the_newest_two_versions_are_never_written_over(arena: Arena) -> None:
    """One of them is the last that all ranks have."""
    for step in range(1, 10):
        buffer = arena.choose(())
        arena.begin(buffer, attempt=1, step=step, rank=0, world_size=1)
        left = [held.step for held in arena.versions()]
        assert left == [s for s in (step - 2, step - 1) if s > 0]
        arena.finish(buffer, data_bytes=0, record_bytes=0)


def test_an_arena_is_mapped_at_a_huge_page_and_given_back_whole() -> None:
    """Else the kernel cannot map huge pages, and a load takes four times as long; and its place is
    chosen by us, so only we unmap the memory around it.
    """
    made = Arena.create("huge", body_bytes=3 << 20)
    found = Arena(os.dup(made.fd))
    buffer = _write(made, 1, os.urandom(3 << 20))
    assert found.body(buffer) == made.body(buffer)
    for arena in (made, found):
        (first, _), *_ = places = _maps("huge")
        assert first % (2 << 20) == 0
        assert sum(stop - start for start, stop in places) % arena.size_bytes == 0
        arena.close()
    assert _maps("huge") == []


def _maps(name: str) -> list[tuple[int, int]]:
    """Return where this process has mapped the arenas of that name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = (line.split()[0].split("-") for line in lines if f"everstep-{name}" in line)
    return [(int(start, 16), int(stop, 16)) for start, stop in spans]


def test_an_arena_that_is_mapped_and_closed_again_and_again_takes_no_more_room() -> None:
    """A worker maps those of its whole node for each recovery."""
    made = Arena.create("again", body_bytes=10_000)
    before = Path("/proc/self/maps").read_text().count("\n")
    for _ in range(50):
        Arena(os.dup(made.fd)).close()
    assert Path("/proc/self/maps").read_text().count("\n") <= before + 5
    made.close()


def test_a_file_that_is_read_stays_open_though_its_arena_is_freed() -> None:
    """Its number would soon be another file's."""
    made = Arena.create("test", body_bytes=10_000)
    with made.opened() as fd:
        made.close()
        assert os.fstat(fd).st_size == made.size_bytes
    with pytest.raises(OSError, match="Bad file descriptor"), made.opened():
        pass


def test_a_version_of_an_older_attempt_goes_first(arena: Arena) -> None:
    """After a resume the steps count down once, and the attempt does not."""
    _write(arena, 7, b"old")
    _write(arena, 8, b"old")
    _write(arena, 6, b"new", attempt=2)
    _write(arena, 7, b"new", attempt=2)

    assert [(held.attempt, held.step) for held in arena.versions()] == [(1, 8), (2, 6), (2, 7)]


@pytest.mark.parametrize("byte", range(0, 60, 7))
def test_a_damaged_header_is_no_version(arena: Arena, byte: int) -> None:
    """Whatever wrote there, the length and step that it says must not be believed."""
    buffer = _write(arena, 1, b"one")
    start = arena.body_offset(buffer) - 4096 + byte
    old = os.pread(arena.fd, 1, start)
    os.pwrite(arena.fd, bytes([old[0] ^ 0x10]), start)

    assert arena.held(buffer) is None


def test_a_file_that_is_no_arena_is_refused() -> None:
    """A restarted keeper takes in what workers hand it."""
    fd = os.memfd_create("other")
    os.ftruncate(fd, 5000)
    with pytest.raises(ArenaError, match="5000 bytes is not an arena"):
        Arena(fd)
    os.close(fd)


@pytest.mark.parametrize("body_bytes", [0, 1])
def test_memory_for_next_to_nothing_is_memory(body_bytes: int) -> None:
    """A page is the least that a buffer has beside its header."""
    arena = Arena.create("small", body_bytes=body_bytes)
    assert arena.body_bytes >= body_bytes
    assert arena.newest() is None
    arena.close()


def test_memory_that_cannot_be_mapped_is_refused_and_let_go_of(tmp_path: Path) -> None:
    """A loader goes on to the next source for that; what it still held would never be free."""
    table = ArenaTable(budget_bytes=1 << 20)
    served = DescriptorServer(descriptor_socket(tmp_path), table)
    fd = os.memfd_create("large")
    # No page of it is ever touched.
    os.ftruncate(fd, 3 << 28)
    table.adopt("w0001.0", fd)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (taken_bytes + (1 << 28), hard))
    try:
        with pytest.raises(ArenaError, match=r"cannot be mapped: .*Cannot allocate memory"):
            open_arena(descriptor_socket(tmp_path), "w0001.0")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    served.close()
    # The keeper lets go of what it has handed over behind the answer.
    assert eventually(lambda: _num_open("memfd:large") == 1, within_s=20.0)
    table.drop("w0001.0")


def _num_open(name: str) -> int:
    files: list[str] = []
    for fd in Path("/proc/self/fd").iterdir():
        # That of the listing itself is gone by now.
        with contextlib.suppress(FileNotFoundError):
            files.append(fd.readlink().name)
    return len([file for file in files if file.startswith(name)])


_TRAINER = """
import sys, time
from pathlib import Path
from workers.memory import reserve
arena = reserve(Path(sys.argv[1]), "w0001.0", body_bytes=8192, attempt=3)
arena.begin(0, attempt=3, step=12, rank=1, world_size=2)
arena.body(0)[:5] = b"state"
arena.finish(0, data_bytes=5, record_bytes=0)
arena.begin(1, attempt=3, step=13, rank=1, world_size=2)
arena.body(1)[:2] = b"st"
print("written", flush=True)
time.sleep(60)
"""


def test_what_a_trainer_wrote_survives_its_kill(served: Path) -> None:
    """That is what the keeper is for; and the version that the kill cut short is not there."""
    command = [sys.executable, "-c", _TRAINER, str(served)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "written\n"
        os.kill(trainer.pid, signal.SIGKILL)

    arena = open_arena(served, "w0001.0")
    (held,) = arena.versions()
    assert (held.attempt, held.step, held.rank, held.world_size) == (3, 12, 1, 2)
    assert bytes(arena.body(held.buffer)[: held.data_bytes]) == b"state"
    arena.close()


def test_a_restarted_keeper_is_handed_what_the_trainers_hold(tmp_path: Path) -> None:
    """Its own memory is gone; the trainers' mapping of the same memory is not."""
    path = descriptor_socket(tmp_path)
    first = DescriptorServer(path, ArenaTable(budget_bytes=1 << 20))
    memory = SnapshotMemory(tmp_path, "w0001")
    mine = memory.ensure(4096, attempt=1, for_cuda=False)
    assert memory.tell()
    _write(mine, 5, b"kept")
    mine.set_followed(True)
    first.close()
    second_shelf = ArenaTable(budget_bytes=1 << 20)
    second = DescriptorServer(path, second_shelf)

    assert not memory.is_told()
    assert memory.tell()

    (held,) = second_shelf.versions()["w0001.1"]
    assert held.step == 5
    assert not mine.is_followed(), "who copied it was connected to the keeper before"
    second.close()
    memory.leave()


def test_a_keeper_is_handed_memory_once(tmp_path: Path) -> None:
    """It is looked at with every snapshot."""
    path = descriptor_socket(tmp_path)
    table = ArenaTable(budget_bytes=1 << 20)
    server = DescriptorServer(path, table)
    memory = SnapshotMemory(tmp_path, "w0001")
    mine = memory.ensure(4096, attempt=1, for_cuda=False)
    assert memory.tell()
    mine.set_followed(True)
    assert memory.tell()

    assert mine.is_followed(), "it was not handed over again"
    server.close()
    assert memory.is_told()
    path.unlink()
    assert not memory.is_told()
    assert not memory.tell(), "a keeper that is gone is no error"
    memory.leave()
    table.drop("w0001.1")


def test_an_arena_that_is_handed_over_again_is_the_same(tmp_path: Path) -> None:
    """Readers are in the middle of it."""
    path = descriptor_socket(tmp_path)
    table = ArenaTable(budget_bytes=1 << 20)
    server = DescriptorServer(path, table)
    mine = reserve(path, "w0001.0", body_bytes=4096, attempt=1)
    before = table.arena("w0001.0")
    adopt(path, "w0001.0", mine)

    assert table.arena("w0001.0") is before
    server.close()
    mine.close()
    table.drop("w0001.0")


def test_an_attempt_that_is_over_gets_no_memory(tmp_path: Path) -> None:
    """Nothing of attempt n is accepted after attempt n + 1 began."""
    table = ArenaTable(budget_bytes=1 << 20)
    server = DescriptorServer(descriptor_socket(tmp_path), table)
    table.fence(3, [(1, 0), (2, 0), (3, 5)])

    with pytest.raises(ArenaError, match="attempt 2 is over, attempt 3 has begun"):
        reserve(descriptor_socket(tmp_path), "w0001.1", body_bytes=4096, attempt=2)
    reserve(descriptor_socket(tmp_path), "w0001.1", body_bytes=4096, attempt=3).close()
    server.close()
    table.drop("w0001.1")


def test_a_notice_wakes_who_waits_and_one_without_a_keeper_is_nothing(tmp_path: Path) -> None:
    """The trainer is in its step: it neither waits nor fails, whatever the keeper does."""
    path = descriptor_socket(tmp_path)
    notify(path, "w0001.1")
    table = ArenaTable(budget_bytes=1 << 20)
    server = DescriptorServer(path, table)
    news = table.wait_news(-1, 0.0)
    for _ in range(2000):
        notify(path, "w0001.1")

    assert table.wait_news(news, 20.0) > news
    server.close()
    notify(path, "w0001.1")


def test_waiting_for_pins_is_not_disturbed_by_other_news() -> None:
    """The persister sleeps while nothing is due, however many snapshots are finished."""
    table = ArenaTable(budget_bytes=1 << 20)
    arena = table.reserve("w0001.1", body_bytes=4096)
    buffer = _write(arena, 1, b"one")
    pins, news = table.wait_pins(-1, 0.0), table.wait_news(-1, 0.0)
    table.tell()
    assert table.wait_news(news, 0.0) > news
    assert table.wait_pins(pins, 0.0) == pins

    arena.pin(buffer)
    table.tell()
    assert table.wait_pins(pins, 0.0) > pins
    table.drop("w0001.1")


def test_a_guest_that_is_stopped_delays_no_owner(
    served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process can be stopped between its first and its second word."""
    monkeypatch.setattr(descriptor_server, "ANSWER_S", 60.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(str(served))
        start_s = time.monotonic()
        reserve(served, "w0001.1", body_bytes=4096, attempt=1).close()

        assert time.monotonic() - start_s < 60.0


def test_memory_beyond_the_budget_is_refused_with_the_numbers(
    served: Path, held: ArenaTable
) -> None:
    """Up front, by name: not by the kernel in the middle of the night."""
    reserve(served, "w0001.0", body_bytes=200_000, attempt=1).close()
    with pytest.raises(ArenaError, match=r"w0002.0 need 600000 bytes .* of the node's 1048576"):
        reserve(served, "w0002.0", body_bytes=200_000, attempt=1)
    held.drop("w0001.0")
    reserve(served, "w0002.0", body_bytes=200_000, attempt=1).close()


def test_memory_that_could_not_be_made_is_not_taken_for_used() -> None:
    """A process runs out of file descriptors for a moment; what was claimed must be free again."""
    table = ArenaTable(budget_bytes=1 << 20, available=lambda: 1 << 40)
    with no_descriptors(), pytest.raises(ArenaError, match="Too many open files"):
        table.reserve("w0.1", body_bytes=1 << 18)
    table.reserve("w0.1", body_bytes=1 << 18)
    table.drop("w0.1")


def test_a_worker_that_asks_again_gets_the_same_memory(served: Path) -> None:
    """A new attempt in the same process must find what the last one left."""
    first = reserve(served, "w0001.0", body_bytes=4096, attempt=1)
    _write(first, 1, b"one")
    second = reserve(served, "w0001.0", body_bytes=4096, attempt=1)

    assert [held.step for held in second.versions()] == [1]
    first.close()
    second.close()


def test_nonsense_at_the_door_is_refused_and_the_next_client_is_served(
    served: Path,
) -> None:
    """One bad process must not take the node's snapshots with it."""
    with pytest.raises(ArenaError, match=r"no snapshot of w0009\.0"):
        open_arena(served, "w0009.0")
    with pytest.raises(ArenaError, match="does not answer"):
        open_arena(served.with_name("nobody"), "w0001.0")
    reserve(served, "w0001.0", body_bytes=4096, attempt=1).close()


def test_memory_that_the_node_has_not_is_refused_whatever_the_budget_says(tmp_path: Path) -> None:
    """The kernel would not refuse it: it would kill somebody later."""
    refused: dict[str, str] = {}
    table = ArenaTable(budget_bytes=1 << 40, available=lambda: 80 << 20)
    server = DescriptorServer(descriptor_socket(tmp_path), table, refused.__setitem__)

    with pytest.raises(ArenaError, match="the node has 16777216 left"):
        reserve(descriptor_socket(tmp_path), "w0001.1", body_bytes=10 << 20, attempt=1)
    assert "snapshot.node_memory_mib" in refused["w0001"]
    reserve(descriptor_socket(tmp_path), "w0001.2", body_bytes=1 << 20, attempt=1).close()
    assert refused == {"w0001": ""}
    with pytest.raises(ArenaError, match="reserve the next generation"):
        reserve(descriptor_socket(tmp_path), "w0001.2", body_bytes=2 << 20, attempt=1)
    server.close()
    table.drop("w0001.2")


@pytest.mark.parametrize(
    ("files", "expected_mib"),
    [
        ({}, 600),
        ({"memory.max": "max\n", "memory.current": "5\n"}, 600),
        (
            {
                "memory.max": str(500 << 20),
                "memory.current": str(300 << 20),
                "memory.stat": f"anon 1\ninactive_file {100 << 20}\n",
            },
            300,
        ),
        (
            {
                "memory/memory.limit_in_bytes": str(200 << 20),
                "memory/memory.usage_in_bytes": str(300 << 20),
                "memory/memory.stat": "total_inactive_file 0\n",
            },
            0,
        ),
    ],
)
def test_what_a_container_may_take_is_what_is_available(
    tmp_path: Path, files: dict[str, str], expected_mib: int
) -> None:
    """The machine may have a terabyte more; pages of a memfd are charged to the container."""
    (tmp_path / "memory").mkdir()
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 999999 kB\nMemAvailable:   {600 << 10} kB\n")
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    assert available_bytes(meminfo, tmp_path) == expected_mib << 20


def _left(table: ArenaTable, name: str, step: int, *, body_bytes: int = 8192) -> Held:
    """Have a worker write a version into an arena of its own."""
    arena = table.reserve(name, body_bytes=body_bytes)
    held = arena.held(_write(arena, step, b"left"))
    assert held is not None
    return held


def test_a_replacement_goes_on_in_the_memory_of_a_dead_worker() -> None:
    """At once, within the same budget; and who was told the old name still finds what is there."""
    dead: set[str] = set()
    table = ArenaTable(budget_bytes=3 * 8192, dead=lambda: dead)
    held = _left(table, "w0001.1", 5)
    before = table.arena("w0001.1")
    assert before is not None
    before.set_followed(True)
    with pytest.raises(ArenaError, match=r"w0002\.1 need"):
        table.reserve("w0002.1", body_bytes=8000)
    dead.add("w0001")

    arena = table.reserve("w0002.1", body_bytes=8000)
    assert arena is before
    assert arena.versions() == [held]
    assert arena.choose(()) != held.buffer
    assert not arena.is_followed()
    assert table.versions() == {"w0002.1": [held]}
    assert table.find("w0001.1") is arena
    assert table.arena("w0001.1") is None
    os.close(table.hand_out("w0001.1"))
    dead.add("w0002")
    assert table.reserve("w0003.1", body_bytes=8000) is arena
    assert table.find("w0001.1") is arena
    for attempt in (1, 2):
        table.fence(attempt, ())
    assert table.find("w0001.1") is None
    table.drop("w0003.1")


@pytest.mark.parametrize("name", ["w0001.1", "0123456789ab/w0009.1"])
def test_memory_that_does_not_fit_is_not_handed_on(name: str) -> None:
    """Too small, far too large, a copy of another node's, or of a worker that is there."""
    dead = {"w0009"} if "/" in name else set()
    table = ArenaTable(budget_bytes=1 << 20, dead=lambda: dead)
    _left(table, name, 5)
    table.reserve("w0002.1", body_bytes=8192)
    dead.add("w0001")
    table.reserve("w0002.2", body_bytes=8193)
    table.reserve("w0003.1", body_bytes=4000)

    assert sorted(table.versions()) == sorted([name, "w0002.1", "w0002.2", "w0003.1"])
    for each in table.versions():
        table.drop(each)
