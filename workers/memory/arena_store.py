"""Make a buffer of an arena a store, in which ``RankSaver`` completes a part of a version.

The buffer then holds a rank's part of a native distributed checkpoint (``ucp_core/SPEC.md``): the
data file, then the record, which completes the buffer. There is no manifest: a version counts once
memory anywhere holds the records of all its ranks.
"""

from collections.abc import Callable, Iterable

import numpy as np

from ucp_core.errors import StorageError
from ucp_core.storage import Buffer, RefusingStore
from workers.memory.arena import Arena


class ArenaStore(RefusingStore):
    """Completes one rank's version in ``buffer``, which was begun and already holds the data.

    ``check`` is called before the buffer is completed. If it raises an error, the buffer stays
    incomplete.
    """

    def __init__(
        self, arena: Arena, buffer: int, *, check: Callable[[], None] = lambda: None
    ) -> None:
        self._arena = arena
        self._buffer = buffer
        self._check = check
        self._body = np.frombuffer(arena.body(buffer), dtype=np.uint8)
        self._data_bytes = -1

    def write_file(self, path: str, chunks: Iterable[Buffer], **_: bool) -> int:
        """Note and return the size of the rank's data, which is at the start of the buffer."""
        assert self._data_bytes < 0, f"{path}: the buffer holds its data already"
        self._data_bytes = sum(map(len, chunks))
        return self._data_bytes

    def write_atomic(self, path: str, data: Buffer, **_: bool) -> bool:
        """Write the record after the data, which completes the buffer."""
        assert self._data_bytes >= 0, f"{path}: a record comes after its data"
        end = self._data_bytes + len(data)
        if end > self._body.size:
            raise StorageError(
                f"{path} needs {end} bytes, but a snapshot buffer has {self._body.size}: "
                "reserve a larger arena",
                path=path,
            )
        self._body[self._data_bytes : end] = np.frombuffer(data, dtype=np.uint8)
        self._check()
        self._arena.finish(self._buffer, data_bytes=self._data_bytes, record_bytes=len(data))
        return True

    def read(self, path: str) -> bytes:
        """Find nothing: a buffer has no manifest."""
        raise StorageError(f"{path} does not exist", path=path, missing=True)

    def sizes(self, _directory: str) -> dict[str, int]:
        """Return nothing: this store does not decide whether the version counts."""
        return {}
