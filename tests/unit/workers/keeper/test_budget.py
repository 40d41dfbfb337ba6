from pathlib import Path

import pytest

from workers.keeper import budget as module
from workers.keeper.budget import Budget


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a machine with 1000 bytes left, and none of them shared."""
    monkeypatch.setattr(module, "available_bytes", lambda: 1000)
    monkeypatch.setattr(module, "meminfo_bytes", lambda _name: 0)


def _directory(root: Path, run: str, node: str = "n1") -> Path:
    directory = root / run / node
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def test_a_keeper_that_is_started_again_has_the_budget_of_the_first(tmp_path: Path) -> None:
    """To it, the snapshots that are there look like memory that is not."""
    directory = _directory(tmp_path, "a")
    assert Budget(directory, 0).num_bytes == 500
    (directory / "budget").write_text("123")

    assert Budget(directory, 0).num_bytes == 123
    assert Budget(directory, 7).num_bytes == 7 << 20


def test_runs_on_one_node_do_not_promise_the_same_memory_twice(tmp_path: Path) -> None:
    """Each found all of it free, as the other had taken none yet: together they took all."""
    first = Budget(_directory(tmp_path, "a"), 0)
    elsewhere = Budget(_directory(tmp_path, "a", "n2"), 0)
    second = Budget(_directory(tmp_path, "b"), 0)
    third = Budget(_directory(tmp_path, "c"), 0)

    assert (first.num_bytes, elsewhere.num_bytes) == (500, 500)
    assert (second.num_bytes, third.num_bytes) == (250, 125)


def test_what_a_run_has_taken_is_not_counted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no longer available, so only the rest of its share is still to come."""
    first = Budget(_directory(tmp_path, "a"), 0)
    monkeypatch.setattr(module, "available_bytes", lambda: 600)
    monkeypatch.setattr(module, "meminfo_bytes", lambda _name: 400)

    assert first.num_bytes == 500
    assert Budget(_directory(tmp_path, "b"), 0).num_bytes == (600 - 100) // 2


def test_a_run_that_is_gone_keeps_no_memory(tmp_path: Path) -> None:
    """Its processes may have been killed, and its files are there until the machine restarts."""
    first = Budget(_directory(tmp_path, "a"), 0)
    first.close()
    first.close()

    assert Budget(_directory(tmp_path, "b"), 0).num_bytes == 500
