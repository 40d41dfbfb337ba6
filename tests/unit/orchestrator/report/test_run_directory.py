"""Reading what a run left behind."""

import json
from math import isnan
from pathlib import Path

import pytest

from orchestrator.report import Tail, read_run
from ucp_core.storage import LocalStore


def _line(step: int, attempt: int, loss: float) -> str:
    return json.dumps({"step": step, "attempt": attempt, "loss": loss}) + "\n"


def test_what_an_attempt_writes_after_a_later_one_does_not_count(tmp_path: Path) -> None:
    """A worker that was taken for dead woke up and finished its step: seen with SIGSTOP."""
    lines = [_line(1, 1, 3.0), _line(2, 2, 2.0), _line(3, 2, 1.0), _line(2, 1, 9.0)]
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics/rank0.jsonl").write_text("".join(lines))

    steps = read_run(str(tmp_path)).steps

    assert [(record.step, record.loss) for record in steps] == [(1, 3.0), (2, 2.0), (3, 1.0)]


def test_redone_step_counts_as_it_was_last_taken(tmp_path: Path) -> None:
    """A step above the commit is taken again by the next attempt."""
    lines = [_line(1, 1, 3.0), _line(2, 1, 2.5), _line(2, 2, 2.0)]
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics/rank0.jsonl").write_text("".join(lines))

    assert [record.loss for record in read_run(str(tmp_path)).steps] == [3.0, 2.0]


def test_lost_steps_do_not_count_before_they_are_redone(tmp_path: Path) -> None:
    """A run that is stopped soon after a recovery ends before the step that its workers were at."""
    lines = [_line(1, 1, 3.0), _line(2, 1, 2.5), _line(3, 1, 2.2), _line(2, 2, 2.0)]
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics/rank0.jsonl").write_text("".join(lines))

    assert [record.loss for record in read_run(str(tmp_path)).steps] == [3.0, 2.0]


def test_a_run_that_diverged_is_read(tmp_path: Path) -> None:
    """A loss that is no number is written as null, and just then one wants to see the curve."""
    diverged = json.dumps({"step": 2, "attempt": 1, "loss": None, "grad_norm": None}) + "\n"
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics/rank0.jsonl").write_text(_line(1, 1, 3.0) + diverged)

    first, second = read_run(str(tmp_path)).steps

    assert first.loss == 3.0
    assert isnan(second.loss)
    assert isnan(second.grad_norm)


@pytest.mark.parametrize("part_bytes", [90, 1 << 20])
def test_a_long_file_is_read_in_parts_and_each_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    """A part may end within a line, and a month's file does not fit into memory."""
    monkeypatch.setattr("orchestrator.report.run_directory._PART_BYTES", part_bytes)
    path = tmp_path / "rank0.jsonl"
    tail = Tail(LocalStore(), str(path))
    assert list(tail.new()) == []
    lines = [_line(step, 1, 1.0) for step in range(1, 8)]
    path.write_text("".join(lines)[:-4])
    parts = list(tail.new())

    assert "".join(parts) == "".join(lines[:-1])
    assert (len(parts) > 1) == (part_bytes == 90)
    path.write_text("".join(lines))
    assert list(tail.new()) == lines[-1:]
    near_end = Tail(LocalStore(), str(path), -len(lines[-1]) - 5)
    assert "".join(near_end.new())[5:] == lines[-1]
