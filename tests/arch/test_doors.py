"""A room is entered by its door, and offers what its ``__init__`` imports."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from tests.arch.tree import PACKAGES, python_files, relative

#: Files that may use a room.
SOURCES = (*PACKAGES, "tests")
#: Modules that a door imports from for its own needs.
NO_OFFERS = {"__future__", "typing", "ucp_core.lazy"}


def test_no_room_reaches_past_a_door() -> None:
    """An import of another room's file breaks when that room is tidied."""
    rooms = {_module(path) for path in python_files(*PACKAGES) if path.name == "__init__.py"}
    past = [
        f"{relative(path)}:{line}: {target}: import it from {door}"
        for path in python_files(*PACKAGES)
        for line, target in _imported(path)
        if (door := _door(target, _module(path), rooms)) not in {None, target}
    ]

    assert not past, "\n".join(past)


def test_a_door_offers_only_names_that_others_use() -> None:
    """Without ``__all__`` an import that is left in a door looks like an offer to other rooms."""
    users = defaultdict(set)
    offers = []
    for path in python_files(*SOURCES):
        text, module = path.read_text(encoding="utf-8"), _module(path)
        aliases = _aliases(text)
        offers += [
            (module, alias.name)
            for origin, alias in aliases
            if _is_room(path) and origin not in NO_OFFERS
        ]
        for origin, alias in aliases:
            users[f"{origin}.{alias.name}"].add(module)
        for dotted in set(re.findall(r"\b[a-z]\w*\.\w+", text)):
            users[dotted].add(module)
    idle = [
        f"{room}: {name}"
        for room, name in offers
        if not any(
            user != room and not user.startswith(f"{room}.")
            for user in users[f"{room}.{name}"] | users[f"{room.rpartition('.')[2]}.{name}"]
        )
    ]

    assert not idle, "\n".join(idle)


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


def _is_room(path: Path) -> bool:
    """Return whether ``path`` is the door of a room; users enter by the doors of packages."""
    return path.name == "__init__.py" and path.parent.name not in {*PACKAGES, "everstep"}


def _aliases(text: str) -> list[tuple[str, ast.alias]]:
    """Return what a file imports by name, each with where it is from."""
    return [
        (node.module, alias)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0
        for alias in node.names
    ]


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
