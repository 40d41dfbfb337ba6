"""Follow the metrics of a run in a separate thread and write them to the services.

The run never waits for a service: one that refuses points gets them again later. The run directory
records how far each file was read and written, and each service's own id of the run. So restarted
controllers and resumed runs continue the same curve.
"""

import json
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Final

from pydantic import TypeAdapter

from orchestrator.config import RunConfig
from orchestrator.report import LOGGERS, Tail
from orchestrator.shell.loggers.curve import FILES, Curve, Point
from orchestrator.shell.loggers.services import SERVICES, Service, first_ids
from ucp_core.errors import StorageError, SupersededError
from ucp_core.storage import RECENT_S, Owner, Store, join
from workers.repeated import Repeated

#: How often the files are read.
_LOOK_S: Final = 2.0
#: The same if each read is a request.
_LOOK_REMOTE_S: Final = 10.0
#: A service that refused is tried again after this many reads.
_ROUNDS: Final = 10
#: How long the end of a run waits for its services, which may be gone.
CLOSE_S: Final = 60.0
#: Most points to keep for a service that does not take them; the oldest are dropped.
_BACKLOG_MAX: Final = 100_000

log = logging.getLogger(__name__)


class Loggers:
    """The services that ``config.logging`` names; without any it does nothing.

    The run directory is ``path`` in ``store``; ``owner`` checks that this claim on it still counts.
    """

    def __init__(self, config: RunConfig, *, store: Store, path: str, owner: Owner) -> None:
        self._store, self._path, self._owner = store, path, owner
        self._tails = {name: Tail(store, join(path, name)) for name in FILES}
        self._curve = Curve()
        self._channels = {
            name: _Channel(name, run_id, partial(SERVICES[name], config))
            for name, run_id in first_ids(config).items()
        }
        self._look_s = _LOOK_S if store.appends else _LOOK_REMOTE_S
        self._ends = threading.Event()
        self._outcome = ""
        self._thread = threading.Thread(target=self._follow, name="loggers", daemon=True)

    def start(self) -> None:
        """Start to follow the metrics."""
        if self._channels:
            self._thread.start()

    def close(self, outcome: str, timeout_s: float = CLOSE_S) -> None:
        """Write the last steps, and end the services' runs; return after ``timeout_s`` at most.

        ``outcome`` says how the run ended; "" if it continues under another controller.
        """
        self._outcome = outcome
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.warning("%s may lack the last steps", ", ".join(sorted(self._channels)))

    def document(self) -> dict[str, str]:
        """Return the problem of each service; "" if it has none."""
        return {name: channel.problem for name, channel in self._channels.items()}

    def _follow(self) -> None:
        is_loaded = is_last = False
        failures = Repeated(log)
        while not is_last:
            is_last = self._ends.wait(self._look_s)
            try:
                if not is_loaded:
                    self._load()
                    is_loaded = True
                self._round(is_final=is_last and bool(self._outcome))
                failures.passed()
            except SupersededError:
                # Another claim on the directory counts now, and its controller writes the curve.
                break
            except StorageError as error:
                failures.failed("the metrics for services of curves cannot be read", error)
        for channel in self._channels.values():
            channel.close(self._outcome)

    def _load(self) -> None:
        """Continue where an earlier process stopped; begin at the start for a new service."""
        self._owner.require(within_s=RECENT_S)
        path = join(self._path, LOGGERS)
        noted = json.loads(self._store.read(path)) if self._store.exists(path) else {}
        known = noted.get("services", {})
        resumed = [one.resume(*known.get(name, ("", -1))) for name, one in self._channels.items()]
        if all(resumed):
            self._curve = TypeAdapter(Curve).validate_python(noted["curve"])
            for name, at_bytes in noted["read"].items():
                self._tails[name].at_bytes = at_bytes
        else:
            # Record the ids before a service gets points: a controller that restarts now must not
            # begin a second run there.
            self._note()

    def _round(self, *, is_final: bool) -> None:
        self._owner.require(within_s=RECENT_S)
        for name, tail in self._tails.items():
            for text in tail.new():
                self._curve.add(name, text.splitlines())
        points = self._curve.take(is_final=is_final)
        before = self._noted()
        for channel in self._channels.values():
            channel.write(points, is_last=self._ends.is_set())
        if self._noted() != before and not any(one.backlog for one in self._channels.values()):
            self._note()

    def _noted(self) -> dict[str, tuple[str, int]]:
        return {name: (one.run_id, one.written) for name, one in self._channels.items()}

    def _note(self) -> None:
        document = {
            "services": self._noted(),
            "curve": asdict(self._curve),
            "read": {name: tail.at_bytes for name, tail in self._tails.items()},
        }
        data = json.dumps(document, indent=1).encode()
        self._store.write_atomic(join(self._path, LOGGERS), data, fsync=False)


class _Channel:
    """The connection to one service, which may be unreachable."""

    def __init__(self, name: str, run_id: str, opened: Callable[[str, int], Service]) -> None:
        self._name, self._open = name, opened
        self._service: Service | None = None
        self._rounds_left = 0
        self.run_id, self.written = run_id, -1
        self.backlog: deque[Point] = deque(maxlen=_BACKLOG_MAX)
        self.problem = ""

    def resume(self, run_id: str, written: int) -> bool:
        """Continue the service's run ``run_id`` if there is one; return whether there is."""
        is_moved = self._name == "tensorboard" and run_id != self.run_id
        if not run_id or is_moved:
            return False
        self.run_id, self.written = run_id, written
        return True

    def write(self, points: list[Point], *, is_last: bool) -> None:
        """Write earlier points that are left, then ``points``. Never fails."""
        self.backlog.extend(points)
        self._rounds_left -= 1
        if not self.backlog or (self._rounds_left > 0 and not is_last):
            return
        try:
            if self._service is None:
                self._service = self._open(self.run_id, self.written)
                self.run_id = self._service.run_id
                self.written = max(self.written, self._service.written)
            new = [point for point in self.backlog if point.step > self.written]
            self._service.write(new)
        except Exception as error:  # noqa: BLE001  a service's own errors, of any kind
            self._failed(error)
            return
        self.problem = ""
        if new:
            self.written = new[-1].step
        self.backlog.clear()

    def close(self, outcome: str) -> None:
        """End the service's run. Never fails."""
        if self._service is not None:
            try:
                self._service.close(outcome)
            except Exception as error:  # noqa: BLE001  a service's own errors, of any kind
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        problem = f"{type(error).__name__}: {error}"
        if problem != self.problem:
            log.warning("%s cannot be written now, will try again: %s", self._name, problem)
        self.problem = problem
        self._rounds_left = _ROUNDS
