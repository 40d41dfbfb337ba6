"""Takes pinned versions from memory to storage, in the background: training never waits for it.

A slot's data and record are bit for bit the rank's two files of a checkpoint. They are copied as
they are, and what is copied is checked against the record on its way: a bit that flipped in
memory is found here and never becomes a checkpoint. Storage that is slow, full or silent keeps
a slot pinned for a while, and is then given up with a line for people; the next version that is
due is tried anew.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from ucp_core import lineage as lineage_rule
from ucp_core.errors import CheckpointCorruptError, UcpError
from ucp_core.manifest import Kind, Manifest, from_bytes
from ucp_core.native import checkpoint_name, collect_garbage, try_commit
from ucp_core.numerics import crc32
from ucp_core.storage import Store, join
from workers.keeper.slots import NodeSlots, be_nice
from workers.memory import Arena, counts, is_parity
from workers.protocol import Held
from workers.settings import CHECKPOINTS, CheckpointSettings

__all__ = ["Persister"]

#: Fits the second-level cache: what was checked there is what is written.
_CHUNK_BYTES: Final = 1 << 20
#: Between two tries: a store that restarts is back by then, and training waits for no pin.
_PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
#: A store that takes nothing for so long is said to be silent.
_SILENT_S: Final = 10.0
#: Beside saturated trainers, which Ray runs at 15, storage gets what they leave.
_NICENESS: Final = 19
_CLOSE_S_MAX: Final = 2.0
_SUBJECT: Final = "storage"

log = logging.getLogger(__name__)


class Persister:
    """Stores what is pinned on a slots in a thread of its own until ``close``.

    Args:
        slots: Its arenas.
        store: Where the run directory is.
        directory: Its path.
        settings: How many checkpoints to keep, and how safe.
        on_problem: Told a subject and how it is, "" for well; from any thread.
        pauses_s: Between the tries to store a version; one more try than pauses.
    """

    def __init__(
        self,
        slots: NodeSlots,
        store: Store,
        directory: str,
        settings: CheckpointSettings,
        on_problem: Callable[[str, str], None],
        *,
        pauses_s: Sequence[float] = _PAUSES_S,
    ) -> None:
        self._slots = slots
        self._checkpoints = join(directory, CHECKPOINTS)
        self._store = store
        self._settings = settings
        self._on_problem = on_problem
        self._pauses_s = tuple(pauses_s)
        self._stored = (0, 0)
        self._under_way: dict[int, tuple[Held, float]] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="persister", daemon=True)
        self._thread.start()

    @property
    def stored_step(self) -> int:
        """Return the newest step that was seen committed and counts; 0 if none."""
        attempt, step = self._stored
        is_valid = lineage_rule.counts(step=step, attempt=attempt, lineage=self._slots.lineage)
        return step if is_valid else 0

    @property
    def silence(self) -> str:
        """Return a line if storage has taken nothing for long, else ""."""
        now_s = time.monotonic()
        for held, moved_s in list(self._under_way.values()):
            if now_s - moved_s > _SILENT_S:
                return (
                    f"storage has been silent for {now_s - moved_s:.0f} s while step {held.step} "
                    f"was written to {self._checkpoints}: check that it can be reached"
                )
        return ""

    def flush(self, attempt: int, step: int) -> bool:
        """Store what is held of a version, now; return whether it is committed then.

        For the end of a run whose newest version is not due. Copies of other nodes' ranks are
        stored too where nobody has done it: their own node may be gone.
        """
        # Own ones first, so that two keepers do not write the same at once.
        names = sorted(self._slots.arenas().items(), key=lambda item: "/" in item[0])
        found = [
            (name, arena, held)
            for name, arena in names
            if not is_parity(name)
            for held in arena.versions()
            if (held.attempt, held.step) == (attempt, step)
        ]
        stored = [self._persist(name, arena, held) for name, arena, held in found]
        # The other keepers are storing their parts now; whoever is last commits.
        for pause_s in self._pauses_s:
            if not stored or any(stored) or self._closing.wait(pause_s):
                break
            name, arena, held = found[0]
            stored.append(self._persist(name, arena, held))
        return any(stored)

    def close(self) -> None:
        """Store nothing any more, and leave nothing but checkpoints. Safe to call again.

        A store that does not answer is not waited for.
        """
        self._closing.set()
        self._slots.tell_pins()
        self._thread.join(_CLOSE_S_MAX)

    def _run(self) -> None:
        be_nice(_NICENESS)
        num_news = -1
        while not self._closing.is_set():
            num_news = self._slots.wait_pins(num_news, None)
            for name, arena in self._slots.arenas().items():
                slot = arena.pinned()
                if slot is not None and not self._closing.is_set():
                    self._serve(name, arena, slot)

    def _serve(self, name: str, arena: Arena, slot: int) -> None:
        held = arena.held(slot)
        if held is not None and counts(held, self._slots.lineage):
            self._persist(name, arena, held)
        with contextlib.suppress(ValueError):
            # Stored, given up, dead, or damaged; the arena may have been let go of.
            arena.unpin(slot)

    def _persist(self, name: str, arena: Arena, held: Held) -> bool:
        """Try until it is stored or hopeless; return whether the whole version is committed."""
        for pause_s in (*self._pauses_s, None):
            try:
                committed = self._put(arena, held)
            except _DamagedError as error:
                with contextlib.suppress(ValueError):
                    # The arena may be let go of at this moment.
                    arena.quarantine(held)
                self._slots.tell()
                self._say(held, f"{error}; it is not used any more")
                return False
            except (_GoneError, ValueError) as error:
                log.info("not_stored", extra={"arena": name, "step": held.step, "why": str(error)})
                return False
            except CheckpointCorruptError as error:
                self._say(held, str(error))
                return False
            except Exception as error:  # noqa: BLE001  whatever a store raises, it is an event
                self._say(held, f"{type(error).__name__}: {error}")
            else:
                self._settle(held, committed=committed)
                return committed
            if pause_s is None or self._closing.wait(pause_s):
                break
            if not counts(held, self._slots.lineage):
                break
        return False

    def _settle(self, held: Held, *, committed: bool) -> None:
        self._on_problem(_SUBJECT, "")
        if committed:
            self._stored = max(self._stored, (held.attempt, held.step))
        lineage = self._slots.lineage
        is_known = any(attempt >= held.attempt for attempt, _ in lineage)
        # Without the lineage a dead checkpoint would be kept, and a good one deleted for it.
        if held.rank == 0 and self._settings.keep and is_known:
            try:
                collect_garbage(
                    self._store, self._checkpoints, keep=self._settings.keep, lineage=lineage
                )
            except Exception as error:  # noqa: BLE001  as above; the version itself is stored
                self._on_problem(_SUBJECT, f"old checkpoints are not deleted: {error}")

    def _say(self, held: Held, why: str) -> None:
        log.warning("not_stored", extra={"step": held.step, "rank": held.rank, "why": why})
        self._on_problem(
            _SUBJECT, f"the part of rank {held.rank} after step {held.step} is not stored: {why}"
        )

    def _put(self, arena: Arena, held: Held) -> bool:
        """Write the two files where they are missing, and commit if they were the last."""
        record, data = self._record(arena, held)
        ((file, entry),) = record.files.items()
        directory = join(self._checkpoints, checkpoint_name(held.step))
        name = file.removesuffix(".bin")
        caller = threading.get_ident()
        self._under_way[caller] = held, time.monotonic()
        try:
            sizes = self._store.sizes(directory)
            if sizes.get(file) != held.data_bytes or f"{name}.json" not in sizes:
                chunks = self._chunks(arena, held, entry.crc32, caller)
                fsync = self._settings.fsync
                self._store.write_file(join(directory, file), chunks, fsync=fsync)
                self._store.write_atomic(join(directory, f"{name}.json"), data, fsync=fsync)
            return try_commit(
                self._store,
                directory,
                step=held.step,
                attempt=held.attempt,
                world_size=held.world_size,
                fsync=self._settings.fsync,
            )
        finally:
            del self._under_way[caller]

    def _record(self, arena: Arena, held: Held) -> tuple[Manifest, bytes]:
        """Return the record that lies behind the data, read and as it is."""
        stop = held.data_bytes + held.record_bytes
        data = bytes(arena.body(held.slot)[held.data_bytes : stop])
        _check_there(arena, held)
        try:
            record = from_bytes(data, where="its record")
        except UcpError as error:
            raise _DamagedError(str(error)) from error
        found = (record.kind, record.step, record.attempt, record.rank, record.world_size)
        expected = (Kind.RANK_RECORD, held.step, held.attempt, held.rank, held.world_size)
        sizes = [entry.num_bytes for entry in record.files.values()]
        if found != expected or sizes != [held.data_bytes]:
            raise _DamagedError(
                f"its record says (kind, step, attempt, rank, world_size) = {found} and sizes "
                f"{sizes}, the slot {expected} and {held.data_bytes}"
            )
        return record, data

    def _chunks(self, arena: Arena, held: Held, expected: int, caller: int) -> Iterator[memoryview]:
        """Yield the data by copies, each of which was checksummed; raise behind the last if bad."""
        body = np.frombuffer(arena.body(held.slot), dtype=np.uint8)[: held.data_bytes]
        copy = np.empty(_CHUNK_BYTES, dtype=np.uint8)
        value = 0
        for low in range(0, held.data_bytes, _CHUNK_BYTES):
            source = body[low : low + _CHUNK_BYTES]
            chunk = copy[: len(source)]
            np.copyto(chunk, source)
            value = crc32(chunk, value)
            yield chunk.data
            self._under_way[caller] = held, time.monotonic()
        _check_there(arena, held)
        if value != expected:
            raise _DamagedError(
                f"its data was damaged in memory: crc32 {value:08x}, written was {expected:08x}"
            )


class _DamagedError(Exception):
    """The bytes in the slot are not the bytes that were written."""


class _GoneError(Exception):
    """The slot was written over, or its arena let go of."""


def _check_there(arena: Arena, held: Held) -> None:
    if arena.held(held.slot) != held:
        raise _GoneError("it was written over")
