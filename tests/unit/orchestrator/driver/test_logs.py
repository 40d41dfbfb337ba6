"""The output of a training script, read while it grows and afterwards."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.main import app
from orchestrator.driver.logs import LogTail, read_logs
from orchestrator.errors import RunNotFoundError


def _append(directory: Path, attempt: int, name: str, text: str) -> None:
    path = directory / f"logs/attempt-{attempt:04d}/{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run that has printed in two attempts."""
    (tmp_path / "controller.json").write_text("{}")
    _append(tmp_path, 1, "rank0", "one\n")
    _append(tmp_path, 1, "rank1", "other one\n")
    _append(tmp_path, 2, "rank0", "two\ncut sho")
    _append(tmp_path, 10, "rank0", "ten\n")
    return tmp_path


def _texts(tail: LogTail) -> list[str]:
    return [line.text for line in tail.new_lines(now=True)]


def test_lines_come_once_and_whole_in_the_order_of_attempts(directory: Path) -> None:
    """A line that is half written is not a line yet, and attempt 10 is not before attempt 2."""
    tail = LogTail(str(directory), rank=0)

    assert _texts(tail) == ["one", "two", "ten"]
    _append(directory, 10, "rank0", "ele")
    assert _texts(tail) == []
    _append(directory, 10, "rank0", "ven\n")
    assert _texts(tail) == ["eleven"]


def test_a_command_that_attaches_begins_with_what_is_printed_from_then_on(directory: Path) -> None:
    """A day of prints would scroll through the terminal first."""
    tail = LogTail(str(directory), rank=0)
    tail.skip()
    _append(directory, 11, "rank0", "now\n")

    assert _texts(tail) == ["now"]


def test_a_rank_may_print_while_the_next_attempt_begins(directory: Path) -> None:
    """The reason why an attempt ended is its last line."""
    tail = LogTail(str(directory), rank=0)
    _texts(tail)
    _append(directory, 11, "rank0", "next\n")
    _texts(tail)
    _append(directory, 10, "rank0", "why\n")

    assert _texts(tail) == ["why"]


def test_the_pieces_of_a_log_in_an_object_store_are_one_log(tmp_path: Path) -> None:
    """An object cannot be appended to, and a piece may end in the middle of a line."""
    (tmp_path / "controller.json").write_text("{}")
    _append(tmp_path, 1, "rank0-10000", "d\nlast\n")
    _append(tmp_path, 1, "rank0-9999", "first\nsecon")

    lines = read_logs(str(tmp_path), rank=0, attempt=None, follow=False)

    assert [line.text for line in lines] == ["first", "second", "last"]


def test_the_last_state_of_a_progress_bar_counts(tmp_path: Path) -> None:
    """A bar that redraws itself a thousand times is one line in a terminal."""
    (tmp_path / "controller.json").write_text("{}")
    _append(tmp_path, 1, "rank0", "10 %\r50 %\r100 %\n")

    lines = read_logs(str(tmp_path), rank=0, attempt=None, follow=False)

    assert [line.text for line in lines] == ["100 %"]


def test_the_last_line_of_a_process_that_died_is_printed(directory: Path) -> None:
    """It says where the process was."""
    lines = read_logs(str(directory), rank=None, attempt=2, follow=False)

    assert [(line.rank, line.text) for line in lines] == [(0, "two"), (0, "cut sho")]


def test_following_ends_with_the_run(directory: Path) -> None:
    """A line that is printed between the last look and the end belongs to it."""
    lines = read_logs(str(directory), rank=0, attempt=10, follow=True)

    assert next(lines).text == "ten"
    _append(directory, 10, "rank0", "bye\n")
    (directory / "summary.json").write_text("{}")
    assert [line.text for line in lines] == ["bye"]


def test_a_rank_that_printed_nothing_is_named(directory: Path) -> None:
    """Silence could as well be a mistyped number."""
    with pytest.raises(RunNotFoundError, match="rank 7 has printed nothing in attempt 1"):
        list(read_logs(str(directory), rank=7, attempt=1, follow=False))


def test_the_command_prints_lines_for_people_and_for_machines(directory: Path) -> None:
    """With several ranks a line without its rank belongs to none."""
    one = CliRunner().invoke(app, ["logs", str(directory), "--attempt", "1"])
    both = CliRunner().invoke(app, ["logs", str(directory), "--attempt", "1", "--rank", "-1"])
    machine = CliRunner().invoke(app, ["logs", str(directory), "--attempt", "10", "--json"])

    assert one.stdout == "one\n"
    assert both.stdout == "[rank 0] one\n[rank 1] other one\n"
    assert json.loads(machine.stdout) == {"attempt": 10, "rank": 0, "text": "ten"}
