"""The memory that all readers of one checkpoint may take together.

A pickle of a megabyte can describe gigabytes, and a folder can hold many of them. Everything made
from a foreign file is therefore paid for in advance, by its estimated size, from one account.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock

from ucp_core.errors import MemoryBudgetError
from ucp_core.numerics import format_bytes

#: The default limit: the metadata of a million fragments take 4 GiB.
_MEMORY_BYTES = 6 << 30


class Budget:
    """The remaining bytes; several threads may draw."""

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = self._left = memory_bytes
        self._lock = Lock()

    def draw(self, num_bytes: int, where: str) -> None:
        """Take ``num_bytes``; they are never returned."""
        with self._lock:
            self._left -= num_bytes
            is_enough = self._left >= 0
        if not is_enough:
            raise MemoryBudgetError(
                f"{where}: with this file, the values beside the tensors take more than the "
                f"{format_bytes(self.memory_bytes)} of memory that opening the checkpoint may "
                "take. It may be an attack; if you trust it, give ucp convert a larger --memory",
                path=where,
                memory_bytes=self.memory_bytes,
            )


_CURRENT: ContextVar[Budget | None] = ContextVar("ucp_budget", default=None)


def current_budget() -> Budget:
    """Return the budget of the checkpoint being opened; outside of that, a new one."""
    return _CURRENT.get() or Budget(_MEMORY_BYTES)


def use_budget(budget: Budget) -> None:
    """Make this thread draw from ``budget``: threads of a pool do not inherit it."""
    _CURRENT.set(budget)


@contextmanager
def reading_within(memory_bytes: int | None) -> Iterator[None]:
    """Make everything that the block reads draw from one budget."""
    token = _CURRENT.set(Budget(memory_bytes or _MEMORY_BYTES))
    try:
        yield
    finally:
        _CURRENT.reset(token)
