"""The state of any rank of any layout in one process: torch's fake group stands for the others."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from ucp_core.layout import ParallelLayout
from workers.parallel import ModelPlan, build_mesh
from workers.settings import ModelSettings, Settings
from workers.state import TrainingState, local_parameters
from workers.train.building import build_model
from workers.train.executor import BuiltModel


def built_of(
    build: Callable[[], nn.Module], plan: ModelPlan, layout: ParallelLayout, rank: int, attempt: int
) -> BuiltModel:
    """Return the model of a rank.

    It leaves a default group behind; another attempt's is ended first.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    mesh = build_mesh(layout, device_type="cpu", attempt=attempt, rank=rank)
    return build_model(
        build,
        plan,
        mesh=mesh,
        settings=Settings(model=ModelSettings(preset="tiny")),
        device=torch.device("cpu"),
    )


def state_of(
    build: Callable[[], nn.Module], plan: ModelPlan, layout: ParallelLayout, rank: int, attempt: int
) -> TrainingState:
    """Return the state of a rank, after a step of its optimizer; see ``built_of``."""
    built = built_of(build, plan, layout, rank, attempt)
    own = local_parameters(built.shards)
    optimizer = torch.optim.AdamW(own.values())
    for parameter in own.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return TrainingState(built.shards, own, optimizer, rank)
