"""Two writers and one folder: whoever comes second is refused, and disturbs nothing."""

import uuid
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support.deepspeed_folders import Param, native
from ucp_core.errors import UcpError
from ucp_core.formats import FORMATS, export, open_source
from ucp_core.native import CLAIM_NAME, UNFINISHED_NAME, Checkpoint, claimed
from ucp_core.storage import LocalStore, MemoryStore, Store, open_store

_MODELS = {
    "ours": [Param("decoder.a.w", (60, 70)), Param("decoder.b.w", (9, 7))],
    "theirs": [Param("decoder.c.w", (5, 6))],
}
_FOREIGN = [name for name in FORMATS if name != "universal"]


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Checkpoint]:
    for name, model in _MODELS.items():
        native(model, dp=2).write(tmp_path / name)
    return {name: open_source(LocalStore(), str(tmp_path / name)) for name in _MODELS}


@pytest.fixture(params=["local", "in memory", "fsspec"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Store, str]:
    if request.param == "fsspec":
        return open_store(f"memory://{uuid.uuid4().hex}/out")
    return (
        (LocalStore(), str(tmp_path / "out"))
        if request.param == "local"
        else (MemoryStore(), "out")
    )


def _files(store: Store, directory: str) -> list[str]:
    found: list[str] = []
    for name in store.list(directory):
        path = f"{directory}/{name}"
        found += _files(store, path) if store.list(path) else [path]
    return found


def _write(
    source: Checkpoint,
    place: tuple[Store, str],
    to: str,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    export(source, *place, format=to, memory_bytes=64 << 20, progress=progress)


@pytest.mark.parametrize("fails", ["fails", "ends"])
@pytest.mark.parametrize(
    ("first", "second"),
    [*zip(_FOREIGN, _FOREIGN, strict=True), ("dcp", "universal"), ("universal", "huggingface")],
)
def test_the_second_of_two_writers_into_one_folder_is_refused(
    sources: dict[str, Checkpoint], place: tuple[Store, str], first: str, second: str, fails: str
) -> None:
    """Each replaced files of the other, or deleted them when it failed, and both exited with 0."""
    told: list[str] = []

    def meet(*_: int) -> None:
        if not told:
            with pytest.raises(UcpError, match="another process exports or converts to") as error:
                _write(sources["theirs"], place, second)
            told.append(str(error.value))
            if fails == "fails":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) if fails == "fails" else nullcontext():
        _write(sources["ours"], place, first, meet)

    store, directory = place
    assert told
    if fails == "fails":
        assert first == "universal" or _files(store, directory) == []
    else:
        assert not store.list(f"{directory}/{UNFINISHED_NAME}")
        made = open_source(store, directory).state_map
        assert {key.fqn for key in made.entries} == {"decoder.a.w", "decoder.b.w"}


def test_an_export_that_was_killed_is_not_overwritten(
    sources: dict[str, Checkpoint], place: tuple[Store, str]
) -> None:
    """It may still live and write, on an unreachable machine."""
    store, directory = place
    claim = f"{directory}/{UNFINISHED_NAME}/{CLAIM_NAME}"
    with claimed(store, directory):
        left = store.read(claim)
    store.write_atomic(claim, left, fsync=False)

    for to in FORMATS:
        with pytest.raises(UcpError, match=f"if none does, remove .*{UNFINISHED_NAME}"):
            _write(sources["ours"], place, to)

    assert store.read(claim) == left
    store.delete(f"{directory}/{UNFINISHED_NAME}")
    _write(sources["ours"], place, "dcp")


def test_an_export_leaves_nothing_that_makes_its_folder_look_like_a_conversion_under_way(
    sources: dict[str, Checkpoint], place: tuple[Store, str]
) -> None:
    """Some storages keep the empty folder of the claim; names of targets would pass for ours."""
    store, directory = place
    path = f"{directory}/model-00001-of-00001.safetensors"
    with claimed(store, directory):
        store.write_atomic(path, b"theirs", fsync=False)

    with pytest.raises(UcpError, match="out holds"):
        _write(sources["ours"], place, "universal")

    assert store.read(path) == b"theirs"
