"""Lets many workers do the items of a conversion: processes, threads, or the caller itself."""

from __future__ import annotations

import os
import pickle  # noqa: TID251 - through a pipe to our own child, nothing is kept
import selectors
import signal
import struct
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ucp_core.conversion.work_items import Item, Job, Result, Worker
from ucp_core.errors import StorageError, UcpError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Items that a worker holds: one under way, and one so that it never waits for the next.
_HELD_MAX = 2
_NUMBER = struct.Struct("<i")
#: Written by one call. The kernel allocates page cache in pieces as large as a call; in virtual
#: machines whose free memory goes back to the host, the large ones are those that are gone:
#: 1.25 GiB took 0.26 to 0.31 s by calls of 128 KiB, and 0.2 to 2.4 s by calls of 1 MiB.
_WRITE_BYTES = 128 << 10


class Writer:
    """Writes chunks to files that are there already; every thread or process has its own."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._open: dict[int, int] = {}

    def write(self, target: int, offset_bytes: int, chunk: memoryview) -> None:
        """Put ``chunk`` at ``offset_bytes`` of a target file."""
        try:
            fd = self._open.get(target)
            if fd is None:
                fd = os.open(self._paths[target], os.O_WRONLY | os.O_CLOEXEC)
                self._open[target] = fd
            done = 0
            while done < len(chunk):
                part = chunk[done : done + _WRITE_BYTES]
                done += os.pwrite(fd, part, offset_bytes + done)
        except OSError as error:
            path = self._paths[target]
            raise StorageError(
                f"{path} cannot be written: {error.strerror}; mend that and give the same command "
                "again: it goes on from here",
                path=path,
                errno=error.errno,
            ) from error

    def close(self) -> None:
        """Close every file."""
        while self._open:
            os.close(self._open.popitem()[1])


class Batch(Protocol):
    """Items that one worker does together, wherever it is; it can be pickled."""

    @property
    def items(self) -> tuple[Item, ...]:
        """Return what is to be done."""

    def do(self, worker: Worker) -> list[Result]:
        """Do them."""


def do_item(worker: Worker, writer: Writer, item: Item) -> Result:
    """Do one item."""
    offset_bytes = item.start
    for chunk in worker.chunks(item):
        writer.write(item.target, offset_bytes, chunk)
        offset_bytes += len(chunk)
    return worker.result(item)


class _Queue:
    """Gives out items so that workers write to different files as long as there are enough.

    A file can be written by one process at a time on most file systems.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self._by_file: dict[int, deque[int]] = {}
        for number, item in enumerate(items):
            self._by_file.setdefault(item.target, deque()).append(number)
        self._users: dict[int, int] = {}

    def next(self, worker: int) -> int | None:
        """Return the number of the next item for ``worker``."""
        file = self._users.get(worker)
        if file is None or not self._by_file.get(file):
            left = [name for name, numbers in self._by_file.items() if numbers]
            if not left:
                return None
            used = list(self._users.values())
            file = min(left, key=lambda name: (used.count(name), -len(self._by_file[name])))
            self._users[worker] = file
        return self._by_file[file].popleft()

    def put_back(self, items: Sequence[Item], numbers: Sequence[int]) -> None:
        """Take back what a worker that died had."""
        for number in numbers:
            self._by_file[items[number].target].appendleft(number)


def run_here(
    job: Job, items: Sequence[Item], paths: Sequence[str], take: Callable[[Result], None]
) -> None:
    """Do all items in this thread."""
    worker, writer = Worker(job), Writer(paths)
    try:
        for item in items:
            take(do_item(worker, writer, item))
    finally:
        worker.close()
        writer.close()


def run_threads(
    job: Job, batches: Sequence[Batch], take: Callable[[Result], None], threads: int
) -> None:
    """Do batches in threads; ``take`` is called by one at a time."""
    left = deque(batches)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        worker = Worker(job)
        try:
            while not errors:
                with lock:
                    batch = left.popleft() if left else None
                if batch is None:
                    return
                results = batch.do(worker)
                with lock:
                    for result in results:
                        take(result)
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
            errors.append(error)
        finally:
            worker.close()

    pool = [threading.Thread(target=work) for _ in range(min(threads, len(left)) - 1)]
    for thread in pool:
        thread.start()
    work()
    for thread in pool:
        thread.join()
    if errors:
        raise errors[0]


class _Process(NamedTuple):
    pid: int
    commands: int
    results: int
    held: deque[int]


def run_processes(
    job: Job,
    items: Sequence[Item],
    paths: Sequence[str],
    take: Callable[[Result], None],
    processes: int,
    *,
    in_child: Callable[[], None],
) -> None:
    """Do all items in forked processes; those of one that dies are done by the others.

    Only for callers without other threads: a lock that one of them holds would stay locked in
    the children. ``in_child`` is called in each child first.

    Raises:
        UcpError: All processes died.
    """
    queue = _Queue(items)
    pool: dict[int, _Process] = {}
    try:
        for number in range(processes):
            pool[number] = _start(job, items, paths, list(pool.values()), in_child)
        with selectors.DefaultSelector() as selector:
            for number, process in pool.items():
                selector.register(process.results, selectors.EVENT_READ, number)
                _feed(process, queue, number)
            while any(process.held for process in pool.values()):
                for key, _ in selector.select():
                    process = pool[key.data]
                    result = _receive(process.results)
                    if result is None:
                        selector.unregister(process.results)
                        _bury(pool, key.data, queue, items)
                        continue
                    process.held.popleft()
                    take(result)
                    _feed(process, queue, key.data)
    finally:
        for process in pool.values():
            _end(process)


def _feed(process: _Process, queue: _Queue, number: int) -> None:
    while len(process.held) < _HELD_MAX:
        index = queue.next(number)
        if index is None:
            return
        process.held.append(index)
        # One that died is noticed by the end of its results.
        with suppress(BrokenPipeError):
            os.write(process.commands, _NUMBER.pack(index))


def _bury(pool: dict[int, _Process], number: int, queue: _Queue, items: Sequence[Item]) -> None:
    """Let the others do what a dead process had."""
    dead = pool.pop(number)
    queue.put_back(items, dead.held)
    _, status = _end(dead)
    if not pool:
        code = os.waitstatus_to_exitcode(status)
        raise UcpError(
            f"all worker processes ended, the last with {code} (-9: killed, perhaps for want of "
            "memory: give less --memory or fewer --processes); the same command goes on from here",
            exit_code=code,
        )
    for other, process in pool.items():
        _feed(process, queue, other)


def _start(
    job: Job,
    items: Sequence[Item],
    paths: Sequence[str],
    others: Sequence[_Process],
    in_child: Callable[[], None],
) -> _Process:
    command_read, command_write = os.pipe()
    result_read, result_write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(command_read)
        os.close(result_write)
        return _Process(pid, command_write, result_read, deque())
    code = 1
    try:
        # The parent is told of an interrupt too, and ends us.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # An end of a pipe that another child holds would keep it open when the parent dies.
        for fd in (command_write, result_read, *(f for o in others for f in o[1:3])):
            os.close(fd)
        in_child()
        _serve(job, items, paths, command_read, result_write)
        code = 0
    finally:
        os._exit(code)


def _serve(
    job: Job, items: Sequence[Item], paths: Sequence[str], commands: int, results: int
) -> None:
    worker, writer = Worker(job), Writer(paths)
    while data := os.read(commands, _NUMBER.size):
        item = items[_NUMBER.unpack(data)[0]]
        try:
            answer: Result | Exception = do_item(worker, writer, item)
        except Exception as error:  # noqa: BLE001 - raised in the parent
            answer = error
        text = pickle.dumps(answer)
        data = _NUMBER.pack(len(text)) + text
        while data:
            data = data[os.write(results, data) :]


def _receive(fd: int) -> Result | None:
    """Return a result, or None at the end of a process; what it raised is raised here."""
    size = _read(fd, _NUMBER.size)
    text = _read(fd, _NUMBER.unpack(size)[0]) if len(size) == _NUMBER.size else b""
    try:
        answer = pickle.loads(text)  # noqa: S301 - written by our own child
    except EOFError:
        return None
    if isinstance(answer, Exception):
        raise answer
    assert isinstance(answer, Result)
    return answer


def _read(fd: int, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes and (part := os.read(fd, num_bytes - len(data))):
        data += part
    return data if len(data) == num_bytes else b""


def _end(process: _Process) -> tuple[int, int]:
    os.close(process.commands)
    os.close(process.results)
    # One that is at work holds nothing that could be lost.
    os.kill(process.pid, signal.SIGKILL)
    return os.waitpid(process.pid, 0)
