"""Load a checkpoint of any format under another layout, without a second copy: the counterpart of
``peer_universal_load`` in ``bench_convert``.

    python -m torch.distributed.run --nproc-per-node RANKS -m tests.benchmarks.direct_load \
        SOURCE STAGE

Every rank ends with what DeepSpeed's engine of that ZeRO stage has: torch parameters (whole ones,
at stage 3 a part of each) and an AdamW that holds this rank's part of both moments. Both are built
before; what counts is opening the checkpoint and loading every element, up to the end of the
slowest rank. Rank 0 prints one line of JSON.
"""

import json
import sys
import time

import torch
import torch.distributed as dist

from ucp_core.formats import open_source
from ucp_core.geometry import Box
from ucp_core.native import Checkpoint, LocalTensor, load
from ucp_core.storage import open_store

MOMENTS = ("exp_avg", "exp_avg_sq")


class Engine:
    """Parameters and optimizer of one rank under ZeRO."""

    def __init__(self, checkpoint: Checkpoint, stage: int) -> None:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        shapes = {k.fqn: e.shape for k, e in checkpoint.state_map.entries.items() if e.shape}
        parts = {fqn: Box.full(shape).split(0, num_ranks)[rank] for fqn, shape in shapes.items()}
        held = {fqn: parts[fqn] if stage == 3 else Box.full(shape) for fqn, shape in shapes.items()}
        self.parameters = {
            fqn: torch.nn.Parameter(torch.zeros(box.num_elements)) for fqn, box in held.items()
        }
        masters = {
            fqn: torch.nn.Parameter(torch.zeros(box.num_elements)) for fqn, box in parts.items()
        }
        self.optimizer = torch.optim.AdamW(masters.values(), lr=1e-3)
        for master in masters.values():
            self.optimizer.state[master] = {
                "step": torch.zeros(()),
                **{slot: torch.zeros_like(master) for slot in MOMENTS},
            }
        self.need: list[LocalTensor] = []
        for fqn, shape in shapes.items():
            state = self.optimizer.state[masters[fqn]]
            self._add(fqn, "weight", shape, held[fqn], self.parameters[fqn])
            for slot in MOMENTS:
                self._add(fqn, slot, shape, parts[fqn], state[slot])
            self._add(fqn, "step", (), Box.full(()), state["step"])

    def _add(
        self, fqn: str, slot: str, shape: tuple[int, ...], box: Box, tensor: torch.Tensor
    ) -> None:
        data = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
        self.need.append(
            LocalTensor(fqn=fqn, slot=slot, dtype="F32", shape=shape, box=box, data=data)
        )


def main() -> None:
    """Load as one of several ranks; rank 0 prints the time of the slowest."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    source, stage = sys.argv[1], int(sys.argv[2])
    store, directory = open_store(source)
    engine = Engine(open_source(store, directory), stage)
    dist.barrier()
    begun = time.perf_counter()
    checkpoint = open_source(store, directory)
    load(checkpoint, engine.need, threads=1)
    seconds = torch.tensor(time.perf_counter() - begun)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    num_elements = sum(parameter.count_nonzero() for parameter in engine.parameters.values())
    assert num_elements > 0, "nothing was loaded"
    if dist.get_rank() == 0:
        print(json.dumps({"load_s": round(float(seconds), 3)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
