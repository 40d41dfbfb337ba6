"""A folder from somebody else: only regular files inside it are opened, whatever links say."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoints import small_state
from tests.support.conversions import convert_to, native_source
from tests.support.deepspeed_folders import Param, native
from ucp_core.errors import CheckpointCorruptError, StorageError
from ucp_core.formats import open_source
from ucp_core.storage import LocalStore

MODEL = [Param("up.weight", (7, 6))]


def _link(path: Path) -> None:
    outside = path.parents[2] / "outside"
    shutil.copy(path, outside)
    path.unlink()
    path.symlink_to(outside)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a link that leads out": (_link, "which is outside .* and is not read"),
    "a named pipe": (_pipe, "is a named pipe, not a file"),
    "a folder": (_folder, "is a folder, not a file"),
    "a device": (_device, "/dev/zero, which is outside|is a device, not a file"),
}


def _make(name: str, tmp_path: Path) -> tuple[Path, Path]:
    """Return a source two folders below ``tmp_path``, and a file that its reader opens."""
    source = tmp_path / "given" / "source"
    if name == "latest":
        native(MODEL, dp=2).write(source / "global_step7")
        (source / "latest").write_text("global_step7")
        return source, source / "latest"
    if name == "everstep":
        made = Path(native_source(tmp_path / "made", small_state()).directory)
        shutil.copytree(made, source)
        return source, source / "manifest.json"
    native(MODEL, dp=2).write(source)
    return source, next(source.glob("*optim_states.pt"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["latest", "deepspeed", "everstep"])
def test_what_is_no_regular_file_inside_the_folder_is_not_opened(
    tmp_path: Path, name: str, kind: str
) -> None:
    """A pipe would wait for ever, a device may do anything, a link reads somebody's secrets."""
    source, file = _make(name, tmp_path)
    change, said = KINDS[kind]
    change(file)

    with pytest.raises(StorageError, match=said):
        open_source(LocalStore(), str(source))


def test_data_behind_a_link_that_was_laid_after_opening_is_not_converted(tmp_path: Path) -> None:
    """Conversion opens the files by itself."""
    source = native_source(tmp_path, small_state())
    file = Path(source.directory) / next(iter(source.manifest.files))
    _link(file)

    with pytest.raises((StorageError, CheckpointCorruptError), match="outside"):
        convert_to(source, tmp_path / "out")

    assert not (tmp_path / "out" / "manifest.json").exists()


def test_links_inside_the_folder_and_a_link_to_it_are_followed(tmp_path: Path) -> None:
    """People name the newest checkpoint so, and keep large files elsewhere in the same folder."""
    source, file = _make("deepspeed", tmp_path)
    file.rename(source / "kept.bin")
    file.symlink_to("kept.bin")
    (tmp_path / "newest").symlink_to(source)

    found = open_source(LocalStore(), str(tmp_path / "newest"))

    assert "up.weight" in {key.fqn for key in found.state_map.entries}


def test_folders_of_one_store_do_not_open_each_other(tmp_path: Path) -> None:
    """A place inside the first is outside the second."""
    for name in ("one", "two"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "file").write_text(name)
    (tmp_path / "two" / "link").symlink_to(tmp_path / "one" / "deep")
    one = LocalStore().within(str(tmp_path / "one"))
    two = one.within(str(tmp_path / "two"))

    assert one.read(str(tmp_path / "one" / "deep" / "file")) == b"one"
    assert two.read(str(tmp_path / "two" / "deep" / "file")) == b"two"
    for path in ("one/deep/file", "two/link/file", "two/../one/deep/file"):
        with pytest.raises(StorageError, match="which is outside"):
            two.read(str(tmp_path / path))
