"""An export that fails leaves the destination as it was, whatever the format and the moment."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ucp
from tests.support.deepspeed_folders import Param, native, optim_name
from ucp_core.errors import StorageError
from ucp_core.formats import FORMATS, export, open_source
from ucp_core.storage import Buffer, LocalStore

#: The first of two ranks has the first of them, the second the other.
MODEL = [Param("decoder.down.weight", (60, 70)), Param("decoder.up.weight", (70, 60))]
#: The file that readers look for first, which is written last; the universal format has its own
#: tests.
COMMITS = {
    "huggingface": "model.safetensors.index.json",
    "dcp": ".metadata",
    "megatron-core": "latest_checkpointed_iteration.txt",
    "deepspeed": "latest",
    "deepspeed-universal": "latest_universal",
}
MEMORY_BYTES = 64 << 20


def _damaged(path: Path) -> Path:
    """Write a source with a flipped bit that shows when the second of its tensors is read."""
    native(MODEL, dp=2).write(path)
    file = path / optim_name(1, 0)
    data = bytearray(file.read_bytes())
    weight = MODEL[1].value("weight").tobytes()
    place = data.find(weight[:64])
    assert place >= 0, "the weight is not where it was"
    data[place] ^= 1
    file.write_bytes(data)
    return path


def _absent(out: Path) -> None:
    """Leave it to the writer to make the folder and those above it."""


def _empty(out: Path) -> None:
    out.mkdir(parents=True)


def _in_use(out: Path) -> None:
    """Put something there that no format calls its own."""
    out.mkdir(parents=True)
    (out / "notes.txt").write_text("kept")


def _tree(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


@pytest.mark.parametrize("there", [_absent, _empty, _in_use])
@pytest.mark.parametrize("to", FORMATS)
def test_an_export_of_a_damaged_source_leaves_the_destination_as_it_was(
    tmp_path: Path, to: str, there: Callable[[Path], None]
) -> None:
    """An empty folder looks like a checkpoint under way; one that was there is not ours."""
    source = _damaged(tmp_path / "source")
    out = tmp_path / "home" / "exports" / "out"
    (tmp_path / "home").mkdir()
    there(out)
    before = _tree(tmp_path)

    done = ucp("export", str(source), str(out), "--format", to)

    assert done.returncode == 1, done
    assert done.stderr.count("\n") == 1
    assert _tree(tmp_path) == before


def test_a_conversion_of_a_damaged_source_leaves_no_folder(tmp_path: Path) -> None:
    """Folders above it that were made for it also go."""
    source = _damaged(tmp_path / "source")
    before = _tree(tmp_path)

    done = ucp("convert", str(source), str(tmp_path / "exports" / "out"))

    assert done.returncode == 1, done
    assert optim_name(1, 0) in done.stderr
    assert _tree(tmp_path) == before


class _Refusing(LocalStore):
    """Puts the file that commits in its place, and then cannot say that it will stay there."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def write_atomic(
        self, path: str, data: Buffer, *, fsync: bool, exclusive: bool = False
    ) -> bool:
        placed = super().write_atomic(path, data, fsync=fsync, exclusive=exclusive)
        if Path(path).name == self._name:
            raise StorageError(f"{path} failed: input/output error", path=path)
        return placed


@pytest.mark.parametrize("to", COMMITS)
def test_an_export_whose_commit_fails_leaves_nothing(tmp_path: Path, to: str) -> None:
    """All data is there by then: who was told that it failed would find a checkpoint."""
    source = open_source(LocalStore(), str(native(MODEL, dp=1).write(tmp_path / "source")))
    out = tmp_path / "exports" / "out"
    options: dict[str, Any] = {"shard_bytes": 20_000} if to == "huggingface" else {}

    with pytest.raises(StorageError, match="input/output error"):
        export(
            source,
            _Refusing(COMMITS[to]),
            str(out),
            format=to,
            memory_bytes=MEMORY_BYTES,
            **options,
        )

    assert not out.parent.exists()
