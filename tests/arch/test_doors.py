"""A room is entered by its door: what it offers is ``__all__`` of its ``__init__``."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.arch.tree import PACKAGES, python_files, relative


def test_nobody_reaches_past_a_door() -> None:
    """Whoever imports a file of another room breaks when that room is tidied."""
    rooms = {_module(path) for path in python_files(*PACKAGES) if path.name == "__init__.py"}
    past = [
        f"{relative(path)}:{line}: {target}: import it from {door}"
        for path in python_files(*PACKAGES)
        for line, target in _imported(path)
        if (door := _door(target, _module(path), rooms)) not in {None, target}
    ]

    assert not past, "\n".join(past)


def test_every_door_says_what_its_room_is_for() -> None:
    """`make rooms` and `help` show these words; a placeholder passes every other check."""
    mute = [
        relative(path)
        for path in python_files(*PACKAGES)
        if path.name == "__init__.py"
        and len((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split()) < 3
    ]

    assert mute == []


def _door(target: str, importer: str, rooms: set[str]) -> str | None:
    """Return the outermost room of ``target`` that ``importer`` is not in; None if there is none.

    The three packages are no rooms: ``ucp_core`` and ``everstep`` are doors for users.
    """
    parts = target.split(".")
    for depth in range(2, len(parts) + 1):
        room = ".".join(parts[:depth])
        if room in rooms and importer != room and not importer.startswith(f"{room}."):
            return room
    return None


def _imported(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.append((node.lineno, node.module))
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
    return [(line, name) for line, name in found if name.split(".")[0] in PACKAGES]


def _module(path: Path) -> str:
    return relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
