"""Read what the training script printed: ``RUN_DIR/logs/attempt-0001/rank0.log``.

In an object store a log is several objects, numbered ``rank0-0001.log`` and so on.
"""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.driver.run import Run
from orchestrator.errors import RunNotFoundError
from ucp_core.storage import LocalStore, join, open_store
from workers.protocol import LOGS

_ATTEMPT = re.compile(r"attempt-(\d+)")
_FILE = re.compile(r"rank(\d+)(?:-(\d+))?\.log")
#: Period of checks for new lines: listing an object store costs money.
_LOCAL_S, _REMOTE_S = 0.25, 5.0


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line that a rank printed in an attempt."""

    attempt: int
    rank: int
    text: str


class LogTail:
    """Reads the logs of the run in ``url`` as they grow: of one rank or attempt, or of all."""

    def __init__(self, url: str, *, rank: int | None = None, attempt: int | None = None) -> None:
        self._store, path = open_store(url)
        self._root = join(path, LOGS)
        self._rank = rank
        self._attempt = attempt
        #: Attempts before this one have written all of their output.
        self._first_attempt = attempt or 0
        self._read_bytes: dict[str, int] = {}
        self._unfinished: dict[tuple[int, int], bytes] = {}
        self._looked_s = float("-inf")

    @property
    def interval_s(self) -> float:
        """Return how often ``new_lines`` looks into the store, in seconds."""
        return _LOCAL_S if isinstance(self._store, LocalStore) else _REMOTE_S

    def skip(self) -> None:
        """Skip the lines that exist already."""
        for _, path, size_bytes in self._files():
            self._read_bytes[path] = size_bytes

    def new_lines(self, *, now: bool = False) -> Iterator[LogLine]:
        """Yield the lines that were completed since the last call, attempt by attempt.

        It looks at most every ``interval_s``, unless ``now`` is set.
        """
        now_s = time.monotonic()
        if not now and now_s - self._looked_s < self.interval_s:
            return
        self._looked_s = now_s
        for (attempt, rank), path, size_bytes in self._files():
            begin = self._read_bytes.get(path, 0)
            if size_bytes <= begin:
                continue
            self._read_bytes[path] = size_bytes
            data = self._unfinished.pop((attempt, rank), b"")
            data += self._store.read_range(path, begin, size_bytes - begin)
            *lines, rest = data.split(b"\n")
            if rest:
                self._unfinished[attempt, rank] = rest
            for line in lines:
                yield LogLine(attempt, rank, _text(line))

    def rest(self) -> Iterator[LogLine]:
        """Yield unfinished lines, which a process leaves if it dies while it prints."""
        for (attempt, rank), data in sorted(self._unfinished.items()):
            yield LogLine(attempt, rank, _text(data))

    def _files(self) -> Iterator[tuple[tuple[int, int], str, int]]:
        """Yield ``(attempt, rank)``, the path and the size of each file, oldest attempt first."""
        attempts: list[tuple[int, str]] = []
        for name in self._store.list(self._root):
            found = _ATTEMPT.fullmatch(name)
            number = int(found[1]) if found else 0
            if number >= self._first_attempt and self._attempt in (None, number):
                attempts.append((number, name))
        for number, name in sorted(attempts):
            sizes = self._store.sizes(join(self._root, name))
            files = [(found, file) for file in sizes if (found := _FILE.fullmatch(file))]
            for found, file in sorted(
                files, key=lambda pair: [int(n or 0) for n in pair[0].groups()]
            ):
                if self._rank in (None, int(found[1])):
                    yield (number, int(found[1])), join(self._root, name, file), sizes[file]
            # A rank of the previous attempt may still be printing.
            self._first_attempt = number - 1


def read_logs(
    url: str, *, rank: int | None, attempt: int | None, follow: bool
) -> Iterator[LogLine]:
    """Yield the lines of a run's logs: of one rank or attempt, or of all.

    With ``follow`` it waits for more until the run is over. Raise ``RunNotFoundError`` if there is
    no run, or it printed nothing that matches.
    """
    run = Run(url)
    run.contact()
    tail = LogTail(url, rank=rank, attempt=attempt)
    has_any = False
    while True:
        # Read this before the logs: lines that are printed later are read below.
        is_over = run.is_over()
        for line in tail.new_lines(now=True):
            has_any = True
            yield line
        if is_over or not follow:
            break
        time.sleep(tail.interval_s)
    for line in tail.rest():
        has_any = True
        yield line
    if not has_any:
        who = "the script" if rank is None else f"rank {rank}"
        when = "" if attempt is None else f" in attempt {attempt}"
        raise RunNotFoundError(f"{who} has printed nothing{when}: see {url}/{LOGS}", url=url)


def _text(line: bytes) -> str:
    # A progress bar redraws its line: only the last state counts.
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
