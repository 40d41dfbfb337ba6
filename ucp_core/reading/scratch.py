"""Memory that passes what is read on its way to where it belongs."""

from __future__ import annotations

import numpy as np

LINE_BYTES = 64
_HUGE_BYTES = 2 << 20


class Scratch:
    """Memory that a thread uses batch after batch: fresh pages cost 10 times the copy."""

    def __init__(self, size_bytes: int) -> None:
        self._memory = _fresh(size_bytes)
        self._used_bytes = 0
        self._unwanted = memoryview(b"")

    def reset(self) -> None:
        """Take everything back, which nobody may use any more."""
        self._used_bytes = 0

    def take(self, size_bytes: int) -> memoryview:
        """Return memory that is aligned for every dtype; more than there is, is made."""
        low = -(-self._used_bytes // 8) * 8
        if low + size_bytes > len(self._memory):
            made = _fresh(size_bytes)
            if not self._used_bytes:
                self._memory, self._used_bytes = made, size_bytes
            return made
        self._used_bytes = low + size_bytes
        return self._memory[low : self._used_bytes]

    def unwanted(self, size_bytes: int) -> memoryview:
        """Return memory for bytes that nobody looks at; it is the same every time."""
        if len(self._unwanted) < size_bytes:
            self._unwanted = _fresh(size_bytes)
        return self._unwanted[:size_bytes]


def _fresh(size_bytes: int) -> memoryview:
    """Return memory that begins at a huge page if it is as large, else at a line of the cache.

    malloc's begins 16 bytes later, where the kernel takes 7 % longer to read to. numpy asks for
    huge pages from 4 MiB on: the first touch of 2 MiB takes 0.1 to 0.3 ms then, else 0.4 to 4 ms
    in a virtual machine, and reading so much 0.1 ms. Not zeroed: every byte is read over.
    """
    alignment = _HUGE_BYTES if size_bytes >= _HUGE_BYTES else LINE_BYTES
    memory = np.empty(size_bytes + alignment, dtype=np.uint8)
    low = -memory.ctypes.data % alignment
    return memory.data[low : low + size_bytes]
