"""Start an incarnation of the controller: its state and its settings.

The first incarnation starts the run. A later one is a restart that continues from the journal, or
it resumes a run that was over or had lost its cluster. A resume may bring other settings, so the
settings of each start and resume are stored under the number of the incarnation.

Each incarnation claims the run directory before it reads the journal. It does not start if there is
a later claim.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from orchestrator import core
from orchestrator.config import RunConfig, load
from orchestrator.core import events as ev
from orchestrator.report import CONFIG, SETTINGS, SUMMARY
from orchestrator.shell.clock import RunClock, wall_time
from orchestrator.shell.storage.compaction import read_journal
from orchestrator.shell.storage.journal import read_chunks, segment_sizes
from orchestrator.shell.storage.sender import send_rest
from ucp_core.native import find_committed, last_attempt, newest_finite, unloadable
from ucp_core.storage import Store, claim, join
from workers.protocol import CHECKPOINTS, RESULT

#: If lines are sent in the background, at most this many attempts may be lost with the head. The
#: next claimant skips their numbers: trainers of the last one may still write files with such
#: names.
UNSENT_ATTEMPTS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Incarnation:
    """The start of a controller."""

    number: int  #: Counts from 1.
    is_resume: bool  #: Whether it resumes the run with its own settings.
    state: core.RunState  #: The state of the run before ``first``.
    first: ev.Event  #: Its first event.
    clock: RunClock  #: Continues the clock of the previous incarnation.
    seq: int  #: Number of the next record in the journal.
    stats: core.RunStats  #: The statistics of earlier incarnations.
    #: How many incidents, counted from the first, are known to be written.
    num_incidents_written: int
    journal_bytes: int
    compacted_bytes: int  #: Size of the part that the compacted journal replaces.


def begin_incarnation(
    store: Store,
    run_path: str,
    config: RunConfig,
    *,
    claim_number: int,
    token: str,
    spool: str = "",
) -> Incarnation:
    """Start the next incarnation of the controller.

    Args:
        claim_number: The claim that starts or resumes the run under ``config``. If its first
            incarnation dies before it has journaled a whole record, the next one does so in its
            place.
        token: Token of this claim; no other claim has it.
        spool: Where an earlier incarnation may have left lines (``Sender``).

    Raises:
        JournalCorruptError: The journal cannot be folded.
        SupersededError: Another claim on the directory counts.
    """
    now = datetime.fromtimestamp(wall_time(), UTC).isoformat(timespec="seconds")
    mine = {"token": token, "host": socket.gethostname(), "since": now}
    number = len(segment_sizes(store, run_path)) + 1
    config_since = claim(store, run_path, claim_number, {**mine, "incarnation": number})[
        "incarnation"
    ]
    # Only now are all earlier actions of other claimants known.
    if spool:
        send_rest(store, run_path, spool)
    sizes = segment_sizes(store, run_path)
    number = len(sizes) + 1
    is_first = not any(_has_record(store, run_path, one) for one in range(config_since, number))
    earlier = _config_before(store, run_path, config_since) if is_first and sizes else config
    reading = read_journal(store, run_path, earlier.rules())
    folded = reading.folded
    if is_first:
        # The time while the run was over does not count.
        clock = RunClock(last_at_s=folded.at_s)
        state = core.RunState()
    else:
        assert folded.seq >= 0, "a restart has a journal before it"
        clock = RunClock(last_at_s=folded.at_s, last_wall_time=folded.wall_time)
        state = folded.state
    started = ev.ControllerStarted(at_s=clock.at_s(), incarnation=number)
    first: ev.Event = started
    if is_first:
        first = _resumed(store, run_path, config, folded, started) or started
        for path in (_config_path(run_path, number), join(run_path, CONFIG)):
            store.write_atomic(path, config.to_yaml().encode(), fsync=False)
        for name in (SUMMARY, RESULT):
            # These files say that the run is over.
            store.delete(join(run_path, name))
    return Incarnation(
        number=number,
        is_resume=1 < number == config_since,
        state=state,
        first=first,
        clock=clock,
        seq=folded.seq + 1,
        stats=folded.stats,
        num_incidents_written=reading.num_incidents_written,
        journal_bytes=sum(sizes),
        # The compacted journal of a resumed run was made under the earlier settings.
        compacted_bytes=0 if is_first else reading.compacted_bytes,
    )


def _resumed(
    store: Store,
    run_path: str,
    config: RunConfig,
    folded: core.Folded,
    started: ev.ControllerStarted,
) -> core.events.RunResumed | None:
    """Return how the run resumes; None if it has no history."""
    checkpoints = join(run_path, CHECKPOINTS)
    at_s, number = started.at_s, started.incarnation
    # A script that ran alone has attempts, too.
    attempt = last_attempt(store, checkpoints, store.list(checkpoints))
    if folded.seq >= 0:
        resumed = core.resume_event(
            folded.state,
            at_s=at_s,
            incarnation=number,
            num_unknown=0 if store.appends else UNSENT_ATTEMPTS,
            last_attempt=attempt,
        )
    elif attempt:
        stored = _step_in_storage(store, checkpoints, config)
        resumed = core.resume_without_journal(attempt, stored, at_s=at_s, incarnation=number)
    else:
        return None
    if config.run.resume_from == "finite":
        newest, finite = newest_finite(store, checkpoints, lineage=resumed.lineage)
        if finite < newest:
            return core.go_back(resumed, finite)
    return resumed


def _step_in_storage(store: Store, checkpoints: str, config: RunConfig) -> int:
    """Return the newest step that may be committed; 0 if only a first save was interrupted."""
    found = find_committed(store, checkpoints, lineage=())
    if found is not None:
        return found.step
    steps = [step for step, _ in unloadable(store, checkpoints, lineage=(), with_data=True)]
    newest = max(steps, default=0)
    return newest if newest > config.checkpoint.first_every else 0


def config_of(store: Store, run_path: str, segments: Sequence[bytes]) -> RunConfig:
    """Return the settings of the last of ``segments``, which begin with the first one."""
    return _config_at(store, run_path, max(core.starts(segments), default=0) + 1)


def _has_record(store: Store, run_path: str, incarnation: int) -> bool:
    """Return whether an incarnation has journaled a whole record."""
    chunks = read_chunks(store, run_path, number=incarnation)
    return any(b"\n" in chunk for chunk in chunks)


def _config_before(store: Store, run_path: str, number: int) -> RunConfig:
    """Return the settings of the last incarnation before ``number``.

    An incarnation that died before it journaled anything also left its settings.
    """
    names = (name.partition(".")[0] for name in store.list(join(run_path, SETTINGS)))
    begun = [int(name) for name in names if name.isdecimal() and int(name) < number]
    return _config_at(store, run_path, max(begun, default=1))


def _config_at(store: Store, run_path: str, incarnation: int) -> RunConfig:
    return load(store.read(_config_path(run_path, incarnation)).decode())


def _config_path(run_path: str, incarnation: int) -> str:
    return join(run_path, SETTINGS, f"{incarnation:06d}.yaml")
