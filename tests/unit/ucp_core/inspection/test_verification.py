"""``verify`` finds every flipped, missing and added byte, and says in which file."""

from pathlib import Path

import pytest

from tests.support.checkpoints import ROOT, State, Whole, assert_loaded, save, whole_need
from tests.support.commands import ucp
from ucp_core.conversion import convert
from ucp_core.errors import ChecksumMismatchError, Problem, UcpError
from ucp_core.geometry import Box, TensorKey
from ucp_core.inspection import verify
from ucp_core.native import Checkpoint, load, open_checkpoint
from ucp_core.storage import LocalStore, MemoryStore, Store, join

_NATIVE = f"{ROOT}/step-00000007"
_KINDS = ("native", "universal")


def tiny_state(fill: int = 0) -> State:
    """Return so few bytes that each can be flipped: two dtypes, two slots, and no tensor of 0."""
    return {
        TensorKey("w", "weight"): Whole(
            dtype="F32", shape=(3, 2), data=bytes(range(fill, fill + 24))
        ),
        TensorKey("w", "exp_avg"): Whole(
            dtype="F32", shape=(3, 2), data=bytes(range(fill, fill + 24))
        ),
        TensorKey("b", "weight"): Whole(
            dtype="BF16", shape=(3,), data=bytes(range(fill, fill + 6))
        ),
    }


def checkpoint_of(
    kind: str, state: State, store: Store | None = None, root: str = ROOT
) -> Checkpoint:
    store = store or MemoryStore()
    halves = [
        {
            key: [tensor_box]
            for key, tensor in state.items()
            for tensor_box in [Box.full(tensor.shape).split(0, 2)[rank]]
        }
        for rank in (0, 1)
    ]
    save(store, state, step=7, sharding=halves, root=root)
    native = open_checkpoint(store, join(root, "step-00000007"))
    if kind == "native":
        return native
    convert(native, store, join(root, "universal"), memory_bytes=16 << 20, processes=1)
    return open_checkpoint(store, join(root, "universal"))


def files_of(checkpoint: Checkpoint) -> list[str]:
    store, directory = checkpoint.store, checkpoint.directory
    extra = store.sizes(join(directory, "extra"))
    return [*store.sizes(directory), *(f"extra/{name}" for name in extra)]


def problems_of(opened: Checkpoint) -> list[Problem]:
    """Return what a new process finds: it opens the checkpoint first, as the command does."""
    try:
        checkpoint = open_checkpoint(opened.store, opened.directory)
    except UcpError as error:
        return [Problem("manifest.json", str(error))]
    return verify(checkpoint)


@pytest.mark.parametrize("kind", _KINDS)
def test_each_byte_of_each_file_counts(kind: str) -> None:
    """Data, headers, the spaces that pad them, braces of JSON, the digits of the seal itself."""
    checkpoint = checkpoint_of(kind, tiny_state())
    store = checkpoint.store
    names = files_of(checkpoint)
    assert len(names) == {"native": 5, "universal": 5}[kind]
    for name in names:
        path = join(checkpoint.directory, name)
        whole = store.read(path)
        for index in range(len(whole)):
            flipped = bytearray(whole)
            flipped[index] ^= 1 << index % 8
            store.write_atomic(path, flipped, fsync=False)

            problems = problems_of(checkpoint)

            assert {problem.path for problem in problems} == {name}, (name, index)
        store.write_atomic(path, whole, fsync=False)
    assert problems_of(checkpoint) == []


@pytest.mark.parametrize("kind", _KINDS)
def test_missing_and_added_bytes_count(kind: str) -> None:
    """A copy that was cut short, one that was appended to, and files that are gone or empty."""
    checkpoint = checkpoint_of(kind, tiny_state())
    store = checkpoint.store
    for name in files_of(checkpoint):
        path = join(checkpoint.directory, name)
        whole = store.read(path)
        for damaged in (whole[:-1], whole[1:], whole[: len(whole) // 2], b"", whole + b"\0"):
            store.write_atomic(path, damaged, fsync=False)
            assert {problem.path for problem in problems_of(checkpoint)} == {name}
        store.delete(path)
        assert {problem.path for problem in problems_of(checkpoint)} == {name}
        store.write_atomic(path, whole, fsync=False)


@pytest.mark.parametrize("kind", _KINDS)
def test_the_place_of_the_damage_is_reported(kind: str) -> None:
    """Around the borders of blocks: the tensor, its box, and the bytes of one block."""
    size = (5 << 20) // 2
    data = bytes(range(256)) * (size // 256)
    state = {TensorKey("w", "weight"): Whole(dtype="U8", shape=(size,), data=data)}
    checkpoint = checkpoint_of(kind, state)
    store = checkpoint.store
    (entry,) = checkpoint.state_map.entries.values()
    for fragment in entry.fragments:
        path = join(checkpoint.directory, fragment.file)
        whole = store.read(path)
        for block in range(len(fragment.blocks)):
            low = fragment.offset_bytes + (block << 20)
            high = min(low + (1 << 20), fragment.offset_bytes + fragment.num_bytes)
            for index in (low, high - 1):
                flipped = bytearray(whole)
                flipped[index] ^= 1
                store.write_atomic(path, flipped, fsync=False)

                (problem,) = verify(checkpoint)

                assert problem.path == fragment.file
                assert f"damaged in bytes {low} to {high}: w (weight) box {fragment.box}" in str(
                    problem
                )
                with pytest.raises(ChecksumMismatchError):
                    load(checkpoint, whole_need(state))
        store.write_atomic(path, whole, fsync=False)


@pytest.mark.parametrize("kind", _KINDS)
def test_old_metadata_with_new_data_is_refused(kind: str) -> None:
    """Files of two runs that were mixed by a copy: names and sizes agree, and each is sound."""
    old, new = checkpoint_of(kind, tiny_state()), checkpoint_of(kind, tiny_state(100))
    for name in files_of(old):
        if name.endswith(".json"):
            continue
        path = join(old.directory, name)
        mine = old.store.read(path)
        theirs = new.store.read(path)
        assert len(mine) == len(theirs)
        old.store.write_atomic(path, theirs, fsync=False)

        assert {problem.path for problem in problems_of(old)} == {name}
        with pytest.raises(ChecksumMismatchError):
            load(old, whole_need(tiny_state()))
        old.store.write_atomic(path, mine, fsync=False)
    need = whole_need(tiny_state())
    load(old, need)
    assert_loaded(tiny_state(), need)


@pytest.mark.parametrize("kind", _KINDS)
def test_the_command_names_the_damaged_file(kind: str, tmp_path: Path) -> None:
    """It ends with 1 and prints the name, whichever file it is."""
    checkpoint = checkpoint_of(kind, tiny_state(), LocalStore(), str(tmp_path))
    assert ucp("verify", checkpoint.directory).returncode == 0
    for name in files_of(checkpoint):
        path = Path(checkpoint.directory, name)
        whole = path.read_bytes()
        path.write_bytes(whole[:-4] + bytes([whole[-4] ^ 4]) + whole[-3:])

        done = ucp("verify", checkpoint.directory)

        assert done.returncode == 1
        assert name in done.stdout + done.stderr
        path.write_bytes(whole)
