"""A store that does nothing: what is not a whole store derives from it and adds what it can."""

from __future__ import annotations

from typing import Any

from ucp_core.errors import StorageError

__all__ = ["RefusingStore"]


class RefusingStore:
    """Raises ``StorageError`` for whatever a subclass does not do."""

    request_bytes = 1 << 20

    # The type of the result is that of no method, so that every method may have its own.
    def _refuse(self, *args: Any, **_: Any) -> Any:
        path = args[0] if args else ""
        raise StorageError(
            f"{type(self).__name__} cannot do this with {path}: it is for one use only", path=path
        )

    read = read_range = read_ranges = _refuse
    write_atomic = write_file = append = delete = makedirs = lock = _refuse
    list = sizes = exists = size = _refuse
