"""Doors of rooms that load a module only when a name of it is used (PEP 562)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

__all__ = ["lazy_door"]


def lazy_door(room: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for the package ``room``.

    Args:
        room: The package's ``__name__``.
        names: Module to the names that the room offers from it. If the room offers a whole module,
            that module is listed under the room's own name.

    So a keeper does not load torch (2 s, 200 MB), and a command that prints help does not load Ray.
    """
    module_of = {name: module for module, offered in names.items() for name in offered}

    def load(name: str) -> Any:
        module = module_of.get(name)
        if module is None:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        if module == room:
            return import_module(f"{room}.{name}")
        return getattr(import_module(module), name)

    return load
