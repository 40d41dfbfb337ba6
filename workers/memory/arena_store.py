"""One buffer of an arena as a store: ``save_rank`` writes a rank's part of a version into it.

The buffer then holds a rank's part of a native distributed checkpoint (``ucp_core/SPEC.md``): the
data file, then the record, which completes the buffer. There is no manifest: a version counts once
the records of all its ranks are held, wherever they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ucp_core.errors import StorageError
from ucp_core.storage import Buffer, RefusingStore
from workers.memory.arena import Arena


class ArenaStore(RefusingStore):
    """Writes one version of one rank into ``buffer``, which was begun.

    Args:
        is_captured: Whether the data is in the buffer already, and only the record is written.
        check: Called before the buffer is completed; if it raises, the buffer stays incomplete.
    """

    def __init__(
        self,
        arena: Arena,
        buffer: int,
        *,
        is_captured: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._is_captured = is_captured
        self._arena = arena
        self._buffer = buffer
        self._check = check
        self._body = np.frombuffer(arena.body(buffer), dtype=np.uint8)
        self._data_bytes = -1

    def write_file(self, path: str, chunks: Iterable[Buffer], **_: bool) -> int:
        """Put the rank's data at the begin of the buffer; return its size."""
        assert self._data_bytes < 0, f"{path}: the buffer holds its data already"
        end = sum(map(len, chunks)) if self._is_captured else self._copy(path, chunks)
        self._data_bytes = end
        return end

    def write_atomic(self, path: str, data: Buffer, **_: bool) -> bool:
        """Put the record behind the data, which completes the buffer."""
        assert self._data_bytes >= 0, f"{path}: a record comes after its data"
        end = self._data_bytes + len(data)
        self._check_fits(path, end)
        self._body[self._data_bytes : end] = np.frombuffer(data, dtype=np.uint8)
        self._check()
        self._arena.finish(self._buffer, data_bytes=self._data_bytes, record_bytes=len(data))
        return True

    def _copy(self, path: str, chunks: Iterable[Buffer]) -> int:
        end = 0
        for chunk in chunks:
            source = np.frombuffer(chunk, dtype=np.uint8)
            self._check_fits(path, end + source.size)
            self._body[end : end + source.size] = source
            end += source.size
        return end

    def _check_fits(self, path: str, size_bytes: int) -> None:
        if size_bytes > self._body.size:
            raise StorageError(
                f"{path} needs {size_bytes} bytes, a snapshot buffer has {self._body.size}: "
                "reserve a larger arena",
                path=path,
            )

    def read(self, path: str) -> bytes:
        """Find nothing: a buffer holds no manifest."""
        raise StorageError(f"{path} does not exist", path=path, missing=True)

    def sizes(self, _directory: str) -> dict[str, int]:
        """Return nothing: whether the version counts is not decided here."""
        return {}
