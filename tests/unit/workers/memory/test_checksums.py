"""Checksums by a process that maps the memory: the values are zlib's, whatever becomes of it."""

import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks import until
from workers.memory import Arena, Checksums, Question, checksum_process
from workers.memory.arena import address_of

BLOCK_BYTES = 64 << 10
BUFFER_BYTES = 16 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create("w0001.0", body_bytes=BUFFER_BYTES)
    made.body(1)[:BUFFER_BYTES] = os.urandom(1 << 20) * (BUFFER_BYTES >> 20)
    yield made
    made.close()


@pytest.fixture
def checksums(arena: Arena) -> Iterator[Checksums]:
    made = Checksums()
    made.attach(arena)
    yield made
    made.detach(arena)


def views_of(arena: Arena) -> list[memoryview]:
    """Return parts of the buffer: large, empty, within a block, with a short last block."""
    body = arena.body(1)
    return [body[:5_000_000], body[7:7], body[5_000_000:5_000_100], body[6_000_001:15_999_999]]


def right(views: list[memoryview], block_bytes: int = BLOCK_BYTES) -> list[tuple[int, str]]:
    found = []
    for view in views:
        blocks = [view[low : low + block_bytes] for low in range(0, len(view), block_bytes)]
        found.append((zlib.crc32(view), ",".join(str(zlib.crc32(block)) for block in blocks)))
    return found


def asked(
    checksums: Checksums, views: list[memoryview], block_bytes: int = BLOCK_BYTES
) -> Question:
    question = Question(views, block_bytes)
    checksums.ask(question)
    return question


def pid_of(checksums: Checksums) -> int:
    assert checksums._process is not None
    return checksums._process.pid


def test_the_process_has_the_right_values(checksums: Checksums, arena: Arena) -> None:
    views = views_of(arena)
    assert checksums.of(views, BLOCK_BYTES) == right(views)
    arena.body(1)[6_100_000] ^= 1
    assert checksums.of(views, BLOCK_BYTES) == right(views)
    assert not checksums._is_given_up


def test_other_memory_is_checksummed_here(checksums: Checksums) -> None:
    other = memoryview(bytearray(os.urandom(3_000_000)))
    assert checksums.of([other], BLOCK_BYTES) == right([other])


@pytest.mark.parametrize("kills", [False, True])
def test_answers_are_had_in_any_order_and_made_here_by_need(
    checksums: Checksums, arena: Arena, *, kills: bool
) -> None:
    views = views_of(arena)
    questions = [asked(checksums, [view]) for view in (views[0], views[3], views[0])]
    if kills:
        os.kill(pid_of(checksums), signal.SIGKILL)
    found = [checksums.answer(questions[number]) for number in (1, 0, 2)]
    assert found == [right([views[number]]) for number in (3, 0, 0)]


def test_more_is_asked_than_a_socket_holds(checksums: Checksums, arena: Arena) -> None:
    """A process that waits for its answers to be read would not read what it is asked."""
    views = [arena.body(1)[low : low + 1000] for low in range(0, 12_000_000, 1000)]
    questions = [asked(checksums, views, 64) for _ in range(4)]
    assert [checksums.answer(question) for question in questions] == [right(views, 64)] * 4
    assert not checksums._is_given_up


def test_several_threads_have_the_right_values(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksum_process, "NUM_THREADS", 3)
    ours, its = socket.socketpair()
    served = threading.Thread(target=checksum_process.serve, args=(its,))
    served.start()
    with ours:
        head = checksum_process.HEAD
        socket.send_fds(ours, [head.pack(checksum_process.ATTACH, 0, arena.size_bytes)], [arena.fd])
        view = views_of(arena)[3]
        place = checksum_process.PLACE.pack(0, address_of(view) - arena.address, len(view))
        ours.sendall(head.pack(checksum_process.SUM, 1, BLOCK_BYTES) + place)
        answer = ours.makefile("rb").readline()
    served.join()
    its.close()
    (expected,) = right([view])
    assert answer.decode() == "{};{}\n".format(*expected)


def test_a_question_is_asked_again(checksums: Checksums, arena: Arena) -> None:
    """Each snapshot asks of the same memory, and its first answer may never be fetched."""
    question = asked(checksums, views := views_of(arena))
    arena.body(1)[6_100_000] ^= 1
    checksums.ask(question)
    assert checksums.answer(question) == right(views)
    other = Arena.create("w0001.2", body_bytes=BUFFER_BYTES)
    checksums.attach(other)
    checksums.detach(arena)
    checksums.ask(question)
    assert checksums.answer(question) == right(views)
    assert not checksums._is_given_up
    checksums.detach(other)
    other.close()


def test_a_platform_without_isal_has_the_same_values(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """zlib of Python combines no checksums."""
    monkeypatch.setattr(checksum_process, "combine", None)
    view = views_of(arena)[3]
    memory = mmap.mmap(arena.fd, arena.size_bytes)
    place = (0, address_of(view) - arena.address, len(view))
    answer = checksum_process.answer_to({0: memory}, [place], BLOCK_BYTES)
    (expected,) = right([view])
    assert answer == "{};{}".format(*expected)


def test_memory_that_is_left_is_released(checksums: Checksums, arena: Arena) -> None:
    """The process would keep it for as long as the trainer lives."""
    maps = Path(f"/proc/{pid_of(checksums)}/maps")
    other = Arena.create("w0001.1", body_bytes=BUFFER_BYTES)
    checksums.attach(other)
    views = views_of(arena)
    checksums.of(views, BLOCK_BYTES)
    assert "w0001.0" in maps.read_text()
    checksums.detach(arena)
    until(lambda: "w0001.0" not in maps.read_text(), "released")
    assert checksums.of(views, BLOCK_BYTES) == right(views)
    checksums.detach(other)
    assert not maps.exists()
    other.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_gone_or_stopped_is_replaced(
    checksums: Checksums,
    arena: Arena,
    number: signal.Signals,
    caplog: pytest.LogCaptureFixture,
) -> None:
    views = views_of(arena)
    assert checksums._connection is not None
    checksums._connection.settimeout(0.2)
    pid = pid_of(checksums)
    os.kill(pid, number)

    assert checksums.of(views, BLOCK_BYTES) == right(views)
    assert checksums.of(views, BLOCK_BYTES) == right(views)
    (told,) = caplog.messages
    assert told.startswith("checksums are now made in the trainer")
    assert not Path(f"/proc/{pid}").exists()


def test_small_memory_starts_no_process() -> None:
    small, checksums = Arena.create("w0002.0", body_bytes=1 << 20), Checksums()
    checksums.attach(small)
    assert checksums._process is None
    small.close()


def test_a_machine_that_starts_no_process_trains_on(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    checksums, views = Checksums(), views_of(arena)
    checksums.attach(arena)
    assert checksums.of(views, BLOCK_BYTES) == right(views)


TRAINER = """
import os, signal
from workers.memory import Arena, Checksums, Question, checksum_process
from workers.memory.arena import address_of
arena, checksums = Arena.create("w0003.0", body_bytes=16 << 20), Checksums()
checksums.attach(arena)
print(checksums._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_process_ends_with_its_trainer() -> None:
    trainer = [sys.executable, "-c", TRAINER]
    done = subprocess.run(trainer, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    until(lambda: not Path(f"/proc/{int(done.stdout)}").exists(), "it ends")
