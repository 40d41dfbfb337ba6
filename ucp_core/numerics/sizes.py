"""Sizes as people write and read them, and groups limited by bytes."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_T = TypeVar("_T")
_UNITS = {
    "": 1,
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


def parse_bytes(text: str) -> int:
    """Parse a size such as ``512MiB`` into bytes; a ``ValueError`` shows the form."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in _UNITS:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise ValueError(f"{text!r} is not a size: give a number and one of {units}")
    return int(float(match[1]) * _UNITS[match[2]])


def grouped(
    items: Iterable[_T], bytes_of: Callable[[_T], int], bytes_max: int
) -> Iterator[list[_T]]:
    """Yield items in groups, in order; only a single item may exceed ``bytes_max``."""
    group: list[_T] = []
    used_bytes = 0
    for item in items:
        num_bytes = bytes_of(item)
        if group and used_bytes + num_bytes > bytes_max:
            yield group
            group, used_bytes = [], 0
        group.append(item)
        used_bytes += num_bytes
    if group:
        yield group


def format_bytes(num_bytes: int) -> str:
    """Return a number of bytes as text: ``17 B``, ``1.5 GiB``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:  # noqa: PLR2004 - the step between units
            return f"{value:.1f} {unit}" if unit != "B" else f"{num_bytes} B"
        value /= 1024
    return f"{value:.1f} TiB"


def shortened(items: Iterable[object], most: int, separator: str = ", ") -> str:
    """Return the first ``most`` items, and the number of the others: ``a, b and 3 more``."""
    named = list(map(str, items))
    return separator.join(named[:most]) + (f" and {len(named) - most} more" if named[most:] else "")


def counted(num: int, what: str) -> str:
    """Return a number of things as text: ``1 worker``, ``2 workers``."""
    return f"{num} {what}{'' if num == 1 else 's'}"
