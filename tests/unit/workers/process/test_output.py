"""The log of what a script prints, on stores that append, that do not, and that refuse."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ucp_core.errors import StorageError
from ucp_core.storage import LocalStore, MemoryStore
from workers.process.output import PENDING_BYTES_MAX, OutputLog, log_of


def wait_until(is_seen: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not is_seen():
        assert time.monotonic() < deadline_s, "it was not seen within 30 s"
        time.sleep(0.005)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[OutputLog]:
    output = OutputLog(LocalStore(), str(tmp_path), attempt=12, rank=3)
    yield output
    output.close()


def test_prints_of_any_thread_and_of_old_handlers_are_in_the_log_while_it_is_open(
    local: OutputLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script configures logging once, in its first attempt, and prints in all of them."""
    with log_of(local):
        sys.stdout.write("by the script")
        other = threading.Thread(target=print, args=(" and its thread",))
        other.start()
        other.join()
        handler = logging.StreamHandler()
    sys.stdout.write("between two attempts\n")
    second = OutputLog(LocalStore(), str(tmp_path), attempt=13, rank=3)
    with log_of(second):
        handler.emit(logging.makeLogRecord({"msg": "by its logger"}))
    local.add("\udcff")
    local.close()
    second.close()

    written = (tmp_path / "logs/attempt-0012/rank3.log").read_text()
    assert written == "by the script and its thread\n\\udcff"
    assert (tmp_path / "logs/attempt-0013/rank3.log").read_text() == "by its logger\n"
    assert "between two attempts\n" in capsys.readouterr().out


def test_a_line_is_written_while_the_script_goes_on(local: OutputLog, tmp_path: Path) -> None:
    """Somebody watches; and a process that is killed has written its last lines."""
    path = tmp_path / "logs/attempt-0012/rank3.log"
    for number in range(2):
        local.add(f"{number}\n")
        wait_until(lambda: path.exists() and path.read_text().endswith(f"{number}\n"))  # noqa: B023


def test_a_store_that_rewrites_to_append_gets_pieces() -> None:
    """Appending to an object of a gigabyte copies a gigabyte."""
    store = MemoryStore()
    output = OutputLog(store, "run", attempt=1, rank=0, interval_s=0.01)
    output.add("a\n")
    wait_until(lambda: store.exists("run/logs/attempt-0001/rank0-0001.log"))
    output.add("b\n")
    output.close()

    assert store.read("run/logs/attempt-0001/rank0-0001.log") == b"a\n"
    assert store.read("run/logs/attempt-0001/rank0-0002.log") == b"b\n"


class Refusing(MemoryStore):
    """Refuses until it is told to accept."""

    def __init__(self) -> None:
        super().__init__()
        self.accepts, self.asked = threading.Event(), threading.Event()

    def write_atomic(self, path: str, data: Any, *, fsync: bool, exclusive: bool = False) -> bool:
        self.asked.set()
        if not self.accepts.is_set():
            raise StorageError("full")
        return super().write_atomic(path, data, fsync=fsync, exclusive=exclusive)


def test_what_a_store_refuses_is_written_later_and_too_much_is_dropped_and_counted() -> None:
    """A full disk must neither fail a run nor fill its memory."""
    store = Refusing()
    output = OutputLog(store, "run", attempt=1, rank=0, interval_s=0.01)
    output.add("first\n")
    assert store.asked.wait(30)
    for _ in range(2):
        output.add("x" * (PENDING_BYTES_MAX - 100))
    store.accepts.set()
    output.close()

    names = store.list("run/logs/attempt-0001")
    written = b"".join(store.read(f"run/logs/attempt-0001/{name}") for name in names).decode()
    assert written.startswith("first\nxxx")
    assert f"[{PENDING_BYTES_MAX - 100} bytes of output were dropped" in written
    assert len(written) < PENDING_BYTES_MAX + 100


class Hanging(MemoryStore):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.answers, self.asked = threading.Event(), threading.Event()

    def write_atomic(self, path: str, data: Any, *, fsync: bool, exclusive: bool = False) -> bool:
        self.asked.set()
        self.answers.wait()
        return super().write_atomic(path, data, fsync=fsync, exclusive=exclusive)


def test_a_store_that_hangs_delays_no_output() -> None:
    """Training prints in every step, and a recovery waits for no output of the last attempt."""
    store = Hanging()
    output = OutputLog(store, "run", attempt=1, rank=0)
    output.add("a\n")
    assert store.asked.wait(30)
    output.add("b\n")
    output.close(wait_s=0.0)

    assert store.list("run/logs/attempt-0001") == ()
    store.answers.set()
    wait_until(lambda: len(store.list("run/logs/attempt-0001")) == 2)
