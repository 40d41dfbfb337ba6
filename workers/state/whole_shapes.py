"""Make parameters report the shape of the whole weight while a script makes its optimizer.

Rules by shape are common: a learning rate by fan-in (muP), a factor by rows over columns, decay by
size. If this worker's part had its own shape, they would depend on the number of workers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from workers.parallel import LocalShard


class WholeShape(nn.Parameter):
    """A part of a weight that reports the whole weight's shape but holds only the part's values."""

    whole: torch.Size

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Return the shape of the whole weight."""
        return self.whole

    def size(self, dim: int | None = None) -> Any:
        """Return the whole weight's shape, or its extent along a dim."""
        return self.whole if dim is None else self.whole[dim]

    def numel(self) -> int:
        """Return the number of elements of the whole weight."""
        return math.prod(self.whole)

    nelement = numel

    def __len__(self) -> int:
        return self.whole[0]


@contextmanager
def saying_whole_shapes(
    shards: Sequence[LocalShard], parameters: Mapping[str, nn.Parameter]
) -> Iterator[None]:
    """Make each of ``parameters``, the parts by name, report the shape of the whole weight."""
    for shard in shards:
        part: Any = parameters[shard.fqn]
        # The optimizer sees a 0-d parameter as one row.
        part.__class__, part.whole = WholeShape, torch.Size(shard.shape or (1,))
    try:
        yield
    finally:
        for part in parameters.values():
            part.__class__ = nn.Parameter
            del part.whole
