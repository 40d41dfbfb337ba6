"""Messages between the ranks of an attempt within a step."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from workers.data import KEEPS_ORDER
from workers.errors import DataError
from workers.train.executor.exchange import by_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """Signals of one rank in a step; after the step's all-reduce, of all ranks together."""

    buffers: bool = False  #: A pass changed a persistent buffer.
    freezes: bool = False  #: Its script froze or unfroze a parameter.
    lacks_room: bool = False  #: It lacks memory for whole gradients.
    stops: bool = False  #: Its script requested the end of the run.
    leaves: bool = False  #: It received a request to leave.
    leaves_durably: bool = False  #: Before it leaves, its state must be in storage.
    no_memory: bool = False  #: It lacks memory for a snapshot.
    behind: bool = False  #: Its last snapshot is not complete, or a peer has not copied it yet.
    storage_busy: bool = False  #: One of its snapshots waits to be stored.
    #: New number of steps between two snapshots, set by one rank; 0 for no change.
    snapshot_steps: int = 0
    storage_steps: int = 0  #: New number of steps between two stored versions, or 0.
    read: int = 0  #: Digest of its samples of a stream, below 2 ** 20; the sum over ranks.
    read_squared: int = 0  #: The square of ``read``; the sum over ranks.
    #: Memory in use on the device of each rank; empty without devices. A rank sets its own, and 0.0
    #: for the others.
    device_bytes: tuple[float, ...] = ()

    def numbers(self) -> list[float]:
        """Return the numbers to sum over all ranks, for ``from_sums``."""
        *each, _ = fields(self)
        return [*(int(getattr(self, field.name)) for field in each), *self.device_bytes]

    @classmethod
    def from_sums(cls, sums: Any) -> Signals:
        """Return the signals of all ranks."""
        *each, _ = fields(cls)
        values: dict[str, Any] = {
            field.name: value > 0 if field.default is False else int(value)
            for field, value in zip(each, sums, strict=False)
        }
        return cls(**values, device_bytes=tuple(sums[len(each) :]))


def refuse_readings(agreed: Signals, mine: Signals, *, step: int, device: torch.device) -> None:
    """Raise ``DataError`` on every rank if not all have read the same samples of a stream."""
    num = dist.get_world_size()
    # By Cauchy and Schwarz, numbers whose squares have this sum are equal.
    if num * agreed.read_squared == agreed.read**2:
        return
    found = by_rank(torch.tensor(mine.read, device=device))
    ranks: dict[float, list[int]] = {}
    for rank, digest in enumerate(found):
        ranks.setdefault(digest, []).append(rank)
    parts = " and ".join(f"rank {', '.join(map(str, alike))}" for alike in ranks.values())
    raise DataError(
        f"step {step}: {parts} have read different samples of the stream. {KEEPS_ORDER}"
    )
