"""This user's local clusters: each has a folder with an entry, in the user's own folder."""

import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.errors import CapacityError
from orchestrator.shell.names import RunNames, run_id
from orchestrator.shell.serve import withdraw

#: Prefix of these folders' names.
PREFIX = "cluster-"
ENTRY = "cluster.json"
#: The path of a socket has at most 107 bytes. Ray's longest ones add 73 to the folder's:
#: ``/ray/session_2026-11-29_04-17-29_277425_4194304/sockets/plasma_store.9999``.
_FOLDER_BYTES_MAX = 107 - 73
#: A place for temporary files whose path is short on every machine.
_SHORT = "/tmp"  # noqa: S108  a folder of the user's own is made in it


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEntry:
    """A local cluster as the registry knows it."""

    address: str  #: Address of its head.
    host_pid: int  #: Its host, which leads the process group of all its processes.
    starter_pid: int  #: The command that started it.
    run_directory: str = ""  #: The run that it serves; "" before there is one.
    is_detached: bool = False  #: Whether it outlives its starter.
    is_hosted: bool = True  #: Whether its host still lives; without it nothing ends the cluster.


def own_folder() -> Path:
    """Return this user's folder for local clusters and Ray's files; create it if needed.

    It is in the temporary directory, or in /tmp if that path is too long for Ray's sockets. Ray's
    default is one folder for all users of a machine, and only its first user can write there.

    Raises:
        CapacityError: There is no place for it.
    """
    found: list[str] = []
    for parent in (os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), _SHORT):
        folder = Path(parent, f"everstep-{os.getuid()}")
        if len(os.fsencode(folder)) > _FOLDER_BYTES_MAX:
            found.append(f"{folder} is longer than the {_FOLDER_BYTES_MAX} bytes that Ray can use")
            continue
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = folder.lstat()
        except OSError as error:
            found.append(str(error))
            continue
        if stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid():
            return folder
        found.append(f"{folder} belongs to another user")
    why = "; ".join(dict.fromkeys(found))
    raise CapacityError(
        f"no place for the files of simulated nodes: {why}. Set TMPDIR to a short path that "
        "you can write, such as /dev/shm"
    )


def local_clusters() -> list[LocalEntry]:
    """Return this user's local clusters, oldest first; forget those without any process.

    A killed host may have left its cluster behind: such an entry is not ``is_hosted``.
    """
    found: list[tuple[float, LocalEntry]] = []
    for folder, entry, began_s in _entries():
        # A container that shares this folder may count its processes differently.
        is_hosted = _accepts(str(folder / "control"))
        if is_hosted or _group_lives(entry.host_pid):
            found.append((began_s, replace(entry, is_hosted=is_hosted)))
        else:
            remove_traces(folder)
    return [entry for _, entry in sorted(found, key=lambda pair: pair[0])]


def kill_local_cluster(run_directory: str) -> bool:
    """End the local cluster of a run at once; return whether there was one."""
    mine = [(f, entry) for f, entry, _ in _entries() if entry.run_directory == run_directory]
    for folder, entry in mine:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(entry.host_pid, signal.SIGKILL)
        remove_traces(folder)
    return bool(mine)


def _entries() -> Iterator[tuple[Path, LocalEntry, float]]:
    """Yield the folder and the entry of each local cluster of this user, and when it started."""
    try:
        folders = list(own_folder().glob(f"{PREFIX}*"))
    except CapacityError:
        return  # None was started then.
    for folder in folders:
        try:
            document = json.loads((folder / ENTRY).read_text())
            yield folder, LocalEntry(**document), folder.stat().st_ctime
        except (OSError, ValueError, TypeError):
            continue  # It is starting, or has just ended.


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except OSError:
        return False
    return True


def _accepts(socket_path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(socket_path)
        except OSError:
            return False
    return True


def remove_traces(folder: Path) -> None:
    """Delete what killed processes left: shared memory, Prometheus targets, the folder."""
    with contextlib.suppress(OSError, ValueError):
        directory = json.loads((folder / ENTRY).read_text())["run_directory"]
        if directory:
            names = RunNames(run_id(directory))
            withdraw(names.run_id)
            shared = Path(names.shared_root)
            for path in (shared, *shared.parent.glob(Path(names.spool("*")).name)):
                shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
