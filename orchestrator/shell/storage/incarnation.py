"""How a life of the controller begins: what the journal says, and under which settings.

The first life opens the run. Later ones are restarts and take up what the journal leads to; or
the run was over, or its cluster gone, and the user lets it go on: that opens it again, under
settings of its own, which are kept under the number of the life that opened it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.config import RunConfig, load
from orchestrator.core import ControllerStarted, Event, RunState, RunStats, openings, reopening
from orchestrator.run_directory import CONFIG, OPENINGS, RESULT, SUMMARY
from orchestrator.shell.clock import RunClock
from orchestrator.shell.storage.compaction import read_journal
from orchestrator.shell.storage.journal import read_chunks, segment_sizes
from ucp_core.storage import Store, join


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What a controller begins with.

    Attributes:
        number: From 1.
        state: Of the run before ``first``.
        first: The first event of this life.
        clock: Continues that of the life before.
        seq: Number of the next record in the journal.
        stats: Of earlier lives.
        num_incidents_written: Incidents, from the first on, that are known to be written.
        journal_bytes: Size of the journal.
        marked_bytes: Size of the part that the bookmark spares a life under the same settings.
    """

    number: int
    state: RunState
    first: Event
    clock: RunClock
    seq: int
    stats: RunStats
    num_incidents_written: int
    journal_bytes: int
    marked_bytes: int


def next_life(store: Store, run_path: str) -> int:
    """Return the number of the life that begins next in a run directory."""
    return len(segment_sizes(store, run_path)) + 1


def begin_life(store: Store, run_path: str, config: RunConfig, *, opening: int) -> Life:
    """Begin the next life of the controller.

    Args:
        store: Where the run directory is.
        run_path: Its path there.
        config: Of the run.
        opening: The life that opens the run under ``config``. One that dies before it has
            journaled anything is begun again under the same number; what a torn line is all of
            leaves the opening to the next.

    Raises:
        JournalCorruptError: The journal cannot be folded.
    """
    sizes = segment_sizes(store, run_path)
    number = len(sizes) + 1
    is_opened = not any(_has_record(store, run_path, life) for life in range(opening, number))
    earlier = _last_config(store, run_path, opening - 1) if is_opened and sizes else config
    reading = read_journal(store, run_path, earlier.rules())
    folded = reading.folded
    if is_opened:
        # The time between two openings is nobody's: the clock goes on from where it stopped.
        clock = RunClock(last_at_s=folded.at_s)
        state = RunState()
    else:
        assert folded.seq >= 0, "a life after the opening one has a journal before it"
        clock = RunClock(last_at_s=folded.at_s, last_wall_time=folded.wall_time)
        state = folded.state
    first: Event = ControllerStarted(at_s=clock.at_s(), life=number)
    if is_opened:
        if folded.seq >= 0:
            first = reopening(folded.state, at_s=clock.at_s(), life=number)
        _write_config(store, run_path, config, number)
        for name in (SUMMARY, RESULT):
            # They say that the run is over.
            store.delete(join(run_path, name))
    return Life(
        number=number,
        state=state,
        first=first,
        clock=clock,
        seq=folded.seq + 1,
        stats=folded.stats,
        num_incidents_written=reading.num_incidents_written,
        journal_bytes=sum(sizes),
        # That of a run that is reopened was made under the settings of then.
        marked_bytes=0 if is_opened else reading.marked_bytes,
    )


def config_of(store: Store, run_path: str, segments: Sequence[bytes]) -> RunConfig:
    """Return the settings under which the last of ``segments``, all from the first, was written."""
    return _config_at(store, run_path, max(openings(segments), default=0) + 1)


def _has_record(store: Store, run_path: str, life: int) -> bool:
    """Return whether a life has journaled anything whole."""
    chunks = read_chunks(store, run_path, number=life)
    return any(b"\n" in chunk for chunk in chunks)


def _last_config(store: Store, run_path: str, num_lives: int) -> RunConfig:
    """Return the settings under which the last life before now was.

    A life that opened the run and died before it had journaled anything has left settings too.
    """
    names = (name.partition(".")[0] for name in store.list(join(run_path, OPENINGS)))
    begun = [int(name) for name in names if name.isdecimal() and int(name) <= num_lives]
    return _config_at(store, run_path, max(begun, default=1))


def _config_at(store: Store, run_path: str, life: int) -> RunConfig:
    path = _config_path(run_path, life)
    if not store.exists(path):  # a run of a version that could not open one again
        path = join(run_path, CONFIG)
    return load(store.read(path).decode())


def _write_config(store: Store, run_path: str, config: RunConfig, life: int) -> None:
    for path in (_config_path(run_path, life), join(run_path, CONFIG)):
        store.write_atomic(path, config.to_yaml().encode(), fsync=False)


def _config_path(run_path: str, life: int) -> str:
    return join(run_path, OPENINGS, f"{life:06d}.yaml")
