"""Conversion: same bytes from every source in every way of working, or nothing at all."""

import fcntl
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.bench_convert import measure
from tests.support.checkpoints import Whole, small_state
from tests.support.conversions import (
    MIB,
    ForeignRecords,
    assert_holds,
    convert_to,
    files_of,
    large_state,
    native_source,
)
from tests.support.made import save_part, tensor_of
from ucp_core.conversion import Batch, Job, Result, convert, do_batch
from ucp_core.conversion import run as convert_module
from ucp_core.conversion.resume_journal import Journal
from ucp_core.conversion.workers import may_fork
from ucp_core.errors import (
    CheckpointCorruptError,
    ChecksumMismatchError,
    StorageError,
    UcpError,
    UncoveredRegionError,
)
from ucp_core.geometry import Box, TensorKey
from ucp_core.inspection import unchecked_bytes, verify
from ucp_core.manifest import Item
from ucp_core.native import UNFINISHED_NAME, open_checkpoint
from ucp_core.storage import LocalStore, MemoryStore


def test_every_way_of_working_makes_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place by one, by forked processes, by threads; as a stream to any store."""
    monkeypatch.setattr(convert_module, "_PROCESS_BYTES_MIN", 1)
    state = large_state()
    source = native_source(tmp_path, state)
    one = convert_to(source, tmp_path / "one")
    # A process with other threads, which a test before this one may have left, never forks.
    in_processes = (3, 1) if may_fork() else (1, 3)
    forked = convert_to(source, tmp_path / "forked", processes=3, memory_bytes=4096 * MIB)
    monkeypatch.setattr(convert_module, "may_fork", lambda: False)
    threads = convert_to(source, tmp_path / "threads", processes=3)
    store = MemoryStore()
    convert(source, store, "out", memory_bytes=64 * MIB, processes=2)

    expected = files_of(tmp_path / "one")
    ways = [(result.processes, result.threads) for result in (one, forked, threads)]
    assert ways == [(1, 1), in_processes, (1, 3)]
    assert files_of(tmp_path / "forked") == expected
    assert files_of(tmp_path / "threads") == expected
    assert {name: store.read(f"out/{name}") for name in expected} == expected
    assert not store.exists(f"out/{UNFINISHED_NAME}")
    assert_holds(one.checkpoint, state)


def test_a_runner_elsewhere_makes_the_same_files(tmp_path: Path) -> None:
    """A cluster gets the job and its batches as bytes, and does them in any order."""
    source = native_source(tmp_path, large_state())

    def run(job: Job, batches: Sequence[Batch], take: Callable[[Result], None]) -> None:
        sent = pickle.dumps(job)
        for batch in map(pickle.dumps, reversed(batches)):
            for result in do_batch(pickle.loads(sent), pickle.loads(batch)):
                take(result)

    convert_to(source, tmp_path / "here")
    convert_to(source, tmp_path / "there", runner=run)

    assert files_of(tmp_path / "there") == files_of(tmp_path / "here")


def test_bytes_are_read_and_written_once(tmp_path: Path) -> None:
    """Whatever the cut: rows, columns, grids and flat ranges are in the source."""
    state = large_state()
    source = native_source(tmp_path, state, world_size=5)
    result = convert_to(source, tmp_path / "out")

    assert result.size_bytes == result.read_bytes
    assert result.written_bytes <= result.size_bytes * 1.02


def test_files_do_not_grow_in_number_with_tensors_or_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer makes a file for each slot of each parameter of each rank, and then one of each."""
    made: list[int] = []
    opened: set[str] = set()
    plain_open = os.open

    def noting(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_CREAT:
            opened.add(os.fspath(path))
        return plain_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", noting)
    for num_tensors, world_size in ((2, 2), (20, 5)):
        root = tmp_path / str(num_tensors)
        source = native_source(root, large_state(num_tensors, rows=5), world_size=world_size)
        opened.clear()
        convert_to(source, root / "out")
        made.append(len(opened))
        assert any("out" in path for path in opened)

    assert made[0] == made[1]


def test_a_universal_source_is_converted_too(tmp_path: Path) -> None:
    """Its blocks and the target's are the same ones."""
    state = large_state(2)
    first = convert_to(native_source(tmp_path, state), tmp_path / "first")
    second = convert_to(first.checkpoint, tmp_path / "second")

    assert files_of(tmp_path / "second") == files_of(tmp_path / "first")
    assert second.read_bytes == second.size_bytes


def test_a_foreign_checkpoint_is_converted(tmp_path: Path) -> None:
    """With its ties and what became of its items."""
    foreign = ForeignRecords(tmp_path / "foreign")
    made = convert_to(foreign.checkpoint, tmp_path / "out").checkpoint

    opened = open_checkpoint(LocalStore(), str(tmp_path / "out"))
    assert opened.manifest == made.manifest
    assert opened.manifest.ties == {"head": "w"}
    assert opened.manifest.items == {"rng": Item("drop", "not ours")}
    state = {TensorKey("w", "weight"): Whole(dtype="F32", shape=foreign.shape, data=foreign.data)}
    assert_holds(opened, state)


@pytest.mark.parametrize(
    "where", [64, 64 + 300_000, 64 + 300_000 + 1_399_999, 64 + 300_000 + 1_400_000 + 76]
)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_flipped_bit_in_a_record_is_found(
    tmp_path: Path, where: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the tensor or in unneeded padding: the record's checksum covers both."""
    monkeypatch.setattr(convert_module, "_PROCESS_BYTES_MIN", 1)
    foreign = ForeignRecords(tmp_path / "foreign")
    path = tmp_path / "foreign" / "rank1.pt"
    data = bytearray(path.read_bytes())
    data[where] ^= 4
    path.write_bytes(data)

    with pytest.raises(ChecksumMismatchError, match=r"w \(weight\): file .*rank1.pt is damaged"):
        convert_to(foreign.checkpoint, tmp_path / "out", processes=processes)
    assert not (tmp_path / "out").exists()


def test_a_foreign_checkpoint_is_verified_by_its_own_checksums(tmp_path: Path) -> None:
    """All that is wrong is told, not only the first thing; what cannot be checked is counted."""
    whole = ForeignRecords(tmp_path / "x").data
    foreign = ForeignRecords(tmp_path / "foreign", replica=whole)
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
    whole = ForeignRecords(tmp_path / "x").data
    same = ForeignRecords(tmp_path / "same", replica=whole)
    assert convert_to(same.checkpoint, tmp_path / "out").size_bytes == len(whole)

    changed = bytearray(whole)
    changed[len(whole) // 3] ^= 1
    other = ForeignRecords(tmp_path / "other", replica=bytes(changed))
    with pytest.raises(
        CheckpointCorruptError, match=r"w \(weight\): box .* in file copy.pt is declared a"
    ):
        convert_to(other.checkpoint, tmp_path / "out2")
    assert not (tmp_path / "out2").exists()


# --- Bad sources and destinations: one error, and nothing written.


def test_what_opening_shows_stops_it_before_anything_is_written(tmp_path: Path) -> None:
    """A missing file, a short one, a hole: known before the first byte moves."""
    source = native_source(tmp_path, small_state())
    file = next(iter(source.manifest.files))
    path = Path(source.directory) / file
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointCorruptError, match=rf"{file} has {len(data) - 1} bytes, not"):
        convert_to(source, tmp_path / "out")
    path.unlink()
    with pytest.raises(CheckpointCorruptError, match=rf"{file} is missing: \w+ \(\w+\) is in it"):
        convert_to(source, tmp_path / "out")
    path.write_bytes(data)
    entries = dict(source.state_map.entries)
    key = TensorKey("wte", "weight")
    entries[key] = replace(entries[key], fragments=entries[key].fragments[:1])
    manifest = replace(source.manifest, state_map=replace(source.state_map, entries=entries))
    with pytest.raises(UncoveredRegionError, match="wte"):
        convert_to(replace(source, manifest=manifest), tmp_path / "out")

    assert not (tmp_path / "out").exists()


def test_a_damaged_native_source_commits_nothing(tmp_path: Path) -> None:
    """Every block is verified though no block is read at once."""
    source = native_source(tmp_path, large_state(2))
    for name in source.manifest.files:
        path = Path(source.directory) / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(ChecksumMismatchError, match=name):
            convert_to(source, tmp_path / "out")
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert not (tmp_path / "out").exists()


def test_a_source_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    """Foreign formats without checksums would mix two states silently."""
    foreign = ForeignRecords(tmp_path / "foreign")
    path = tmp_path / "foreign" / "rank0.pt"

    def touch(done: int, total: int) -> None:
        if done == total:
            os.utime(path, ns=(1, 1))

    with pytest.raises(CheckpointCorruptError, match="changed while they were converted"):
        convert_to(foreign.checkpoint, tmp_path / "out", progress=touch)
    assert not (tmp_path / "out").exists()


def test_the_source_is_no_destination(tmp_path: Path) -> None:
    """By whatever path it is named."""
    foreign = ForeignRecords(tmp_path / "foreign")
    (tmp_path / "link").symlink_to(tmp_path / "foreign")

    with pytest.raises(UcpError, match="is the source itself"):
        convert_to(foreign.checkpoint, tmp_path / "link")


@pytest.mark.parametrize(
    ("files", "what"),
    [
        (["latest", "global_step7/mp_rank_00_model_states.pt"], "global_step7, latest"),
        (["model-00001-of-00001.safetensors"], "a checkpoint of huggingface"),
        (["a.txt", "b.txt", "c.txt", "d.txt", "e.txt"], r"a.txt, b.txt, c.txt, d.txt and 1 more"),
    ],
    ids=["its own source under a tag", "a file of the same name", "anything"],
)
def test_a_destination_that_holds_other_files_is_left_as_it_is(
    tmp_path: Path, files: list[str], what: str
) -> None:
    """A source that lies under a tag has another folder than the one that was named."""
    out = tmp_path / "out"
    for name in files:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(b"theirs")
    before = files_of(out)

    with pytest.raises(UcpError, match=f"out holds .*{what}.*give a new or empty folder"):
        convert_to(native_source(tmp_path, small_state()), out)

    assert files_of(out) == before


def test_a_destination_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    """A file where the directory should be."""
    (tmp_path / "out").write_text("here")

    with pytest.raises(StorageError, match="out"):
        convert_to(native_source(tmp_path, small_state()), tmp_path / "out")


def test_a_conversion_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    """It finds out while it reserves the space; what it has reserved may be all that is free."""
    source = native_source(tmp_path, large_state(2))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(StorageError, match="cannot be written: File too large"):
            convert_to(source, tmp_path / "home" / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("kind", ["a link", "a folder in it", "a file in it", "a journal in it"])
def test_a_folder_of_that_name_that_no_conversion_made_is_left_as_it_is(
    tmp_path: Path, kind: str
) -> None:
    """Its content would be deleted, through a link far from the destination."""
    out = tmp_path / "out"
    theirs = tmp_path / "theirs" if kind == "a link" else out / UNFINISHED_NAME
    kept = theirs / "deep" / "keep" if kind == "a folder in it" else theirs / "keep"
    kept.parent.mkdir(parents=True)
    kept.write_text("theirs")
    if kind == "a journal in it":
        kept = kept.rename(theirs / "journal")
        (theirs / "model-00001-of-00001.safetensors").write_text("theirs too")
    out.mkdir(exist_ok=True)
    if kind == "a link":
        (out / UNFINISHED_NAME).symlink_to(theirs)

    with pytest.raises(UcpError, match=f"{UNFINISHED_NAME} is not the folder of a conversion"):
        convert_to(native_source(tmp_path, small_state()), out)

    assert kept.read_text() == "theirs"


def test_two_conversions_do_not_write_one_directory(tmp_path: Path) -> None:
    """They would rename each other's files."""
    source = native_source(tmp_path, small_state())
    held = Journal(str(tmp_path / "out"), "other", resume=True)

    with pytest.raises(UcpError, match="another process is converting"):
        convert_to(source, tmp_path / "out")
    held.close()
    convert_to(source, tmp_path / "out")


def test_a_conversion_waits_for_the_lock_that_a_killed_one_left_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its children have it too, and let go of it as soon as they run."""
    source = native_source(tmp_path, small_state())
    convert_to(source, tmp_path / "whole")
    Journal(str(tmp_path / "out"), "other", resume=True).close()
    child = os.open(next((tmp_path / "out" / UNFINISHED_NAME).iterdir()), os.O_RDONLY)
    fcntl.flock(child, fcntl.LOCK_EX)
    monkeypatch.setattr("ucp_core.conversion.resume_journal.time.sleep", lambda _: os.close(child))

    convert_to(source, tmp_path / "out")

    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_journal_that_is_deleted_while_a_conversion_waits_for_it_counts_as_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other conversion has just finished, so its result is in the destination."""
    out = tmp_path / "out"
    held = Journal(str(out), "other", resume=True)
    journal = next((out / UNFINISHED_NAME).iterdir())
    monkeypatch.setattr("ucp_core.conversion.resume_journal._LOCK_S", 0.1)
    monkeypatch.setattr(
        "ucp_core.conversion.resume_journal.time.sleep", lambda _: journal.unlink(missing_ok=True)
    )

    with pytest.raises(UcpError, match="another process is converting"):
        convert_to(native_source(tmp_path, small_state()), out)
    held.close()


def test_numpy_is_needed_for_interleaved_tensors_only() -> None:
    """It takes longer to import than a small checkpoint to convert."""
    probe = "import sys, ucp_core.conversion.work_items\nprint('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert np.__name__ == "numpy"


@pytest.mark.parametrize(
    ("dim", "memory_mib"), [(0, 96), (1, 200)], ids=["rows alone", "columns by several"]
)
def test_the_bound_is_that_of_all_processes(tmp_path: Path, dim: int, memory_mib: int) -> None:
    """Interpreters, what they import, buffers: the state is larger than all of it."""
    shape = (12_000, 1_500)
    data = bytes(4 * prod(shape) // 2)
    for rank in range(2):
        box = Box.full(shape).split(dim, 2)[rank]
        tensors = [
            tensor_of("w", shape, memoryview(data), slot=slot, box=box)
            for slot in ("weight", "exp_avg", "exp_avg_sq")
        ]
        save_part(LocalStore(), str(tmp_path / "source"), tensors, rank=rank, world_size=2)
    command = [sys.executable, "-m", "ucp_core.cli", "convert", str(tmp_path / "source")]
    command += [str(tmp_path / "out"), "--memory", f"{memory_mib}MiB"]

    found = measure(command)

    assert found["read_bytes"] > 3 * len(data)
    assert found["peak_tree_bytes"] < memory_mib * MIB
