"""The parts of ``tests.gpu`` with stand-ins for the GPU: that they work when a GPU is at hand."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import __main__ as suite
from tests.gpu import faults
from tests.gpu.parts import Lab, perform
from tests.gpu.rows import Row

pytestmark = pytest.mark.ray

#: The others differ from these in settings, and each takes as long as all of them.
PARTS = (
    "groups",
    pytest.param("faults", marks=pytest.mark.chaos),
    "pinning",
    "models",
    pytest.param("snapshot", marks=pytest.mark.chaos),
)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_sees_what_is_to_be_seen(
    part: str,
    nodes: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A part that fails of itself on a lent machine costs the machine's time."""

    @contextlib.contextmanager
    def here(_: Any) -> Iterator[Any]:
        yield nodes

    monkeypatch.setattr(faults, "cluster_for", here)

    # Its whole settings have every way in which a state may leave a device.
    perform([part], Lab(on_cpu=True, full=part == "snapshot", logs=tmp_path))

    rows = [row for line in capsys.readouterr().out.splitlines() if (row := Row.of(line))]
    assert rows
    assert [row for row in rows if row.ok is False] == []


def test_parts_that_do_not_fit_the_time_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lent machine is lent for minutes."""
    monkeypatch.setattr(suite, "ALL_S_MAX", 0.2)
    monkeypatch.setattr("sys.argv", ["tests.gpu", "--on-cpu"])

    assert suite.main() == 0

    printed = capsys.readouterr().out
    assert all(f"{part}: the part itself: skipped" in printed for part in ("card", "kills"))
