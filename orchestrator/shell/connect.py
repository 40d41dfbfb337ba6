"""Connect this process to a Ray cluster, quietly."""

import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.request import getproxies, proxy_bypass

import ray
from ray import _raylet
from ray._private import ray_constants
from ray._private import worker as ray_worker
from ray.job_config import JobConfig

from orchestrator.errors import ConfigError
from orchestrator.shell.local import local_clusters

#: A running cluster accepts a connection in milliseconds, even from far away.
ANSWER_S = 3.0
#: Ray's own message does not say that a process was refused because it has no token.
_AUTH = "if it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
_UV_HOOK = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
_OWN_NAMES = frozenset({"127.0.0.1", "localhost"})
#: A client's first bytes to a gRPC server: the preface of HTTP/2 and empty settings. The server's
#: own settings are its first frame (RFC 9113, 3.4).
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_FRAME_KIND, _SETTINGS = 3, 4


def connect_ray(address: str, *, namespace: str | None = None) -> None:
    """Join the cluster at ``address``; keep its logs out of our output.

    Raises:
        ConnectionError: Nothing answers there.
        RayError: The cluster refuses this process.
        ConfigError: This process and the cluster have different versions of Ray or Python.
    """
    why = why_silent(address) or _why_no_head(address)
    if why:  # Ray would look for a cluster for minutes
        raise ConnectionError(why)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if any(entry.address == address for entry in local_clusters()):
        # Local clusters need no token, even if the user has one for other clusters.
        os.environ["RAY_AUTH_MODE"] = "disabled"
    # Ray 2.60 prints a raylet's lines about dead workers to our stdout whatever log_to_driver is.
    # The output of --json must stay clean, and incidents report the same facts. The same thread of
    # Ray held up a command for a minute if its cluster ended just after the command connected.
    ray_worker.listen_error_messages = lambda *_, **__: None
    # Ray would put this command's working directory first on the path of its workers, where a
    # user's file such as attrs.py would shadow a library.
    job: Any = JobConfig
    job._py_driver_sys_path = property(lambda _: [], lambda *_: None)  # noqa: SLF001
    if _UV_HOOK not in os.environ:
        # Ray would let `uv run` build an environment for each worker, although nodes have their own
        # with the same versions as this one.
        ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
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
    except ValueError as error:
        said = " ".join(str(error).split())
        raise ConnectionError(f"an address is HOST:PORT of a head, or auto; {said}") from error
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

    Ray resolves addresses such as "auto"; they are not checked here.
    """
    host, port = _parts(address.removeprefix("ray://"))
    if not port:
        return ""
    try:
        _connected(host, port, timeout_s).close()
    except OSError as error:
        return str(error)
    return ""


def _connected(host: str, port: int, timeout_s: float) -> socket.socket:
    try:
        return socket.create_connection((host, port), timeout=timeout_s)
    except OSError:
        if host not in _OWN_NAMES:
            raise
        # A head may listen only at its node's address, which Ray also uses for the machine's own
        # names.
        own = ray.util.get_node_ip_address()
        return socket.create_connection((own, port), timeout=timeout_s)


def _parts(address: str) -> tuple[str, int]:
    """Return the host and the port; port 0 if the address has another form."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port) if port.isdecimal() and "/" not in host else 0


def _why_no_head(address: str) -> str:
    """Return why the server at HOST:PORT is not a head of Ray; "" if it is one."""
    host, port = _parts(address)
    if not port:
        return ""
    # With a server that does not speak gRPC, Ray's own client would write log lines for a minute.
    why = "" if os.environ.get("RAY_USE_TLS") else _why_no_grpc(host, port)
    if not why:
        _, why = _ask_head(address)
    if not why:
        return ""
    proxies = [f"{kind}_proxy" for kind in getproxies() if not proxy_bypass(host)]
    through = f"; {' and '.join(proxies)} is set, and no_proxy lacks this host" if proxies else ""
    return (
        f"something answers, but not the head of a cluster: {why}{through}. The port is the one "
        "that `ray start` prints, 6379 by default, not the dashboard's (8265) or clients' (10001)"
    )


def is_another_head(address: str) -> bool:
    """Return whether another cluster than the one this process joined has its head at ``address``.

    A head that was restarted without its old state has a new cluster id.
    """
    there, _ = _ask_head(address)
    worker: Any = ray_worker.global_worker
    return bool(there) and there != worker.gcs_client.cluster_id.hex()


def _ask_head(address: str) -> tuple[str, str]:
    """Return the id of the cluster whose head is at ``address``, or "" and why it is not known."""
    answers: list[tuple[str, str]] = []

    def ask() -> None:
        raylet: Any = _raylet
        try:
            answers.append((raylet.GcsClient(address=address).cluster_id.hex(), ""))
        except Exception as error:  # noqa: BLE001  Ray's own classes of errors are not public
            answers.append(("", str(error)))

    # Ray's call takes up to 40 s, and no argument shortens that.
    asking = threading.Thread(target=ask, name="asking", daemon=True)
    with _quiet_stderr():
        asking.start()
        asking.join(ANSWER_S)
    return answers[0] if answers else ("", f"no answer of Ray's came in {ANSWER_S:g} s")


def _why_no_grpc(host: str, port: int) -> str:
    """Return why the server there is not a gRPC server; "" if it is one."""
    try:
        with _connected(host, port, ANSWER_S) as connection:
            connection.sendall(_HELLO)
            answer = connection.recv(_FRAME_KIND + 1, socket.MSG_WAITALL)
    except TimeoutError:
        return f"nothing came in {ANSWER_S:g} s"
    except OSError as error:
        return str(error)
    return "" if answer[_FRAME_KIND:] == bytes([_SETTINGS]) else "it does not speak gRPC"


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Drop output to file descriptor 2, where Ray's C++ library logs."""
    kept = os.dup(2)
    try:
        with tempfile.TemporaryFile() as dropped:
            os.dup2(dropped.fileno(), 2)
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def head_returns(environment: Mapping[str, str]) -> bool:
    """Return whether a head with ``environment`` returns as the same cluster after a restart.

    It does if it keeps its state outside the head.
    """
    kept = environment.get("RAY_gcs_storage", "memory")
    return bool(environment.get("RAY_REDIS_ADDRESS")) or kept != "memory"
