"""Start a run, resume it, or attach to it.

The same command does one of three things. If a controller leads the run, it attaches to it. If the
run was stopped, has failed or lost its cluster, it resumes from the last committed step. Otherwise
it starts the run. On an existing cluster the run needs no driver; simulated nodes end with the
driver that started them, unless they are detached.
"""

import contextlib
import secrets
import time
from collections.abc import Callable
from shlex import quote
from typing import Any

import ray
from ray.exceptions import RayError

from orchestrator.config import RunConfig
from orchestrator.driver.changes import require_resumable, require_same
from orchestrator.driver.cluster import (
    CONTROLLER_START_S,
    FOLLOW_S,
    HEAD,
    ClusterWatch,
    has_controller,
    join_cluster,
    open_cluster,
    wait,
)
from orchestrator.driver.launch_order import one_launch
from orchestrator.driver.logs import LogTail
from orchestrator.driver.run import Run
from orchestrator.errors import CapacityError, RunNotFoundError
from orchestrator.shell import CONTROLLER, OPTIONS, Controller, HostedCluster, RunNames, run_id
from ucp_core.errors import StorageError
from ucp_core.numerics import counted
from ucp_core.storage import RECENT_S, Owner, held, next_claim, open_store


class Launched(Run):
    """A run that this process started or found.

    Args:
        config: The run's configuration; its directory is absolute.
        cluster: Simulated nodes on this machine, if the run has them.
        attach: Only look for a controller. The run may end before one is found.
    """

    def __init__(
        self, config: RunConfig, cluster: HostedCluster | None, *, attach: bool = False
    ) -> None:
        super().__init__(config.run.directory)
        self.config = config
        self.cluster = cluster
        self.names = RunNames(run_id(self.url))
        self._address = ray.get_runtime_context().gcs_address
        self._watch = ClusterWatch(
            self, self._address, is_alive=lambda: cluster is None or cluster.is_alive
        )
        if not attach:
            # The controller writes the summary before it ends.
            wait(lambda: not self.is_over() or not self._has_controller())
        #: The lines that rank 0 prints from now on.
        self.logs = LogTail(self.url, rank=0)
        self.logs.skip()
        self._controller: Any = self._find() if attach else self._find_or_create()
        if not attach:
            self.controller_pid(timeout_s=CONTROLLER_START_S)
        #: The claim of the run that this process follows.
        self._owner = Owner(self.store, self.path, next_claim(self.store, self.path) - 1)

    def await_contact(self) -> None:
        """Wait until other commands can find the controller, which takes over a little earlier."""

        def is_found() -> bool:
            with contextlib.suppress(RayError, TimeoutError, RunNotFoundError):
                return bool(self.contact()["pid"] == self.controller_pid())
            return False

        wait(lambda: self.is_over() or is_found())

    def _has_controller(self) -> bool:
        return has_controller(self._address, self.names.namespace)

    def _find(self) -> Any:
        try:
            return ray.get_actor(CONTROLLER, namespace=self.names.namespace)
        except ValueError:
            return None

    def _find_or_create(self) -> Any:
        create: Any = ray.remote(Controller).options(
            **OPTIONS,
            name=CONTROLLER,
            namespace=self.names.namespace,
            lifetime="detached",
            get_if_exists=True,
            # By the head's resource instead of its id: a rebooted head has a new id.
            resources={HEAD: 0.001},
        )
        return create.remote(
            run_id=self.names.run_id,
            config=self.config.model_dump(mode="json"),
            claim=next_claim(self.store, self.path),
            token=secrets.token_hex(8),
        )

    def status(self) -> dict[str, Any] | None:
        """Return the controller's status; None while it does not answer."""
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
        """Record that a fault is injected now, for the incident's ``t_fault_s``."""
        with contextlib.suppress(RayError):
            token = self.token()
            ray.get(self._controller.note_fault.remote(kind, target, token), timeout=2.0)

    def what_continues(self) -> str:
        """Return, for people, what happens to the run when this process leaves it."""
        if self.cluster is not None:
            return f"the simulated nodes are stopped. {self.safe_text()}"
        stop = f"everstep stop {quote(self.url)}"
        return f"the run continues; the same command follows it, `{stop}` stops it"

    def stop(self, reason: str) -> None:
        """Ask the run to stop at the next step boundary."""
        if self._controller is not None:
            self._controller.stop.remote(reason, self.token())

    def _summary_of_ours(self, *, within_s: float = RECENT_S) -> dict[str, Any] | None:
        # ``ClusterWatch`` and the controller judge storage that cannot be reached.
        with contextlib.suppress(StorageError):
            self._owner.require(within_s=within_s)
        return self.summary()

    def follow(self, on_status: Callable[[dict[str, Any] | None], None]) -> dict[str, Any]:
        """Call ``on_status`` until the run is over; return its summary.

        Raises:
            CapacityError: The cluster or the run is gone; the message names the safe step in
                storage.
            SupersededError: The run continues elsewhere, under a newer claim.
        """
        while True:
            # During an outage of storage the run continues to train, and its summary is read later.
            with contextlib.suppress(StorageError):
                if (summary := self._summary_of_ours()) is not None:
                    return summary
            self._watch.require()
            status = self.status()
            if (
                status is None
                and not self._has_controller()
                # The controller may have ended because it saw the newer claim first.
                and self._summary_of_ours(within_s=0.0) is None
            ):
                raise CapacityError(
                    f"the run in {self.url} was ended by force, or its head lost its state. "
                    f"{self.safe_text()}",
                    path=self.url,
                )
            on_status(status)
            time.sleep(FOLLOW_S)


def launch_run(
    config: RunConfig, *, detach: bool = False, say: Callable[[str], None] = lambda _: None
) -> Launched:
    """Start the run in ``config``, resume it, or attach to it.

    With ``detach``, simulated nodes started for it outlive this process. ``say`` is called with a
    line for people before a long wait.

    Raises:
        ConfigError: All its steps are done, or a setting changed that must not change now.
        CapacityError: No cluster answers.
        HeldError: A script trains alone in the directory.
    """
    with one_launch(config.run.directory, say=say):
        if _is_under_way(config, say):
            require_same(config)
            return Launched(config, None, attach=True)
        store, path = open_store(config.run.directory)
        if store.list(path):  # Otherwise the directory is new, or a launch in it was refused.
            with held(store, path, shared=True):
                require_resumable(config)
        if config.cluster.address is None:
            nodes = counted(config.cluster.local_nodes, "simulated node")
            say(f"starting {nodes} on this machine ...")
        cluster = open_cluster(config)
        try:
            if cluster is not None:
                cluster.serve_run(config.run.directory, detached=detach)
            launched = Launched(config, cluster)
            launched.await_contact()
        except BaseException:
            if cluster is not None:
                cluster.shutdown()
            raise
        return launched


def _is_under_way(config: RunConfig, say: Callable[[str], None]) -> bool:
    """Return whether a controller leads the run; if so, connect to its cluster.

    Wait for an absent head that will return: its trainers continue. The cluster may be another one
    than ``config`` names. Two controllers in one directory would fence each other's workers.
    """
    run, namespace = Run(config.run.directory), RunNames(run_id(config.run.directory)).namespace
    if run.is_over():
        return False
    try:
        address = run.contact()["ray_address"]
        ClusterWatch(run, address).await_head(say)
        join_cluster(address, namespace=namespace)
    except (RunNotFoundError, CapacityError):
        return False
    if has_controller(address, namespace):
        return True
    ray.shutdown()
    return False
