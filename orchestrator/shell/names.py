"""The names of a run's actors and placement groups in Ray."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

#: The Ray namespaces of all runs start with this.
NAMESPACE_PREFIX = "everstep-"
#: The controller's actor name, in the namespace of its run.
CONTROLLER = "controller"


def run_id(directory: str) -> str:
    """Return the id of the run in ``directory``: readable, and always the same for a directory."""
    where = directory if "://" in directory else str(Path(directory).resolve())
    name = re.sub(r"[^a-zA-Z0-9]+", "-", Path(directory).name).strip("-").lower()[:24]
    return f"{name}-{hashlib.sha256(where.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class RunNames:
    """The Ray names of one run.

    Each run has its own namespace. Ray gives every job a random one, so each look-up must name it.
    """

    run_id: str

    @property
    def namespace(self) -> str:
        """Return the Ray namespace of the run's actors."""
        return f"{NAMESPACE_PREFIX}{self.run_id}"

    def worker(self, worker: str) -> str:
        """Return the actor name of ``worker``."""
        return f"worker/{worker}"

    def keeper(self, node: str) -> str:
        """Return the actor name of the keeper of ``node``."""
        return f"keeper/{node}"

    def reservation(self, reservation: int) -> str:
        """Return the placement group name of ``reservation``."""
        return f"{self.reservation_prefix}{reservation:04d}"

    @property
    def reservation_prefix(self) -> str:
        """Return the prefix of the names of all the run's placement groups."""
        return f"everstep/{self.run_id}/reservation-"

    def shared_directory(self, node: str) -> str:
        """Return where the workers on ``node`` keep progress records and record rings.

        Simulated nodes share one /dev/shm, so the path contains the node.
        """
        return f"{self.shared_root}/{node[:16]}"

    @property
    def shared_root(self) -> str:
        """Return the folder in shared memory that holds everything of the run on a machine."""
        return f"/dev/shm/{self.namespace}"  # noqa: S108  memory, not a temp file

    def spool(self, actor: str) -> str:
        """Return where a controller keeps what it has not sent to storage yet.

        It is outside ``shared_root``, which keepers remove at the end of a run before the journal
        is complete. Each controller of the run has another Ray actor id, and so its own spool.
        """
        return f"{self.shared_root}-journal-{actor}"
