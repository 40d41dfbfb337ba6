"""The Ray cluster of a run: connect to it, and notice when it is gone."""

import os
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from orchestrator.config import RunConfig
from orchestrator.driver.run import Run
from orchestrator.errors import CapacityError, OrchestratorError
from orchestrator.shell import (
    CONTROLLER,
    HostedCluster,
    RunNames,
    connect_ray,
    is_another_head,
    run_id,
    why_silent,
)
from ucp_core.errors import UcpError
from workers.process import gpus_here
from workers.protocol import LEAVE_SHARE
from workers.telemetry import lease_s

#: The resource of the head, where the controller runs.
HEAD = "node:__internal_head__"
#: A cluster is gone for good if its head accepts no connection for this long.
GONE_S = 15.0
#: Period of checks of the head.
_LOOK_S = 2.0
#: Period of checks of a run.
FOLLOW_S = 0.25
#: A new controller answers within this time; it took 1 to 8 s on a busy 2-core machine.
CONTROLLER_START_S = 90.0


class ClusterWatch:
    """Notices that the cluster of a run is gone.

    ``is_alive`` returns whether its processes live, if this process started them.
    """

    def __init__(
        self, run: Run, address: str, *, is_alive: Callable[[], bool] = lambda: True
    ) -> None:
        self._run, self._address, self._is_alive = run, address, is_alive
        self._looked_s = self._heard_s = time.monotonic()

    def await_head(self, say: Callable[[str], None]) -> None:
        """Wait for an absent head that will return; call ``say`` before the wait.

        Raises:
            CapacityError: It did not return while trainers still wait for it.
        """
        if not self._returns() or not why_silent(self._address, timeout_s=_LOOK_S):
            return
        say(
            f"the head at {self._address} does not answer; training continues without it. "
            f"Waiting up to {self._patience_s():g} s for it to come back ..."
        )
        while why_silent(self._address, timeout_s=_LOOK_S):
            self.require()
            time.sleep(_LOOK_S)

    def _returns(self) -> bool:
        """Return whether a lost head comes back with its state; False if unknown."""
        try:
            return bool(self._run.contact().get("head_returns"))
        except (UcpError, OrchestratorError):
            return False

    def _patience_s(self) -> float:
        # Ray silently ends a driver process at the end of this time.
        return LEAVE_SHARE * lease_s(os.environ) if self._returns() else GONE_S

    def require(self) -> None:
        """Raise ``CapacityError`` with the newest step in storage if the cluster is gone."""
        now_s, is_alive = time.monotonic(), self._is_alive()
        if is_alive and now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        why = why_silent(self._address, timeout_s=_LOOK_S)
        if not why:
            self._heard_s = now_s
        if is_alive and (why == "" or now_s - self._heard_s < self._patience_s()):
            return
        raise CapacityError(
            f"the Ray cluster at {self._address} is gone{f': {why}' if why else ''}. "
            f"{self._run.safe_text()}",
            address=self._address,
        )


def wait(until: Callable[[], bool]) -> None:
    """Wait until ``until`` returns true, for at most ``CONTROLLER_START_S``."""
    deadline_s = time.monotonic() + CONTROLLER_START_S
    while not until() and time.monotonic() < deadline_s:
        time.sleep(FOLLOW_S)


def on_head(function: Callable[..., Any], *arguments: Any) -> Any:
    """Start a task on the head, where the controller runs; return Ray's reference to its result."""
    task: Any = ray.remote(function).options(num_cpus=0, resources={HEAD: 0.001})
    return task.remote(*arguments)


def has_controller(address: str, namespace: str) -> bool:
    """Return whether Ray knows a run's controller, alive or restarting.

    This process must be connected to the cluster at ``address``.
    """
    if why_silent(address, timeout_s=_LOOK_S):
        return True  # The head does not answer, and Ray would ask for a minute.
    if is_another_head(address):
        return False
    try:
        ray.get_actor(CONTROLLER, namespace=namespace)
    except ValueError:
        return False
    except RayError:
        pass
    return True


def open_cluster(config: RunConfig) -> HostedCluster | None:
    """Connect to the cluster that the run names, or start its simulated nodes.

    Raise ``CapacityError`` if no cluster answers.
    """
    cluster = None
    address = config.cluster.address
    if address is None:
        cluster = HostedCluster(
            num_nodes=config.cluster.local_nodes,
            cpus_per_node=config.cpus_per_local_node(),
            gpus=gpus_here() if config.cluster.gpus_per_worker else (),
        )
        address = cluster.address
    join_cluster(
        address,
        namespace=RunNames(run_id(config.run.directory)).namespace,
        advice=". Start one with `ray start --head`, or leave cluster.address out to use simulated "
        "nodes on this machine.",
    )
    return cluster


def join_cluster(address: str, *, namespace: str | None = None, advice: str = "") -> None:
    """Connect this process to the cluster at ``address``.

    Raises:
        CapacityError: Nothing answers there; ``advice`` is added to the reason.
        ConfigError: This process and the cluster have different versions of Ray or Python.
    """
    try:
        connect_ray(address, namespace=namespace)
    except (RayError, OSError) as error:
        raise CapacityError(
            f"no Ray cluster answers at {address}: {error}{advice}", address=address
        ) from error
