"""Create or find a run's controller.

The same command does three things. If a controller has the run in its care, it attaches to it. If
the run was stopped, has failed or lost its cluster, it resumes from the last committed step.
Otherwise it starts the run. On a cluster that exists by itself the run needs no driver; simulated
nodes end with the driver that started them, unless they are detached.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from orchestrator.config import RunConfig
from orchestrator.driver.changes import require_resumable, require_same
from orchestrator.driver.cluster import ClusterWatch, has_controller, open_cluster, safe_text
from orchestrator.driver.launch_order import one_launch
from orchestrator.driver.logs import LogTail
from orchestrator.driver.status import RunFiles
from orchestrator.errors import CapacityError
from orchestrator.run_directory import CONTACT, SUMMARY
from orchestrator.shell import (
    OPTIONS,
    Controller,
    HostedCluster,
    RunNames,
    connect_ray,
    run_id,
)
from ucp_core.errors import StorageError
from ucp_core.storage import RECENT_S, Owner, join, next_life, open_store

#: How often a followed run is looked at.
FOLLOW_S = 0.25
#: A new controller must answer within this; it took 1 to 8 s on a busy 2-core machine.
CONTROLLER_START_S = 90.0


class Launched:
    """A run that this process started or found.

    Args:
        config: The run's configuration; its directory is absolute.
        cluster: Simulated nodes of this machine, if the run has them.
        attach: Only look for a controller. The run may be over before that is found.
    """

    def __init__(
        self, config: RunConfig, cluster: HostedCluster | None, *, attach: bool = False
    ) -> None:
        self.config = config
        self.cluster = cluster
        self._address = ray.get_runtime_context().gcs_address
        self._watch = ClusterWatch(
            self._address,
            config.run.directory,
            is_alive=lambda: cluster is None or cluster.is_alive,
        )
        self._files = RunFiles(config.run.directory)
        self.names = RunNames(run_id(config.run.directory))
        self._store, self._path = open_store(config.run.directory)
        if not attach:
            self._await_last()
        #: What rank 0 prints from now on.
        self.logs = LogTail(config.run.directory, rank=0)
        self.logs.skip()
        self._controller: Any = self._find() if attach else self._find_or_create()
        if not attach:
            self.controller_pid(timeout_s=CONTROLLER_START_S)
        #: As the life of the run sees it that this process follows.
        self._owner = Owner(self._store, self._path, next_life(self._store, self._path) - 1)

    def _await_last(self) -> None:
        """Wait until the controller of a run that is over is gone: its summary comes before."""
        deadline_s = time.monotonic() + CONTROLLER_START_S
        while self.summary() is not None and time.monotonic() < deadline_s:
            if not has_controller(self._address, self.names.namespace):
                return
            time.sleep(FOLLOW_S)

    def await_contact(self) -> None:
        """Wait until other commands can find the controller: it is in charge a little earlier."""
        deadline_s = time.monotonic() + CONTROLLER_START_S
        path = join(self._path, CONTACT)
        while self.summary() is None and time.monotonic() < deadline_s:
            with contextlib.suppress(RayError, TimeoutError):
                pid = self.controller_pid()
                if self._store.exists(path) and json.loads(self._store.read(path))["pid"] == pid:
                    return
            time.sleep(FOLLOW_S)

    def _find(self) -> Any:
        try:
            return ray.get_actor(self.names.controller, namespace=self.names.namespace)
        except ValueError:
            return None

    def _find_or_create(self) -> Any:
        options = {
            **OPTIONS,
            "name": self.names.controller,
            "namespace": self.names.namespace,
            "lifetime": "detached",
            "get_if_exists": True,
            # The head's resource and not its id: a rebooted head has a new id.
            "resources": {"node:__internal_head__": 0.001},
        }
        return (
            ray.remote(Controller)
            .options(**options)
            .remote(
                run_id=self.names.run_id,
                config=self.config.model_dump(mode="json"),
                life=next_life(self._store, self._path),
                token=secrets.token_hex(8),
            )
        )

    def status(self) -> dict[str, Any] | None:
        """Return the controller's status, None while it does not answer."""
        if self._controller is None:
            return None
        try:
            answer: dict[str, Any] = ray.get(self._controller.status.remote(), timeout=2.0)
        except (RayError, TimeoutError):
            return None
        return answer

    def controller_pid(self, *, timeout_s: float = 5.0) -> int:
        """Return the process id of the controller. Raises ``RayError`` while it is down."""
        return int(ray.get(self._controller.pid.remote(), timeout=timeout_s))

    def note_fault(self, kind: str, target: str) -> None:
        """Write down that a fault is injected now, for the incident's ``t_fault_s``."""
        with contextlib.suppress(RayError):
            token = self._files.token()
            ray.get(self._controller.note_fault.remote(kind, target, token), timeout=2.0)

    def what_continues(self) -> str:
        """Return what becomes of the run when this process leaves it, for people."""
        directory = self.config.run.directory
        if self.cluster is not None:
            return f"the simulated nodes are stopped. {safe_text(directory)}"
        return (
            f"the run continues; the same command follows it, `everstep stop {directory}` stops it"
        )

    def stop(self, reason: str) -> None:
        """Ask the run to stop at the next step boundary."""
        if self._controller is not None:
            self._controller.stop.remote(reason, self._files.token())

    def summary(self) -> dict[str, Any] | None:
        """Return the run's summary, None before the run is over."""
        return self._files.summary()

    def _summary_so_far(self) -> dict[str, Any] | None:
        # What storage does not tell during an outage it tells later: the run trains on meanwhile.
        with contextlib.suppress(StorageError):
            return self._summary_of_ours()
        return None

    def _summary_of_ours(self, *, within_s: float = RECENT_S) -> dict[str, Any] | None:
        # One that cannot be reached is for ``ClusterWatch`` and the controller to judge.
        with contextlib.suppress(StorageError):
            self._owner.require(within_s=within_s)
        return self.summary()

    def follow(self, on_status: Callable[[dict[str, Any] | None], None]) -> dict[str, Any]:
        """Call ``on_status`` until the run is over; return its summary.

        Raises:
            CapacityError: The cluster or the run is gone; says which step is safe in storage.
            SupersededError: The run goes on elsewhere; this life of it has ended.
        """
        while (summary := self._summary_so_far()) is None:
            self._watch.require()
            status = self.status()
            if (
                status is None
                and not has_controller(self._address, self.names.namespace)
                # It may have ended because it saw first that another life took over.
                and self._summary_of_ours(within_s=0.0) is None
            ):
                directory = self.config.run.directory
                raise CapacityError(
                    f"the run in {directory} was ended by force. {safe_text(directory)}",
                    path=directory,
                )
            on_status(status)
            time.sleep(FOLLOW_S)
        return summary


def launch_run(
    config: RunConfig, *, detach: bool = False, say: Callable[[str], None] = lambda _: None
) -> Launched:
    """Start the run in ``config``, resume it, or attach to it.

    Args:
        config: Of the run.
        detach: Let simulated nodes that are started for it outlive this process.
        say: Called with a line for people before something that takes long.

    Raises:
        ConfigError: All its steps are done, or a setting changed that may not change now.
        CapacityError: No cluster answers.
    """
    with one_launch(config.run.directory, say=say) as require_alone:
        if _is_under_way(config, say):
            require_same(config)
            return Launched(config, None, attach=True)
        require_resumable(config)
        if config.cluster.address is None:
            say(f"starting {config.cluster.local_nodes} simulated nodes on this machine ...")
        cluster = open_cluster(config)
        try:
            if cluster is not None:
                cluster.serve_run(config.run.directory, detached=detach)
            require_alone()
            launched = Launched(config, cluster)
            launched.await_contact()
        except BaseException:
            if cluster is not None:
                cluster.shutdown()
            raise
        return launched


def _is_under_way(config: RunConfig, say: Callable[[str], None]) -> bool:
    """Return whether a controller has the run in its care; connect to its cluster if so.

    A head that is away and will come back is waited for: its trainers go on.
    That may be another cluster than ``config`` names. Two controllers in one directory would
    fence each other's workers.
    """
    store, path = open_store(config.run.directory)
    if store.exists(join(path, SUMMARY)) or not store.exists(join(path, CONTACT)):
        return False
    address = json.loads(store.read(join(path, CONTACT)))["ray_address"]
    names = RunNames(run_id(config.run.directory))
    try:
        ClusterWatch(address, config.run.directory).await_head(say)
        connect_ray(address, namespace=names.namespace)
    except (CapacityError, ConnectionError, RayError, OSError):
        return False
    if has_controller(address, names.namespace):
        return True
    ray.shutdown()
    return False
