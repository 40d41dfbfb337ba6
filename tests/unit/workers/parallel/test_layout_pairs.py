"""Any layout loads to the bit what any other saves: all axes, growing and shrinking.

A process builds each of the ranks in turn.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ucp_core
from tests.support.fake_ranks import state_of
from tests.support.made import save_part
from ucp_core.layout import ParallelLayout
from ucp_core.storage import LocalStore
from workers.models import Decoder, resolve, tensor_plan
from workers.parallel import ModelPlan
from workers.state import HostBuffer, StateEntry, TrainingState

pytestmark = pytest.mark.usefixtures("group")

SHAPE = replace(resolve("tiny", {}), num_layers=4, num_kv_heads=4, tied=False)
LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(dp_shard=3),
    ParallelLayout(dp_shard=4),
    ParallelLayout(dp_replicate=2),
    ParallelLayout(dp_replicate=2, dp_shard=2),
    ParallelLayout(tp=2),
    ParallelLayout(tp=4),
    ParallelLayout(dp_shard=2, tp=2),
    ParallelLayout(pp=2),
    ParallelLayout(pp=4),
    ParallelLayout(pp=2, dp_shard=2),
    ParallelLayout(pp=2, tp=2),
    ParallelLayout(pp=2, dp_replicate=2, dp_shard=1, tp=2),
    ParallelLayout(cp=2),
    ParallelLayout(dp_shard=2, cp=2),
    ParallelLayout(cp=2, tp=2),
    ParallelLayout(pp=2, cp=2),
]
#: Those of a model with experts: its plan is that of ``transformers``.
EXPERT_LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(dp_shard=3),
    ParallelLayout(tp=2),
    ParallelLayout(pp=2, tp=2),
    ParallelLayout(dp_shard=2, ep=2),
    ParallelLayout(dp_shard=4, ep=2),
    ParallelLayout(dp_shard=4, ep=4),
    ParallelLayout(dp_replicate=2, dp_shard=2, ep=2),
    ParallelLayout(dp_shard=2, ep=2, tp=2),
    ParallelLayout(pp=2, dp_shard=2, ep=2),
    ParallelLayout(dp_shard=2, cp=2, ep=2),
]


def _value(entry: StateEntry) -> Tensor:
    """Return the elements of an entry: each of the whole state has another one."""
    ends = zip(entry.box.start, entry.box.stop, strict=True)
    return _whole(entry.fqn, entry.slot, entry.shape)[tuple(slice(*end) for end in ends)]


@lru_cache(maxsize=1000)
def _whole(fqn: str, slot: str, shape: tuple[int, ...]) -> Tensor:
    seed = sum(map(ord, fqn + slot))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_every_layout_loads_what_every_layout_saved(tmp_path: Path) -> None:
    """Each rank saves its share of what others hold too, and no element twice."""
    plan = ModelPlan(tensor=tensor_plan(), keep_stage=Decoder.keep_stage, sequence=("input_ids",))
    _check_pairs(tmp_path, LAYOUTS, lambda: Decoder(SHAPE), plan)


def test_every_layout_of_experts_loads_what_every_layout_saved(tmp_path: Path) -> None:
    """Ranks of one data-parallel group have different experts, and each a share of all the rest."""
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
    )

    def build() -> nn.Module:
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        return model

    _check_pairs(tmp_path, EXPERT_LAYOUTS, build, ModelPlan())


def _check_pairs(
    tmp_path: Path,
    layouts: Sequence[ParallelLayout],
    build: Callable[[], nn.Module],
    plan: ModelPlan,
) -> None:
    store, states = LocalStore(), list[list[TrainingState]]()
    for layout in layouts:
        ranks = range(layout.world_size)
        states.append(
            [state_of(build, plan, layout, rank, 100 * len(states) + rank + 1) for rank in ranks]
        )
        for rank, state in enumerate(states[-1]):
            for entry in state.entries():
                entry.tensor.detach().copy_(_value(entry))
            save_part(
                store,
                str(tmp_path / str(layout)),
                HostBuffer().capture(state.saved()),
                rank=rank,
                world_size=layout.world_size,
            )
    for saved in layouts:
        checkpoint = ucp_core.open(str(tmp_path / str(saved)))
        for layout, loading in zip(layouts, states, strict=True):
            for rank, state in enumerate(loading):
                entries = state.entries()
                # A fused weight has several boxes in a rank's memory.
                found = [torch.full(entry.tensor.shape, torch.nan) for entry in entries]
                ucp_core.load(
                    checkpoint,
                    [each.local_tensor(one) for each, one in zip(entries, found, strict=True)],
                )
                for entry, one in zip(entries, found, strict=True):
                    where = f"{saved} -> {layout}, rank {rank}: {entry.fqn} {entry.slot}"
                    assert torch.equal(one, _value(entry)), where
