"""How a life of the controller begins: what the journal says, and under which settings.

The first life opens the run. Later ones are restarts and take up what the journal leads to; or
the run was over, or its cluster gone, and the user lets it go on: that opens it again, under
settings of its own, which are kept under the number of the life that opened it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.config import RunConfig, load
from orchestrator.core.events import ControllerStarted, Event
from orchestrator.core.journal import JournalRecord, fold, openings, read
from orchestrator.core.reopening import reopening
from orchestrator.core.state import RunState
from orchestrator.run_directory import CONFIG, OPENINGS, RESULT, SUMMARY
from orchestrator.shell.clock import RunClock
from orchestrator.shell.journal_file import read_segments
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
        records: Those of earlier lives.
    """

    number: int
    state: RunState
    first: Event
    clock: RunClock
    seq: int
    records: Sequence[JournalRecord]


def next_life(store: Store, run_path: str) -> int:
    """Return the number of the life that begins next in a run directory."""
    return len(read_segments(store, run_path)) + 1


def begin_life(store: Store, run_path: str, config: RunConfig, *, opening: int) -> Life:
    """Begin the next life of the controller.

    Args:
        store: Where the run directory is.
        run_path: Its path there.
        config: Of the run.
        opening: The life that opens the run under ``config``. One that dies before it has
            journaled anything is begun again under the same number.

    Raises:
        JournalCorruptError: The journal cannot be folded.
    """
    segments = read_segments(store, run_path)
    number = len(segments) + 1
    records = list(read(segments))
    seq = records[-1]["seq"] + 1 if records else 0
    if number != opening:
        state, last = fold(segments, config.rules())
        assert last is not None, "a life after the opening one has a journal before it"
        clock = RunClock(last_at_s=last["at_s"], last_wall_time=last["wall_time"])
        started = ControllerStarted(at_s=clock.at_s(), life=number)
        return Life(
            number=number, state=state, first=started, clock=clock, seq=seq, records=records
        )
    # The time between two openings is nobody's: the clock goes on from where it stopped.
    clock = RunClock(last_at_s=records[-1]["at_s"] if records else 0.0)
    first: Event = ControllerStarted(at_s=clock.at_s(), life=number)
    if records:
        before, _ = fold(segments, config_of(store, run_path, segments).rules())
        first = reopening(before, at_s=clock.at_s(), life=number)
    _write_config(store, run_path, config, number)
    for name in (SUMMARY, RESULT):
        # They say that the run is over.
        store.delete(join(run_path, name))
    return Life(number=number, state=RunState(), first=first, clock=clock, seq=seq, records=records)


def config_of(store: Store, run_path: str, segments: Sequence[bytes]) -> RunConfig:
    """Return the settings under which the last of ``segments``, all from the first, was written."""
    path = _config_path(run_path, max(openings(segments), default=0) + 1)
    if not store.exists(path):  # a run of a version that could not open one again
        path = join(run_path, CONFIG)
    return load(store.read(path).decode())


def _write_config(store: Store, run_path: str, config: RunConfig, life: int) -> None:
    for path in (_config_path(run_path, life), join(run_path, CONFIG)):
        store.write_atomic(path, config.to_yaml().encode(), fsync=False)


def _config_path(run_path: str, life: int) -> str:
    return join(run_path, OPENINGS, f"{life:06d}.yaml")
