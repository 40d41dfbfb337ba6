"""Every argument of Trainer, beside Trainer itself on one process.

Each argument is in one of three classes: it does what it does with Trainer, it is refused by name
before the first step, or it changes nothing here, as the guide says. A new release of transformers
with another argument fails the first test.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from workers.errors import TaskError

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
pytest.importorskip("accelerate", reason="the extra hf is not installed")

GUIDE = Path(__file__).parents[2] / "workers/guide/trainer.md"
#: Arguments of every case, unless it says otherwise: four batches an epoch, in one order.
BASE = {
    "max_steps": 6, "gradient_accumulation_steps": 1, "train_sampling_strategy": "sequential",
    "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 3, "warmup_steps": 0,
}  # fmt: skip
#: Arguments that do what they do with Trainer, a few in each case.
EQUAL: dict[str, dict[str, Any]] = {
    "epochs": {"max_steps": -1, "num_train_epochs": 1.5, "learning_rate": 3e-3},
    "a short last batch": {
        "max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
    },
    "dropped batches": {
        "max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 3,
        "dataloader_drop_last": True, "dataloader_num_workers": 1,
    },
    "cosine with a least rate": {
        "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.5},
        "warmup_steps": 0.34,
    },
    "polynomial": {"lr_scheduler_type": "polynomial", "warmup_steps": 2},
    "inverse root": {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2},
    "plateau": {
        "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "accuracy",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.1, "mode": "min"}, "eval_steps": 1,
    },
    "decay and betas": {
        "optim": "adamw_torch", "weight_decay": 0.3, "adam_beta1": 0.8, "adam_beta2": 0.9,
        "adam_epsilon": 1e-4, "max_grad_norm": 0.1,
    },
    "no clipping": {"optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 0.1},
    "other optimizers": {"optim": "rmsprop", "optim_args": "alpha=0.8", "learning_rate": 1e-3},
    # The smoother looks up the name of the model's class.
    "smoothed labels": {
        "label_smoothing_factor": 0.2, "lr_scheduler_type": "cosine_with_restarts",
    },
    "checkpointed activations": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
        "use_cache": False,
    },
    "their older names": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "grouped by length": {
        "train_sampling_strategy": "group_by_length", "length_column_name": "length",
        "max_steps": 4, "gradient_accumulation_steps": 4, "per_device_eval_batch_size": 3,
    },
    "evaluations": {
        "per_device_eval_batch_size": 3, "eval_on_start": True, "eval_delay": 3,
        "eval_steps": 0.34, "eval_accumulation_steps": 1,
    },
    "loss alone": {"prediction_loss_only": True, "per_device_eval_batch_size": 5},
    "evaluation by epoch": {
        "eval_strategy": "epoch", "logging_strategy": "epoch", "logging_first_step": True,
        "eval_do_concat_batches": False,
    },
    "the best": {
        "load_best_model_at_end": True, "metric_for_best_model": "eval_accuracy",
        "greater_is_better": False, "save_strategy": "steps", "save_steps": 3,
        "save_total_limit": 2,
    },
    "the best alone": {"save_strategy": "best", "metric_for_best_model": "loss"},
    "seldom": {"logging_steps": 0.5, "eval_strategy": "no", "average_tokens_across_devices": False},
    "columns": {"remove_unused_columns": True, "label_names": ["labels"]},
}  # fmt: skip
STATE = (
    "best_metric", "best_global_step", "global_step", "epoch", "num_train_epochs", "max_steps",
    "logging_steps", "eval_steps", "total_flos",
)  # fmt: skip
#: Arguments that are refused by name, and a value.
REFUSED: dict[str, Any] = {
    "fp16": True, "push_to_hub": True, "batch_eval_metrics": True,
    "include_for_metrics": ["inputs"], "deepspeed": {"zero_optimization": {"stage": 2}},
    "fsdp": True, "parallelism_config": object(), "torch_compile": True, "use_liger_kernel": True,
    "auto_find_batch_size": True, "enable_jit_checkpoint": True,
    "restore_callback_states_from_checkpoint": True, "debug": ["underflow_overflow"],
    "include_num_input_tokens_seen": "all",
}  # fmt: skip


def documented() -> set[str]:
    """Return the arguments that the guide says to change nothing here, or other numbers."""
    rows = [line for line in GUIDE.read_text().splitlines() if line.startswith("| `")]
    return {name for row in rows for name in row.split("|")[1].replace("`", " ").split() if name}


def accuracy(prediction: Any) -> dict[str, float]:
    """Return a number that depends on all outputs, whether they are in one array or in many."""
    logits, labels = prediction
    parts = zip(logits, labels, strict=True) if isinstance(logits, list) else [(logits, labels)]
    right = [
        float((one[:, :-1].argmax(-1) == label[:, 1:]).sum() + one[..., 0].sum() / 1000)
        for one, label in parts
    ]
    return {"accuracy": sum(right) / 16, "parts": len(right)}


def trained(kind: Any, directory: Path, given: dict[str, Any]) -> Any:
    from tests.support.ports.trainer_elastic import make_trainer

    trainer = make_trainer(kind, str(directory), **{**BASE, **given})
    trainer.compute_metrics = accuracy
    trainer.train()
    return trainer


def history(trainer: Any) -> list[dict[str, float]]:
    """Return the log, without what a clock says."""
    return [
        {
            name: value
            for name, value in line.items()
            if not name.endswith(("_runtime", "_per_second"))
        }
        for line in trainer.state.log_history
    ]


def names() -> dict[str, int]:
    every = [*(name for case in EQUAL.values() for name in case), *BASE]
    counted = dict.fromkeys(every, 1)
    for name in (*REFUSED, *documented()):
        counted[name] = counted.get(name, 0) + 1
    return counted


def test_every_argument_is_in_one_class() -> None:
    """Label smoothing trained wrong in silence, because nothing compared it."""
    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}

    counted = names()
    assert counted.keys() - fields == set(), "no argument"
    assert fields - counted.keys() == set(), "in no class"
    assert {name for name, count in counted.items() if count > 1} == set(), "in two classes"


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("case", EQUAL)
def test_it_does_what_trainer_does(tmp_path: Path, case: str) -> None:
    from everstep.integrations.transformers import ElasticTrainer

    theirs, ours = (
        trained(kind, tmp_path / kind.__name__, EQUAL[case])
        for kind in (transformers.Trainer, ElasticTrainer)
    )

    for line, expected in zip(history(ours), history(theirs), strict=True):
        assert line == pytest.approx(expected, rel=1e-5, abs=1e-6)
    keys = [[[*line] for line in one.state.log_history] for one in (ours, theirs)]
    assert [set(line) for line in keys[0]] == [set(line) for line in keys[1]]
    for name, value in theirs.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[name], value, rtol=1e-3, atol=1e-4)
    states = [{name: getattr(one.state, name) or -1 for name in STATE} for one in (ours, theirs)]
    assert states[0] == pytest.approx(states[1], rel=1e-5)
    assert (ours.state.best_model_checkpoint or "").startswith(
        str(tmp_path) if theirs.state.best_model_checkpoint else ""
    )


def test_others_are_refused_by_name(tmp_path: Path) -> None:
    from everstep.integrations.transformers import ElasticTrainer
    from tests.support.ports.trainer_elastic import make_trainer

    trainer = make_trainer(ElasticTrainer, str(tmp_path), max_steps=1)
    for name, value in REFUSED.items():
        setattr(trainer.args, name, value)
    with pytest.raises(TaskError) as raised:
        trainer.train()

    told = [one.partition(" ")[0] for one in raised.value.facts["refused"]]
    assert sorted(told) == sorted(f"args.{name}" for name in REFUSED)
    assert trainer.state.global_step == 0
