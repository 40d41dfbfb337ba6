"""Hugging Face's Trainer and ours, on the same script."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.attempts import curve, finish, lines, newest, reset, wait_for_steps
from tests.support.trainers import Run
from ucp_core.layout import ParallelLayout
from workers.errors import TaskError
from workers.protocol import Yielded
from workers.settings import (
    CheckpointSettings,
    ParallelSettings,
    RunSettings,
    Settings,
    TrainSettings,
)

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
pytest.importorskip("accelerate", reason="the extra hf is not installed")

SCRIPT = Path(__file__).parents[1] / "support/ports/trainer_elastic.py"
STEPS = 12


def _trainer(kind: Any, directory: Path, **given: Any) -> Any:
    from tests.support.ports.trainer_elastic import make_trainer

    return make_trainer(kind, str(directory), **{"max_steps": STEPS, **given})


def _history(trainer: Any) -> list[dict[str, float]]:
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "step")
    return [
        {key: value for key, value in line.items() if key in kept}
        for line in trainer.state.log_history
        if "train_runtime" not in line
    ]


def _count(module: Any, _: Any) -> None:
    module.passes += 1


def test_it_trains_in_training_mode_whatever_mode_the_model_was_in(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    from everstep.integrations.transformers import ElasticTrainer

    modes: list[tuple[bool, bool]] = []

    class Watched(ElasticTrainer):
        def compute_loss(self, model: Any, *args: Any, **given: Any) -> Any:
            modes.append((torch.is_grad_enabled(), model.training))
            return super().compute_loss(model, *args, **given)

    class Generates(TrainerCallback):
        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            model.eval()

    trainer = _trainer(Watched, tmp_path, max_steps=4)
    trainer.add_callback(Generates())
    trainer.model.eval()
    trainer.train()

    assert set(modes) == {(True, True), (False, False)}


def test_a_batch_without_labels_counts_for_nothing(tmp_path: Path) -> None:
    """Such as one whose prompt was cut to the whole length: the mean over it is no number."""
    from everstep.integrations.transformers import ElasticTrainer

    histories = []
    for kind in (transformers.Trainer, ElasticTrainer):
        trainer = _trainer(
            kind, tmp_path / kind.__name__, max_steps=4, per_device_train_batch_size=1,
            gradient_accumulation_steps=8, eval_strategy="no",
        )  # fmt: skip
        trainer.train_dataset[3]["labels"] = torch.full_like(
            trainer.train_dataset[3]["labels"], -100
        )
        trainer.train()
        histories.append(_history(trainer))

    for line, expected in zip(*reversed(histories), strict=True):
        assert line == pytest.approx(expected, rel=2e-4)


def test_it_evaluates_on_every_sample(tmp_path: Path) -> None:
    from everstep.integrations.transformers import ElasticTrainer

    trainer = _trainer(
        ElasticTrainer, tmp_path, max_steps=1, per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    trainer.eval_dataset = trainer.eval_dataset[:15]
    trainer.train()

    (found,) = [line["eval_loss"] for line in _history(trainer) if "eval_loss" in line]
    expected = transformers.Trainer.evaluate(trainer)["eval_loss"]
    assert found == pytest.approx(expected, rel=1e-6)


def test_it_goes_on_for_more_steps_when_the_arguments_say_so(tmp_path: Path) -> None:
    from everstep.integrations.transformers import ElasticTrainer

    for steps in (2, 6):
        trainer = _trainer(ElasticTrainer, tmp_path, max_steps=steps, logging_steps=steps // 2)
        assert trainer.train().global_step == steps

    assert trainer.state.max_steps == 6
    # Steps 1 and 2 were logged by the first one, 3 and 6 by the second.
    assert [line["step"] for line in _history(trainer) if "loss" in line] == [1, 2, 3, 6]


def test_adapters_are_trained_and_buffers_come_back(tmp_path: Path) -> None:
    from everstep.integrations.transformers import ElasticTrainer

    peft = pytest.importorskip("peft", reason="peft is not installed")
    trained = []
    for kind in (transformers.Trainer, ElasticTrainer):
        made = _trainer(kind, tmp_path / kind.__name__, eval_strategy="no", max_steps=3)
        norm = made.model.model.norm
        norm.register_buffer("passes", torch.zeros(1))
        norm.register_forward_pre_hook(_count)
        torch.manual_seed(0)
        adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
        trainer = kind(
            model=peft.get_peft_model(made.model, adapters),
            args=made.args,
            train_dataset=made.train_dataset,
        )
        trainer.train()
        named = trainer.model.named_parameters()
        trained.append({name: one.detach() for name, one in named if one.requires_grad})

    assert trained[1].keys() == trained[0].keys()
    for name, value in trained[0].items():
        torch.testing.assert_close(trained[1][name], value, rtol=1e-3, atol=1e-4)
    # Each of a step's micro-batches begins with the value before the step.
    assert norm.passes.item() == 3


@pytest.mark.chaos
def test_workers_may_change_in_the_middle(tmp_path: Path) -> None:
    """Scheduler, callbacks and log go on; the curve is that of one undisturbed worker.

    Every second step is the last of an epoch, and has one batch of three.
    """
    settings = Settings(
        run=RunSettings(directory="run", script=str(SCRIPT), arguments=(str(tmp_path / "output"),)),
        train=TrainSettings(steps=STEPS, global_batch=6, micro_batch=2, deterministic=True),
        checkpoint=CheckpointSettings(every_steps=1, keep=0),
    )

    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    with Run(tmp_path / "undisturbed") as run:
        (left,) = run.train(settings, num_workers=1)
        assert not hasattr(left.outcome, "traceback"), left.outcome.traceback
    with Run(tmp_path / "disturbed") as run:
        members = run.begin(settings, num_workers=2)
        wait_for_steps(run, 4)
        members[1].yield_at_boundary(1)
        for trainer in members:
            trainer.left()
        run.train(settings, num_workers=1, resume=newest(run))

    assert curve(tmp_path / "disturbed") == curve(tmp_path / "undisturbed")


UNTIED = """
import sys
from transformers import LlamaForCausalLM
from tests.support.ports import trainer_elastic

config = trainer_elastic.make_model().config
config.tie_word_embeddings = False
trainer_elastic.make_model = lambda: LlamaForCausalLM(config)
trainer_elastic.make_trainer(trainer_elastic.Trainer, sys.argv[1], max_steps=12).train()
"""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(ParallelLayout(tp=2), ParallelLayout(pp=2), marks=pytest.mark.chaos),
        (ParallelLayout(cp=2), ParallelLayout(dp_shard=2)),
    ],
    ids=str,
)
def test_its_model_is_cut_by_its_own_plan(
    first: ParallelLayout, second: ParallelLayout, tmp_path: Path
) -> None:
    """And so are its sequences; labels count as for one worker that was asked for nothing."""
    script = tmp_path / "train.py"
    script.write_text(UNTIED)
    settings = Settings(
        run=RunSettings(directory="run", script=str(script), arguments=(str(tmp_path / "output"),)),
        train=TrainSettings(steps=6, global_batch=8, micro_batch=2),
        checkpoint=CheckpointSettings(every_steps=1, keep=0),
    )
    cut = replace(settings, parallel=ParallelSettings(cp=first.cp))

    with Run(tmp_path) as run:
        members = run.begin(cut, num_workers=first.world_size, layout=first)
        # It leaves after one step.
        members[1].yield_at_boundary(len(run.lineage))
        for trainer in members:
            outcome = trainer.left().outcome
            assert isinstance(outcome, Yielded), getattr(outcome, "traceback", outcome)
        finish(run, cut, num_workers=second.world_size, layout=second, resume=newest(run))
        told = [*lines(run), *lines(run, "metrics/validation.jsonl")]
        layouts = {line["layout"] for line in lines(run)}
        reset(run)
        finish(run, settings, num_workers=1)
        expected = [*lines(run), *lines(run, "metrics/validation.jsonl")]

    assert layouts == {str(first), str(second)}
    for line, other in zip(told, expected, strict=True):
        for name in ("loss", "grad_norm") if "grad_norm" in line else ("loss",):
            assert line[name] == pytest.approx(other[name], rel=1e-4)


def test_callbacks_hear_what_trainer_tells_them(tmp_path: Path) -> None:
    """Also of epochs, of noise for embeddings, of checkpointed activations."""
    from transformers import TrainerCallback

    from everstep.integrations.transformers import ElasticTrainer

    heard: list[list[Any]] = []

    class Listens(TrainerCallback):
        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("on_") or name == "on_init_end":
                return super().__getattribute__(name)
            return lambda *_, **given: self.note(name, **given)

        def note(self, name: str, model: Any, logs: Any = None, **_: Any) -> None:
            if "train_runtime" in (logs or {}):
                return
            graded = name == "on_pre_optimizer_step" and model.lm_head.weight.grad is not None
            noise = getattr(model.model.embed_tokens, "neftune_noise_alpha", None)
            heard[-1].append((name, graded, noise, model.is_gradient_checkpointing))

    for kind in (transformers.Trainer, ElasticTrainer):
        heard.append([])
        trainer = _trainer(
            kind, tmp_path / kind.__name__, max_steps=-1, num_train_epochs=2,
            gradient_accumulation_steps=2, eval_strategy="epoch", logging_strategy="epoch",
            save_strategy="epoch", save_only_model=True, per_device_eval_batch_size=2,
            eval_on_start=True, activation_checkpointing=True, neftune_noise_alpha=5.0,
        )  # fmt: skip
        # A last batch that is short.
        trainer.eval_dataset = trainer.eval_dataset[:3]
        trainer.add_callback(Listens())
        trainer.train()

    assert heard[1] == heard[0]
    assert {name for name, *_ in heard[0]} >= {"on_epoch_begin", "on_epoch_end", "on_evaluate"}
    assert not hasattr(trainer.model.model.embed_tokens, "neftune_noise_alpha")


def test_noise_for_embeddings_is_added(tmp_path: Path) -> None:
    from everstep.integrations.transformers import ElasticTrainer

    losses = [
        _trainer(
            ElasticTrainer, tmp_path / str(alpha), max_steps=1, neftune_noise_alpha=alpha
        ).train().training_loss
        for alpha in (None, 1e-9, 50.0)
    ]  # fmt: skip

    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert abs(losses[2] - losses[0]) > 1e-3


class Sized(torch.nn.Module):
    """A model that takes no ``num_items_in_batch``; its loss shows how batches are weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x: Any, labels: Any = None) -> Any:  # noqa: ARG002  Trainer looks for it
        return {"loss": self.weight.sum() * len(x) + (self.weight**2).sum(), "logits": x}


@pytest.mark.parametrize(
    ("model", "given", "num_steps"),
    [
        ("causal", {"num_train_epochs": 2}, 6),
        ("sized", {"num_train_epochs": 1.5}, 5),
        ("sized", {"num_train_epochs": 2, "dataloader_drop_last": True}, 4),
        ("sized", {"max_steps": 4}, 4),
    ],
    ids=["causal", "half", "drop_last", "max_steps"],
)
def test_epochs_are_cut_as_trainer_cuts_them(
    tmp_path: Path, model: str, given: dict[str, Any], num_steps: int
) -> None:
    """13 samples, batches of 2, accumulation 3: 7 batches, the last of one, in steps of 3, 3, 1.

    4 epochs asked were 5.33 trained. All samples are alike, so that their order does not count.
    """
    from everstep.integrations.transformers import ElasticTrainer

    seen: list[list[int]] = []
    histories, weights = [], []
    for kind in (transformers.Trainer, ElasticTrainer):

        class Watched(kind):  # type: ignore[misc, valid-type]
            def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
                if model.training:
                    seen[-1].append(len(next(iter(inputs.values()))))
                return super().compute_loss(model, inputs, *args, **named)

        seen.append([])
        trainer = _trainer(
            Watched, tmp_path / kind.__name__, gradient_accumulation_steps=3, logging_steps=1,
            eval_strategy="no", warmup_steps=0, **{"max_steps": -1, **given},
        )  # fmt: skip
        trainer.train_dataset = [trainer.train_dataset[0]] * 13
        if model == "sized":
            torch.manual_seed(0)
            trainer = Watched(
                model=Sized(), args=trainer.args,
                train_dataset=[{"x": torch.ones(3), "labels": torch.ones(1)}] * 13,
            )  # fmt: skip
        output = trainer.train()
        assert output.global_step == num_steps
        histories.append(_history(trainer))
        weights.append([one.detach().clone() for one in trainer.model.parameters()])

    # The stand-in for a missing batch counts for nothing, and is one sample.
    num_batches = 6 if "dataloader_drop_last" in given else 7
    assert seen[0] == _without_stand_ins(seen[1], seen[0], num_batches)
    assert len(histories[0]) == num_steps
    for line, expected in zip(histories[1], histories[0], strict=True):
        assert line == pytest.approx(expected, rel=1e-4)
    for mine, theirs in zip(*reversed(weights), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def _without_stand_ins(ours: list[int], theirs: list[int], num_batches: int) -> list[int]:
    """Return our sizes of batches without those that fill up the last step of an epoch."""
    kept, rest = [], iter(ours)
    for at in range(len(theirs)):
        kept.append(next(rest))
        if at % num_batches == num_batches - 1:
            assert all(next(rest) == 1 for _ in range(-num_batches % 3))
    assert not list(rest)
    return kept


@pytest.mark.parametrize("drops", [False, True])
def test_an_epoch_takes_each_sample_once(tmp_path: Path, drops: bool) -> None:  # noqa: FBT001
    """In another order each time; what is dropped is another one, too."""
    from everstep.integrations.transformers import ElasticTrainer

    seen: list[tuple[int, ...]] = []

    class Watched(ElasticTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
            seen.extend(tuple(row) for row in inputs["input_ids"].tolist())
            return super().compute_loss(model, inputs, *args, **named)

    trainer = _trainer(
        Watched, tmp_path, max_steps=-1, num_train_epochs=2, eval_strategy="no",
        gradient_accumulation_steps=2, per_device_train_batch_size=3, dataloader_drop_last=drops,
    )  # fmt: skip
    trainer.train()

    rows = {tuple(one["input_ids"].tolist()) for one in trainer.train_dataset}
    taken = 6 if drops else 8
    # Two batches of 3, and one of 2 with one that stands in for its neighbour.
    epochs = [seen[:taken], seen[len(seen) // 2 :][:taken]]
    assert all(len(set(epoch)) == taken and set(epoch) <= rows for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_a_callback_ends_the_training_where_trainer_ends(tmp_path: Path) -> None:
    """Early stopping is the usual one. The run is complete, and a restart trains no more."""
    from transformers import EarlyStoppingCallback

    from everstep.integrations.transformers import ElasticTrainer

    found = []
    for kind in (transformers.Trainer, ElasticTrainer):
        trainer = _trainer(
            kind, tmp_path / kind.__name__, max_steps=24, eval_steps=2, logging_steps=2,
            learning_rate=0.5, metric_for_best_model="loss", greater_is_better=False,
        )  # fmt: skip
        trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
        output = trainer.train()
        found.append((output.global_step, [line["step"] for line in _history(trainer)]))

    assert found[1] == found[0]
    assert 4 <= found[0][0] < 24

    def again(**given: Any) -> Any:
        return _trainer(
            ElasticTrainer, tmp_path / "ElasticTrainer",
            **{"max_steps": 24, "learning_rate": 0.5, **given},
        )  # fmt: skip

    assert again().train().global_step == found[0][0]
    with pytest.raises(TaskError, match=r"ended with step \d+: .*learning_rate=0\.1 \(was 0\.5\)"):
        again(learning_rate=0.1).train()
    # Where a callback ended it, Trainer trains on, too.
    assert again(learning_rate=0.1).train(resume_from_checkpoint=True).global_step == 24


def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path) -> None:
    from everstep.integrations.transformers import ElasticTrainer

    class Mine(ElasticTrainer):
        def compute_loss(self, *args: Any, **given: Any) -> Any:
            return super().compute_loss(*args, **given)

        def training_step(self, *args: Any, **given: Any) -> Any:
            return super().training_step(*args, **given)

        def create_optimizer(self, *_: Any) -> Any:
            return self.optimizer

    trainer = _trainer(
        Mine, tmp_path, train_sampling_strategy="batch_rebalance", auto_find_batch_size=True,
        batch_eval_metrics=True, optim="adafactor",
    )  # fmt: skip
    trainer.get_train_dataloader = list
    with pytest.raises(TaskError, match=r"not supported: train\(resume_from") as raised:
        trainer.train(resume_from_checkpoint=False)

    *refused, overridden = raised.value.facts["refused"]
    assert refused == [
        "train(resume_from_checkpoint=False) (for a new run, delete args.output_dir)",
        "args.batch_eval_metrics (compute_metrics gets all batches at once)",
        "args.auto_find_batch_size (set per_device_train_batch_size)",
        "args.train_sampling_strategy=batch_rebalance (it makes batches for ranks)",
        "args.optim=adafactor (its sums over rows cannot be saved; use adamw_torch)",
    ]
    assert overridden.startswith("overriding get_train_dataloader, create_optimizer, training_step")


def test_a_scheduler_that_is_none_of_torch_is_refused(tmp_path: Path) -> None:
    from everstep.integrations.transformers import ElasticTrainer

    with pytest.raises(TaskError, match="GreedyLR, which is no LRScheduler of torch"):
        _trainer(ElasticTrainer, tmp_path, lr_scheduler_type="greedy").train()


@pytest.mark.parametrize("origin", ["Trainer", "version"])
def test_a_training_goes_on_from_a_checkpoint(tmp_path: Path, origin: str) -> None:
    """Weights, moments, schedule, log and place in the data, as Trainer does; and once only."""
    from everstep.integrations.transformers import ElasticTrainer

    given = {
        "max_steps": 12, "save_strategy": "steps", "save_steps": 5, "logging_steps": 1,
        "gradient_accumulation_steps": 1, "train_sampling_strategy": "sequential",
    }  # fmt: skip

    def trained(kind: Any, name: str, resume: Any = None, **more: Any) -> Any:
        trainer = _trainer(kind, tmp_path / name, **{**given, **more})
        if resume is None:
            return trainer, trainer.train()
        for one in trainer.model.parameters():
            torch.nn.init.zeros_(one.data)
        return trainer, trainer.train(resume_from_checkpoint=str(resume))

    theirs, _ = trained(transformers.Trainer, "theirs")
    path = tmp_path / "theirs/checkpoint-5"
    if origin == "version":
        # Its last step is one that was saved.
        trained(ElasticTrainer, "first", max_steps=5, lr_scheduler_type="constant")
        path = tmp_path / "first/checkpoints/step-00000005"
    expected, _ = trained(transformers.Trainer, "again", tmp_path / "theirs/checkpoint-5")
    ours, output = trained(ElasticTrainer, "ours", path)

    assert output.global_step == 12
    if origin == "Trainer":
        assert len(_history(ours)) == len(_history(expected))
        for line, other in zip(_history(ours), _history(expected), strict=True):
            assert line == pytest.approx(other, rel=2e-4)
        assert ours.state.total_flos == expected.state.total_flos
        assert output.training_loss == pytest.approx(
            sum(line["loss"] for line in _history(theirs)[-9:] if "loss" in line) / 7, rel=1e-3
        )
    else:
        assert [line["step"] for line in _history(ours) if "loss" in line] == [*range(1, 13)]
    again, _ = trained(ElasticTrainer, "ours", path, max_steps=14)
    assert again.state.global_step == 14
    with pytest.raises(TaskError, match="steps up to 14 that did not begin there"):
        trained(ElasticTrainer, "ours", tmp_path / "theirs/checkpoint-10", max_steps=16)
