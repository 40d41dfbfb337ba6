"""Conversion goes on after a kill -9 at any moment, and takes in nothing that is not its own."""

import errno
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import State
from tests.support.conversions import (
    MIB,
    ForeignRecords,
    assert_holds,
    convert_to,
    files_of,
    large_state,
    native_source,
)
from ucp_core.conversion import convert
from ucp_core.errors import StorageError, UcpError
from ucp_core.native import MANIFEST_NAME, UNFINISHED_NAME, Checkpoint, open_checkpoint
from ucp_core.numerics import crc32
from ucp_core.storage import Buffer, LocalStore, MemoryStore

_WEIGHTS = "out/model-00001-of-00001.safetensors"
_SCRIPT = """
import os, sys
from ucp_core.conversion import run as module
from ucp_core.native import open_checkpoint
from ucp_core.storage import LocalStore

module._PROCESS_BYTES_MIN = 1
source, out, items, processes, whom = sys.argv[1:]
left = [int(items)]

def children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return list(map(int, file.read().split()))

def progress(done, total):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid() if whom == "all" else children()[0], 9)

print("begin", flush=True)
module.convert(
    open_checkpoint(LocalStore(), source), LocalStore(), out,
    memory_bytes=1 << 32, processes=int(processes), progress=progress,
)
if left[0] > 0:
    sys.exit("it ended before anybody was killed")
"""


def _run_killed(
    source: Checkpoint, out: Path, items: int, processes: int, whom: str = "all"
) -> int:
    """Convert in a program of its own: in one that has threads no process would be forked."""
    command = [sys.executable, "-c", _SCRIPT, source.directory, str(out), str(items)]
    command += [str(processes), whom]
    return subprocess.run(command, check=False, capture_output=True).returncode


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_conversion_goes_on(tmp_path: Path, processes: int) -> None:
    """After kill -9 at several of its items; the result is the same and less is done."""
    state = large_state(8)
    source = native_source(tmp_path, state)
    convert_to(source, tmp_path / "whole")
    expected = files_of(tmp_path / "whole")
    for items in (1, 5, 11):
        out = tmp_path / f"out{items}"
        assert _run_killed(source, out, items, processes) == -signal.SIGKILL
        assert not (out / "manifest.json").exists()

        result = convert_to(source, out)

        assert result.resumed_bytes > 0
        assert result.read_bytes + result.resumed_bytes == result.size_bytes
        assert files_of(out) == expected


def test_killed_at_any_moment_it_goes_on(tmp_path: Path) -> None:
    """Between any two system calls, with children at work, again and again."""
    state = large_state(8)
    source = native_source(tmp_path, state)
    convert_to(source, tmp_path / "whole")
    expected = files_of(tmp_path / "whole")
    rng = random.Random(0)
    for number in range(4):
        out = tmp_path / f"out{number}"
        command = [sys.executable, "-c", _SCRIPT, source.directory, str(out), "0", "2", "all"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begin\n"
            # Not a wait for a condition: the moment is what is drawn at random.
            time.sleep(rng.random() * 0.05)
            process.kill()
        if not (out / "manifest.json").exists():
            convert_to(source, out)
        # A hidden file beside the manifest is left by who is killed between its two names.
        found = {n: d for n, d in files_of(out).items() if not n.startswith(".tmp-")}
        assert found == expected


def test_what_the_journal_says_is_not_believed(tmp_path: Path) -> None:
    """A byte of a finished item changed after the kill: power loss, a full disk, a hand."""
    source = native_source(tmp_path, large_state(8))
    convert_to(source, tmp_path / "whole")
    out = tmp_path / "out"
    _run_killed(source, out, 9, 1)
    for path in (out / UNFINISHED_NAME).glob("*.safetensors"):
        with path.open("r+b") as file:
            file.seek(3 * MIB)
            file.write(b"damage")

    convert_to(source, out)

    assert files_of(out) == files_of(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["a file", "a link", "a dangling link"])
@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("model-00001-of-00001.safetensors", True),
        ("model-00001-of-00001.safetensors", False),
        ("model.safetensors.index.json", False),
    ],
)
def test_a_resumed_conversion_replaces_no_file_that_is_not_its_own(
    tmp_path: Path,
    name: str,
    missing: bool,  # noqa: FBT001
    kind: str,
) -> None:
    """It has the name of a target; a link was written through, outside the destination."""
    source = native_source(tmp_path, large_state(8))
    out = tmp_path / "out"
    assert _run_killed(source, out, 11, 1) == -signal.SIGKILL
    if missing:
        (out / UNFINISHED_NAME / "model-00001-of-00001.safetensors").unlink()
    theirs = out / name if kind == "a file" else tmp_path / "theirs"
    if kind != "a dangling link":
        theirs.write_bytes(b"precious")
    if kind != "a file":
        (out / name).symlink_to(theirs)

    with pytest.raises(UcpError, match=name):
        convert_to(source, out)

    assert (out / name).is_symlink() == (kind != "a file")
    assert not theirs.exists() if kind == "a dangling link" else theirs.read_bytes() == b"precious"
    (out / name).unlink()
    assert convert_to(source, out).resumed_bytes > 0


def test_a_file_that_appears_during_a_conversion_is_not_replaced(tmp_path: Path) -> None:
    """The user cannot know which names will be taken at the end."""
    source = native_source(tmp_path, large_state(2))
    theirs = tmp_path / "out" / "model-00001-of-00001.safetensors"

    def appear(*_: int) -> None:
        theirs.write_bytes(b"precious")

    with pytest.raises(UcpError, match="is not from this conversion, which would replace it"):
        convert_to(source, tmp_path / "out", progress=appear)

    assert theirs.read_bytes() == b"precious"


def test_a_conversion_that_was_killed_while_it_renamed_goes_on(tmp_path: Path) -> None:
    """Some of its files have their final names already, and it must know them again."""
    source = native_source(tmp_path, large_state(8))
    convert_to(source, tmp_path / "whole")
    out = tmp_path / "out"
    script = _SCRIPT.replace("print(", "rename = module.LocalFiles.finish\nprint(").replace(
        "def progress",
        """def finish(self, *, fsync):
    os.rename(self.paths[0], os.path.join(out, self.targets[0].name))
    os.kill(os.getpid(), 9)

module.LocalFiles.finish = finish

def progress""",
    )
    command = [sys.executable, "-c", script, source.directory, str(out), "0", "1", "all"]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL

    result = convert_to(source, out)

    assert result.resumed_bytes == result.size_bytes
    assert files_of(out) == files_of(tmp_path / "whole")


def _alike(tmp_path: Path) -> tuple[Checkpoint, Checkpoint, State]:
    """Return two sources whose files have the same names and sizes, and the second's state."""
    changed = {
        key: replace(whole, data=bytes(byte ^ 255 for byte in whole.data[:64]) + whole.data[64:])
        for key, whole in large_state(8).items()
    }
    one = native_source(tmp_path / "a", large_state(8))
    return one, native_source(tmp_path / "b", changed), changed


def test_leftovers_of_another_source_are_not_taken_in(tmp_path: Path) -> None:
    """The same names and sizes with other values: what an interrupted run left behind."""
    one, two, changed = _alike(tmp_path)
    out = tmp_path / "out"
    _run_killed(one, out, 9, 1)

    result = convert_to(two, out)

    assert result.resumed_bytes == 0
    assert_holds(result.checkpoint, changed)


def test_a_changed_source_restarts_the_conversion(tmp_path: Path) -> None:
    """Touched files may hold anything."""
    foreign = ForeignRecords(tmp_path / "foreign")

    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_to(foreign.checkpoint, tmp_path / "out", progress=stop)
    os.utime(tmp_path / "foreign" / "rank0.pt", ns=(1, 1))

    assert convert_to(foreign.checkpoint, tmp_path / "out").resumed_bytes == 0


def test_a_cut_line_of_the_journal_is_no_line(tmp_path: Path) -> None:
    """A kill in the middle of a write, and what is appended after it."""
    source = native_source(tmp_path, large_state(8))
    out = tmp_path / "out"
    _run_killed(source, out, 9, 1)
    path = out / UNFINISHED_NAME / "journal"
    # Longer than what is written over it.
    path.write_bytes(path.read_bytes()[:-7] + b"?" * 9000)
    seen = len(path.read_bytes().splitlines())

    def stop(*_: int) -> None:
        if len(path.read_bytes().splitlines()) >= seen + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_to(source, out, progress=stop)
    lines = path.read_bytes().splitlines()

    assert all(crc32(line[9:]) == int(line[:8], 16) for line in lines)
    assert json.loads(lines[-1][9:])
    assert convert_to(source, out).resumed_bytes > 0


def test_the_workers_of_a_killed_conversion_end(tmp_path: Path) -> None:
    """They get no more work; their memory would be missing until the next boot."""
    source = native_source(tmp_path, large_state(8))
    command = [sys.executable, "-c", _SCRIPT, source.directory, str(tmp_path / "out"), "1", "2"]
    # The workers have the pipe too: it is at its end when the last of them is gone.
    with subprocess.Popen([*command, "all"], stdout=subprocess.PIPE) as process:
        output, _ = process.communicate(timeout=30)

    assert process.returncode == -signal.SIGKILL
    assert output == b"begin\n"


def test_a_killed_worker_is_replaced_by_the_others(tmp_path: Path) -> None:
    """The kernel kills for want of memory; the conversion need not fail."""
    state = large_state(8)
    source = native_source(tmp_path, state)

    assert _run_killed(source, tmp_path / "out", 3, 2, whom="a worker") == 0

    assert_holds(open_checkpoint(LocalStore(), str(tmp_path / "out")), state)


def test_a_stream_goes_on_by_whole_files(tmp_path: Path) -> None:
    """An object store keeps only what is complete."""
    source = native_source(tmp_path, large_state(8))
    store = MemoryStore()
    _stop_after_the_weights(source, store)
    result = convert(source, store, "out", memory_bytes=64 * MIB, processes=1)

    assert result.resumed_bytes > 0
    assert "model-00001-of-00001.safetensors" in result.checkpoint.manifest.files
    assert_holds(result.checkpoint, large_state(8))


class _DyingStore(MemoryStore):
    """The process dies before it can write that the weights are complete."""

    dies = False

    def write_atomic(
        self, path: str, data: Buffer, *, fsync: bool, exclusive: bool = False
    ) -> bool:
        if self.dies and f"{UNFINISHED_NAME}/model-00001-of-00001" in path:
            raise KeyboardInterrupt
        return super().write_atomic(path, data, fsync=fsync, exclusive=exclusive)


def test_a_stream_is_not_continued_with_the_file_of_another_source(tmp_path: Path) -> None:
    """The file is complete and has the right size; its bytes are those of the other source."""
    one, two, _ = _alike(tmp_path)
    store = _DyingStore()
    _stop_after_the_weights(one, store)
    store.dies = True
    with pytest.raises(KeyboardInterrupt):
        _stream(two, store)
    names = [name for name in store.list("out") if name.startswith("model-")]
    assert len(names) == 2, "the other conversion did not come to this file"
    store.dies = False

    assert_holds(_stream(one, store), large_state(8))


def _stream(source: Checkpoint, store: MemoryStore, **options: Any) -> Checkpoint:
    chosen = {"memory_bytes": 64 * MIB, "processes": 1, **options}
    return convert(source, store, "out", **chosen).checkpoint


def _stop(*_: int) -> None:
    raise KeyboardInterrupt


def _stop_after_the_weights(source: Checkpoint, store: MemoryStore) -> bytes:
    """Return the file of the weights, which the interrupted conversion completed."""

    def stop(*_: int) -> None:
        if store.exists(_WEIGHTS):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _stream(source, store, progress=stop)
    return store.read(_WEIGHTS)


def test_a_stream_is_not_continued_with_bytes_that_its_marker_does_not_tell(
    tmp_path: Path,
) -> None:
    """Two conversions took turns, and the file is of the one that wrote no marker."""
    source, other, _ = _alike(tmp_path)
    store = MemoryStore()
    _stop_after_the_weights(source, store)
    others = MemoryStore()
    _stream(other, others)
    store.write_atomic(_WEIGHTS, others.read(_WEIGHTS), fsync=False)

    assert_holds(_stream(source, store), large_state(8))


@pytest.mark.parametrize("ends", [True, False])
def test_the_first_of_two_streams_into_one_directory_stops(tmp_path: Path, ends: bool) -> None:  # noqa: FBT001
    """Each would commit files that the other one overwrote."""
    first, second, changed = _alike(tmp_path)
    store = MemoryStore()
    begun: list[int] = []

    def begin_the_other(*_: int) -> None:
        if begun:
            return
        begun.append(1)
        with suppress(KeyboardInterrupt):
            _stream(second, store, progress=None if ends else _stop)

    with pytest.raises(UcpError, match="another process is converting to out, or has"):
        _stream(first, store, progress=begin_the_other)

    if not ends:
        assert not store.exists("out/manifest.json")
        _stream(second, store)
    assert_holds(open_checkpoint(store, "out"), changed)
    assert not store.exists(f"out/{UNFINISHED_NAME}")


class _Paused(MemoryStore):
    """Something happens before a file is written whose name holds ``at``."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at
        self.act: Callable[[], object] | None = None

    def write_atomic(
        self, path: str, data: Buffer, *, fsync: bool, exclusive: bool = False
    ) -> bool:
        act = self.act if self.at in path else None
        if act is not None:
            self.act = None
            act()
        return super().write_atomic(path, data, fsync=fsync, exclusive=exclusive)


def _files(store: MemoryStore) -> set[str]:
    return {name for name in store.list("out") if not store.list(f"out/{name}")}


@pytest.mark.parametrize(
    ("at", "second_stops", "wins"),
    [
        ("model-00001-of-00001", False, "second"),
        ("model-00001-of-00001", True, "second"),
        ("index.json", False, "second"),
        ("index.json", True, "first"),
        ("manifest.json", False, "first"),
        ("manifest.json", True, "first"),
    ],
)
def test_a_stream_that_is_taken_over_at_any_moment_shares_no_file(
    tmp_path: Path,
    at: str,
    second_stops: bool,  # noqa: FBT001
    wins: str,
) -> None:
    """In the middle of a file; between its last look at the claim and its manifest."""
    first, second, changed = _alike(tmp_path)
    store = _Paused(at)
    ended: list[str] = []
    told: list[str] = []

    def stop(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    def write(name: str, source: Checkpoint, **options: Any) -> None:
        with suppress(KeyboardInterrupt):
            try:
                _stream(source, store, **options)
                ended.append(name)
            except UcpError as error:
                told.append(str(error))

    store.act = lambda: write("second", second, progress=stop if second_stops else None)
    write("first", first)
    if not ended:
        write("second", second)

    assert ended == [wins]
    assert all(
        "is converting to out, or has" in each or "is running or has finished" in each
        for each in told
    )
    made = open_checkpoint(store, "out")
    assert_holds(made, changed if wins == "second" else large_state(8))
    assert not store.list(f"out/{UNFINISHED_NAME}")
    left = _files(store) - set(made.manifest.files) - {"manifest.json"}
    # The file that the first one wrote when it had lost already may be a user's, for all one knows.
    assert left == (
        {_WEIGHTS.removeprefix("out/")} if at.startswith("mo") and second_stops else set()
    )


def test_a_stream_writes_over_nothing_that_came_before_its_claim(tmp_path: Path) -> None:
    """Another one may have begun and ended since it looked at the destination."""
    store = _Paused("/begun")
    store.act = lambda: store.write_atomic(_WEIGHTS, b"theirs", fsync=False)

    with pytest.raises(UcpError, match=r"another process has just written model-.* to out"):
        _stream(native_source(tmp_path, large_state(2)), store)

    assert store.read(_WEIGHTS) == b"theirs"
    assert _files(store) == {_WEIGHTS.removeprefix("out/")}


def test_a_stream_takes_over_a_file_though_another_one_came_between(tmp_path: Path) -> None:
    """The other one has written its own, under other names."""
    one, two, _ = _alike(tmp_path)
    store = MemoryStore()
    _stop_after_the_weights(one, store)
    with pytest.raises(KeyboardInterrupt):
        _stream(two, store, progress=_stop)

    result = convert(one, store, "out", memory_bytes=64 * MIB, processes=1)

    assert result.resumed_bytes > 0
    assert_holds(result.checkpoint, large_state(8))
    assert _files(store) == {n for n in result.checkpoint.manifest.files if "/" not in n} | {
        "manifest.json"
    }


def test_a_destination_is_not_blamed_on_another_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Waiting for a process that does not exist would never end."""
    source = native_source(tmp_path, large_state(num_tensors=1))
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / MANIFEST_NAME).touch()
    with pytest.raises(UcpError, match=r"is empty: a process is writing it .* remove it"):
        convert_to(source, empty)

    def lost(link: Callable[..., None], *args: Any) -> None:
        link(*args)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", partial(lost, os.link))
        convert_to(source, tmp_path / "lost")
    assert open_checkpoint(LocalStore(), str(tmp_path / "lost")).manifest.files

    def none(fd: int, operation: int) -> None:
        del fd, operation
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(StorageError, match=r"without locks.*another file system"):
        convert_to(source, tmp_path / "unlocked")
