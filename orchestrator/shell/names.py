"""How the run's actors and placement groups are called in Ray, so that they can be found again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunNames:
    """The Ray names of one run. Everything lives in a namespace of its own.

    Jobs get random namespaces from Ray, so every look-up must name this one.
    """

    run_id: str

    @property
    def namespace(self) -> str:
        """Return the Ray namespace of the run's actors."""
        return f"everstep-{self.run_id}"

    @property
    def controller(self) -> str:
        """Return the controller's actor name."""
        return "controller"

    def worker(self, worker: str) -> str:
        """Return the actor name of ``worker``."""
        return f"worker/{worker}"

    def keeper(self, node: str) -> str:
        """Return the actor name of the keeper of ``node``."""
        return f"keeper/{node}"

    def slot(self, slot: int) -> str:
        """Return the placement group name of ``slot``."""
        return f"{self.slot_prefix}{slot:04d}"

    @property
    def slot_prefix(self) -> str:
        """Return what the names of all the run's placement groups start with."""
        return f"everstep/{self.run_id}/slot-"

    def shared_directory(self, node: str) -> str:
        """Return where the workers on ``node`` keep pages and rings.

        Simulated nodes share one machine and so one /dev/shm: the node is in the path.
        """
        return f"/dev/shm/everstep-{self.run_id}/{node[:16]}"  # noqa: S108  memory, not a temp file
