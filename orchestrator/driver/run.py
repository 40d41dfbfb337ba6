"""A run by its directory: read its files, and reach its controller."""

import contextlib
import json
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from shlex import quote
from typing import Any

from orchestrator.config import RunConfig, load
from orchestrator.core import Folded, RunState
from orchestrator.errors import OrchestratorError, RunNotFoundError, TokenError
from orchestrator.policies import StoredVersion, bad_sources
from orchestrator.report import CONFIG, CONTACT, SUMMARY, TOKEN, appended_text
from orchestrator.shell import read_journal, wall_time
from ucp_core.errors import StorageError, UcpError
from ucp_core.lineage import Lineage
from ucp_core.native import BEST, checkpoint_name, find_committed
from ucp_core.storage import join, open_store
from workers.protocol import CHECKPOINTS, METRICS, Source

#: A living controller answered in 1 to 20 ms.
ANSWER_S = 2.0
#: On these addresses the controller serves readers without a token.
LOOPBACKS = ("127.0.0.1", "[::1]")
#: The user's proxy is for the internet, and does not reach a cluster's network.
_PAST_PROXIES = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Run:
    """The run in the directory ``url``, a path or an fsspec URL."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store, self.path = open_store(url)

    def contact(self) -> dict[str, Any]:
        """Return how to reach the run's newest controller, or raise ``RunNotFoundError``."""
        document = self._document(CONTACT)
        if document is None:
            raise RunNotFoundError(
                f"{self.url} holds no run: {CONTACT} is not there; name the folder that `everstep "
                "run` printed as its run directory, or ask again if the run is still starting",
                url=self.url,
            )
        return document

    def live_contact(self) -> dict[str, Any]:
        """Return ``contact`` for a run that is not over, else raise ``RunNotFoundError``."""
        found = self.contact()
        if self.is_over():
            raise RunNotFoundError(
                f"the run in {self.url} is over; see `everstep report {quote(self.url)}`",
                url=self.url,
            )
        return found

    def is_over(self) -> bool:
        """Return whether the run has written its summary."""
        return self.store.exists(join(self.path, SUMMARY))

    def summary(self) -> dict[str, Any] | None:
        """Return the run's summary, None before the run is over."""
        return self._document(SUMMARY)

    def token(self, given: str = "") -> str:
        """Return ``given``, or the token in the directory, or raise ``TokenError``."""
        if given:
            return given
        try:
            return self.store.read(join(self.path, TOKEN)).decode().strip()
        except StorageError as error:
            raise TokenError(
                f"the token of the run cannot be read: {error}; get it from the person who "
                "started the run, and give it by --token or EVERSTEP_TOKEN",
                url=self.url,
            ) from error

    def killed_at(self) -> float | None:
        """Return when the run was killed; None if it never was, or has continued since."""
        return (self._document(CONTACT) or {}).get("killed_at")

    def note_killed(self) -> None:
        """Record that the run is being killed, so that no waiting command resumes it."""
        contact = {**self.contact(), "killed_at": wall_time()}
        path = join(self.path, CONTACT)
        self.store.write_atomic(path, json.dumps(contact).encode(), fsync=False)

    def saves(self) -> tuple[str, ...]:
        """Return the names of the checkpoints in storage."""
        return tuple(sorted(self.store.list(join(self.path, CHECKPOINTS))))

    def settings(self) -> RunConfig:
        """Return the current settings of the run."""
        return load(self.store.read(join(self.path, CONFIG)).decode())

    def folded(self) -> Folded:
        """Return the folded journal; start from the compacted one if possible."""
        return read_journal(self.store, self.path, self.settings().rules()).folded

    def state(self) -> RunState:
        """Return the state that the journal leads to."""
        return self.folded().state

    def ask(self, page: str) -> dict[str, Any] | None:
        """Return a document of the controller's page; None if it does not answer.

        An answer from another process that now has the port does not count.
        """
        request = urllib.request.Request(f"{self.contact()['url']}/{page}")  # noqa: S310
        if request.host.rpartition(":")[0] not in LOOPBACKS:
            with contextlib.suppress(TokenError):
                request.add_header("Authorization", f"Bearer {self.token()}")
        try:
            with _PAST_PROXIES.open(request, timeout=ANSWER_S) as answer:
                document: Any = json.load(answer)
        except (OSError, HTTPException, ValueError):
            return None
        directory = self.settings().run.directory
        is_own = isinstance(document, dict) and document.get("directory") == directory
        return document if is_own else None

    def stored(self, lineage: Lineage, bad: Sequence[Source]) -> StoredVersion:
        """Return the newest committed version from which the run could resume."""
        excluded = frozenset(map(checkpoint_name, bad_sources.in_storage(bad, lineage)))
        root = join(self.path, CHECKPOINTS)
        found = find_committed(self.store, root, lineage=lineage, exclude=excluded)
        if found is None:
            return StoredVersion()
        files = found.checkpoint.manifest.files
        sizes = tuple(files[name].num_bytes for name in sorted(files))
        return StoredVersion(step=found.step, attempt=found.attempt, part_bytes=sizes)

    def best(self, lineage: Lineage | None = None) -> dict[str, Any] | None:
        """Return the best step that the newest checkpoint names, and its value; None without one.

        The ``lineage`` is read from the journal by default.
        """
        lineage = self.state().lineage if lineage is None else lineage
        found = find_committed(self.store, join(self.path, CHECKPOINTS), lineage=lineage)
        best = found.checkpoint.manifest.extra.get(BEST) if found is not None else None
        if not best or not best["kept"]:
            return None
        step, value = best["kept"][0]
        return {"step": step, best["value"]: value}

    def safe_text(self) -> str:
        """Return which step is safe without the cluster, and how to resume from it."""
        try:
            state = self.state()
            step = self.stored(state.lineage, state.bad).step
        except (UcpError, OrchestratorError) as error:
            return f"The safe step could not be read: {error}"
        if not step:
            return "No step is in storage yet; the same command starts the run again"
        return f"Step {step} is safe in storage; the same command resumes from it"

    def last_step(self) -> tuple[int, float | None]:
        """Return the last recorded step and its loss, which is None if it is not a number.

        Return (0, None) before the first step. Workers also record it while no controller runs.
        """
        for line in reversed(appended_text(self.store, join(self.path, METRICS)).splitlines()):
            try:
                found = json.loads(line)
                loss = found["loss"]
                return int(found["step"]), None if loss is None else float(loss)
            except (ValueError, KeyError):
                continue  # The last line may be incomplete.
        return 0, None

    def _document(self, name: str) -> dict[str, Any] | None:
        path = join(self.path, name)
        if not self.store.exists(path):
            return None
        document: dict[str, Any] = json.loads(self.store.read(path))
        return document
