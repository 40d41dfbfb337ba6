"""A rank's part of sequences; torch's fake group stands for the other ranks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from ucp_core.layout import ParallelLayout
from workers.errors import LayoutRefusedError, TaskError
from workers.models import use_context
from workers.parallel import ModelPlan, SequenceParts, apply_sequence_plan, build_mesh

PLAN = ModelPlan(sequence=("input_ids", "labels", "position_ids"))
IDS = torch.arange(12).reshape(1, 12)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    yield
    use_context(None)
    if dist.is_initialized():
        dist.destroy_process_group()


def parts(cp: int, rank: int = 0, plan: ModelPlan = PLAN, model: Any = None) -> SequenceParts:
    layout = ParallelLayout(cp=cp, tp=2)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2 * cp)
    mesh = build_mesh(layout, device_type="cpu", attempt=1, rank=rank)
    return apply_sequence_plan(model or nn.Linear(2, 2), mesh, plan)


def values(batch: dict[str, Any], name: str) -> list[int]:
    assert isinstance(batch[name], Tensor)
    return batch[name][0].tolist()  # type: ignore[no-any-return]


def test_labels_are_shifted_before_the_cut_and_positions_are_those_of_the_whole() -> None:
    ours = parts(3, rank=2).of({"input_ids": IDS, "labels": IDS, "weight": 7})

    assert values(ours, "input_ids") == [4, 5, 6, 7]
    assert values(ours, "labels") == values(ours, "shift_labels") == [5, 6, 7, 8]
    assert values(ours, "position_ids") == [4, 5, 6, 7]
    assert ours["weight"] == 7


def test_whole_sequences_get_their_labels_shifted_alone() -> None:
    whole = parts(1).of({"input_ids": IDS, "labels": IDS, "attention_mask": IDS > 3})

    assert values(whole, "shift_labels") == [*range(1, 12), -100]
    assert whole.keys() == {"input_ids", "labels", "shift_labels", "attention_mask"}


def test_padding_behind_sequences_needs_no_mask() -> None:
    ours = parts(2).of({"input_ids": IDS, "attention_mask": IDS < 5})

    assert ours.keys() == {"input_ids", "position_ids"}


@pytest.mark.parametrize(
    ("batch", "cp", "why"),
    [
        ({}, 8, r"cp=8 does not divide dim 1 of input_ids \[1, 12\].*parallel.cp: 6"),
        ({"attention_mask": IDS > 3}, 2, "attention_mask hides more than padding"),
        ({"position_ids": IDS % 6}, 2, "position_ids begin again within a row"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch: dict[str, Any], cp: int, why: str) -> None:
    with pytest.raises(LayoutRefusedError, match=why) as refused:
        parts(cp).of({"input_ids": IDS, **batch})
    assert refused.value.facts["axis"] == "cp"


def test_a_batch_without_sequences_is_an_error_on_any_layout() -> None:
    with pytest.raises(TaskError, match="none of input_ids, labels, position_ids, shift_labels"):
        parts(1).of({"tokens": IDS})


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(LayoutRefusedError, match=r"parallel.cp=2: model Linear has no plan"):
        parts(2, plan=ModelPlan())


def hub_model(kind: str, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, num_attention_heads=2, num_key_value_heads=2, head_dim=4, **more
    )
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def test_the_configuration_of_a_script_stays_as_it_was() -> None:
    """The next attempt may have whole sequences, with masks that ours does not know."""
    model = hub_model("Llama")
    theirs = model.config
    parts(2, plan=ModelPlan(), model=model)

    assert model.config is model.model.config is model.model.layers[0].self_attn.config
    assert model.config._attn_implementation == "everstep"
    assert theirs._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("kind", "more", "why"),
    [
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type=dyn"),
        ("Lfm2", {"layer_types": ["conv"]}, "Conv1d, conv"),
    ],
)
def test_a_model_that_looks_along_sequences_otherwise_is_refused(
    kind: str, more: dict[str, Any], why: str
) -> None:
    with pytest.raises(LayoutRefusedError, match=why):
        parts(2, model=hub_model(kind, **more))


@pytest.mark.parametrize(
    ("layout", "exchanging", "if_deterministic"),
    [
        (ParallelLayout(dp_shard=4, tp=2), [], [(0, 2, 4, 6)]),
        (ParallelLayout(pp=2, cp=2, tp=2), [(0, 4), (0, 2)], [(0, 4), (0, 2), (0, 2)]),
        (ParallelLayout(dp_shard=8, ep=4), [(0, 1, 2, 3)], [(0, 1, 2, 3), tuple(range(8))]),
    ],
)
def test_ranks_exchange_along_stages_sequences_and_experts(
    layout: ParallelLayout,
    exchanging: list[tuple[int, ...]],
    if_deterministic: list[tuple[int, ...]],
) -> None:
    """Their GPUs are connected before the first step; all pairs of all groups take memory."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh = build_mesh(layout, device_type="cpu", attempt=1, rank=0)

    def ranks(*, deterministic: bool) -> list[tuple[int, ...]]:
        groups = mesh.exchanging(deterministic=deterministic)
        return [tuple(dist.get_process_group_ranks(group)) for group in groups]

    assert ranks(deterministic=False) == exchanging
    assert ranks(deterministic=True) == if_deterministic
