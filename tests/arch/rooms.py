"""Prints which room imports which: ``make rooms``. Exits with 1 if an arrow goes up.

The order of the rooms is that of the contracts in ``pyproject.toml``.
"""

import functools
import sys
import textwrap
import tomllib
from collections import Counter

from tests.arch.imports import import_graph
from tests.arch.tree import PACKAGES, ROOT


@functools.cache
def room_order(package: str) -> dict[str, int]:
    """Return the level of each room of ``package``; 0 is the top."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c.get("containers") == [package])
    return {
        room.strip(): level
        for level, layer in enumerate(layers)
        for room in layer.replace(":", "|").split("|")
    }


def arrows() -> Counter[tuple[str, str]]:
    """Return the arrows between rooms (``package.room``) and how many files make each."""
    found: Counter[tuple[str, str]] = Counter()
    for module, targets in import_graph().items():
        here = room_of(module)
        found.update((here, room) for room in {room_of(target) for target in targets} - {here})
    return found


def upward() -> list[tuple[str, str]]:
    """Return the arrows that lead to a higher package, to a higher room, or to the same level."""
    return [(here, there) for here, there in sorted(arrows()) if _level(here) >= _level(there)]


def room_of(module: str) -> str:
    """Return the room of a module as ``package.room``."""
    return ".".join(module.split(".")[:2])


def _place(room: str) -> tuple[tuple[int, int], str]:
    return _level(room), room


def _level(room: str) -> tuple[int, int]:
    package, _, name = room.partition(".")
    # The package's own __init__.py is its face: above its rooms.
    return PACKAGES.index(package), room_order(package)[name] if name else -1


def picture() -> str:
    """Return the rooms of each package from top to bottom, each with the rooms that it imports."""
    found = arrows()
    rooms = {room for arrow in found for room in arrow}
    width = max(len(room.partition(".")[2]) for room in rooms)
    lines = []
    for package in PACKAGES:
        lines += ["", f"{package}", "─" * 96]
        for room in sorted((r for r in rooms if r.split(".")[0] == package), key=_place):
            name = room.partition(".")[2] or "(face)"
            below = sorted((there for here, there in found if here == room), key=_place)
            marks = ["↑" if _level(there) <= _level(room) else "" for there in below]
            names = [
                mark + there.removeprefix(f"{package}.")
                for mark, there in zip(marks, below, strict=True)
            ]
            first = f"  {name:<{width}}  "
            lead = f"{first}──> " if below else first
            lines += textwrap.wrap(
                "  ".join(names) or ".",
                width=96,
                initial_indent=lead,
                subsequent_indent=" " * (width + 8),
                break_on_hyphens=False,
            )
    return "\n".join(lines[1:])


def main() -> int:
    """Print the picture and the arrows that go up."""
    sys.stdout.write(picture() + "\n")
    wrong = upward()
    for here, there in wrong:
        sys.stderr.write(f"goes up: {here} ──> {there}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
