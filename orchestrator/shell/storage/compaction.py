"""The file with the compacted journal, replaced from time to time.

With it, a restarted controller reads only the end of the journal. It only saves time: if it cannot
be used, the whole journal is folded.
"""

import logging
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from orchestrator import core, diagnosis, fault_kinds, traffic
from orchestrator.errors import CompactionError, JournalCorruptError
from orchestrator.policies import policies
from orchestrator.report import COMPACTED
from orchestrator.shell.storage.journal import (
    JournalFile,
    read_from,
    read_segments,
    segment_sizes,
)
from orchestrator.shell.threads import STORAGE, in_thread
from ucp_core.errors import StorageError
from ucp_core.storage import Store, join

log = logging.getLogger(__name__)

#: The journal must grow by this much, or by the size of the compaction if that is more, before it
#: is compacted again. This is about 1500 records, which are folded in 40 ms.
SPACING_BYTES = 256 << 10
#: In a run that is never quiet, compaction waits until the journal has grown this many times as
#: much.
PATIENCE = 8


class Reading(NamedTuple):
    """The journal at the start of an incarnation.

    The first ``num_incidents_written`` incidents are known to be written; the first
    ``compacted_bytes`` did not have to be folded.
    """

    folded: core.Folded
    num_incidents_written: int = 0
    compacted_bytes: int = 0


def read_journal(store: Store, run_path: str, rules: core.RunRules) -> Reading:
    """Fold the journal of a run, starting at its compaction if possible."""
    try:
        return _from_compacted(store, run_path, rules)
    except (CompactionError, JournalCorruptError, StorageError) as error:
        # If the journal itself is damaged, folding all of it reports this.
        num_bytes = sum(segment_sizes(store, run_path))
        if num_bytes >= SPACING_BYTES:
            told = "the compacted journal is not used, all %s bytes are read: %s"
            log.warning(told, num_bytes, error)
    return Reading(core.fold_on(core.Folded(), read_segments(store, run_path), rules))


def _from_compacted(store: Store, run_path: str, rules: core.RunRules) -> Reading:
    path = join(run_path, COMPACTED)
    if not store.exists(path):
        raise CompactionError("there is none")
    found = core.Compaction.read(store.read(path), basis_of(rules))
    place = found.place
    sizes = segment_sizes(store, run_path)
    before_bytes = sum(sizes[: place.segment - 1])
    if place.segment > len(sizes) or place.before_bytes != before_bytes:
        raise CompactionError(f"the sizes of the segments up to {place.segment} have changed")
    if sizes[place.segment - 1] < place.end_bytes:
        raise CompactionError(f"segment {place.segment} is shorter than it was")
    segments = read_from(store, run_path, number=place.segment, offset_bytes=place.begin_bytes)
    num_written = found.folded.stats.num_settled
    folded = core.fold_on(found.folded, found.behind(segments), rules, first=place.segment)
    return Reading(folded, num_written, place.journal_bytes)


def basis_of(rules: core.RunRules) -> str:
    """Return a digest of all inputs of the fold but the journal."""
    return sha256(f"{_program()} {rules!r}".encode()).hexdigest()


@cache
def _program() -> str:
    """Return a digest of the modules that decide: another version may decide otherwise."""
    digest = sha256()
    for path in deciding_files():
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def deciding_files() -> list[Path]:
    """Return the files of the modules that decide, in a fixed order."""
    rooms = (core, diagnosis, policies, traffic)
    folders = [Path(folder) for room in rooms for folder in room.__path__]
    found = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [*found, Path(fault_kinds.__file__)]


class CompactionFile:
    """Compacts the journal when it has grown enough and the run is quiet."""

    def __init__(
        self, store: Store, run_path: str, *, rules: core.RunRules, compacted_bytes: int
    ) -> None:
        self._store = store
        self._path = join(run_path, COMPACTED)
        # Compute it now: files that change under a running controller are not the ones that run.
        self._basis = basis_of(rules)
        self._compacted_bytes = compacted_bytes
        self._spacing_bytes = SPACING_BYTES
        self._is_writing = False

    def is_due(self, journal_bytes: int, *, is_quiet: bool) -> bool:
        """Return whether to compact now; ``is_quiet`` if no events wait for the controller."""
        spacing_bytes = self._spacing_bytes * (1 if is_quiet else PATIENCE)
        return not self._is_writing and journal_bytes - self._compacted_bytes >= spacing_bytes

    def prepare(self, journal: JournalFile, state: core.RunState, stats: core.RunStats) -> bytes:
        """Return the document for ``write``: the whole of ``journal``, folded."""
        place = journal.place
        folded = core.Folded.at(journal.last, state, stats)
        document = core.Compaction(basis=self._basis, place=place, folded=folded).document()
        self._compacted_bytes = place.journal_bytes
        self._spacing_bytes = max(SPACING_BYTES, len(document))
        self._is_writing = True
        return document

    async def write(self, document: bytes) -> None:
        """Replace the compacted journal; a failure is only logged."""
        try:
            # This runs in a thread, because storage may be slow and nothing waits for it.
            await in_thread(STORAGE, self._store.write_atomic, self._path, document, fsync=False)
        except StorageError as error:
            log.warning("the compacted journal is not written: %s", error)
        finally:
            self._is_writing = False
