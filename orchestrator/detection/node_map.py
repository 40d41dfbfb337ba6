"""A persistent map of nodes: a report changes one of them and copies few others.

With a plain ``dict`` each report would copy all nodes, so a round of reports would take quadratic
time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar
from zlib import crc32

V = TypeVar("V")

#: A change copies this many references and the nodes of one bucket, which are 40 of 10,000.
_NUM_BUCKETS: Final = 256
_EMPTY: Final[tuple[dict[str, Any], ...]] = ({},) * _NUM_BUCKETS


class NodeMap(Mapping[str, V]):
    """An immutable map by name; ``set`` returns a new one. Its order has no meaning."""

    __slots__ = ("_buckets",)

    def __init__(self, _buckets: tuple[dict[str, V], ...] = _EMPTY) -> None:
        self._buckets = _buckets

    @classmethod
    def of(cls, items: Iterable[tuple[str, V]]) -> NodeMap[V]:
        """Return the map of ``items``."""
        buckets: tuple[dict[str, V], ...] = tuple({} for _ in range(_NUM_BUCKETS))
        for name, value in items:
            buckets[_bucket(name)][name] = value
        return cls(buckets)

    def set(self, name: str, value: V) -> NodeMap[V]:
        """Return the map with ``name`` set to ``value``."""
        index, old = _bucket(name), self._buckets
        return NodeMap((*old[:index], {**old[index], name: value}, *old[index + 1 :]))

    def __getitem__(self, name: str) -> V:
        return self._buckets[_bucket(name)][name]

    def __iter__(self) -> Iterator[str]:
        for bucket in self._buckets:
            yield from bucket

    def __len__(self) -> int:
        return sum(map(len, self._buckets))


def _bucket(name: str) -> int:
    # Not ``hash``, which differs from process to process.
    return crc32(name.encode()) % _NUM_BUCKETS
