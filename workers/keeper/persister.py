"""Store pinned versions in the background: training never waits for storage.

A buffer holds, bit for bit, the two files of a rank in a checkpoint. The persister checks the bytes
that it copies against the record, so a bit that flipped in memory never gets into a checkpoint.
Slow, full or silent storage keeps a buffer pinned for a while. Then the persister gives up on the
version, reports this, and tries the next version that is due.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from ucp_core import lineage as lineage_rule
from ucp_core.errors import CheckpointCorruptError, SupersededError, UcpError
from ucp_core.manifest import Kind, Manifest, from_bytes
from ucp_core.native import Collector, checkpoint_name, try_commit
from ucp_core.numerics import crc32
from ucp_core.storage import Owner, Store, join
from workers.keeper.arena_table import ArenaTable
from workers.memory import Arena, counts, is_parity
from workers.niceness import be_nice
from workers.protocol import CHECKPOINTS, Held
from workers.repeated import Repeated
from workers.settings import CheckpointSettings

#: Bytes to copy at a time. They fit the second-level cache, from which they are checked and
#: written.
_CHUNK_BYTES: Final = 1 << 20
#: Pauses between the tries; by their end a restarted store is back.
_PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
#: A store that accepts no bytes for this long is reported as silent.
_SILENT_S: Final = 10.0
#: Above the trainers' 15, so that storing only uses the time that they leave.
_NICENESS: Final = 19
_CLOSE_S_MAX: Final = 2.0
_SUBJECT: Final = "storage"

log = logging.getLogger(__name__)


class Persister:
    """Stores the pinned buffers of a node in its own thread until ``close``.

    ``on_problem`` is called with a subject and its problem, "" for none, from any thread.
    ``pauses_s`` are the pauses between the tries to store a version.
    """

    def __init__(
        self,
        table: ArenaTable,
        store: Store,
        directory: str,
        settings: CheckpointSettings,
        on_problem: Callable[[str, str], None],
        *,
        pauses_s: Sequence[float] = _PAUSES_S,
    ) -> None:
        self._table = table
        self._directory = directory
        self._checkpoints = join(directory, CHECKPOINTS)
        self._store = store
        self._owner, self._owned_attempt = Owner(store, directory, 0), 0
        self._settings = settings
        self._served: set[str] = set()
        self._collector: Collector | None = None
        if settings.keep:
            self._collector = Collector(store, self._checkpoints, keep=settings.keep)
        self._on_problem = on_problem
        self._pauses_s = tuple(pauses_s)
        self._stored = (0, 0)
        self._failures = Repeated(log)
        self._under_way: dict[int, tuple[Held, float]] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="persister", daemon=True)
        self._thread.start()

    @property
    def stored(self) -> tuple[int, int]:
        """Return the attempt and step of the newest commit seen that counts; 0, 0 if none."""
        attempt, step = self._stored
        is_valid = lineage_rule.counts(step=step, attempt=attempt, lineage=self._table.lineage)
        return self._stored if is_valid else (0, 0)

    @property
    def silence(self) -> str:
        """Return a line if storage has accepted no bytes for long, else ""."""
        now_s = time.monotonic()
        for held, moved_s in list(self._under_way.values()):
            if now_s - moved_s > _SILENT_S:
                return (
                    f"storage has been silent for {now_s - moved_s:.0f} s while step {held.step} "
                    f"was written to {self._checkpoints}: check that it can be reached"
                )
        return ""

    def flush(self, attempt: int, step: int) -> bool:
        """Store a version now; return whether it is committed.

        This is for the end of a run whose newest version is not due. It also stores copies of other
        nodes' parts, unless they are stored already, because their own node may be gone.
        """
        # Own parts come first, so that two keepers do not write the same part at once.
        names = sorted(self._table.arenas().items(), key=lambda item: "/" in item[0])
        found = [
            (name, arena, held)
            for name, arena in names
            if not is_parity(name)
            for held in arena.versions()
            if (held.attempt, held.step) == (attempt, step)
        ]
        stored = [self._persist(name, arena, held) for name, arena, held in found]
        # The other keepers are storing their parts; the last one commits.
        for pause_s in self._pauses_s:
            if not stored or any(stored) or self._closing.wait(pause_s):
                break
            name, arena, held = found[0]
            stored.append(self._persist(name, arena, held))
        return any(stored)

    def close(self) -> None:
        """Store nothing from now on. Safe to repeat; does not wait for a store that is stuck."""
        self._closing.set()
        self._table.tell_pins()
        self._thread.join(_CLOSE_S_MAX)

    def _run(self) -> None:
        be_nice(_NICENESS)
        num_news = -1
        while not self._closing.is_set():
            num_news = self._table.wait_pins(num_news, None)
            for name, arena in self._table.arenas().items():
                buffer = arena.pinned()
                if buffer is not None and not self._closing.is_set():
                    self._serve(name, arena, buffer)

    def _serve(self, name: str, arena: Arena, buffer: int) -> None:
        held = arena.held(buffer)
        if held is not None and counts(held, self._table.lineage):
            self._persist(name, arena, held)
        with contextlib.suppress(ValueError):
            # The version is stored, given up, outdated or damaged. The arena may have been freed.
            arena.unpin(buffer)

    def _persist(self, name: str, arena: Arena, held: Held) -> bool:
        """Try until the part is stored or hopeless; return whether the version is committed."""
        # It may be stored already: by this keeper before its process died, or at the end of a run.
        is_usual = arena.pinned() == held.buffer and name in self._served
        may_be_there = self._store.appends or not is_usual
        self._served.add(name)
        for pause_s in (*self._pauses_s, None):
            try:
                committed = self._put(arena, held, may_be_there=may_be_there)
            except _DamagedError as error:
                with contextlib.suppress(ValueError):
                    # The arena may be freed at this moment.
                    arena.quarantine(held)
                self._table.tell()
                self._say(held, f"{error}; it is dropped")
                return False
            except (_GoneError, ValueError) as error:
                log.info("not_stored", extra={"arena": name, "step": held.step, "why": str(error)})
                return False
            except CheckpointCorruptError as error:
                self._say(held, str(error))
                return False
            except SupersededError as error:
                self._end(error)
                return False
            except Exception as error:  # noqa: BLE001  whatever a store raises, it is an event
                self._say(held, f"{type(error).__name__}: {error}", is_tried_again=True)
            else:
                self._settle(held, committed=committed)
                return committed
            may_be_there = True
            if pause_s is None or self._closing.wait(pause_s):
                break
            if not counts(held, self._table.lineage):
                break
        return False

    def _settle(self, held: Held, *, committed: bool) -> None:
        self._failures.passed()
        self._on_problem(_SUBJECT, "")
        if committed:
            self._stored = max(self._stored, (held.attempt, held.step))
        lineage = self._table.lineage
        is_known = any(attempt >= held.attempt for attempt, _ in lineage)
        # Without the lineage an outdated checkpoint could be kept in place of a good one.
        if held.rank == 0 and self._collector is not None and is_known:
            try:
                self._collector.collect_sometimes(lineage, require_owner=self._owner.require)
            except SupersededError as error:
                self._end(error)
            except Exception as error:  # noqa: BLE001  as above; the version itself is stored
                self._on_problem(_SUBJECT, f"old checkpoints are not deleted: {error}")

    def _end(self, error: SupersededError) -> None:
        """Store nothing from now on: another run owns the directory."""
        log.critical(
            "this keeper has stopped storing, because the run continues elsewhere: %s", error
        )
        self._closing.set()
        self._on_problem(_SUBJECT, str(error))

    def _require_owner(self, attempt: int) -> None:
        """Check the owner of the directory once per attempt: its later parts do no harm."""
        claim = self._table.claim
        if claim != self._owner.claim:
            self._owner, self._owned_attempt = Owner(self._store, self._directory, claim), 0
        if attempt != self._owned_attempt:
            self._owner.require()
            self._owned_attempt = attempt

    def _say(self, held: Held, why: str, *, is_tried_again: bool = False) -> None:
        what = f"the part of rank {held.rank} after step {held.step} is not stored"
        if is_tried_again:
            self._failures.failed(what, why)
        else:
            log.warning("%s: %s", what, why)
        self._on_problem(_SUBJECT, f"{what}: {why}")

    def _put(self, arena: Arena, held: Held, *, may_be_there: bool) -> bool:
        """Write the missing files of the part; commit if they were the last of the version."""
        self._require_owner(held.attempt)
        record, data = self._record(arena, held)
        ((file, entry),) = record.files.items()
        directory = join(self._checkpoints, checkpoint_name(held.step))
        name = file.removesuffix(".bin")
        caller = threading.get_ident()
        self._under_way[caller] = held, time.monotonic()
        try:
            # The usual case avoids a listing, which can be a request.
            sizes = self._store.sizes(directory) if may_be_there else {}
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
                require_owner=self._owner.require,
                known={f"{name}.json": data},
            )
        finally:
            del self._under_way[caller]

    def _record(self, arena: Arena, held: Held) -> tuple[Manifest, bytes]:
        """Return the record after the data, parsed and as bytes."""
        stop = held.data_bytes + held.record_bytes
        data = bytes(arena.body(held.buffer)[held.data_bytes : stop])
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
                f"{sizes}, the buffer {expected} and {held.data_bytes}"
            )
        return record, data

    def _chunks(self, arena: Arena, held: Held, expected: int, caller: int) -> Iterator[memoryview]:
        """Yield checksummed copies of the data; raise after the last one if the sum is wrong."""
        body = np.frombuffer(arena.body(held.buffer), dtype=np.uint8)[: held.data_bytes]
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
                f"its data was damaged in memory: crc32 is {value:08x}, but was written as "
                f"{expected:08x}"
            )


class _DamagedError(Exception):
    """The buffer does not hold the bytes that were written."""


class _GoneError(Exception):
    """The buffer was overwritten, or its arena freed."""


def _check_there(arena: Arena, held: Held) -> None:
    if arena.held(held.buffer) != held:
        raise _GoneError("it was overwritten")
