"""Create or find a run's controller.

The same command does three things. If a controller has the run in its care, it attaches to it. If
the run was stopped, has failed or lost its cluster, it resumes from the last committed step.
Otherwise it starts the run. On a cluster that exists by itself the run needs no driver; simulated
nodes end with the driver that started them, unless they are detached.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from orchestrator.config import RunConfig
from orchestrator.driver.launch_order import one_launch
from orchestrator.driver.logs import LogTail
from orchestrator.driver.resume import require_resumable, require_same
from orchestrator.driver.status import RunFiles
from orchestrator.errors import CapacityError, OrchestratorError
from orchestrator.run_directory import CONTACT, SUMMARY
from orchestrator.shell import (
    NAMESPACE_PREFIX,
    OPTIONS,
    Controller,
    HostedCluster,
    RunNames,
    connect_ray,
    local_clusters,
    next_incarnation,
    run_id,
    why_silent,
)
from ucp_core.errors import UcpError
from ucp_core.storage import join, open_store

#: How often a followed run is looked at.
FOLLOW_S = 0.25
#: A new controller must answer within this; it took 1 to 8 s on a busy 2-core machine.
CONTROLLER_START_S = 90.0
#: One that is there answers within this; it took 1 to 50 ms.
ANSWER_S = 3.0
#: A cluster is gone if its head accepts no connection for so long. Ray itself ends the process of a
#: driver without a word after 60 s.
GONE_S = 15.0
#: How often the head is looked for.
_LOOK_S = 2.0


class Launched:
    """A run that this process started or found.

    Args:
        config: The run's configuration; its directory is absolute.
        cluster: Simulated nodes of this machine, if the run has them.
    """

    def __init__(self, config: RunConfig, cluster: HostedCluster | None) -> None:
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
        self._await_last()
        #: What rank 0 prints from now on.
        self.logs = LogTail(config.run.directory, rank=0)
        self.logs.skip()
        self._controller: Any = self._find_or_create()
        self.controller_pid(timeout_s=CONTROLLER_START_S)

    def _await_last(self) -> None:
        """Wait until the controller of a run that is over is gone: its summary comes before."""
        deadline_s = time.monotonic() + CONTROLLER_START_S
        while self.summary() is not None and time.monotonic() < deadline_s:
            if not self._has_controller():
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
                config_since=next_incarnation(self._store, self._path),
            )
        )

    def status(self) -> dict[str, Any] | None:
        """Return the controller's status, None while it does not answer."""
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
            ray.get(self._controller.note_fault.remote(kind, target), timeout=2.0)

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
        self._controller.stop.remote(reason)

    def summary(self) -> dict[str, Any] | None:
        """Return the run's summary, None before the run is over."""
        return self._files.summary()

    def follow(self, on_status: Callable[[dict[str, Any] | None], None]) -> dict[str, Any]:
        """Call ``on_status`` until the run is over; return its summary.

        Raises:
            CapacityError: The cluster or the run is gone; says which step is safe in storage.
        """
        while (summary := self.summary()) is None:
            self._watch.require()
            status = self.status()
            if status is None and not self._has_controller() and self.summary() is None:
                directory = self.config.run.directory
                raise CapacityError(
                    f"the run in {directory} was ended by force. {safe_text(directory)}",
                    path=directory,
                )
            on_status(status)
            time.sleep(FOLLOW_S)
        return summary

    def _has_controller(self) -> bool:
        """Return whether Ray knows the controller, alive or restarting."""
        if why_silent(self._address, timeout_s=_LOOK_S):
            return True  # nobody can say, and Ray would ask for a minute
        try:
            ray.get_actor(self.names.controller, namespace=self.names.namespace)
        except ValueError:
            return False
        except RayError:
            pass
        return True


class ClusterWatch:
    """Notices that the cluster of a run is gone.

    Args:
        address: Of its head.
        url: The run directory.
        is_alive: Says whether its processes live, where this process started them.
    """

    def __init__(
        self, address: str, url: str, *, is_alive: Callable[[], bool] = lambda: True
    ) -> None:
        self._address = address
        self._url = url
        self._is_alive = is_alive
        self._looked_s = self._heard_s = time.monotonic()

    def require(self) -> None:
        """Raise ``CapacityError`` with the step that is safe if the cluster is gone."""
        now_s, is_alive = time.monotonic(), self._is_alive()
        if is_alive and now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        why = why_silent(self._address, timeout_s=_LOOK_S)
        if not why:
            self._heard_s = now_s
        if is_alive and now_s - self._heard_s < GONE_S:
            return
        raise CapacityError(
            f"the Ray cluster at {self._address} is gone{f': {why}' if why else ''}. "
            f"{safe_text(self._url)}",
            address=self._address,
        )


def safe_text(url: str) -> str:
    """Return what is left of the run in ``url`` without its cluster, and how it resumes."""
    try:
        step = RunFiles(url).stored_step()
    except (UcpError, OrchestratorError) as error:
        return f"Which step is safe could not be read: {error}"
    if not step:
        return "No step is in storage yet; the same command starts the run again"
    return f"Step {step} is safe in storage; the same command resumes from it"


def open_cluster(config: RunConfig) -> HostedCluster | None:
    """Connect to the cluster that the run asks for; start simulated nodes if it asks for those.

    ``cluster.address``, else ``RAY_ADDRESS`` (set inside ``ray job submit``), else nodes on
    this machine. Raises ``CapacityError`` if nothing answers.
    """
    cluster = None
    address = config.cluster.address
    if address is None:
        cluster = HostedCluster(
            num_nodes=config.cluster.local_nodes, cpus_per_node=config.cpus_per_local_node()
        )
        address = cluster.address
        os.environ["RAY_AUTH_MODE"] = "disabled"
    try:
        connect_ray(address, namespace=RunNames(run_id(config.run.directory)).namespace)
    except (ConnectionError, RayError, OSError) as error:
        raise CapacityError(
            f"no Ray cluster answers at {address}: {error}. Start one with `ray start --head`, "
            "or leave cluster.address out to use simulated nodes on this machine.",
            address=address,
        ) from error
    return cluster


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
        if _is_under_way(config):
            require_same(config)
            return Launched(config, None)
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


def _is_under_way(config: RunConfig) -> bool:
    """Return whether a controller has the run in its care; connect to its cluster if so.

    That may be another cluster than ``config`` names. Two controllers in one directory would
    fence each other's workers.
    """
    store, path = open_store(config.run.directory)
    if store.exists(join(path, SUMMARY)) or not store.exists(join(path, CONTACT)):
        return False
    address = json.loads(store.read(join(path, CONTACT)))["ray_address"]
    names = RunNames(run_id(config.run.directory))
    try:
        connect_ray(address, namespace=names.namespace)
        ray.get_actor(names.controller, namespace=names.namespace)
    except (ConnectionError, RayError, OSError):
        return False
    except ValueError:
        ray.shutdown()
        return False
    return True


def stop_run(url: str, reason: str, *, say: Callable[[str], None]) -> None:
    """Ask the controller of the run in ``url`` to stop it at the next step boundary.

    Args:
        url: The run directory.
        reason: For the record.
        say: Called with a line for people before something that takes long.

    Raises:
        RunNotFoundError: There is no run, or it is over.
        CapacityError: No controller answers, nor does the one that Ray would start after it.
    """
    run = RunFiles(url)
    contact = run.live_contact()
    try:
        connect_ray(contact["ray_address"])
        controller: Any = ray.get_actor(RunNames("").controller, namespace=contact["namespace"])
        order: Any = controller.stop.remote(reason)
        if not ray.wait([order], timeout=ANSWER_S)[0]:
            ended_s = run.config().controller_stopped_s
            say(
                "the controller does not answer yet; if a signal has stopped it, it is ended "
                f"after {ended_s:g} s and the next one is told. Waiting up to "
                f"{ended_s + CONTROLLER_START_S:g} s ..."
            )
            ray.get(order, timeout=ended_s + CONTROLLER_START_S)
        else:
            ray.get(order)
    except (ConnectionError, ValueError, RayError, TimeoutError) as error:
        raise CapacityError(
            f"the controller does not answer at {contact['ray_address']}: {error}. If its cluster "
            f"is gone, nothing trains any more. {safe_text(url)}",
            address=contact["ray_address"],
        ) from error


def await_end(url: str) -> dict[str, Any]:
    """Wait until the run in ``url`` is over and its controller gone; return its summary.

    Call it after ``stop_run``.

    Raises:
        CapacityError: Its cluster is gone.
    """
    run = RunFiles(url)
    contact = run.contact()
    watch = ClusterWatch(contact["ray_address"], url)
    while (summary := run.summary()) is None:
        watch.require()
        time.sleep(FOLLOW_S)
    deadline_s = time.monotonic() + CONTROLLER_START_S
    with contextlib.suppress(ValueError, RayError):
        while time.monotonic() < deadline_s:
            ray.get_actor(RunNames("").controller, namespace=contact["namespace"])
            time.sleep(FOLLOW_S)
    return summary


def kill_run(url: str) -> None:
    """End all processes of the run in ``url`` at once; steps since the last checkpoint are lost.

    Simulated nodes that were started for it end too.

    Raises:
        RunNotFoundError: There is no run, or it is over.
        CapacityError: Its cluster does not answer.
    """
    run = RunFiles(url)
    contact, directory = run.live_contact(), run.config().run.directory
    hosts = [entry for entry in local_clusters() if entry.run_directory == directory]
    for entry in hosts:
        os.killpg(entry.host_pid, signal.SIGKILL)
    if hosts:
        return
    try:
        connect_ray(contact["ray_address"])
    except (ConnectionError, RayError) as error:
        raise CapacityError(
            f"no Ray cluster answers at {contact['ray_address']}: {error}. Nothing trains there",
            address=contact["ray_address"],
        ) from error
    names = RunNames(contact["namespace"].removeprefix(NAMESPACE_PREFIX))
    actors = [
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["namespace"] == names.namespace
    ]
    # The controller first: it would start new workers.
    for name in sorted(actors, key=lambda name: name != names.controller):
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(name, namespace=names.namespace), no_restart=True)
    for group in ray.util.placement_group_table().values():
        if group["name"].startswith(names.slot_prefix):
            with contextlib.suppress(ValueError):
                ray.util.remove_placement_group(ray.util.get_placement_group(group["name"]))
