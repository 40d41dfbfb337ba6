"""Expectations of missing GPUs, beside published figures and arithmetic."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.policies.layout import (
    GPUS,
    MIXTURES,
    Asked,
    Job,
    Nodes,
    forecast,
    forecasts,
    memory_bytes,
    weigh,
)
from ucp_core.layout import ParallelLayout
from workers.models import PRESETS, chunks_of, num_parameters

MEASURED = json.loads((Path(__file__).parents[3] / "gpu/measured.json").read_text())
LLAMA = Job(
    shape=PRESETS["70b"],
    sequence_length=8192,
    micro_batch=1,
    num_micro_batches=512,
    compute_bytes=2,
    recomputes=True,
)
SMALL = Job(
    shape=PRESETS["8b"], sequence_length=1024, micro_batch=1, num_micro_batches=64, compute_bytes=2
)


def test_parameters_are_those_that_are_published() -> None:
    """Llama 3.1: 70.6 and 405.9 billion."""
    counts = [round(num_parameters(PRESETS[name]) / 1e9, 1) for name in ("70b", "405b")]
    assert counts == [70.6, 405.9]


def test_a_step_takes_its_products() -> None:
    """One GPU waits for no other: six operations a parameter and token, and attention."""
    shape = SMALL.shape
    alone = forecast(ParallelLayout(), SMALL, GPUS["h100"], node_size=1)

    products = num_parameters(shape) - shape.vocab_size * shape.dim
    pairs = shape.num_layers * shape.dim * 1024
    assert alone.step_s == pytest.approx(6 * 65_536 * (products + pairs) / (0.54 * 989e12))
    assert alone.mfu == pytest.approx(0.54)
    again = forecast(ParallelLayout(), replace(SMALL, recomputes=True), GPUS["h100"], 1)
    assert again.step_s == pytest.approx(alone.step_s * 4 / 3)
    assert again.memory_bytes < alone.memory_bytes


def test_each_axis_takes_its_part_of_the_memory() -> None:
    """State is cut by all of them; activations by tp, and by pp only as stages keep several."""
    state = num_parameters(SMALL.shape) * 16
    whole = memory_bytes(ParallelLayout(), SMALL)
    sharded = memory_bytes(ParallelLayout(dp_shard=8), SMALL)
    tensor = memory_bytes(ParallelLayout(tp=8), SMALL)
    stages = memory_bytes(ParallelLayout(pp=8), SMALL)

    # Sharding gathers two blocks and the embeddings, and adds up whole gradients.
    gathered = 2 * (2 * SMALL.block + 2 * SMALL.embedding + SMALL.shape.dim)
    gathered += 4 * num_parameters(SMALL.shape) * 7 // 8
    assert whole - sharded == pytest.approx(state * 7 / 8 - gathered, rel=1e-6)
    assert tensor < whole
    # Parts of sequences cut activations, too, and the model as shards do.
    parts = memory_bytes(ParallelLayout(cp=8), SMALL)
    assert parts == memory_bytes(ParallelLayout(dp_shard=8), replace(SMALL, sequence_length=128))
    assert state / 8 < stages < whole
    assert memory_bytes(ParallelLayout(pp=8), replace(SMALL, num_micro_batches=8)) == stages


def test_gradients_that_are_added_up_are_whole_on_every_rank() -> None:
    """FSDP2 keeps them in float32 between passes, a tree of sums several times.

    One pass has nothing to add to, and what is reduced after each pass is cut at once.
    """
    layout = ParallelLayout(dp_shard=8)
    two = replace(SMALL, num_micro_batches=16)
    jobs = replace(SMALL, num_micro_batches=8), two, replace(two, reduces=True)
    once, often, least = (memory_bytes(layout, job) for job in jobs)
    tree = memory_bytes(layout, replace(two, in_tree=True))
    whole = 4 * num_parameters(SMALL.shape)
    assert often - once == pytest.approx(whole * 7 / 8, rel=1e-6)
    assert least == once
    assert tree - once == pytest.approx(whole * 2, rel=1e-6)
    # A rank alone with its stage has the sum as its gradient.
    stage = ParallelLayout(pp=8)
    assert memory_bytes(stage, replace(SMALL, reduces=True)) == memory_bytes(stage, SMALL)


def test_every_rank_of_a_tensor_group_has_all_logits() -> None:
    """The loss takes them whole, in float32 three times, unless a plan cuts it."""
    job = replace(SMALL, sequence_length=65_536)
    cut = replace(job, cuts_sequences=True)
    logits = 14 * job.num_tokens * job.shape.vocab_size
    alone, eight = (memory_bytes(ParallelLayout(tp=ways), job) for ways in (1, 8))
    assert eight > logits
    assert memory_bytes(ParallelLayout(tp=8), cut) < eight - logits * 3 / 4
    assert memory_bytes(ParallelLayout(), cut) == alone
    # The built-in model's loss holds those of a chunk, whatever the sequence.
    chunks = replace(job, chunks_loss=True)
    saved = 1 - 1 / chunks_of(job.num_tokens, job.shape.vocab_size)
    for ways, needed, whole in ((1, alone, logits), (8, eight, logits * (1 + 1 / 56))):
        left = memory_bytes(ParallelLayout(tp=ways), chunks)
        assert needed - left == pytest.approx(whole * saved, rel=1e-6)


@pytest.mark.parametrize("card", MEASURED)
def test_memory_is_that_of_a_card(card: str) -> None:
    """Whatever was measured, within a tenth."""
    for point in MEASURED[card]["points"]:
        job = Job(
            shape=PRESETS[point["model"]],
            sequence_length=point["sequence_length"],
            micro_batch=point["micro_batch"],
            num_micro_batches=2,
            compute_bytes={"fp32": 4, "bf16": 2}[point["precision"]],
            recomputes=point["checkpointed"],
        )
        expected = pytest.approx(point["peak_bytes"], rel=0.1)
        assert memory_bytes(ParallelLayout(), job) == expected, point


def test_a_pipeline_waits_and_ranks_that_are_too_many_repeat() -> None:
    """Seven of 63 + 8 passes, or 36 of 100."""
    stages = forecast(ParallelLayout(pp=8), SMALL, GPUS["h100"], node_size=8)
    assert stages.bubble == pytest.approx(7 / 71)
    many = forecast(ParallelLayout(dp_shard=100), SMALL, GPUS["h100"], node_size=8)
    assert many.idle == pytest.approx(36 / 100)


def test_what_fits_comes_first_and_then_what_is_fast() -> None:
    """A tensor-parallel group is inside a node; 80 layers may be on 32 stages."""
    found = forecasts(LLAMA, GPUS["a100-40gb"], 8, 4)

    keys = [one.order for one in found]
    assert keys == sorted(keys)
    assert {one.layout.world_size for one in found} == {32}
    assert {one.layout.tp for one in found} == {1, 2, 4}
    assert {one.layout.pp for one in found} == {1, 2, 4, 8, 16, 32}


def mixture(name: str, **more: Any) -> Job:
    found = MIXTURES[name]
    return replace(
        LLAMA, shape=found.shape, experts=found.experts, attention=found.attention, **more
    )


def test_experts_are_those_that_are_published() -> None:
    """Mixtral 8x7B and 8x22B: 46.7 and 141 billion parameters, 12.9 and 39 of them for a token.

    DeepSeek-V3: 671 and 37 billion.
    """
    jobs = [mixture(name) for name in ("mixtral-8x7b", "mixtral-8x22b", "deepseek-v3")]
    assert [round(job.num_parameters / 1e9, 1) for job in jobs] == [46.7, 140.6, 671.0]
    assert [round((job.num_used + job.embedding) / 1e9, 1) for job in jobs] == [12.9, 39.2, 37.6]


def test_experts_are_shared_out_with_the_layers_that_have_them() -> None:
    """DeepSeek-V3's first three layers have none; 61 layers are on 16 stages."""
    job, layout = mixture("deepseek-v3", num_micro_batches=15_360), ParallelLayout(pp=16)
    assert sum(job.layers(layout)) == 61
    assert sum(job.stage(layout, rank) for rank in range(16)) == job.num_parameters
    apart = ParallelLayout(dp_shard=64, ep=64)
    own = job.num_parameters - 58 * job.expert_block * 63 / 64
    assert job.whole(apart, 0) == pytest.approx(own)


def test_ranks_with_some_of_the_experts_gather_less_and_send_tokens() -> None:
    job = mixture("mixtral-8x7b", num_micro_batches=32)
    apart, together = ParallelLayout(dp_shard=32, ep=8), ParallelLayout(dp_shard=32)
    gathered = 2 * job.expert_block * job.compute_bytes
    saved = memory_bytes(together, job) - memory_bytes(apart, job)
    assert saved == pytest.approx(gathered * 7 / 8)
    quick = replace(job, sequence_length=64)
    steps = [forecast(one, quick, GPUS["h100"], 8).step_s for one in (apart, together)]
    assert steps[0] < steps[1] / 3, "weights take longer than tokens"
    # There and back, forward twice and backward: seven of eight tokens, each to two experts.
    sent_bytes = 6 * 32 * 2 * 7 / 8 * 8192 * 4096 * 2
    within, across = (forecast(apart, job, GPUS["h100"], size).step_s for size in (8, 1))
    assert across - within == pytest.approx(sent_bytes * (1 / 50e9 - 1 / 450e9))


def test_interleaved_stages_wait_less_and_keep_more() -> None:
    """Two stages a worker: half the bubble, and 11.5 micro-batches open instead of 8."""
    job, pairs = (
        replace(SMALL, recomputes=True),
        replace(SMALL, recomputes=True, stages_per_worker=2),
    )
    layout = ParallelLayout(pp=8)
    one, two = (forecast(layout, each, GPUS["h100"], 8) for each in (job, pairs))
    assert two.bubble == pytest.approx(3.5 / 67.5)
    deep = (replace(each, shape=PRESETS["70b"]) for each in (job, pairs))
    steps = [forecast(layout, each, GPUS["h100"], 8).step_s for each in deep]
    assert steps[1] < steps[0]
    kept = pairs.layers(layout)[0] * SMALL.shape.dim * 1024 * SMALL.compute_bytes
    assert two.memory_bytes - one.memory_bytes == pytest.approx(3.5 * kept)
    assert forecast(ParallelLayout(tp=8), pairs, GPUS["h100"], 8).bubble == 0


def test_long_sequences_are_cut_and_short_ones_are_not() -> None:
    """131,072 tokens of an 8 B model fit on no GPU of 80 GB; sixteen sequences keep all busy."""
    long = replace(LLAMA, shape=PRESETS["8b"], sequence_length=131_072, num_micro_batches=16)
    found = forecasts(long, GPUS["h100"], 2, 8)
    assert found[0].fits
    assert found[0].layout.cp > 1
    assert not any(one.fits for one in found if one.layout.cp == 1)
    many = replace(long, sequence_length=2048, num_micro_batches=1024)
    assert forecasts(many, GPUS["h100"], 2, 8)[0].layout.cp == 1
    # Eight key heads are shared out; sixteen parts gather keys, and the last one looks at all.
    eight, sixteen = (forecast(ParallelLayout(cp=n), long, GPUS["h100"], n) for n in (8, 16))
    assert sixteen.step_s > 0.7 * eight.step_s


def test_the_first_choice_goes_on_without_a_node() -> None:
    """One that is a tenth faster and then waits for four hours is no choice for an elastic run."""
    job = replace(LLAMA, sequence_length=4096, num_micro_batches=128, recomputes=False)
    tried = Asked(reshards=True, recomputes=True, stages=True)
    found = forecasts(job, GPUS["h100"], 4, 8, tried)
    nodes = Nodes(gpu=GPUS["h100"], num=4, size=8)
    weighed = weigh(found, job, nodes)

    assert found[0].layout == ParallelLayout(pp=4, tp=8)
    fastest = next(one for one in weighed if one.forecast == found[0])
    assert fastest.after is None
    first = weighed[0]
    assert first.expected_s > fastest.expected_s
    assert first.after is not None
    assert first.after.fits
    assert first.after.layout.world_size <= 24
    # A run that may not shrink waits in every layout, so the fastest is first.
    whole = weigh(found, job, replace(nodes, num_min=32))
    assert whole[0].after is None
    assert whole[0].forecast == found[0]
    # With 2,048 nodes one is nearly always away: two passes must not become three.
    assert replace(nodes, num=2048).away > 0.7


def test_a_ring_of_many_machines_takes_its_time() -> None:
    """However little each of 2,048 sends, 33 gathers and 33 sums go through all of them."""
    layout = ParallelLayout(dp_shard=2048, tp=8)
    quick = replace(SMALL, sequence_length=8, num_micro_batches=2048, reshards=False)
    assert forecast(layout, quick, GPUS["h100"], 8).step_s > 2 * 33 * 2048 * 4e-6


def test_what_is_asked_for_is_in_every_layout() -> None:
    """A wish that the answer leaves out, without a word, is an answer to another question."""
    degrees = {"tp": 8, "pp": 2, "dp_replicate": 2}
    found = forecasts(LLAMA, GPUS["h100"], 8, 8, Asked(degrees=degrees))
    assert found
    for one in found:
        assert {axis: getattr(one.layout, axis) for axis in degrees} == degrees
    assert not forecasts(LLAMA, GPUS["h100"], 8, 8, Asked(degrees={"pp": 81}))


def test_each_layout_is_shown_as_it_is_best() -> None:
    """Gathers once a step are faster where they fit, repeated layers where nothing else fits."""
    tried = Asked(reshards=True, recomputes=True, stages=True)
    job = replace(LLAMA, recomputes=False)
    found = {one.layout: one for one in forecasts(job, GPUS["h100"], 64, 8, tried)}
    plain = {one.layout: one for one in forecasts(job, GPUS["h100"], 64, 8)}
    assert all(one.order <= plain[layout].order for layout, one in found.items())
    for choice in ("reshards", "recomputes", "reduces"):
        assert {getattr(one, choice) for one in found.values()} == {True, False}
    assert max(one.stages_per_worker for one in found.values()) > 1
