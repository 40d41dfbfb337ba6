"""JSON as the format allows it: no NaN, and no two members of one name. Pure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def refuse_constant(name: str) -> Any:
    """Refuse what Python takes for a number."""
    raise ValueError(f"{name} is no number of JSON")


def load_json(data: bytes, *, constant: Callable[[str], Any] = refuse_constant) -> Any:
    """Return what ``data`` says.

    Args:
        data: UTF-8.
        constant: Returns what ``NaN`` and infinities stand for.

    Raises:
        ValueError: It is not JSON.
        RecursionError: It is nested too deeply.
    """
    return json.loads(data, object_pairs_hook=_object, parse_constant=constant)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return one JSON object; of two members of one name, readers would take either."""
    found = dict(pairs)
    if len(found) != len(pairs):
        for name, _ in pairs:
            if found.pop(name, found) is found:
                raise ValueError(f"the name {name[:80]!a} is there twice in one object")
    return found
