"""A persistent map from small integers: a change makes a new version and keeps the old one.

The run state is a value, so a change must not touch the old one. With 10,000 nodes, copying a whole
``dict`` for each event would be the controller's main cost. Keys are consecutive integers here, so
the map is cut into chunks and a change copies one chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

#: Keys per chunk: with 30,000 keys a change copies 64 entries and 470 references, about 2 us.
_CHUNK_BITS = 6


class _Chunk(dict[int, V]):
    """A part of a table. It never changes, so results of searches in it are cached."""

    found: dict[Callable[[V], object], list[tuple[int, V]]] | None = None
    counts: dict[Callable[[V], Any], Counter[Any]] | None = None


class Table(Generic[V]):
    """An immutable map from ``int >= 0``; iterates over chunks in order of keys, then by age.

    ``set`` and ``without`` return a new table and leave the old one as it is.
    """

    __slots__ = ("_chunks",)

    def __init__(self, _chunks: tuple[_Chunk[V], ...] = ()) -> None:
        self._chunks = _chunks

    @classmethod
    def of(cls, items: Iterable[tuple[int, V]]) -> Table[V]:
        """Return the table that results from ``set`` of all ``items`` in order."""
        chunks: list[_Chunk[V]] = []
        chunk, last = _Chunk[V](), -1
        for key, value in items:
            index = key >> _CHUNK_BITS
            if index != last:
                assert key >= 0, f"key {key} is negative"
                chunks += (_Chunk() for _ in range(index + 1 - len(chunks)))
                chunk, last = chunks[index], index
            chunk[key] = value
        return Table(tuple(chunks))

    def get(self, key: int) -> V | None:
        """Return the value of ``key``, or None."""
        index = key >> _CHUNK_BITS
        return self._chunks[index].get(key) if index < len(self._chunks) else None

    def __getitem__(self, key: int) -> V:
        """Return the value of ``key``; ``KeyError`` or ``IndexError`` if there is none."""
        return self._chunks[key >> _CHUNK_BITS][key]

    def __contains__(self, key: int) -> bool:
        index = key >> _CHUNK_BITS
        return index < len(self._chunks) and key in self._chunks[index]

    def those_in(self, keys: Iterable[int]) -> list[int]:
        """Return those of ``keys``, which may be negative, that have a value."""
        chunks, end = self._chunks, len(self._chunks) << _CHUNK_BITS
        return [key for key in keys if 0 <= key < end and key in chunks[key >> _CHUNK_BITS]]

    def __len__(self) -> int:
        return sum(map(len, self._chunks))

    def set(self, key: int, value: V) -> Table[V]:
        """Return the table with ``key`` set to ``value``."""
        assert key >= 0, f"key {key} is negative"
        index = key >> _CHUNK_BITS
        chunks = list(self._chunks)
        if index >= len(chunks):
            chunks += (_Chunk() for _ in range(index + 1 - len(chunks)))
        chunk = chunks[index] = _Chunk(chunks[index])
        chunk[key] = value
        return Table(tuple(chunks))

    def update(self, values: Mapping[int, V]) -> Table[V]:
        """Return the table with all ``values`` set, in about the time of a single ``set``."""
        if not values:
            return self
        assert min(values) >= 0, f"key {min(values)} is negative"
        chunks = list(self._chunks)
        chunks += (_Chunk() for _ in range((max(values) >> _CHUNK_BITS) + 1 - len(chunks)))
        own: dict[int, _Chunk[V]] = {}
        chunk, last = _Chunk[V](), -1
        for key, value in values.items():
            index = key >> _CHUNK_BITS
            if index != last:
                if index not in own:
                    own[index] = chunks[index] = _Chunk(chunks[index])
                chunk, last = own[index], index
            chunk[key] = value
        return Table(tuple(chunks))

    def without(self, *keys: int) -> Table[V]:
        """Return the table without ``keys``, which must be there."""
        chunks = list(self._chunks)
        own: dict[int, _Chunk[V]] = {}
        chunk, last = _Chunk[V](), -1
        for key in keys:
            index = key >> _CHUNK_BITS
            if index != last:
                if index not in own:
                    own[index] = chunks[index] = _Chunk(chunks[index])
                chunk, last = own[index], index
            del chunk[key]
        return Table(tuple(chunks))

    def where(self, is_so: Callable[[V], object]) -> list[tuple[int, V]]:
        """Return ``(key, value)`` where ``is_so(value)`` is true, in the order of ``items``.

        Only chunks that changed since the last call with the same ``is_so``, on any version, are
        searched. So ``is_so`` must be a module-level function that depends on the value alone.
        """
        found: list[tuple[int, V]] = []
        for chunk in self._chunks:
            known = chunk.found
            if known is None:
                known = chunk.found = {}
            pairs = known.get(is_so)
            if pairs is None:
                pairs = known[is_so] = [item for item in chunk.items() if is_so(item[1])]
            found += pairs
        return found

    def counted(self, kind_of: Callable[[V], K]) -> Counter[K]:
        """Count the values of each kind; ``kind_of`` must be like ``is_so`` in ``where``."""
        total: Counter[K] = Counter()
        for chunk in self._chunks:
            known = chunk.counts
            if known is None:
                known = chunk.counts = {}
            counts = known.get(kind_of)
            if counts is None:
                counts = known[kind_of] = Counter(map(kind_of, chunk.values()))
            total.update(counts)
        return total

    def to_dict(self) -> dict[int, V]:
        """Return a copy as a dict, which is several times as fast to look many keys up in."""
        found: dict[int, V] = {}
        for chunk in self._chunks:
            found.update(chunk)
        return found

    def items(self) -> Iterator[tuple[int, V]]:
        """Yield ``(key, value)`` pairs."""
        for chunk in self._chunks:
            yield from chunk.items()

    def values(self) -> Iterator[V]:
        """Yield the values."""
        for chunk in self._chunks:
            yield from chunk.values()

    def __iter__(self) -> Iterator[int]:
        for chunk in self._chunks:
            yield from chunk

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table):
            return False
        # Chunks that are shared compare by identity, so versions of one table compare fast.
        one, two = self._chunks, other._chunks
        length = min(len(one), len(two))
        return one[:length] == two[:length] and not any((*one[length:], *two[length:]))

    def __hash__(self) -> int:
        """Refuse: tables hold mutable chunks, so a hash would invite misuse."""
        raise TypeError("a Table is not hashable")

    def __repr__(self) -> str:
        return f"Table({dict(self.items())!r})"
