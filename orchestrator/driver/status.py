"""Read the status of a run from its directory: its controller answers, else its journal."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any

from orchestrator.config import RunConfig, load
from orchestrator.core import Folded, RunState, describe, fold_on, starts, verify
from orchestrator.errors import RunNotFoundError, TokenError
from orchestrator.policies import CadenceRules, StoredVersion, bad_sources
from orchestrator.run_directory import CHECKPOINTS, CONFIG, CONTACT, METRICS, SUMMARY, TOKEN
from orchestrator.shell import (
    capacity_rows,
    config_of,
    cost_document,
    read_segments,
    wall_time,
)
from ucp_core.errors import StorageError
from ucp_core.lineage import Lineage
from ucp_core.native import checkpoint_name, find_committed
from ucp_core.storage import join, open_store, read_appended
from workers.protocol import Source

__all__ = ["RunFiles", "read_status", "replay_run"]

#: A living controller answered in 1 to 20 ms.
ANSWER_S = 2.0
#: A proxy of the user's is for the world, and does not reach a cluster's own network.
_PAST_PROXIES = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class RunFiles:
    """What the directory of a run says, and how to reach its controller.

    Args:
        url: The run directory, a path or an fsspec URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._store, self._path = open_store(url)

    def contact(self) -> dict[str, Any]:
        """Return how to reach the run's newest controller.

        Raises:
            RunNotFoundError: The directory holds no run.
        """
        document = self._document(CONTACT)
        if document is None:
            raise RunNotFoundError(
                f"{self.url} holds no run: {CONTACT} is not there; name the folder that `everstep "
                "run` printed as its run directory, or ask again if the run is still starting",
                url=self.url,
            )
        return document

    def live_contact(self) -> dict[str, Any]:
        """Return the same for a run that is not over.

        Raises:
            RunNotFoundError: There is no run, or it is over.
        """
        found = self.contact()
        if self.is_over():
            raise RunNotFoundError(
                f"the run in {self.url} is over; see `everstep report {self.url}`", url=self.url
            )
        return found

    def is_over(self) -> bool:
        """Return whether the run has written its summary."""
        return self._store.exists(join(self._path, SUMMARY))

    def summary(self) -> dict[str, Any] | None:
        """Return the run's summary, None before the run is over."""
        return self._document(SUMMARY)

    def token(self, given: str = "") -> str:
        """Return ``given``, or the token in the directory.

        Raises:
            TokenError: It cannot be read.
        """
        if given:
            return given
        try:
            return self._store.read(join(self._path, TOKEN)).decode().strip()
        except StorageError as error:
            raise TokenError(
                f"the token of the run cannot be read: {error}; ask who started the run for it, "
                "and give it by --token or EVERSTEP_TOKEN",
                url=self.url,
            ) from error

    def killed_at(self) -> float | None:
        """Return when the run was ended by force, None unless that was the last thing done."""
        return (self._document(CONTACT) or {}).get("killed_at")

    def note_killed(self) -> None:
        """Write down that the run is ended by force, so that nobody who waits resumes it."""
        contact = {**self.contact(), "killed_at": wall_time()}
        path = join(self._path, CONTACT)
        self._store.write_atomic(path, json.dumps(contact).encode(), fsync=False)

    def saves(self) -> tuple[str, ...]:
        """Return the names of the checkpoints in storage."""
        return tuple(sorted(self._store.list(join(self._path, CHECKPOINTS))))

    def config(self) -> RunConfig:
        """Return the settings that the run has now."""
        return load(self._store.read(join(self._path, CONFIG)).decode())

    def state(self) -> RunState:
        """Return the state that the journal leads to."""
        return self.folded().state

    def folded(self) -> Folded:
        """Return what the whole journal amounts to."""
        segments = read_segments(self._store, self._path)
        return fold_on(Folded(), segments, self.config().rules())

    def ask(self, page: str) -> dict[str, Any] | None:
        """Return a document of the controller's page; None if it does not answer.

        Whoever has its port by now, such as another run, is not believed.
        """
        url = f"{self.contact()['url']}/{page}"
        try:
            with _PAST_PROXIES.open(url, timeout=ANSWER_S) as answer:
                document: Any = json.load(answer)
        except (OSError, HTTPException, ValueError):
            return None
        directory = self.config().run.directory
        is_own = isinstance(document, dict) and document.get("directory") == directory
        return document if is_own else None

    def stored(self, lineage: Lineage, bad: Sequence[Source]) -> StoredVersion:
        """Return the newest committed version of a history from which the run could resume."""
        excluded = frozenset(map(checkpoint_name, bad_sources.in_storage(bad)))
        root = join(self._path, CHECKPOINTS)
        found = find_committed(self._store, root, lineage=lineage, exclude=excluded)
        if found is None:
            return StoredVersion()
        files = found.checkpoint.manifest.files
        sizes = tuple(files[name].num_bytes for name in sorted(files))
        return StoredVersion(step=found.step, attempt=found.attempt, part_bytes=sizes)

    def stored_step(self) -> int:
        """Return the step from which the run would resume from storage, 0 if there is none."""
        state = self.state()
        return self.stored(state.lineage, state.bad).step

    def last_step(self) -> tuple[int, float | None]:
        """Return the last step that was written down and its loss, None if that is no number.

        (0, None) before the first. Workers write it also while nobody is in charge.
        """
        try:
            lines = read_appended(self._store, join(self._path, METRICS)).splitlines()
        except StorageError as error:
            if not error.facts.get("missing"):
                raise
            return 0, None
        for line in reversed(lines):
            try:
                found = json.loads(line)
                loss = found["loss"]
                return int(found["step"]), None if loss is None else float(loss)
            except (ValueError, KeyError):
                continue  # the last line may be half written
        return 0, None

    def replay(self) -> dict[str, Any]:
        """Fold the journal again and check its decisions; see ``replay_run``."""
        segments = read_segments(self._store, self._path)
        if not segments:
            raise RunNotFoundError(
                f"{self.url} holds no run: it has no journal/ to replay; "
                "name the folder that `everstep run` printed as its run directory",
                url=self.url,
            )
        ends = [*starts(segments)[1:], len(segments)]
        state, last = RunState(), None
        for begin, end in zip(starts(segments), ends, strict=True):
            rules = config_of(self._store, self._path, segments[:end]).rules()
            state, last = verify(segments[begin:end], rules)
        num_records = last["seq"] + 1 if last else 0
        return {"records": num_records, "same_decisions": True, "phase": str(state.phase)}

    def _document(self, name: str) -> dict[str, Any] | None:
        path = join(self._path, name)
        if not self._store.exists(path):
            return None
        document: dict[str, Any] = json.loads(self._store.read(path))
        return document


def read_status(url: str) -> dict[str, Any]:
    """Return the status of the run in ``url``, with ``controller`` "alive", "down" or "over".

    While the controller is down, the journal says what was true last. A run that is over has no
    workers, nodes or pending capacity. Process ids that are not known are null.
    """
    run = RunFiles(url)
    run.contact()
    over = run.is_over()
    answer = None if over else run.ask("status")
    if answer is not None:
        return {**answer, "controller": "alive"}
    config = run.config()
    folded = run.folded()
    state = folded.state
    described = describe(state)

    def known(what: str, **unknown: None) -> list[dict[str, Any]]:
        return [] if over else [{**unknown, **row} for row in described[what]]

    step, loss = run.last_step()
    copied = ("phase", "attempt", "layout", "shared", "cause", "waits_for", "reason")
    return {
        **{name: described[name] for name in copied},
        "directory": config.run.directory,
        "step": step or described["step"],
        "loss": loss,
        "workers": known("members", phase=None, step=None, last_heartbeat_s=None),
        "standbys": known("standbys", phase=None, step=None, last_heartbeat_s=None),
        "nodes": known("nodes", raylet_pid=None, keeper_pid=None),
        "pending_capacity": 0 if over else len(described["pending_reservations"]),
        "capacity": [] if over else capacity_rows(described, config.alternative_names(), at_s=None),
        "cost": cost_document(folded.stats, config),
        "redundancy": _stored_redundancy(run, state),
        "cadence": _first_cadence(config),
        "bounds_s": {},
        "loaded": {},
        "passed_over": [],
        "logging": {},
        "controller": "over" if over else "down",
    }


def replay_run(url: str) -> dict[str, Any]:
    """Fold the journal of ``url`` again; raise ``JournalCorruptError`` where the actions differ.

    Each resume of the run may have had other settings: its part of the journal is folded under
    those.
    """
    return RunFiles(url).replay()


def _stored_redundancy(run: RunFiles, state: RunState) -> dict[str, Any]:
    """Return what is known of redundancy while no controller says what is in memory."""
    step = run.stored(state.lineage, state.bad).step
    return {
        "kind": "storage" if step else "none",
        "step": 0,
        "stored_step": step,
        "node_losses_survived": 0,
        "reduced_s": None,
        "mechanism": "",
        "reason": "the controller is not there to say what is in memory",
        "problems": bad_sources.described(state.bad),
    }


def _first_cadence(config: RunConfig) -> dict[str, Any]:
    """Return the intervals that attempts begin with: no controller says which are used now."""
    return {
        "snapshot_steps": config.snapshot.first_every,
        "snapshot_taken_steps": None,
        "checkpoint_steps": config.checkpoint.first_every,
        "step_s": None,
        "snapshot_stall_s": None,
        "checkpoint_stall_s": None,
        "cost_share": None,
        "cost_share_max": CadenceRules().cost_share_max,
        "problems": [],
        "reason": "what attempts begin with",
    }
