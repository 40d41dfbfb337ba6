"""Checkpoints large enough to be converted in pieces, and what looks at the result."""

import random
from math import prod
from pathlib import Path

from tests.support.checkpoints import State, Whole, assert_loaded, save, small_state, whole_need
from ucp_core.conversion import ConvertResult, convert
from ucp_core.geometry import Box, Extent, Fragment, StateMap, TensorEntry, TensorKey
from ucp_core.inspection import verify
from ucp_core.manifest import Item, Kind, Manifest
from ucp_core.native import Checkpoint, checkpoint_name, load, open_checkpoint
from ucp_core.numerics import BLOCK_BYTES, crc32
from ucp_core.storage import LocalStore

MIB = 1 << 20


def large_state(num_tensors: int = 6, rows: int = 350) -> State:
    """Return tensors of a few MiB each, so that there are blocks and items to speak of."""
    rng = random.Random(3)
    state: State = {}
    for index in range(num_tensors):
        shape = (rows + index, 513)
        for slot in ("weight", "exp_avg"):
            data = rng.randbytes(4 * prod(shape))
            state[TensorKey(f"layers.{index}.w", slot)] = Whole(dtype="F32", shape=shape, data=data)
    return state | small_state()


def native_source(tmp_path: Path, state: State, world_size: int = 3) -> Checkpoint:
    root = str(tmp_path / "run")
    save(LocalStore(), state, step=7, world_size=world_size, root=root)
    return open_checkpoint(LocalStore(), f"{root}/{checkpoint_name(7)}")


def convert_to(source: Checkpoint, out: Path, **options: object) -> ConvertResult:
    chosen: dict[str, object] = {"memory_bytes": 512 * MIB, "processes": 1}
    chosen |= options
    return convert(source, LocalStore(), str(out), **chosen)  # type: ignore[arg-type]


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def assert_holds(checkpoint: Checkpoint, state: State) -> None:
    assert verify(checkpoint) == []
    need = whole_need(state)
    load(checkpoint, need)
    assert_loaded(state, need)


class ForeignRecords:
    """A foreign source, whose only checksums are those of whole records.

    Two files with one record each: a tensor in rows, padding behind it, a replica.
    """

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
