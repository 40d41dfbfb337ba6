"""A pipeline for ``train_deepspeed``: one stage or two, the embedding tied to the head."""

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from tests.support.deepspeed_models import (
    GLOBAL_BATCH,
    VOCABULARY,
    WIDTH,
    Embedding,
    logits,
    mean_loss,
)

MICRO_BATCHES = 2


class Block(nn.Module):
    """A layer of the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        rest: torch.Tensor = self.down(torch.relu(self.up(hidden)))
        return hidden + rest


def build(case: dict[str, Any], *, seed: int, spoilt: bool) -> Any:
    """Return an engine; a spoilt one has hyper-parameters that a checkpoint has to replace."""
    model = PipelineModule(
        layers=[
            TiedLayerSpec("embed", Embedding),
            LayerSpec(Block),
            LayerSpec(Block),
            LayerSpec(nn.LayerNorm, WIDTH),
            TiedLayerSpec("embed", Embedding, forward_fn=logits),
        ],
        num_stages=case["pp"],
        loss_fn=mean_loss,
        partition_method="type:Block",
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # By name, so that it does not depend on the stage.
            values = torch.Generator().manual_seed(seed * 1000 + sum(name.encode()))
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=values))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 if spoilt else 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    data_ranks = dist.get_world_size() // case["pp"]
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        config={
            "train_batch_size": GLOBAL_BATCH,
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH // data_ranks // MICRO_BATCHES,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": case["stage"]},
            "checkpoint": {"load_universal": case.get("universal", False)},
            "steps_per_print": 10**9,
        },
    )
    return engine


def train(engine: Any, first: int, steps: int) -> list[float]:
    """Return the loss of each step over the global batch."""
    rank, size = engine.grid.get_data_parallel_rank(), engine.grid.get_data_parallel_world_size()
    losses = []
    for step in range(first, first + steps):
        batch = torch.Generator().manual_seed(step)
        data = torch.randint(0, VOCABULARY, (2, GLOBAL_BATCH, 5), generator=batch)
        mine = data.chunk(size, 1)[rank].chunk(MICRO_BATCHES, 1)
        losses.append(float(engine.train_batch(iter([(part[0], part[1]) for part in mine]))))
    return losses


def gathered(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of all stages; of a tied one any is as good as another."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, tensors)
    return {key: value for part in parts for key, value in part.items()}
