"""A buffer of an arena that is filled as it is saved: trainers capture their data there before."""

from collections.abc import Iterable

from ucp_core.storage import Buffer
from workers.memory import Arena, ArenaStore


class FilledStore(ArenaStore):
    """Puts the data into the buffer, as far as there is room, before it is completed."""

    def __init__(self, arena: Arena, buffer: int) -> None:
        super().__init__(arena, buffer)
        self._room = arena.body(buffer)

    def write_file(self, path: str, chunks: Iterable[Buffer], **options: bool) -> int:
        """Copy the data; return its size."""
        data = b"".join(chunks)
        fitting = data[: len(self._room)]
        self._room[: len(fitting)] = fitting
        return super().write_file(path, [data], **options)
