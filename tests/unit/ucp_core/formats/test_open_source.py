"""Any known format opens by itself, from any store, under other names if wished."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tests.support.checkpoints import save, small_state
from tests.support.deepspeed_folders import CLASSES, Folder, Param, assert_equal, loaded, native
from ucp_core.errors import CheckpointNotFoundError
from ucp_core.formats import open_source, recognise
from ucp_core.storage import LocalStore, Store, join, open_store
from ucp_core.torch_files import write_torch_file

MODEL = [Param("up.weight", (7, 6)), Param("up.bias", (7,), group=1), Param("down.weight", (3, 7))]


def _put(folder: Folder, store: Store, directory: str) -> None:
    for name, tree in folder.trees.items():
        write_torch_file(store, join(directory, name), tree, allow=CLASSES, fsync=False)


@pytest.mark.parametrize("scheme", ["", "memory://test_open_source"])
def test_any_store_serves_a_foreign_checkpoint(tmp_path: Path, scheme: str) -> None:
    """Listings of object stores do not tell folders from files."""
    store, directory = open_store(f"{scheme}{tmp_path}")
    folder = native(MODEL, dp=2)
    _put(folder, store, join(directory, "global_step5"))
    store.write_atomic(join(directory, "latest"), b"global_step5", fsync=False)

    assert recognise(store, directory) == "deepspeed"
    assert_equal(loaded(open_source(store, directory)), folder.expected)


def test_nothing_known_is_recognised_as_nothing(tmp_path: Path) -> None:
    """A path that is not there, too."""
    assert recognise(LocalStore(), str(tmp_path)) is None
    assert recognise(LocalStore(), str(tmp_path / "missing")) is None
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    with pytest.raises(CheckpointNotFoundError, match=r"no known format .*deepspeed, "):
        open_source(LocalStore(), str(tmp_path))


def test_recognition_loads_no_reader(tmp_path: Path) -> None:
    """Every command looks at what a path is, and readers of six formats take a while to import."""
    program = (
        "import sys; from ucp_core.formats import recognise; "
        "from ucp_core.storage import LocalStore; "
        f"recognise(LocalStore(), {str(tmp_path)!r}); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    loaded_names = done.stdout.decode().split()
    assert "ucp_core.formats.dcp.recognition" in loaded_names
    assert not [n for n in loaded_names if n.endswith(".reader") or "torch_files" in n]


def test_names_are_mapped_in_every_slot_and_group(tmp_path: Path) -> None:
    """A model of another framework looks for its moments under its names, too."""
    folder = native(MODEL, dp=2)
    _put(folder, LocalStore(), str(tmp_path))

    checkpoint = open_source(LocalStore(), str(tmp_path), rename={"up.weight": "fc1.weight"})

    expected = {
        ("fc1.weight" if name == "up.weight" else name, slot): array
        for (name, slot), array in folder.expected.items()
    }
    assert_equal(loaded(checkpoint), expected)
    assert checkpoint.param_groups[0]["params"] == ["fc1.weight", "down.weight"]


def test_a_tag_where_there_are_none_is_refused(tmp_path: Path) -> None:
    """A caller that selects one of several checkpoints must not get another one."""
    store = LocalStore()
    folder = tmp_path / "hf"
    folder.mkdir()
    safetensors.numpy.save_file({"w": np.ones(3, np.float32)}, folder / "model.safetensors")
    save(store, small_state(), step=7, root=str(tmp_path / "own"))
    store.write_atomic(str(tmp_path / "dcp" / ".metadata"), b"", fsync=False)

    for name, what in (("hf", "Hugging Face"), ("own/step-00000007", "everstep")):
        with pytest.raises(CheckpointNotFoundError, match=rf"{name} is .*{what}, which has no t"):
            open_source(store, str(tmp_path / name), tag="global_step5")
    with pytest.raises(CheckpointNotFoundError, match=r"dcp/global_step5 has no \.metadata"):
        open_source(store, str(tmp_path / "dcp"), tag="global_step5")
