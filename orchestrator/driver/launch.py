"""The driver: create or find the run's controller, and follow the run until it is over.

The driver owns nothing that the run needs. Killing it leaves the run going; starting it again
on the same run directory attaches to the controller that is there. Where there is none, because
the run was stopped, has failed, or lost its cluster, it goes on from its last committed step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from orchestrator.config import RunConfig, load
from orchestrator.driver.continuing import require_continuable, require_same
from orchestrator.driver.start_order import taking_turns
from orchestrator.errors import CapacityError
from orchestrator.run_directory import CONFIG, CONTACT, SUMMARY
from orchestrator.shell import OPTIONS, Controller, HostedCluster, RunNames, connect_ray, next_life
from ucp_core.storage import join, open_store

#: How often a followed run is looked at.
FOLLOW_S = 0.25
#: A new controller must answer within this; it took 1 to 8 s on a busy 2-core machine.
CONTROLLER_START_S = 90.0
#: One that is there answers within this; it took 1 to 50 ms.
ANSWER_S = 3.0


def run_id(directory: str) -> str:
    """Return the id of the run in ``directory``: readable, and equal for equal directories."""
    where = directory if "://" in directory else str(Path(directory).resolve())
    name = re.sub(r"[^a-zA-Z0-9]+", "-", Path(directory).name).strip("-").lower()[:24]
    return f"{name}-{hashlib.sha256(where.encode()).hexdigest()[:8]}"


class Launched:
    """A run that this process started or found.

    Args:
        config: The run's configuration; its directory is absolute.
        cluster: Simulated nodes of this machine, if the run has them.
    """

    def __init__(self, config: RunConfig, cluster: HostedCluster | None) -> None:
        self.config = config
        self.cluster = cluster
        self.names = RunNames(run_id(config.run.directory))
        self._store, self._path = open_store(config.run.directory)
        self._await_last()
        self._controller: Any = self._find_or_create()
        self.controller_pid(timeout_s=CONTROLLER_START_S)

    def _await_last(self) -> None:
        """Wait until the controller of a run that is over is gone: its summary comes before."""
        deadline_s = time.monotonic() + CONTROLLER_START_S
        while self.summary() is not None and time.monotonic() < deadline_s:
            try:
                ray.get_actor(self.names.controller, namespace=self.names.namespace)
            except ValueError:
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
                opening=next_life(self._store, self._path),
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

    def stop(self, reason: str) -> None:
        """Ask the run to stop at the next step boundary."""
        self._controller.stop.remote(reason)

    def summary(self) -> dict[str, Any] | None:
        """Return the run's summary, None before the run is over."""
        path = join(self._path, SUMMARY)
        if not self._store.exists(path):
            return None
        document: dict[str, Any] = json.loads(self._store.read(path))
        return document

    def follow(self, on_status: Callable[[dict[str, Any] | None], None]) -> dict[str, Any]:
        """Call ``on_status`` until the run is over; return its summary."""
        while (summary := self.summary()) is None:
            on_status(self.status())
            time.sleep(FOLLOW_S)
        return summary


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


def launch_run(config: RunConfig, *, say: Callable[[str], None] = lambda _: None) -> Launched:
    """Start the run in ``config``, let it go on, or attach to it if it goes on already.

    Args:
        config: Of the run.
        say: Is told what takes long.

    Raises:
        ConfigError: All its steps are done, or it was begun with what cannot be changed now.
        CapacityError: No cluster answers.
    """
    with taking_turns(config.run.directory, say=say) as require_turn:
        return _launch(config, say, require_turn)


def _launch(
    config: RunConfig, say: Callable[[str], None], require_turn: Callable[[], None]
) -> Launched:
    if is_going_on(config):
        require_same(config)
        return Launched(config, None)
    require_continuable(config)
    if config.cluster.address is None:
        say(f"starting {config.cluster.local_nodes} simulated nodes on this machine ...")
    cluster = open_cluster(config)
    try:
        if cluster is not None:
            # Before there is a controller: from then on the run does not need this process.
            cluster.stop_when(join(config.run.directory, SUMMARY))
        require_turn()
        launched = Launched(config, cluster)
        launched.await_contact()
    except BaseException:
        if cluster is not None:
            cluster.shutdown()
        raise
    return launched


def is_going_on(config: RunConfig) -> bool:
    """Return whether a controller has the run in its care; this process is connected to it then.

    It may be on a cluster that another driver started on this machine, wherever ``config`` would
    have the run now: two controllers in one directory would fence each other's workers.
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


def stop_run(url: str, contact: dict[str, Any], reason: str, *, say: Callable[[str], None]) -> None:
    """Ask the controller of the run in ``url`` to stop it; one that is ended takes no order.

    Args:
        url: The run directory.
        contact: Its ``controller.json``.
        reason: For the record.
        say: Is told what takes long.

    Raises:
        CapacityError: No controller answers, nor does the one that Ray would start after it.
    """
    try:
        connect_ray(contact["ray_address"])
        controller: Any = ray.get_actor(RunNames("").controller, namespace=contact["namespace"])
        order: Any = controller.stop.remote(reason)
        if not ray.wait([order], timeout=ANSWER_S)[0]:
            store, path = open_store(url)
            ended_s = load(store.read(join(path, CONFIG)).decode()).controller_stopped_s
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
            f"the controller does not answer at {contact['ray_address']}: {error}. Where its "
            "cluster is gone nothing trains any more; `everstep run` goes on from what is stored",
            address=contact["ray_address"],
        ) from error
