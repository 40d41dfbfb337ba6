"""Packages that load a module only when one of its names is used (PEP 562)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any


def lazy_door(room: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for the package ``room``.

    It offers what the package imports under ``if TYPE_CHECKING``. So a keeper does not load torch
    (2 s, 200 MB), and a command that prints help does not load Ray.
    """

    @cache
    def modules() -> Mapping[str, str]:
        return _type_checking_imports(room)

    def load(name: str) -> Any:
        module = modules().get(name)
        if module is None:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        if module == room:
            return import_module(f"{room}.{name}")
        return getattr(import_module(module), name)

    return load


def _type_checking_imports(room: str) -> dict[str, str]:
    """Return the names that a package imports for type checkers, each with its module."""
    loader: Any = sys.modules[room].__spec__.loader  # type: ignore[union-attr]
    found: dict[str, str] = {}
    for node in ast.parse(loader.get_source(room)).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for each in node.body:
                if isinstance(each, ast.ImportFrom) and each.module:
                    found |= {alias.name: each.module for alias in each.names}
    return found
