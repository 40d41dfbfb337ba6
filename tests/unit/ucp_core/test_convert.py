"""Conversion: same bytes from every source in every way of working, or nothing at all."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest

from tests.support.checkpoints import (
    State,
    Whole,
    assert_loaded,
    save,
    small_state,
    whole_need,
)
from ucp_core import convert as convert_module
from ucp_core._convert_journal import FOLDER, Journal
from ucp_core.boxes import Box
from ucp_core.checkpoint import Checkpoint, checkpoint_name, load, open_checkpoint, verify
from ucp_core.checksums import BLOCK_BYTES, crc32
from ucp_core.convert import ConvertResult, convert
from ucp_core.errors import (
    CheckpointCorruptError,
    ChecksumMismatchError,
    StorageError,
    UcpError,
    UncoveredRegionError,
)
from ucp_core.manifest import Item, Kind, Manifest
from ucp_core.statemap import Extent, Fragment, StateMap, TensorEntry, TensorKey
from ucp_core.storage import LocalStore, MemoryStore
from ucp_core.verification import unchecked_bytes

_MIB = 1 << 20


def _state(num_tensors: int = 6, rows: int = 350) -> State:
    """Return tensors of a few MiB each, so that there are blocks and items to speak of."""
    rng = random.Random(3)
    state: State = {}
    for index in range(num_tensors):
        shape = (rows + index, 513)
        for slot in ("weight", "exp_avg"):
            data = rng.randbytes(4 * prod(shape))
            state[TensorKey(f"layers.{index}.w", slot)] = Whole(dtype="F32", shape=shape, data=data)
    return state | small_state()


def _source(tmp_path: Path, state: State, world_size: int = 3) -> Checkpoint:
    root = str(tmp_path / "run")
    save(LocalStore(), state, step=7, world_size=world_size, root=root)
    return open_checkpoint(LocalStore(), f"{root}/{checkpoint_name(7)}")


def _convert(source: Checkpoint, out: Path, **options: object) -> ConvertResult:
    chosen: dict[str, object] = {"memory_bytes": 512 * _MIB, "processes": 1}
    chosen |= options
    return convert(source, LocalStore(), str(out), **chosen)  # type: ignore[arg-type]


def _files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def _assert_holds(checkpoint: Checkpoint, state: State) -> None:
    assert verify(checkpoint) == []
    need = whole_need(state)
    load(checkpoint, need)
    assert_loaded(state, need)


def test_every_way_of_working_makes_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place by one, by forked processes, by threads; as a stream to any store."""
    monkeypatch.setattr(convert_module, "_PROCESS_BYTES_MIN", 1)
    state = _state()
    source = _source(tmp_path, state)
    one = _convert(source, tmp_path / "one")
    forked = _convert(source, tmp_path / "forked", processes=3, memory_bytes=4096 * _MIB)
    monkeypatch.setattr(convert_module, "_may_fork", lambda: False)
    threads = _convert(source, tmp_path / "threads", processes=3)
    store = MemoryStore()
    convert(source, store, "out", memory_bytes=64 * _MIB, processes=2)

    expected = _files(tmp_path / "one")
    assert (one.processes, forked.processes, threads.processes) == (1, 3, 3)
    assert _files(tmp_path / "forked") == expected
    assert _files(tmp_path / "threads") == expected
    assert {name: store.read(f"out/{name}") for name in expected} == expected
    assert not store.exists(f"out/{FOLDER}")
    _assert_holds(one.checkpoint, state)


def test_bytes_are_read_and_written_once(tmp_path: Path) -> None:
    """Whatever the cut: rows, columns, grids and flat ranges are in the source."""
    state = _state()
    source = _source(tmp_path, state, world_size=5)
    result = _convert(source, tmp_path / "out")

    assert result.size_bytes == result.read_bytes
    assert result.written_bytes <= result.size_bytes * 1.02


def test_a_universal_source_is_converted_too(tmp_path: Path) -> None:
    """Its blocks and the target's are the same ones."""
    state = _state(2)
    first = _convert(_source(tmp_path, state), tmp_path / "first")
    second = _convert(first.checkpoint, tmp_path / "second")

    assert _files(tmp_path / "second") == _files(tmp_path / "first")
    assert second.read_bytes == second.size_bytes


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    """A bar that stops at 97 % makes people wait."""
    seen: list[tuple[int, int]] = []
    _convert(
        _source(tmp_path, _state(2)),
        tmp_path / "out",
        progress=lambda done, total: seen.append((done, total)),
    )

    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


# --- A foreign source, whose only checksums are those of whole records.


class _Foreign:
    """Two files with one record each: a tensor in rows, padding behind it, a replica."""

    def __init__(self, directory: Path, *, replica: bytes | None = None) -> None:
        rng = random.Random(1)
        self.directory = directory
        directory.mkdir()
        self.shape = (1000, 700)
        self.data = rng.randbytes(4 * prod(self.shape))
        half = len(self.data) // 2
        self.gap = 300_000
        self.files: dict[str, tuple[Extent, ...]] = {}
        fragments: list[Fragment] = []
        for number, low in enumerate((0, half)):
            record = rng.randbytes(self.gap) + self.data[low : low + half] + rng.randbytes(77)
            name = f"rank{number}.pt"
            (directory / name).write_bytes(b"head" * 16 + record + b"tail")
            self.files[name] = (Extent(64, len(record), crc32(record)),)
            box = Box((500 * number, 0), (500 * number + 500, 700))
            fragments.append(Fragment(box, name, 64 + self.gap, half, None, ()))
        if replica is not None:
            (directory / "copy.pt").write_bytes(replica)
            fragments.append(
                Fragment(Box.full(self.shape), "copy.pt", 0, len(replica), None, (), replica=True)
            )
        entry = TensorEntry(
            key=TensorKey("w", "weight"), dtype="F32", shape=self.shape, fragments=tuple(fragments)
        )
        state_map = StateMap(
            entries={entry.key: entry}, block_bytes=BLOCK_BYTES, extents=self.files
        )
        self.checkpoint = Checkpoint(
            store=LocalStore(),
            directory=str(directory),
            manifest=Manifest(
                kind=Kind.FOREIGN,
                step=5,
                attempt=0,
                state_map=state_map,
                files={},
                ties={"head": "w"},
                items={"rng": Item("drop", "not ours")},
            ),
        )


def test_a_foreign_checkpoint_is_converted(tmp_path: Path) -> None:
    """With its ties and what became of its items."""
    foreign = _Foreign(tmp_path / "foreign")
    made = _convert(foreign.checkpoint, tmp_path / "out").checkpoint

    opened = open_checkpoint(LocalStore(), str(tmp_path / "out"))
    assert opened.manifest == made.manifest
    assert opened.manifest.ties == {"head": "w"}
    assert opened.manifest.items == {"rng": Item("drop", "not ours")}
    state = {TensorKey("w", "weight"): Whole(dtype="F32", shape=foreign.shape, data=foreign.data)}
    _assert_holds(opened, state)


@pytest.mark.parametrize(
    "where", [64, 64 + 300_000, 64 + 300_000 + 1_399_999, 64 + 300_000 + 1_400_000 + 76]
)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_flipped_bit_in_a_record_is_found(
    tmp_path: Path, where: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the tensor or in the padding that nobody needs: the record's checksum covers both."""
    monkeypatch.setattr(convert_module, "_PROCESS_BYTES_MIN", 1)
    foreign = _Foreign(tmp_path / "foreign")
    path = tmp_path / "foreign" / "rank1.pt"
    data = bytearray(path.read_bytes())
    data[where] ^= 4
    path.write_bytes(data)

    with pytest.raises(ChecksumMismatchError, match=r"w \(weight\): file rank1.pt is damaged"):
        _convert(foreign.checkpoint, tmp_path / "out", processes=processes)
    assert not (tmp_path / "out").exists()


def test_a_foreign_checkpoint_is_verified_by_its_own_checksums(tmp_path: Path) -> None:
    """All that is wrong is told, not only the first thing; what cannot be checked is counted."""
    whole = _Foreign(tmp_path / "x").data
    foreign = _Foreign(tmp_path / "foreign", replica=whole)
    assert verify(foreign.checkpoint) == []
    assert unchecked_bytes(foreign.checkpoint) == len(whole)
    copy = tmp_path / "foreign" / "copy.pt"
    copy.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert [problem.path for problem in verify(foreign.checkpoint)] == ["tensors.w.slots.weight"]
    for number in range(2):
        path = tmp_path / "foreign" / f"rank{number}.pt"
        path.write_bytes(path.read_bytes()[:100] + b"!!" + path.read_bytes()[102:])
    copy.unlink()

    problems = verify(foreign.checkpoint)

    assert [problem.path for problem in problems] == ["copy.pt", "rank0.pt", "rank1.pt"]
    assert "does not exist" in problems[0].message
    assert "damaged in bytes 64 to " in problems[1].message


def test_equal_replicas_pass_and_different_ones_do_not(tmp_path: Path) -> None:
    """An element that two files hold differently has no value."""
    whole = _Foreign(tmp_path / "x").data
    same = _Foreign(tmp_path / "same", replica=whole)
    assert _convert(same.checkpoint, tmp_path / "out").size_bytes == len(whole)

    changed = bytearray(whole)
    changed[len(whole) // 3] ^= 1
    other = _Foreign(tmp_path / "other", replica=bytes(changed))
    with pytest.raises(
        CheckpointCorruptError, match=r"w \(weight\): box .* in file copy.pt is said to be a"
    ):
        _convert(other.checkpoint, tmp_path / "out2")
    assert not (tmp_path / "out2").exists()


# --- Bad sources and destinations: one error, and nothing written.


def test_what_opening_shows_stops_it_before_anything_is_written(tmp_path: Path) -> None:
    """A missing file, a short one, a hole: known before the first byte moves."""
    source = _source(tmp_path, small_state())
    file = next(iter(source.manifest.files))
    path = Path(source.directory) / file
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointCorruptError, match=rf"{file} has {len(data) - 1} bytes, not"):
        _convert(source, tmp_path / "out")
    path.unlink()
    with pytest.raises(CheckpointCorruptError, match=rf"{file} is missing: \w+ \(\w+\) is in it"):
        _convert(source, tmp_path / "out")
    path.write_bytes(data)
    entries = dict(source.state_map.entries)
    key = TensorKey("wte", "weight")
    entries[key] = replace(entries[key], fragments=entries[key].fragments[:1])
    manifest = replace(source.manifest, state_map=replace(source.state_map, entries=entries))
    with pytest.raises(UncoveredRegionError, match="wte"):
        _convert(replace(source, manifest=manifest), tmp_path / "out")

    assert not (tmp_path / "out").exists()


def test_a_damaged_native_source_commits_nothing(tmp_path: Path) -> None:
    """Every block is verified though no block is read at once."""
    source = _source(tmp_path, _state(2))
    for name in source.manifest.files:
        path = Path(source.directory) / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(ChecksumMismatchError, match=name):
            _convert(source, tmp_path / "out")
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert not (tmp_path / "out").exists()


def test_a_source_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    """Foreign formats without checksums would mix two states silently."""
    foreign = _Foreign(tmp_path / "foreign")
    path = tmp_path / "foreign" / "rank0.pt"

    def touch(done: int, total: int) -> None:
        if done == total:
            os.utime(path, ns=(1, 1))

    with pytest.raises(CheckpointCorruptError, match="changed while they were converted"):
        _convert(foreign.checkpoint, tmp_path / "out", progress=touch)
    assert not (tmp_path / "out").exists()


def test_the_source_is_no_destination(tmp_path: Path) -> None:
    """By whatever path it is named."""
    foreign = _Foreign(tmp_path / "foreign")
    (tmp_path / "link").symlink_to(tmp_path / "foreign")

    with pytest.raises(UcpError, match="is the source itself"):
        _convert(foreign.checkpoint, tmp_path / "link")


def test_a_destination_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    """A file where the directory should be."""
    (tmp_path / "out").write_text("here")

    with pytest.raises(StorageError, match="out"):
        _convert(_source(tmp_path, small_state()), tmp_path / "out")


def test_two_conversions_do_not_write_one_directory(tmp_path: Path) -> None:
    """They would rename each other's files."""
    source = _source(tmp_path, small_state())
    held = Journal(str(tmp_path / "out"), "other", resume=True)

    with pytest.raises(UcpError, match="another process is converting"):
        _convert(source, tmp_path / "out")
    held.close()
    _convert(source, tmp_path / "out")


# --- Going on after a kill.

_SCRIPT = """
import os, sys
from ucp_core import convert as module
from ucp_core.checkpoint import open_checkpoint
from ucp_core.storage import LocalStore

module._PROCESS_BYTES_MIN = 1
source, out, items, processes = sys.argv[1:]
left = [int(items)]

def progress(done, total):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), 9)

print("begin", flush=True)
module.convert(
    open_checkpoint(LocalStore(), source), LocalStore(), out,
    memory_bytes=1 << 32, processes=int(processes), progress=progress,
)
"""


def _run_killed(source: Checkpoint, out: Path, items: int, processes: int) -> int:
    command = [sys.executable, "-c", _SCRIPT, source.directory, str(out), str(items)]
    return subprocess.run([*command, str(processes)], check=False, capture_output=True).returncode


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_conversion_goes_on(tmp_path: Path, processes: int) -> None:
    """After kill -9 at several of its items; the result is the same and less is done."""
    state = _state(8)
    source = _source(tmp_path, state)
    _convert(source, tmp_path / "whole")
    expected = _files(tmp_path / "whole")
    for items in (1, 5, 11):
        out = tmp_path / f"out{items}"
        assert _run_killed(source, out, items, processes) == -signal.SIGKILL
        assert not (out / "manifest.json").exists()

        result = _convert(source, out)

        assert result.resumed_bytes > 0
        assert result.read_bytes + result.resumed_bytes == result.size_bytes
        assert _files(out) == expected


def test_killed_at_any_moment_it_goes_on(tmp_path: Path) -> None:
    """Between any two system calls, with children at work, again and again."""
    state = _state(8)
    source = _source(tmp_path, state)
    _convert(source, tmp_path / "whole")
    expected = _files(tmp_path / "whole")
    rng = random.Random(0)
    for number in range(4):
        out = tmp_path / f"out{number}"
        command = [sys.executable, "-c", _SCRIPT, source.directory, str(out), "0", "2"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            # Not a wait for a condition: the moment is what is drawn at random.
            time.sleep(rng.random() * 0.05)
            process.kill()
        if not (out / "manifest.json").exists():
            _convert(source, out)
        assert {n: d for n, d in _files(out).items() if FOLDER not in n} == expected


def test_what_the_journal_says_is_not_believed(tmp_path: Path) -> None:
    """A byte of a finished item changed after the kill: power loss, a full disk, a hand."""
    source = _source(tmp_path, _state(8))
    _convert(source, tmp_path / "whole")
    out = tmp_path / "out"
    _run_killed(source, out, 9, 1)
    for path in (out / FOLDER).glob("*.safetensors"):
        with path.open("r+b") as file:
            file.seek(3 * _MIB)
            file.write(b"damage")

    _convert(source, out)

    assert _files(out) == _files(tmp_path / "whole")


def test_leftovers_of_another_source_are_not_taken_in(tmp_path: Path) -> None:
    """The same names and sizes with other values: what an interrupted run left behind."""
    one = _source(tmp_path / "a", _state(8))
    changed = {
        key: replace(whole, data=bytes(byte ^ 255 for byte in whole.data[:64]) + whole.data[64:])
        for key, whole in _state(8).items()
    }
    two = _source(tmp_path / "b", changed)
    out = tmp_path / "out"
    _run_killed(one, out, 9, 1)

    result = _convert(two, out)

    assert result.resumed_bytes == 0
    _assert_holds(result.checkpoint, changed)


def test_a_changed_source_begins_anew(tmp_path: Path) -> None:
    """Touched files may hold anything."""
    foreign = _Foreign(tmp_path / "foreign")

    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _convert(foreign.checkpoint, tmp_path / "out", progress=stop)
    os.utime(tmp_path / "foreign" / "rank0.pt", ns=(1, 1))

    assert _convert(foreign.checkpoint, tmp_path / "out").resumed_bytes == 0


def test_a_cut_line_of_the_journal_is_no_line(tmp_path: Path) -> None:
    """A kill in the middle of a write, and what is appended after it."""
    source = _source(tmp_path, _state(8))
    out = tmp_path / "out"
    _run_killed(source, out, 9, 1)
    path = out / FOLDER / "journal"
    # Longer than what is written over it.
    path.write_bytes(path.read_bytes()[:-7] + b"?" * 9000)
    seen = len(path.read_bytes().splitlines())

    def stop(*_: int) -> None:
        if len(path.read_bytes().splitlines()) >= seen + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _convert(source, out, progress=stop)
    lines = path.read_bytes().splitlines()

    assert all(crc32(line[9:]) == int(line[:8], 16) for line in lines)
    assert json.loads(lines[-1][9:])
    assert _convert(source, out).resumed_bytes > 0


def test_a_killed_worker_is_replaced_by_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel kills for want of memory; the conversion need not fail."""
    monkeypatch.setattr(convert_module, "_PROCESS_BYTES_MIN", 1)
    state = _state(8)
    source = _source(tmp_path, state)
    killed: list[int] = []

    def kill_one(done: int, _total: int) -> None:
        if not killed and done > 4 * _MIB:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            killed.append(int(children[0]))
            os.kill(killed[0], signal.SIGKILL)

    result = _convert(
        source, tmp_path / "out", processes=2, memory_bytes=1 << 32, progress=kill_one
    )

    assert killed
    _assert_holds(result.checkpoint, state)


def test_a_stream_goes_on_by_whole_files(tmp_path: Path) -> None:
    """An object store keeps only what is complete."""
    source = _source(tmp_path, _state(8))
    store = MemoryStore()

    def stop(*_: int) -> None:
        if store.exists("out/model-00001-of-00001.safetensors"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, store, "out", memory_bytes=64 * _MIB, processes=1, progress=stop)
    result = convert(source, store, "out", memory_bytes=64 * _MIB, processes=1)

    assert result.resumed_bytes > 0
    _convert(source, tmp_path / "whole")
    expected = _files(tmp_path / "whole")
    assert {name: store.read(f"out/{name}") for name in expected} == expected


def test_numpy_is_needed_for_interleaved_tensors_only() -> None:
    """It takes longer to import than a small checkpoint to convert."""
    probe = "import sys, ucp_core._convert_work\nprint('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert np.__name__ == "numpy"
