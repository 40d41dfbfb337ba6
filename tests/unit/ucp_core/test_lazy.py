"""A door loads what is asked for, and nothing else."""

import importlib
import sys
from pathlib import Path

import pytest

DOOR = """
from typing import TYPE_CHECKING
from ucp_core.lazy import lazy_door
if TYPE_CHECKING:
    from room_of_a_test import whole
    from room_of_a_test.heavy import Load, other
__getattr__ = lazy_door(__name__)
"""


def test_a_door_offers_what_it_imports_for_type_checkers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second list of the names would be forgotten; nothing is loaded before it is used."""
    room = tmp_path / "room_of_a_test"
    room.mkdir()
    (room / "__init__.py").write_text(DOOR)
    (room / "heavy.py").write_text("Load, other = 5, 6")
    (room / "whole.py").write_text("x = 7")
    monkeypatch.syspath_prepend(str(tmp_path))

    door = importlib.import_module("room_of_a_test")

    assert "room_of_a_test.heavy" not in sys.modules
    assert (door.Load, door.other, door.whole.x) == (5, 6, 7)
    with pytest.raises(AttributeError, match="module 'room_of_a_test' has no attribute 'nothing'"):
        _ = door.nothing
