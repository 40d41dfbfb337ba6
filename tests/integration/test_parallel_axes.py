"""Axes that cut a model or sequences: training as one process does, state any layout loads."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.attempts import (
    curve,
    finish,
    lines,
    newest,
    of_script,
    reset,
    result,
    settings,
    wait_for_steps,
)
from tests.support.experts import with_experts
from tests.support.node_memory import NodeProcess
from tests.support.node_memory import newest as newest_in_memory
from tests.support.trainers import Run
from ucp_core.layout import ParallelLayout
from ucp_core.native import open_checkpoint
from ucp_core.storage import LocalStore
from workers.models import chunks_of
from workers.protocol import DEVICE_MEMORY, VALIDATION, Completed, Fenced, PeerLost, Raised, Yielded
from workers.settings import (
    CheckpointSettings,
    DataSettings,
    ModelSettings,
    ParallelSettings,
    RunSettings,
    Settings,
)

TP = ParallelLayout(tp=2)


def validation(run: Run) -> dict[int, float]:
    """Return the losses of evaluations, by step."""
    return {line["step"]: line["loss"] for line in lines(run, VALIDATION)}


def untied(data: DataSettings, **train: Any) -> Settings:
    chosen = settings(data, deterministic=True, **train)
    return replace(chosen, model=replace(chosen.model, tied=False))


def leave(run: Run, chosen: Settings, **how: Any) -> None:
    """Train the next attempt for a step or more, and leave with the state in storage."""
    members = run.begin(chosen, **how)
    members[-1].yield_at_boundary(len(run.lineage))
    outcomes = [member.left().outcome for member in members]
    assert all(isinstance(outcome, Yielded) for outcome in outcomes), outcomes


@pytest.mark.parametrize(("per_worker", "global_batch"), [(1, 8), (2, 20)])
def test_stages_train_to_the_bit_as_one_worker_does(
    run: Run, text: DataSettings, per_worker: int, global_batch: int
) -> None:
    """Each stage has other parameters, passes are interleaved, and the first one saves the rest.

    Half-way the state goes to two workers without stages. The schedule of several stages a worker
    has no place for a fifth micro-batch, so a sixth is one that does not count.
    """
    chosen = untied(text, global_batch=global_batch, validation_every=2)
    chosen = replace(
        chosen,
        model=replace(chosen.model, num_layers=2 * per_worker),
        parallel=ParallelSettings(stages_per_worker=per_worker),
    )
    finish(run, chosen, num_workers=1)
    alone, losses = result(run), curve(run.directory)
    groups = open_checkpoint(
        LocalStore(), f"{run.directory}/checkpoints/step-00000006"
    ).param_groups
    reset(run)
    leave(run, chosen, num_workers=4, layout=ParallelLayout(pp=2, dp_shard=2))
    stored, _ = resume = newest(run)
    opened = open_checkpoint(LocalStore(), f"{run.directory}/checkpoints/step-{stored:08d}")
    finish(run, chosen, num_workers=2, resume=resume)

    assert curve(run.directory) == losses
    for name in ("weights_digest", "validation_loss"):
        assert result(run)[name] == alone[name]
    assert [group["params"] for group in opened.param_groups] == [each["params"] for each in groups]


def test_a_loss_in_chunks_is_that_of_one_process(run: Run, text: DataSettings) -> None:
    """Ranks gather the logits of some tokens at a time, again in the backward pass."""
    data = replace(text, sequence_length=512, validation_samples=2)
    chosen = settings(data, steps=1, warmup_steps=1, global_batch=4)
    chosen = replace(chosen, model=ModelSettings(preset="tiny", vocab_size=40_000, tied=False))
    assert chunks_of(2 * 512, 40_000) == 2
    curves: list[list[float]] = []
    norms: list[list[float]] = []
    for layout in (ParallelLayout(), TP, ParallelLayout(pp=2)):
        reset(run)
        finish(run, chosen, num_workers=layout.world_size, layout=layout)
        losses = [line["loss"] for line in lines(run)]
        curves.append([*losses, result(run)["validation_loss"]])
        norms.append([line["grad_norm"] for line in lines(run)])

    for other, norm in zip(curves[1:], norms[1:], strict=True):
        assert other == pytest.approx(curves[0], rel=1e-6)
        # Five million squares are added up in float32.
        assert norm == pytest.approx(norms[0], rel=5e-5)


@pytest.mark.parametrize("size", [300, 340])
def test_a_vocabulary_of_another_size_is_cut_over_ranks(
    run: Run, text: DataSettings, tmp_path: Path, size: int
) -> None:
    """Where the common rows end is in one rank's part, and of the others all are new or loaded."""
    chosen = untied(text, steps=2)
    chosen = replace(chosen, model=replace(chosen.model, vocab_size=320))
    finish(run, chosen, num_workers=1)
    shutil.copytree(run.directory / "checkpoints/step-00000002", tmp_path / "source")
    rows = ("embedding.weight", "head.weight")
    chosen = replace(
        chosen,
        model=replace(chosen.model, vocab_size=size),
        run=RunSettings(
            directory="run", init_from=str(tmp_path / "source"), init_state="all", init_rows=rows
        ),
    )
    found = []
    for num_workers, layout in ((1, None), (2, None), (2, TP), (2, ParallelLayout(pp=2))):
        reset(run)
        how = {} if layout is None else {"layout": layout}
        finish(run, chosen, num_workers=num_workers, **how)
        found.append((result(run)["weights_digest"], curve(run.directory)))

    assert found[0] == found[1] == found[3]
    for step, (loss, _) in found[0][1].items():
        assert found[2][1][step][0] == pytest.approx(loss, abs=1e-5)


def test_a_tensor_parallel_worker_is_replaced_and_no_bit_is_lost(
    run: Run, text: DataSettings, tmp_path: Path
) -> None:
    """The new worker gets its half of every matrix from the memory of the node."""
    chosen = replace(
        settings(text, steps=16, global_batch=4, deterministic=True),
        checkpoint=CheckpointSettings(every_steps=10**6, keep=0),
    )
    finish(run, chosen, num_workers=2, layout=TP)
    undisturbed, losses = result(run), curve(run.directory)
    reset(run)
    node = NodeProcess("node-a", tmp_path / "node-a", run.directory, chosen)
    try:
        run.nodes = [(node.node, node.directory)]
        members = run.begin(chosen, num_workers=2, layout=TP)
        wait_for_steps(run, 2)
        members[1].process.kill()
        members[1].process.join()
        members[0].fence(len(run.lineage))
        outcome = members[0].left().outcome
        assert isinstance(outcome, Fenced | PeerLost), outcome
        resume, memory = newest_in_memory([node])
        assert resume[0] > 0
        left = run.train(
            chosen, num_workers=3, members=(0, 2), layout=TP, resume=resume, memory=memory
        )
    finally:
        node.kill()

    assert all(isinstance(one.outcome, Completed) for one in left), left
    assert result(run)["weights_digest"] == undisturbed["weights_digest"]
    assert curve(run.directory) == losses


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(dp_replicate=2, dp_shard=2),
        ParallelLayout(dp_shard=2, tp=2),
        ParallelLayout(dp_shard=4, ep=2),
        ParallelLayout(dp_shard=2, cp=2),
    ],
    ids=str,
)
def test_ranks_with_parts_train_along_the_curve_of_others(
    layout: ParallelLayout, run: Run, text: DataSettings, tmp_path: Path
) -> None:
    """Sums have another order, and nothing else differs, in an evaluation neither.

    AdamW hides a gradient that is twice as large; its norm shows it.
    """
    chosen = settings(text, global_batch=8, validation_every=1)
    if layout.ep > 1:
        chosen = replace(chosen, model=ModelSettings(preset=with_experts(tmp_path / "experts")))
    finish(run, chosen, num_workers=1)
    alone, validated = {line["step"]: line for line in lines(run)}, validation(run)
    reset(run)
    leave(run, chosen, num_workers=4, layout=layout)
    finish(run, chosen, num_workers=2, resume=newest(run))

    assert lines(run)[0]["layout"] == str(layout)
    assert validation(run) == pytest.approx(validated, rel=1e-5)
    for line in lines(run):
        expected = alone[line["step"]]
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        assert (line["lr"], line["tokens"]) == (expected["lr"], expected["tokens"])


#: Queries are normed head by head, as in Qwen3: a rank has some of the heads.
QUERIES = """\
import sys

import everstep
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel


class Queries(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.RMSNorm(4), nn.Linear(16, 8)
        if "zeros" in sys.argv:
            nn.init.zeros_(self.down.weight)

    def forward(self, inputs):
        heads = self.up(inputs).unflatten(-1, (-1, 4))
        return self.down(self.norm(heads).flatten(-2))


def train(session):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = session.model(Queries, plan=everstep.ModelPlan(tensor=plan))
    session.optimizer(lambda named: torch.optim.SGD(named.values(), lr=0.1))
    inputs = torch.linspace(-1, 1, 512).reshape(64, 8)
    for _ in session.steps(len(inputs)):
        session.train_step(lambda indices: model(inputs[indices]).square().mean())


everstep.run(train)
"""
#: Each worker would train on whole sequences; on parts alone; with parts of different weights.
SEQUENCES = """\
import sys

import everstep
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        heads = hidden.unflatten(-1, (2, 4)).transpose(1, 2)
        attend = everstep.causal_attention
        if "alone" in sys.argv:
            attend = nn.functional.scaled_dot_product_attention
        return self.head(attend(heads, heads, heads).transpose(1, 2).flatten(-2) + hidden)


def train(session):
    plan = everstep.ModelPlan(sequence=("tokens", "labels"))
    model = session.model(Attention, plan=plan)
    session.optimizer(lambda named: torch.optim.SGD(named.values(), lr=0.1))
    rows = torch.arange(512).reshape(64, 8) % 8

    def loss_of(indices):
        batch = {"tokens": rows[indices], "labels": rows[indices]}
        if "whole" not in sys.argv:
            batch = session.part(batch)
        labels = batch["labels"].flatten()
        loss = nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), labels)
        return loss if "mean" in sys.argv else (loss, int((labels >= 0).sum()))

    if "outputs" in sys.argv:
        session.evaluate(lambda rows: (*loss_of(rows), [torch.ones(1)]), 4, outputs={})
    for _ in session.steps(len(rows)):
        session.train_step(loss_of)


everstep.run(train)
"""
#: Its metrics need outputs that no worker has, in an evaluation after steps of training.
METRICS = """\
from pathlib import Path

import torch
from everstep.integrations.transformers import ElasticTrainer
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
model = LlamaForCausalLM(LlamaConfig(vocab_size=8, num_hidden_layers=2, **sizes))
rows = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 8
out = str(Path(__file__).with_name("out"))
arguments = TrainingArguments(out, eval_strategy="steps", eval_steps=50, use_cpu=True)
ElasticTrainer(
    model=model, args=arguments, train_dataset=rows, eval_dataset=rows,
    compute_metrics=lambda found: {},
).train()
"""
OUT_OF_MEMORY = """\
import everstep, torch


def train(session):
    try:
        torch.empty(2**60)
    except RuntimeError as error:
        # As a GPU says it, and a library that passes it on.
        raise ValueError("no batch") from torch.OutOfMemoryError(str(error))


everstep.run(train)
"""


def _scripted(tmp_path: Path, text: str, *arguments: str) -> Settings:
    script = tmp_path / "train.py"
    script.write_text(text)
    return of_script(script, *arguments, steps=3, global_batch=8, micro_batch=2)


@pytest.mark.parametrize(("how", "step"), [("drawn", 1), ("zeros", 2)])
def test_a_plan_that_misses_a_module_is_refused_before_it_does_harm(
    run: Run, tmp_path: Path, how: str, step: int
) -> None:
    """Each rank computes the gradient of its own heads; behind zeros it is 0 in the first step."""
    chosen = _scripted(tmp_path, QUERIES, how)
    for left in run.train(chosen, num_workers=2, layout=TP):
        outcome = left.outcome
        assert isinstance(outcome, Raised), outcome
        assert (outcome.step, outcome.refuses) == (step, "tp")
        assert "parallel.tp=2: ranks 0, 1 have the same weights" in outcome.error
        assert " norm.weight (" in outcome.error
        assert "down.bias" not in outcome.error


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("whole", "did not call session.part"),
        ("alone", "no attention of the model saw the other parts"),
        ("mean", "return (loss, tokens)"),
        ("outputs", "needs those of the whole model; write parallel.cp: 1"),
    ],
)
def test_a_script_that_would_train_on_other_sequences_is_refused(
    how: str, why: str, run: Run, tmp_path: Path
) -> None:
    """Before the first update: the loss falls in each of these cases."""
    chosen = _scripted(tmp_path, SEQUENCES, how)
    for left in run.train(chosen, num_workers=2, layout=ParallelLayout(cp=2)):
        outcome = left.outcome
        assert isinstance(outcome, Raised), outcome
        assert (outcome.step, outcome.refuses) == (1, "cp")
        assert why in outcome.error


def test_metrics_that_need_the_whole_outputs_are_refused_before_the_first_step(
    run: Run, tmp_path: Path
) -> None:
    """The first evaluation may be hours away, and the layout has trained by then."""
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    layout = ParallelLayout(pp=2)
    chosen = replace(_scripted(tmp_path, METRICS), parallel=ParallelSettings(pp=2))
    for left in run.train(chosen, num_workers=2, layout=layout):
        outcome = left.outcome
        assert isinstance(outcome, Raised), outcome
        assert (outcome.step, outcome.refuses) == (1, "pp")
        assert "compute_metrics needs the outputs of the whole model" in outcome.error


def test_a_script_says_what_no_layout_of_its_can_have(run: Run, tmp_path: Path) -> None:
    """The reason is found behind the error that a library made of it, too."""
    (left,) = run.train(_scripted(tmp_path, OUT_OF_MEMORY), num_workers=1)
    assert isinstance(left.outcome, Raised)
    assert (left.outcome.error, left.outcome.refuses) == ("ValueError: no batch", DEVICE_MEMORY)
