"""A container gets 64 MB of /dev/shm unless somebody asks for more: snapshots need none of it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from workers.process.device import EXIT_CODE

#: In a /dev/shm of its own, with the pages and the descriptor socket there as in a run.
SCRIPT = """
import os
from pathlib import Path
from tests.support.snapshots import snapshot, weights
from workers.memory import descriptor_socket, open_arena, reserve
from workers.keeper.descriptor_server import DescriptorServer
from workers.keeper.arena_table import ArenaTable

def used_bytes():
    found = os.statvfs("/dev/shm")
    return (found.f_blocks - found.f_bfree) * found.f_frsize

total = os.statvfs("/dev/shm")
assert total.f_blocks * total.f_frsize == 64 << 20
directory = Path("/dev/shm/node")
directory.mkdir()
door = DescriptorServer(descriptor_socket(directory), ArenaTable(budget_bytes=1 << 30))
before = used_bytes()
arena = reserve(descriptor_socket(directory), "w0001.1", body_bytes=60 << 20, attempt=1)
for step in (1, 2, 3):
    snapshot(arena, step)
    held = arena.newest()
    arena.body(held.buffer)[held.data_bytes + held.record_bytes :] = bytes(
        arena.body_bytes - held.data_bytes - held.record_bytes
    )
other = open_arena(descriptor_socket(directory), "w0001.1")
assert [held.step for held in other.versions()] == [1, 2, 3]
assert bytes(other.body(2)[: weights(3).nbytes]) == weights(3).tobytes()
print(used_bytes() - before, arena.size_bytes)
"""


def _in_small_shm(command: list[str]) -> subprocess.CompletedProcess[str]:
    mount = "mount -t tmpfs -o size=64m none /dev/shm"
    unshare = ["unshare", "--map-root-user", "--mount"]
    return subprocess.run(
        [*unshare, "sh", "-c", f'{mount} && exec "$@"', "sh", *command],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def may_mount() -> None:
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare on this machine")
    if (tried := _in_small_shm(["true"])).returncode:
        pytest.skip(f"this user may not mount a /dev/shm: {tried.stderr.strip()}")


def test_snapshots_do_not_fit_into_shared_memory_and_need_not() -> None:
    """180 MB of three buffers; files of that size in /dev/shm are a bus error in the trainer."""
    done = _in_small_shm([sys.executable, "-c", SCRIPT])

    assert done.returncode == 0, done.stderr
    used_bytes, arena_bytes = map(int, done.stdout.split())
    assert used_bytes == 0
    assert arena_bytes >= 180 << 20


#: In a /dev/shm of its own that somebody else has filled.
IN_FULL = """
import os
from workers.telemetry.ring import RecordRing
from workers.telemetry.progress import ProgressRecord

fill()
for make in (
    lambda: RecordRing("/dev/shm/ring", attempt=1, num_ranks=4),
    lambda: ProgressRecord.create("/dev/shm/page", worker="w0001"),
):
    try:
        make()
    except OSError as error:
        print(error)
print(os.listdir("/dev/shm"))
"""


def test_where_shared_memory_is_full_a_worker_says_so() -> None:
    """A file grows there without a word: the first store to it was a bus error, and no outcome."""
    done = _in_small_shm([sys.executable, "-c", FILL + IN_FULL])

    assert done.returncode == 0, done.stderr
    ring, page, left = done.stdout.splitlines()
    assert ring.startswith("[Errno 28] No space left on device for ")
    assert ring.endswith(": '/dev/shm/ring'")
    assert page == "[Errno 28] No space left on device for 4096 bytes: '/dev/shm/page'"
    assert left == "['other']"


#: A worker that is there already is to form an attempt. Its script raises such an error, too.
FORMING = """
import sys
from pathlib import Path
from tests.unit.workers.process.test_device import attempts

pages = Path("/dev/shm/pages")
pages.mkdir()
attempts(Path(sys.argv[1]), pages, before=fill if sys.argv[2] == "full" else None)
"""
OUT_OF_SPACE = """
import everstep

def train(session):
    raise OSError(28, "no space for the script")

everstep.run(train)
"""
FILL = """
import contextlib

def fill():
    with open("/dev/shm/other", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
"""


@pytest.mark.parametrize(
    ("room", "code", "outcomes"), [("full", EXIT_CODE, ""), ("free", 0, "Raised Raised ")]
)
def test_where_an_attempt_finds_no_room_its_process_ends(
    room: str, code: int, outcomes: str, tmp_path: Path
) -> None:
    """The second such error was taken for a bug of the script, and ended the run on all nodes."""
    (tmp_path / "script.py").write_text(OUT_OF_SPACE)
    (tmp_path / "outcomes").touch()
    done = _in_small_shm([sys.executable, "-c", FILL + FORMING, str(tmp_path), room])

    assert done.returncode == code, done.stderr
    assert (tmp_path / "outcomes").read_text() == outcomes


#: In one in which 1 MiB is left after the first attempt.
IN_NARROW = """
import os
from workers.telemetry.ring import RecordRing

ring = RecordRing("/dev/shm/ring", attempt=1, num_ranks=2)
group = ring.group("g", (0, 1))
for _ in range(5000):
    ring.enter(group, "all_reduce", 8)
found = os.statvfs("/dev/shm")
with open("/dev/shm/other", "wb") as file:
    os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - (1 << 20))
RecordRing("/dev/shm/ring", attempt=2, num_ranks=2)
print(os.path.getsize("/dev/shm/ring"), sorted(os.listdir("/dev/shm")))
"""


def test_records_take_what_shared_memory_has_left() -> None:
    """60 s of a fast run are 8 MiB: a worker must not fail for the past it would like to keep."""
    done = _in_small_shm([sys.executable, "-c", IN_NARROW])

    assert done.returncode == 0, done.stderr
    size_bytes, names = done.stdout.split(maxsplit=1)
    assert int(size_bytes) < 1 << 20
    assert names.strip() == "['other', 'ring', 'ring.last']"
