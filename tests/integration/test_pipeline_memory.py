"""Real pipelines: what a worker holds does not grow with the micro-batches of a step."""

import gc
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.support.ranks import Place, running
from ucp_core.layout import ParallelLayout
from workers import collectives
from workers.parallel import (
    ModelPlan,
    PassHooks,
    Pipeline,
    Stages,
    build_mesh,
    materialize,
    shard_model,
)

DIM, ROWS, NUM = 8, 16, 64


class Layers(nn.Module):
    """Some matrices, of which a stage has as many as every other one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(n): nn.Linear(DIM, DIM, bias=False) for n in range(4)})

    def keep_stage(self, number: int, num_stages: int) -> None:
        """Remove the layers of the other stages."""
        each = 4 // num_stages
        for n in range(4):
            if not number * each <= n < (number + 1) * each:
                del self.layers[str(n)]

    def forward(self, values: Tensor) -> Tensor:
        """Return what the layers make of them."""
        for layer in self.layers.values():
            values = layer(values)
        return values


def num_held() -> int:
    """Return how many tensors there are like what a stage receives."""
    gc.collect()
    return sum(
        isinstance(one, Tensor) and one.shape == (ROWS, DIM) and one.device.type == "cpu"
        for one in gc.get_objects()
    )


def held(place: Place) -> tuple[int, int]:
    """Return how many there are after steps of ``NUM`` micro-batches, and most in an evaluation."""
    collectives.form(**place.formation(1, 2))
    mesh = build_mesh(ParallelLayout(pp=2), device_type="cpu", attempt=1, rank=place.rank)
    with torch.device("meta"):
        whole = Layers()
    stages = Stages(whole, ModelPlan(keep_stage=Layers.keep_stage), 2)
    called = stages.of_rank(mesh.stage, Layers)
    shard_model(called.stages, mesh, precision="fp32", reshard_after_forward=True)
    materialize(called.stages, torch.device("cpu"))
    for parameter in called.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    batch = torch.ones(ROWS, DIM)
    hooks = PassHooks(begin=lambda *_: None, weigh=lambda _, loss: loss)
    pipeline = Pipeline(called, stages, mesh=mesh, device=torch.device("cpu"), dtype=None)
    for _ in range(2):
        pipeline.train([batch] * NUM, lambda given: called(given).sum(), hooks)
    found = num_held()
    counts: list[int] = []
    hooks = PassHooks(
        begin=lambda _stage, number: counts.append(num_held() if number % 16 == 15 else 0),
        weigh=lambda _, loss: loss,
    )
    pipeline.evaluate([batch] * NUM, lambda given: called(given).sum(), hooks)
    assert len(counts) == NUM
    collectives.leave()
    return found, max(counts)


def test_a_pipeline_has_no_buffer_for_each_micro_batch(tmp_path: Path) -> None:
    """torch's stages have one for what each receives, forward and backward, all the time.

    Schedules keep all that they send in an evaluation until their end.
    """
    with running(held, 2, tmp_path) as ranks:
        found = ranks.results()

    assert max(map(max, found)) < NUM // 4, found
