"""Which of several checkpoints in a folder is opened."""

from pathlib import Path

import pytest

from tests.support.deepspeed_folders import Param, native, read
from ucp_core.errors import CheckpointCorruptError, CheckpointNotFoundError

MODEL = [Param("up.weight", (7, 6))]


def test_the_folder_that_latest_names_is_opened(tmp_path: Path) -> None:
    """Older checkpoints lie beside it."""
    newer = native(MODEL, dp=2, step=7)
    native(MODEL, dp=3, step=6).write(tmp_path / "global_step6")
    newer.write(tmp_path / "global_step7")
    (tmp_path / "latest").write_text("global_step7\n")

    assert read(tmp_path).step == 7
    assert read(tmp_path, tag="global_step6").step == 6
    assert read(tmp_path / "global_step6").step == 6


def test_a_tag_may_be_a_folder_in_a_folder(tmp_path: Path) -> None:
    """DeepSpeed joins it to the path, whatever it is."""
    native(MODEL, dp=1, step=8).write(tmp_path / "epoch_1" / "step_8")
    (tmp_path / "latest").write_text("epoch_1/step_8")

    assert read(tmp_path).step == 8
    assert read(tmp_path, tag="epoch_1/step_8").manifest.source["tag"] == "epoch_1/step_8"


def test_several_checkpoints_without_latest_are_not_guessed(tmp_path: Path) -> None:
    """The one that sorts last is not the newest."""
    for step in (9, 10):
        native(MODEL, dp=1, step=step).write(tmp_path / f"global_step{step}")

    with pytest.raises(CheckpointNotFoundError, match=r"global_step10, global_step9.*--tag"):
        read(tmp_path)


def test_latest_that_names_nothing_is_told(tmp_path: Path) -> None:
    """The save that wrote it was deleted, or not copied."""
    native(MODEL, dp=1).write(tmp_path / "global_step5")
    (tmp_path / "latest").write_text("global_step9")

    with pytest.raises(CheckpointNotFoundError, match=r"global_step9.*there are: global_step5"):
        read(tmp_path)


@pytest.mark.parametrize(
    "text", ["../elsewhere", "a/../../b", "/etc", "a//b", "", "..", "x" * 5000]
)
def test_latest_cannot_lead_out_of_the_folder(tmp_path: Path, text: str) -> None:
    """It is a file that anybody may have written."""
    native(MODEL, dp=1).write(tmp_path / "global_step5")
    (tmp_path / "latest").write_text(text)

    with pytest.raises(CheckpointCorruptError, match="name of a folder"):
        read(tmp_path)
