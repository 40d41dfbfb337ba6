"""Reads rows of Parquet files as a map-style dataset: the footers say where each row group is."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from workers.data.files import find_files
from workers.errors import DataError

_CACHE_BYTES: Final = 256 << 20


class ParquetRows:
    """The rows of Parquet files; give it to ``DataLoader``. It needs ``pyarrow``.

    Making the dataset reads only the footers. Reading a row reads its whole row group, which is
    kept for the next rows: with a random order and more row groups than ``cache_bytes`` holds, each
    sample costs a row group. Write small row groups (a thousand rows), or make the cache hold all
    of them.

    Args:
        paths: Paths, URLs or globs. Their order matters.
        columns: The columns to read; everything by default.
        cache_bytes: Bytes of decoded row groups to keep in each reading process.

    Attributes:
        digest: Identifies the files and columns: an object by its ETag, a local file by its footer
            and 32 pieces of it.
        stamps: Distinguish the files from later ones in their place.

    Raises:
        DataError: A file cannot be read, has other columns, or ``pyarrow`` is not installed.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        columns: Sequence[str] | None = None,
        cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        try:
            from pyarrow import ArrowException
            from pyarrow.parquet import ParquetFile
        except ImportError as error:
            raise DataError("ParquetRows needs pyarrow: pip install 'everstep[data]'") from error
        self._files = find_files("ParquetRows", paths)
        self._columns = list(columns) if columns is not None else None
        self._cache: OrderedDict[int, Any] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._groups: list[tuple[int, int]] = []
        counts = [0]
        for number, file in enumerate(self._files):
            try:
                opened = ParquetFile(file.open())
            except (ArrowException, OSError) as error:
                raise DataError(
                    f"{file.url} is not a Parquet file: {error}", path=file.url
                ) from error
            metadata = opened.metadata
            missing = sorted(set(self._columns or ()) - set(opened.schema_arrow.names))
            if missing:
                raise DataError(
                    f"{file.url} has no column {', '.join(missing)}; it has "
                    f"{', '.join(opened.schema_arrow.names)}",
                    path=file.url,
                )
            for group in range(metadata.num_row_groups):
                self._groups.append((number, group))
                counts.append(metadata.row_group(group).num_rows)
        self._firsts = np.cumsum(counts)
        self.stamps = [(one.url, one.stamp.text) for one in self._files]
        names = [(one.url.rsplit("/", 1)[-1], one.size_bytes, one.content()) for one in self._files]
        facts = (names, len(self), self._columns)
        self.digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row; a list of numbers is an array."""
        return self.__getitems__([range(len(self))[index]])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several rows; read each row group once."""
        places = np.searchsorted(self._firsts, indices, side="right") - 1
        rows: list[dict[str, Any]] = [{}] * len(indices)
        for place in np.unique(places).tolist():
            table = self._group(place)
            for at in np.flatnonzero(places == place).tolist():
                row = indices[at] - int(self._firsts[place])
                names = table.column_names
                rows[at] = {name: _value(table.column(name)[row]) for name in names}
        return rows

    def _group(self, place: int) -> Any:
        """Return a row group as a table, and drop the least recently used ones."""
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        if place in self._cache:
            self._cache.move_to_end(place)
            return self._cache[place]
        number, group = self._groups[place]
        file = self._files[number]
        try:
            # In a process forked from one with threads, pyarrow's threads would wait forever.
            table = ParquetFile(file.open()).read_row_group(
                group, columns=self._columns, use_threads=False
            )
        except (ArrowException, OSError) as error:
            raise DataError(
                f"{file.url}: row group {group} cannot be read: {error}", path=file.url
            ) from error
        self._cache[place] = table
        held_bytes = sum(each.nbytes for each in self._cache.values())
        while len(self._cache) > 1 and held_bytes > self._cache_bytes:
            held_bytes -= self._cache.popitem(last=False)[1].nbytes
        return table


def _value(scalar: Any) -> Any:
    """Return a Python value, with a list of numbers as an array, which becomes a tensor quickly."""
    from pyarrow import types

    kind = scalar.type
    is_list = types.is_list(kind) or types.is_large_list(kind)
    if is_list and scalar.is_valid and types.is_primitive(kind.value_type):
        return scalar.values.to_numpy(zero_copy_only=False).copy()
    return scalar.as_py()
