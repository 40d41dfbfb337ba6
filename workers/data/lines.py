"""JSON lines as a map-style dataset: an index of where lines begin makes any line one read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from workers.data.files import Arrays, DataFile, cached_arrays, find_files
from workers.errors import DataError

_CHUNK_BYTES: Final = 8 << 20
_NEWLINE: Final = 10


class JsonLines:
    """The lines of JSONL files; give it to ``DataLoader``.

    The files are read once to find where lines begin; that index is cached, so the next process
    only maps it. Then a sample is one read, wherever it is. Empty lines are skipped.

    Args:
        paths: Paths, URLs (``s3://...``) or globs of uncompressed files. Their order matters.
        cache: Local directory of the index, such as one beside the run; by default among
            temporary files.

    Attributes:
        digest: Identifies the files by their names and their whole content.
        stamps: Distinguish the files from later ones in their place.

    Raises:
        DataError: A file cannot be read, or is compressed.
    """

    def __init__(
        self, paths: str | Path | Sequence[str | Path], *, cache: str | None = None
    ) -> None:
        self._files = find_files("JsonLines", paths)
        packed = [one.url for one in self._files if one.url.endswith((".gz", ".zst", ".bz2"))]
        if packed:
            raise DataError(
                f"JsonLines: {', '.join(packed)}: a line of a compressed file cannot be read "
                "without reading everything before it; decompress the files, or give an "
                "iterable"
            )
        self.stamps = [(one.url, one.stamp.text) for one in self._files]
        index = cached_arrays({"lines": 2, "files": self.stamps}, cache, self._index)
        self._starts, self._firsts = index["starts"], index["firsts"]
        names = [one.url.rsplit("/", 1)[-1] for one in self._files]
        facts = (names, index["content"].tobytes())
        self.digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        """Return the number of lines."""
        return len(self._starts)

    def __getitem__(self, index: int) -> Any:
        """Return the value of a line.

        Raises:
            DataError: The line cannot be read, or is not JSON.
        """
        number = range(len(self))[index]
        place = int(np.searchsorted(self._firsts, number, side="right")) - 1
        file, start = self._files[place], int(self._starts[number])
        is_last = number + 1 == self._firsts[place + 1]
        stop = file.size_bytes if is_last else int(self._starts[number + 1])
        text = file.read(start, stop - start)
        try:
            return json.loads(text)
        except ValueError as error:
            line = number - int(self._firsts[place]) + 1
            raise DataError(
                f"{file.url}: non-empty line {line}, at byte {start}, is not JSON: {error}",
                path=file.url,
                offset_bytes=start,
            ) from error

    def _index(self) -> Arrays:
        digests = [hashlib.sha256() for _ in self._files]
        parts = [_starts(*each) for each in zip(self._files, digests, strict=True)]
        counts = np.array([0, *map(len, parts)], np.int64)
        content = np.frombuffer(b"".join(each.digest() for each in digests), np.int64)
        return {
            "starts": np.concatenate(parts),
            "firsts": np.cumsum(counts),
            "content": content,
        }


def _starts(file: DataFile, digest: hashlib._Hash) -> NDArray[np.int64]:
    """Return the positions of the non-empty lines, and add the file to ``digest``."""
    ends = np.concatenate([*_newlines(file, digest), np.array([file.size_bytes], np.int64)])
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1])
    # A line of two bytes may be only "\r"; a JSON value of one byte is a digit.
    sizes = ends - starts
    kept = sizes > 0
    for at in np.flatnonzero(sizes == 1):
        kept[at] = file.read(int(starts[at]), 1).strip() != b""
    found: NDArray[np.int64] = starts[kept]
    return found


def _newlines(file: DataFile, digest: hashlib._Hash) -> Iterator[NDArray[np.int64]]:
    for start in range(0, file.size_bytes, _CHUNK_BYTES):
        data = file.read(start, min(_CHUNK_BYTES, file.size_bytes - start))
        digest.update(data)
        yield np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE).astype(np.int64) + start
