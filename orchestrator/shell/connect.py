"""Connect this process to a Ray cluster, quietly."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Mapping

import ray
from ray._private import worker as ray_worker

from orchestrator.errors import ConfigError
from orchestrator.shell.local import local_clusters

#: A cluster that is there accepts a connection in milliseconds, also from far away.
ANSWER_S = 10.0
#: Ray's own words do not say so: whoever asks without the token is turned away like a stranger.
_AUTH = "if it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
_OWN_NAMES = frozenset({"127.0.0.1", "localhost"})


def connect_ray(address: str, *, namespace: str | None = None) -> None:
    """Join the cluster at ``address``; none of its logs reach our output.

    Raises:
        ConnectionError: Nothing answers there.
        RayError: What answers does not want this process.
        ConfigError: This process has another version of Ray or Python than the cluster.
    """
    why = why_silent(address)
    if why:  # Ray would look for a cluster for minutes
        raise ConnectionError(why)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if any(entry.address == address for entry in local_clusters()):
        # They ask for no token, also where the user has one for other clusters.
        os.environ["RAY_AUTH_MODE"] = "disabled"
    # Ray 2.60 prints a raylet's lines about dead workers to our stdout whatever log_to_driver says.
    # --json must stay clean, and a run's incidents say the same.
    ray_worker.print_to_stdstream = _drop
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address,
            namespace=namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except ConnectionError as error:
        raise ConnectionError(f"{error}; {_AUTH}") from error
    except RuntimeError as error:
        said = " ".join(str(error).split())
        raise ConfigError(
            f"this process cannot join the Ray cluster at {address}: {said.rstrip('.')}. "
            "`ray job submit` runs a command with the cluster's own versions",
            problems=[said],
        ) from error
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray has set its own, which ends the process


def why_silent(address: str, *, timeout_s: float = ANSWER_S) -> str:
    """Return why nothing accepts a connection at ``address``; "" if something does.

    Addresses such as "auto" and "ray://host:port" are Ray's to understand: nothing is said of them.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "/" in host:
        return ""
    # A head may listen at its node's address only, which Ray uses for the machine's own names.
    own = [ray.util.get_node_ip_address()] if host in _OWN_NAMES else []
    why = ""
    for name in (host.strip("[]"), *own):
        try:
            socket.create_connection((name, int(port)), timeout=timeout_s).close()
        except OSError as error:
            why = str(error)
        else:
            return ""
    return why


def head_returns(environment: Mapping[str, str]) -> bool:
    """Return whether a head comes back as the same cluster: what it knows is kept elsewhere.

    Args:
        environment: Of the head's processes.
    """
    kept = environment.get("RAY_gcs_storage", "memory")
    return bool(environment.get("RAY_REDIS_ADDRESS")) or kept != "memory"


def _drop(*_: object, **__: object) -> None:
    """Print nothing."""
