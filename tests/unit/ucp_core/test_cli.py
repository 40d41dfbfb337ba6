"""``ucp`` as a person and as a program use it."""

import json
from pathlib import Path

import pytest
import safetensors.numpy

from tests.support.checkpoints import save, small_state
from tests.support.commands import ucp
from ucp_core.storage import LocalStore

COMMANDS = ("inspect", "convert", "verify", "diff", "export", "extract")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(LocalStore(), small_state(), step=7, root=str(tmp_path))
    return tmp_path / "step-00000007"


def test_help_shows_an_example_of_every_command() -> None:
    """People copy examples; the exit codes are in the help of the whole."""
    assert "Exit codes: 0 success" in ucp("--help").stdout
    for command in COMMANDS:
        done = ucp(command, "--help")
        assert done.returncode == 0
        assert f"Example: ucp {command} " in done.stdout


def test_inspect_shows_what_is_there(checkpoint: Path) -> None:
    """For people line by line, for programs with every tensor."""
    shown = ucp("inspect", str(checkpoint), "--tensors")
    found = json.loads(ucp("inspect", str(checkpoint), "--json").stdout)

    assert shown.returncode == 0
    assert "wte exp_avg F32 8x4 in " in shown.stdout
    assert "step exp_avg F32 scalar in 1 fragment(s)" in shown.stdout
    assert (found["step"], found["attempt"], found["ranks"]) == (7, 1, 2)
    assert not set("{}[]") & set(shown.stdout), "people read no literals of Python"
    assert found["slots"] == ["exp_avg", "weight"]
    assert found["bytes"] == sum(len(whole.data) for whole in small_state().values())
    assert len(found["tensors"]) == len(small_state())


def test_convert_makes_files_that_others_read_and_verify_agrees(
    checkpoint: Path, tmp_path: Path
) -> None:
    """The way of a trained model out of the run directory."""
    out = tmp_path / "out"
    done = ucp("convert", str(checkpoint), str(out), "--memory", "4GB", "--json")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["format"] == "everstep-universal"
    weights = safetensors.numpy.load_file(out / "model-00001-of-00001.safetensors")
    assert set(weights) == {key.fqn for key in small_state()}
    verified = json.loads(ucp("verify", str(out), "--json").stdout)
    assert verified["ok"] is True


def test_convert_says_what_it_did(checkpoint: Path, tmp_path: Path) -> None:
    """Bytes read and written are what a slow storage is paid for."""
    found = json.loads(ucp("convert", str(checkpoint), str(tmp_path / "a"), "--json").stdout)
    shown = ucp("convert", str(checkpoint), str(tmp_path / "b"), "--memory", "4GB", "--fsync")

    size = sum(len(whole.data) for whole in small_state().values())
    assert (found["bytes"], found["read_bytes"], found["resumed_bytes"]) == (size, size, 0)
    assert size < found["written_bytes"]
    assert "8 tensors, " in shown.stdout


def test_convert_in_too_little_memory_says_how_much_it_needs(
    checkpoint: Path, tmp_path: Path
) -> None:
    """The interpreter alone has more than some people would give."""
    done = ucp("convert", str(checkpoint), str(tmp_path / "out"), "--memory", "9MiB")

    assert done.returncode == 1
    assert "give at least" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("convert", "{old}", "{old}"), 1, "holds a committed checkpoint already"),
        (("convert", "{old}", "/proc/none"), 3, "/proc/none"),
        (("inspect", "nosuch://x"), 3, "nosuch://x cannot be opened"),
        (("convert", "{old}", "x", "--memory", "3 bananas"), 2, "is not a size"),
        (("convert", "{old}", "x", "--memory", "1KiB"), 2, "is too small"),
        (("inspect",), 2, "Missing argument"),
    ],
)
def test_errors_are_short_and_have_their_exit_code(
    arguments: tuple[str, ...],
    code: int,
    message: str,
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    """A traceback does not help a user who mistyped a path."""
    done = ucp(*(text.format(tmp=tmp_path, old=checkpoint) for text in arguments))

    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    if code != 2:
        assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_what_a_file_does_not_say_is_not_told_as_a_number(tmp_path: Path) -> None:
    """A folder of weights was said to be of step 0, from attempt 0, in 0 files."""
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "model.safetensors").write_bytes(data)

    shown = ucp("inspect", str(tmp_path))
    found = json.loads(ucp("inspect", str(tmp_path), "--json").stdout)

    told = dict(line.split(maxsplit=1) for line in shown.stdout.splitlines())
    assert told.keys() >= {"format", "parameters", "files"}
    assert not told.keys() & {"step", "attempt", "ranks", "ties", "frozen"}
    assert told["files"] == "1"
    assert told["source"] == "format=huggingface"
    assert found["step"] is found["attempt"] is found["ranks"] is None
