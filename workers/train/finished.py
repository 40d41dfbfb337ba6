"""The versions that a complete run has in storage, for code after ``everstep.run``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ucp_core.geometry import TensorKey
from ucp_core.native import Checkpoint, checkpoint_name, find_committed, open_checkpoint
from ucp_core.storage import Store, join
from workers.errors import StateError
from workers.protocol import CHECKPOINTS
from workers.state import TORCH_DTYPES, decode
from workers.train.loading import read_whole


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that is complete."""

    store: Store
    directory: str  #: Path of the run directory in the store.
    lineage: tuple[tuple[int, int], ...] = ()  #: ``(attempt, resume_step)`` of all its attempts.

    def checkpoint(self, step: int | None = None) -> Checkpoint:
        """Return the checkpoint of a step, the newest one by default."""
        checkpoints = join(self.directory, CHECKPOINTS)
        if step is not None:
            return open_checkpoint(self.store, join(checkpoints, checkpoint_name(step)))
        found = find_committed(self.store, checkpoints, lineage=self.lineage)
        if found is None:
            raise StateError(f"{checkpoints} has no checkpoint", path=checkpoints)
        return found.checkpoint


def registered_state(checkpoint: Checkpoint, name: str) -> Any:
    """Return the state that a script registered under ``name``."""
    return decode(checkpoint.manifest.extra["registered"][name]["state"])


def fill(tensors: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
    """Set parameters and buffers to the values that a checkpoint has for their names.

    It holds one tensor at a time in memory beside them. Buffers that no checkpoint stores stay
    unchanged.
    """
    entries, ties = checkpoint.state_map.entries, checkpoint.manifest.ties
    with torch.no_grad():
        for name, tensor in tensors.items():
            entry = entries.get(TensorKey(ties.get(name, name), "weight"))
            if entry is None:
                continue
            (held,) = read_whole(checkpoint, [entry], TORCH_DTYPES[entry.dtype])
            tensor.copy_(held)
