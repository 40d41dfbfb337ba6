"""A decoder's weights and Adam moments as data-parallel workers hold them, of a wanted size."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from ucp_core.geometry import Box
from ucp_core.layout import ParallelLayout
from workers.models import PRESETS, Decoder, ModelShape
from workers.protocol import Assignment
from workers.state import StateEntry

SLOTS: Final = ("weight", "exp_avg", "exp_avg_sq")
#: Workers whose parts have the sizes of ``SHAPES``.
NUM_WORKERS: Final = 4


def _shape(dim: int, num_layers: int, ffn_dim: int) -> ModelShape:
    return ModelShape(
        vocab_size=264, dim=dim, num_layers=num_layers, num_heads=dim // 64,
        num_kv_heads=dim // 64, ffn_dim=ffn_dim, tied=True,
    )  # fmt: skip


#: By megabytes of state per worker, if there are four.
SHAPES: Final = {
    3: PRESETS["small"],
    50: _shape(512, 5, 1408),
    200: _shape(768, 9, 2112),
    300: _shape(1024, 8, 2816),
}


def shape_of(megabytes: int, num_workers: int) -> ModelShape:
    """Return a decoder of which each worker has about so much state."""
    shape = SHAPES[megabytes]
    if megabytes == min(SHAPES):
        return shape
    return replace(shape, num_layers=max(1, round(shape.num_layers * num_workers / NUM_WORKERS)))


class DecoderPart:
    """The state of one worker of ``world_size`` under FSDP, in one block of memory.

    Attributes:
        entries: The tensors, views of the block.
        block: All their bytes, in the same order.
    """

    def __init__(self, megabytes: int, rank: int, world_size: int) -> None:
        with torch.device("meta"):
            model = Decoder(SHAPES[megabytes])
        shapes = {fqn: tuple(held.shape) for fqn, held in model.named_parameters()}
        boxes = {fqn: _chunk(shape, rank, world_size) for fqn, shape in shapes.items()}
        num_elements = len(SLOTS) * sum(box.num_elements for box in boxes.values())
        block = torch.empty(num_elements)
        self.block: NDArray[np.uint8] = block.numpy().view(np.uint8)
        self.entries: list[StateEntry] = []
        start = 0
        for slot in SLOTS:
            for fqn, box in boxes.items():
                tensor = block[start : start + box.num_elements].view(box.shape)
                start += box.num_elements
                # Written at once, so that later writes need no fresh pages; every row differs.
                rows = torch.arange(box.start[0], box.stop[0], dtype=torch.float32)
                columns = (1,) * (len(box.shape) - 1)
                tensor.copy_((rows + 7919 * len(self.entries)).view(-1, *columns).expand(box.shape))
                self.entries.append(
                    StateEntry(fqn=fqn, slot=slot, shape=shapes[fqn], box=box, tensor=tensor)
                )


def _chunk(shape: tuple[int, ...], rank: int, world_size: int) -> Box:
    """Return the rows that FSDP leaves to a rank: as torch.chunk cuts them."""
    rows = -(-shape[0] // world_size)
    low, high = (min(shape[0], number * rows) for number in (rank, rank + 1))
    return Box.full(shape).with_dim(0, low, high)


def assignment(rank: int, world_size: int, *, attempt: int = 1) -> Assignment:
    """Return the place of a worker in an attempt without a rendezvous."""
    return Assignment(
        attempt=attempt,
        rank=rank,
        layout=ParallelLayout(dp_shard=world_size),
        store_host="127.0.0.1",
        store_port=0,
        resume_step=0,
        resume_attempt=0,
        lineage=((attempt, 0),),
    )
