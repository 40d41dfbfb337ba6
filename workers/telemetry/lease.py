"""Store in shared memory how long a node's trainers may continue without a controller.

A live controller calls each keeper every few seconds, and the keeper renews the lease. When the
lease runs out, trainers leave at the next step boundary, even if the keeper is also gone.

A lease runs out somewhat before Ray stops waiting for an absent head. If the head returns in time,
it takes over trainers that never stopped.
"""

import contextlib
import math
import mmap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from workers.protocol import LEASE_S, LEAVE_SHARE
from workers.telemetry.ring import map_draft

#: Ray's variable for the time, in seconds, after which it ends the processes of a node that has
#: lost the head.
VARIABLE: Final = "RAY_gcs_rpc_server_reconnect_timeout_s"

_NAME: Final = "lease"
_SIZE_BYTES: Final = 8
#: A keeper that checks its lease this late was stopped, and could not receive the controller's
#: calls.
_GAP_S: Final = 1.0


def lease_s(environment: Mapping[str, str]) -> float:
    """Return the length of a lease in seconds, as Ray's processes read it from this environment."""
    try:
        found = float(environment.get(VARIABLE, LEASE_S))
    except ValueError:
        return LEASE_S  # Ray also ignores a value that is not a number.
    return found if math.isfinite(found) and found > 0.0 else LEASE_S


class Lease:
    """The keeper's end of the lease: one time of the machine's monotonic clock, in ns.

    A lease that an earlier keeper left in ``directory`` continues. Raise OSError if there is no
    room for the file.
    """

    def __init__(self, directory: Path, lease_s: float = LEASE_S) -> None:
        self._leave_s = LEAVE_SHARE * lease_s
        path = directory / _NAME
        try:
            with path.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), _SIZE_BYTES)
            is_new = False
        except (FileNotFoundError, ValueError):
            directory.mkdir(parents=True, exist_ok=True)
            draft, memory = map_draft(path, _SIZE_BYTES)
            is_new = True
        self._until_ns = memoryview(memory).cast("Q")
        self._looked_ns = time.monotonic_ns()
        if is_new:
            self.renew()
            draft.replace(path)

    def renew(self) -> None:
        """Record that the controller called."""
        self._until_ns[0] = time.monotonic_ns() + int(self._leave_s * 1e9)

    def look(self) -> None:
        """Extend the lease by time in which this process did not run. Call this often."""
        now_ns = time.monotonic_ns()
        if now_ns - self._looked_ns > _GAP_S * 1e9:
            self._until_ns[0] += now_ns - self._looked_ns
        self._looked_ns = now_ns


def has_run_out(directory: Path) -> bool:
    """Return whether the lease of the node's trainers has run out; False if there is none."""
    try:
        until = (directory / _NAME).read_bytes()
    except FileNotFoundError:
        return False
    return time.monotonic_ns() >= int.from_bytes(until, "little")


def holders(directory: Path) -> list[int]:
    """Return the processes that map the lease of a node: its keeper."""
    path = str(directory / _NAME)
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        # A process may end in the meantime, or belong to another user.
        with contextlib.suppress(OSError):
            if any(line.endswith(path) for line in maps.read_text("utf-8", "replace").splitlines()):
                found.append(int(maps.parent.name))
    return found
