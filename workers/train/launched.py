"""Connect the ranks of a training without a controller: alone, or under a launcher.

Under torchrun, rank 0 decides what the controller of ``everstep run`` would: the attempt and the
version from which it resumes. The ranks exchange messages in the launcher's store. If one ends, the
collectives of the others fail, and they end too: the launcher starts the job again.
"""

import json
import socket
from collections.abc import Mapping
from datetime import timedelta
from math import gcd
from typing import Any

import torch
import torch.distributed as dist

from ucp_core.layout import ParallelLayout
from workers.errors import SettingsError, TaskError
from workers.launchers import LaunchedPlace
from workers.settings import ParallelSettings


class Ranks:
    """The ranks as seen by one of them. Every rank makes the same calls.

    ``place`` is None if this process trains alone. ``timeout_s`` bounds waits for another rank.
    """

    def __init__(self, place: LaunchedPlace | None, *, timeout_s: float) -> None:
        #: This rank, and the number of ranks.
        self.rank, self.num_ranks = (place.rank, place.num_ranks) if place else (0, 1)
        self.node = socket.gethostname() if place else ""  #: Name of this machine.
        self.host = place.host if place else "127.0.0.1"  #: Host of their store.
        serves = place is None or (self.rank == 0 and not place.is_served)
        try:
            store = dist.TCPStore(
                self.host,
                place.port if place else 0,
                is_master=serves,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
            )
        except (RuntimeError, dist.DistError) as error:
            raise TaskError(
                f"rank {self.rank} of {self.num_ranks}: no other rank answers at MASTER_ADDR="
                f"{self.host} ({error}); RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set: "
                "start the script with torchrun, or unset them to train in this process alone"
            ) from error
        self.port: int = store.port  #: Port of their store.
        self._store = store
        self._said = dist.PrefixStore(f"everstep/{place.restart if place else 0}", store)
        self._num_said = self._num_told = 0
        if place and torch.cuda.is_available():
            torch.cuda.set_device(place.local_rank % torch.cuda.device_count())

    def gather(self, mine: Any) -> list[Any]:
        """Return the messages of all ranks on rank 0; [] on others, which do not wait."""
        self._num_said += 1
        self._said.set(f"said/{self._num_said}/{self.rank}", json.dumps(mine))
        if self.rank:
            return []
        return [self._get(f"said/{self._num_said}/{rank}") for rank in range(self.num_ranks)]

    def tell(self, plan: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the plan that rank 0 passes."""
        self._num_told += 1
        key = f"told/{self._num_told}"
        if plan is not None:
            self._said.set(key, json.dumps(plan))
        found: dict[str, Any] = self._get(key)
        return found

    def next_attempt(self, last: int) -> int:
        """Return an attempt number above ``last`` that the store has not given yet; for rank 0."""
        # The launcher's store may outlive an earlier start that wrote nothing to storage.
        seen = self._store.add("everstep/attempt", 0)
        return self._store.add("everstep/attempt", max(last - seen, 0) + 1)

    def _get(self, key: str) -> Any:
        try:
            return json.loads(self._said.get(key))
        except (RuntimeError, dist.DistError) as error:
            raise TaskError(
                f"rank {self.rank} of {self.num_ranks}: another rank has ended or does not answer; "
                f"see its own output for the reason ({error})"
            ) from error


def layout_for(num_ranks: int, parallel: ParallelSettings) -> ParallelLayout:
    """Return the layout of all ranks; one rank has the whole model.

    Raise ``SettingsError`` if the degrees do not divide their number.
    """
    axes = ("pp", "dp_replicate", "cp", "tp")
    degrees = {axis: getattr(parallel, axis) for axis in axes if num_ranks > 1}
    num_parts = ParallelLayout(**degrees).world_size
    if num_ranks % num_parts:
        told = " x ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1)
        problem = (
            f"parallel: {told} needs a multiple of {num_parts} processes, and the launcher started "
            f"{num_ranks}; start another number (--nproc-per-node), or change the degrees"
        )
        raise SettingsError(problem, problems=[problem])
    dp_shard = num_ranks // num_parts
    return ParallelLayout(**degrees, dp_shard=dp_shard, ep=gcd(parallel.ep, dp_shard))
