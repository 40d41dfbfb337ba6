"""Messages of the commands about mistakes, in the user's words."""

import json
import uuid
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tests.support.checkpoints import save, small_state
from tests.support.commands import ucp
from tests.support.conversions import convert_to, files_of, native_source
from tests.support.deepspeed_folders import Param, native
from tests.support.training_states import adam_state
from ucp_core.conversion import convert
from ucp_core.errors import UcpError
from ucp_core.native import UNFINISHED_NAME, open_checkpoint
from ucp_core.storage import LocalStore, open_store


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save(LocalStore(), small_state(), step=7, root=str(tmp_path / "run"))
    return tmp_path / "run" / "step-00000007"


def test_an_option_of_another_format_is_wrong_usage_and_named_as_it_was_typed(
    source: Path, tmp_path: Path
) -> None:
    """All of them at once, with the options that the format has."""
    done = ucp(
        *("export", str(source), str(tmp_path / "out"), "--format", "deepspeed-universal"),
        *("--dp", "2", "--keep-tied"),
    )

    said = " ".join(done.stderr.split())
    assert done.returncode == 2
    assert "--keep-tied, --dp" in said
    assert "deepspeed-universal has --dtype, --target-rules, --target-tag" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_path_that_is_not_there_is_said_not_to_be_there(command: str, tmp_path: Path) -> None:
    """The format of nothing is no question."""
    done = ucp(command, str(tmp_path / "none"))

    assert done.returncode == 1
    assert done.stderr == f"ucp: {tmp_path}/none does not exist\n"


def test_an_empty_folder_is_said_to_be_empty(tmp_path: Path) -> None:
    done = ucp("inspect", str(tmp_path))

    assert (done.returncode, done.stderr) == (1, f"ucp: {tmp_path} is empty\n")


def test_a_conversion_that_did_not_end_is_called_that(source: Path, tmp_path: Path) -> None:
    """Also when all its files have their names: without the manifest they count for nothing."""
    opened = native_source(tmp_path / "other", small_state())
    made = convert_to(opened, tmp_path / "half").checkpoint
    Path(made.manifest_path).unlink()
    (tmp_path / "half" / UNFINISHED_NAME).mkdir()
    (tmp_path / "half" / UNFINISHED_NAME / "journal").touch()

    done = ucp("inspect", str(tmp_path / "half"))

    assert done.returncode == 1
    assert "an unfinished conversion or export" in done.stderr
    assert "same ucp convert" in done.stderr
    assert str(source) not in done.stderr


def test_inspect_names_the_foreign_format(tmp_path: Path) -> None:
    """``foreign`` says only what it is not."""
    native([Param("w", (4, 3))], dp=1).write(tmp_path / "ds")
    weights = {"w": np.arange(6, dtype=np.float32)}
    (tmp_path / "hf").mkdir()
    safetensors.numpy.save_file(weights, tmp_path / "hf" / "model.safetensors")

    found = [
        json.loads(ucp("inspect", str(tmp_path / name), "--json").stdout)["format"]
        for name in ("ds", "hf")
    ]

    assert found == ["deepspeed", "huggingface"]


def test_verify_reads_what_has_no_checksum_and_says_what_that_leaves_open(tmp_path: Path) -> None:
    """Nothing read and no problem found sounds like a clean bill of health."""
    file = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"w": np.arange(6, dtype=np.float32)}, file)

    found = json.loads(ucp("verify", str(file), "--json").stdout)
    shown = ucp("verify", str(file))

    assert found == {"ok": True, "bytes": 24, "unchecked_bytes": 24, "problems": []}
    assert "24 B read, 0 problem(s)" in shown.stdout
    assert "24 B have no checksum in this format" in shown.stdout
    assert "damage in them" in shown.stdout


@pytest.mark.parametrize("command", ["convert", "export"])
@pytest.mark.parametrize("inner", ["out", "deep/out", "link"])
def test_a_destination_inside_the_source_is_refused(
    source: Path, tmp_path: Path, command: str, inner: str
) -> None:
    """It would be deleted with the source, and makes the source two checkpoints."""
    out = source / inner
    if inner == "link":
        out = tmp_path / "link" / "out"
        (tmp_path / "link").symlink_to(source)
    before = files_of(source)

    options = () if command == "convert" else ("--format", "huggingface")
    done = ucp(command, str(source), str(out), *options)

    assert done.returncode == 1
    assert "is inside the source" in done.stderr
    assert files_of(source) == before


@pytest.mark.parametrize("command", ["convert", "export"])
def test_a_destination_beside_the_tags_of_the_source_is_refused(
    tmp_path: Path, command: str
) -> None:
    """The source is the folder that was given, not only the tag in it that was opened."""
    run = tmp_path / "run"
    native([Param("a.weight", (4, 2))], dp=1).write(run / "global_step4")
    (run / "latest").write_text("global_step4", encoding="utf-8")
    before = files_of(run)

    options = () if command == "convert" else ("--format", "huggingface")
    done = ucp(command, str(run), str(run / "out"), *options)

    assert done.returncode == 1
    assert f"is inside the source {run}:" in " ".join(done.stderr.split())
    assert files_of(run) == before


def test_a_destination_inside_the_source_is_refused_by_whatever_url_it_is_named() -> None:
    """Each URL opens a store of its own."""
    url = f"memory://{uuid.uuid4().hex}/run"
    store, root = open_store(url)
    save(store, small_state(), step=7, root=root)
    source = open_checkpoint(*open_store(f"{url}/step-00000007"))

    for inner in ("step-00000007/out", "step-00000007//out"):
        store, directory = open_store(f"{url}/{inner}")
        with pytest.raises(UcpError, match="is inside the source"):
            convert(source, store, directory, memory_bytes=64 << 20)


def test_a_target_that_deepspeed_itself_restores_wrongly_comes_with_a_warning(
    tmp_path: Path,
) -> None:
    """Its losses differ from the second step on, and one would look for the fault here."""
    state = adam_state({"a.w": (4, 2), "b.w": (5,)})
    one, two = tmp_path / "one", tmp_path / "two"
    state.save(LocalStore(), str(one))
    (group,) = state.groups
    groups = [{**group, "params": [name]} for name in ("a.w", "b.w")]
    replace(state, groups=groups).save(LocalStore(), str(two))

    told = [
        ucp("export", str(path), f"{path}-ds", "--format", "deepspeed-universal")
        for path in (one, two)
    ]

    assert [done.returncode for done in told] == [0, 0], told
    assert [("ZeRO-3" in done.stdout) for done in told] == [False, True]


def test_the_version_is_that_of_the_package() -> None:
    done = ucp("--version")

    assert done.returncode == 0
    assert done.stdout.startswith("ucp 0.")
