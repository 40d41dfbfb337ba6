"""Hugging Face's ``Trainer`` on everstep's loop: a fine-tuning script changes one import.

    from everstep.integrations.transformers import ElasticTrainer as Trainer

The script runs alone as before. Under everstep the configuration decides on steps and batches, and
the script is run up to ``trainer.train()``.

Kept: the data collator, ``compute_loss`` and ``compute_loss_func``, the optimizer and scheduler of
the arguments, callbacks, logging, evaluation with ``compute_metrics``, the best model, ``state``.
An epoch takes each sample once, in an order of everstep's, and its last step takes what is left. A
callback may end the training. Checkpoints are everstep's. The rest is refused by name when
``train`` is called (see ``refusals``). Weights are sharded in float32; ``bf16=True`` computes in
bfloat16.

Code behind ``train`` runs once, when the run is complete, with the trained weights in ``model``.
Under everstep rank 0 runs the script again for that, from its top.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from transformers import Trainer, TrainerState
from transformers.integrations.neftune import activate_neftune, deactivate_neftune
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import (
    IntervalStrategy,
    TrainOutput,
    align_special_tokens,
    denumpify_detensorize,
)

from everstep import (
    CheckpointSettings,
    DataLoader,
    DataSettings,
    Session,
    Settings,
    Step,
    TaskError,
    TrainSettings,
    run,
)
from everstep.integrations.epochs import Epoch, Samples
from everstep.integrations.predictions import Predictions
from everstep.integrations.refusals import refusals
from ucp_core.storage import open_store
from workers.errors import LayoutRefusedError
from workers.launchers import forget_place
from workers.models import saved_by
from workers.parallel import drop_gathered, own_names
from workers.train import FinishedRun, all_agree, fill, finished_run, registered_state

#: Lines of ``state.log_history`` that are saved; older ones are in the logs of the callbacks.
_HISTORY: Final = 500
#: What is said of this worker, or by the arguments, and not by a checkpoint.
_OWN: Final = (
    "is_world_process_zero", "is_local_process_zero", "max_steps", "num_train_epochs",
    "logging_steps", "eval_steps", "save_steps",
)  # fmt: skip
#: Labels that count for no loss.
_IGNORED: Final = -100
#: Settings that follow from the arguments when the script runs alone.
_OVERRIDDEN: Final = {
    "train": ("steps", "global_batch", "micro_batch", "clip_norm", "precision", "seed"),
    "checkpoint": ("every_steps", "keep"),
}

log = logging.getLogger(__name__)

# Alone there is one process. Arguments that find WORLD_SIZE=2 of another job would wait for a
# second one. Under torchrun others do come.
if "TORCHELASTIC_RUN_ID" not in os.environ and (forgotten := forget_place(os.environ)):
    log.warning("ElasticTrainer: took %s out of the environment", ", ".join(forgotten))


class ElasticTrainer(Trainer):
    """A ``Trainer`` whose ``train`` is elastic; see the module for what is kept."""

    _session: Session | None = None

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,  # noqa: FBT001  as in Trainer
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train to the last step, from the newest step of ``args.output_dir`` on.

        Returns as ``Trainer.train`` does, with the trained weights in ``model``, those of the best
        step if ``args.load_best_model_at_end``. Under everstep on rank 0 of the complete run.

        Raises:
            TaskError: Something is asked for that cannot be kept; names everything.
        """
        refused = refusals(
            self,
            ElasticTrainer,
            resume=resume_from_checkpoint,
            trial=trial,
            ignored=ignore_keys_for_eval,
        )
        if refused:
            raise TaskError(f"ElasticTrainer: not supported: {'; '.join(refused)}", refused=refused)
        self._prepare_source()
        self._source = self.model
        run(self._train_elastically, directory=self.args.output_dir, settings=self._settings())
        self._take_results()
        loss = self._sums.total / max(1, self.state.global_step)
        return TrainOutput(self.state.global_step, loss, {"train_loss": loss})

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Return loss and metrics of the evaluation data; all workers share it in training."""
        session = self._session
        if session is None:
            found: dict[str, float] = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            return found
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, Mapping):
            metrics: dict[str, float] = {}
            for name, one in dataset.items():
                metrics |= self.evaluate(one, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        collate, read = self._reader(dataset, "evaluation")

        number, predictions = len(dataset), self._predictions()

        def loss_of(indices: NDArray[Any]) -> tuple[Any, ...]:
            inputs = collate(read(indices.tolist()))
            outputs = predictions.add if predictions is not None else None
            found = self._loss(self.model, inputs, len(indices), outputs)
            self._tell("on_prediction_step")
            return found if predictions is None else (*found, predictions.last)

        begun_s = time.monotonic()
        loss = session.evaluate(
            loss_of, number, outputs=predictions.gathered if predictions is not None else None
        )
        taken_s = time.monotonic() - begun_s
        metrics = {
            f"{metric_key_prefix}_loss": loss,
            f"{metric_key_prefix}_runtime": taken_s,
            f"{metric_key_prefix}_samples_per_second": number / taken_s,
        }
        if predictions is not None:
            told = denumpify_detensorize(self.compute_metrics(predictions.whole()))
            prefix = f"{metric_key_prefix}_"
            metrics |= {prefix + name.removeprefix(prefix): one for name, one in told.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def predict(self, *args: Any, **given: Any) -> Any:
        """Do as ``Trainer.predict``, before or behind the training."""
        self._refuse_in_training("predict")
        return super().predict(*args, **given)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:  # noqa: FBT001, FBT002  as in Trainer
        """Do as ``Trainer.save_model``, before or behind the training."""
        self._refuse_in_training("save_model")
        super().save_model(output_dir, _internal_call)

    def is_world_process_zero(self) -> bool:
        """Return whether this is the worker that speaks for all."""
        return self._session.rank == 0 if self._session is not None else True

    is_local_process_zero = is_world_process_zero

    def _refuse_in_training(self, what: str) -> None:
        if self._session is not None:
            raise TaskError(
                f"ElasticTrainer: {what} while it trains: each worker has a part of the model; "
                "call it behind trainer.train(); `everstep export RUN --to FOLDER` writes a step "
                "that is committed, also during the training"
            )

    def _predictions(self) -> Predictions | None:
        """Return what collects outputs for ``compute_metrics``; None if they are not needed."""
        if self.compute_metrics is None or self.args.prediction_loss_only:
            return None
        self._refuse_parts()
        return Predictions(self)

    def _refuse_parts(self) -> None:
        assert self._session is not None
        parallel = self._session.settings.parallel
        for axis in ("pp", "cp"):
            if getattr(parallel, axis) > 1:
                raise LayoutRefusedError(
                    f"parallel.{axis}={getattr(parallel, axis)}: compute_metrics needs the outputs "
                    f"of the whole model; write parallel.{axis}: 1",
                    axis=axis,
                )

    def _best_name(self) -> str:
        """Return the metric that decides which step is best; "" for none."""
        name: str = self.args.metric_for_best_model or ""
        return name if not name or name.startswith("eval_") else f"eval_{name}"

    def _take_results(self) -> None:
        """Put into the trainer what the complete run has in storage."""
        args, done = self.args, finished_run()
        here = done or FinishedRun(*open_store(args.output_dir))
        best = args.load_best_model_at_end
        if done is not None:
            newest = done.checkpoint()
            self.state, self._sums = TrainerState(), _Sums()
            self.state.compute_steps(args, newest.step)
            self.state.max_steps = newest.step
            saved = _Saved(self.state, self._sums, self.callback_handler.callbacks)
            saved.load_state_dict(registered_state(newest, "trainer"))
            self.state.global_step = newest.step
        if done is not None or (best and self.state.best_global_step):
            step = self.state.best_global_step if best else None
            fill(_values(self.model), here.checkpoint(step))

    def _settings(self) -> Settings:
        """Return the settings of a script that runs alone, from its arguments."""
        args: Any = self.args
        batch = args.per_device_train_batch_size
        global_batch = batch * args.gradient_accumulation_steps
        epoch = Epoch.of(self, batch, args.gradient_accumulation_steps)
        steps = args.max_steps
        if steps <= 0:
            steps = math.ceil(args.num_train_epochs * epoch.num_steps)
        saves = args.save_strategy == "steps" and args.save_steps >= 1
        return Settings(
            data=DataSettings(seed=args.seed if args.data_seed is None else args.data_seed),
            train=TrainSettings(
                steps=steps,
                global_batch=global_batch,
                micro_batch=batch,
                clip_norm=args.max_grad_norm,
                precision="bf16" if args.bf16 else "fp32",
                seed=args.seed,
                # The scheduler of the arguments sets the learning rate.
                warmup_steps=0,
                schedule="constant",
            ),
            checkpoint=CheckpointSettings(
                every_steps=int(args.save_steps) if saves else "auto",
                keep=max(2, args.save_total_limit or 3),
            ),
        )

    def _train_elastically(self, session: Session) -> None:
        source, args, train = self._source, self.args, session.settings.train
        self._session, self.lr_scheduler = session, None
        # Deep copies take this for the parameter with its values, so a tied one stays tied.
        empty = {
            id(one): nn.Parameter(torch.empty_like(one, dtype=torch.float32, device="meta"))
            for one in source.parameters()
        }
        for one in source.parameters():
            empty[id(one)].requires_grad_(one.requires_grad)
        named = own_names(source.named_parameters())

        def initialise(fqn: str, _shape: tuple[int, ...]) -> Tensor:
            return named[fqn].detach().float()

        alpha = self.neftune_noise_alpha
        noise = None if alpha is None else activate_neftune(source, alpha, self.accelerator)
        try:
            model = session.model(lambda: copy.deepcopy(source, dict(empty)), initialise)
            optimizer = session.optimizer(self._make_optimizer)
            self.model = self.model_wrapped = model
            self.optimizer = optimizer
            scheduler = self.create_scheduler(train.steps, optimizer)
            if not isinstance(scheduler, LRScheduler):
                raise TaskError(
                    f"ElasticTrainer: not supported: {type(scheduler).__name__}, which is no "
                    "LRScheduler of torch; set another args.lr_scheduler_type"
                )
            session.register("lr_scheduler", scheduler)
            self._begin_state(session)
            self._show_callbacks()
            optimizer.register_step_pre_hook(lambda *_: self._tell("on_pre_optimizer_step"))
            optimizer.register_step_post_hook(lambda *_: self._tell("on_optimizer_step"))
            self._tell("on_train_begin")
            if args.eval_on_start and not session.step:
                self.evaluate()
            begins_epoch = True
            for step in session.steps(self._loader()):
                if begins_epoch:
                    self._tell("on_epoch_begin")
                begins_epoch = self._step(step, model, scheduler)
                if self.control.should_training_stop and step.number < train.steps:
                    session.stop("a callback of the trainer asked for it (should_training_stop)")
            self._tell("on_train_end")
            if session.world_size == 1:
                _copy_values(model, source)
        finally:
            self._session = self.optimizer = self.lr_scheduler = None
            self.model = self.model_wrapped = source
            self._show_callbacks()
            if noise is not None:
                deactivate_neftune(source, noise, self.accelerator)

    def _prepare_source(self) -> None:
        """Change the script's model as ``Trainer.train`` does."""
        args: Any = self.args
        if args.gradient_checkpointing:
            given = dict(args.gradient_checkpointing_kwargs or {})
            how = {name: given.pop(name) for name in ("every_n_layers", "offload") if name in given}
            self.model.activation_checkpointing_enable(given or None, **how)
        if hasattr(self.processing_class, "special_tokens_map") and hasattr(self.model, "config"):
            align_special_tokens(self.model, self.processing_class)

    def _tell(self, event: str) -> None:
        """Call the callbacks."""
        call = getattr(self.callback_handler, event)
        self.control = call(self.args, self.state, self.control)

    def _show_callbacks(self) -> None:
        """Have callbacks get what is trained now."""
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))

    def _begin_state(self, session: Session) -> None:
        """Begin or continue the trainer's own state."""
        if session.rank == 0 and hasattr(self.processing_class, "save_pretrained"):
            session.export_with(saved_by(self.processing_class))
        args, steps = self.args, session.settings.train.steps
        if args.eval_on_start or args.eval_strategy != IntervalStrategy.NO:
            # The first evaluation may be hours away: by then the layout would have trained.
            self._predictions()
        self.state = TrainerState()
        self.state.compute_steps(args, steps)
        self.state.max_steps = steps
        train = session.settings.train
        self._epoch = Epoch.of(self, train.micro_batch, train.num_micro_batches)
        self.state.num_train_epochs = math.ceil(steps / self._epoch.num_steps)
        if args.max_steps <= 0 and steps == math.ceil(
            args.num_train_epochs * self._epoch.num_steps
        ):
            self.state.num_train_epochs = math.ceil(args.num_train_epochs)
        self.state.is_world_process_zero = self.state.is_local_process_zero = session.rank == 0
        self.state.global_step = session.step
        if self._best_name():
            mode: Literal["min", "max"] = "max" if args.greater_is_better else "min"
            session.keep_best(self._best_name(), mode=mode)
        self._tell_ignored(session)
        self._sums = _Sums()
        callbacks = self.callback_handler.callbacks
        session.register("trainer", _Saved(self.state, self._sums, callbacks))
        # What transformers' own callbacks ask for follows from the state, which is the same on all.
        self._votes = any(not type(one).__module__.startswith("transformers.") for one in callbacks)

    def _tell_ignored(self, session: Session) -> None:
        """Say which arguments the configuration overrides."""
        asked, found = self._settings(), session.settings
        told = [
            f"{part}.{name}={theirs!r} (the arguments: {ours!r})"
            for part, names in _OVERRIDDEN.items()
            for name in names
            if (ours := getattr(getattr(asked, part), name))
            != (theirs := getattr(getattr(found, part), name))
        ]
        if told and session.rank == 0:
            log.warning("ElasticTrainer: the configuration decides: %s", ", ".join(told))

    def _step(self, step: Step, model: nn.Module, scheduler: Any) -> bool:
        """Train a step; return whether an epoch ended with it."""
        args, state = self.args, self.state
        assert self._session is not None
        train = self._session.settings.train
        self._tell("on_step_begin")
        # ``from_pretrained`` returns a model in evaluation mode, and a callback may leave it so.
        model.train()
        before: Any = None

        def loss_of(batch: tuple[int, Any]) -> tuple[Tensor, int]:
            nonlocal before
            num_samples, inputs = batch
            # In a pipeline it is called for the first one twice.
            if before is not None and before is not batch and num_samples:
                self._tell("on_substep_end")
            before = batch
            return self._loss(model, inputs, num_samples)

        self._session.train_step(loss_of)
        if not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()
        state.global_step, state.epoch = step.number, self._epoch.at(step.number)
        filters = args.logging_nan_inf_filter and not math.isfinite(step.loss)
        self._sums.add(self._sums.mean if filters else step.loss)
        self._tell("on_step_end")
        self._log_evaluate_save(step, scheduler)
        ends_epoch = step.number % self._epoch.num_steps == 0 or step.number == train.steps
        self._agree_on_control(step, is_last=step.number == train.steps)
        if ends_epoch or self.control.should_training_stop:
            self._tell("on_epoch_end")
            self._log_evaluate_save(step, scheduler)
            self._agree_on_control(step, is_last=step.number == train.steps)
        return ends_epoch

    def _agree_on_control(self, step: Step, *, is_last: bool) -> None:
        """Have what a callback asks for on one worker hold on all."""
        control, session = self.control, self._session
        assert session is not None
        for name in ("should_training_stop", "should_epoch_stop"):
            wanted = bool(getattr(control, name))
            if self._votes and session.world_size > 1:
                wanted = not all_agree(not wanted, session.device)
            setattr(control, name, wanted)
        if control.should_epoch_stop and not control.should_training_stop and not is_last:
            raise TaskError(
                f"ElasticTrainer: a callback asked to leave the epoch of step {step.number} "
                "(should_epoch_stop), whose samples would be lost; should_training_stop ends the "
                "training"
            )

    def _log_evaluate_save(self, step: Step, scheduler: Any) -> None:
        """Do what the callbacks have asked for."""
        if self.control.should_log and self._sums.steps:
            loss = self._sums.take_mean()
            self.log({"loss": loss, "grad_norm": step.grad_norm, "learning_rate": step.lr})
        if self.control.should_evaluate:
            metrics = self.evaluate()
            is_best = self._determine_best_metric(metrics, None)
            if self._best_name():
                assert self._session is not None
                self._session.log({self._best_name(): metrics[self._best_name()]})
            if self.args.save_strategy == "best":
                self.control.should_save = is_best
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(metrics["eval_loss"])
        if self.control.should_save:
            self._tell("on_save")

    def _loss(
        self,
        model: nn.Module,
        inputs: Any,
        num_samples: int,
        outputs: Callable[[Any, Any], None] | None = None,
    ) -> tuple[Tensor, int]:
        """Return the mean loss of a batch, and its weight: labels, or else batches count alike.

        ``outputs`` is called with the batch and with what the model returned for it.
        """
        inputs = self._prepare_inputs(inputs)
        assert self._session is not None, "it trains"
        degree = self._session.settings.parallel.cp
        if degree > 1:
            inputs = self._session.part(inputs)
        labels = inputs.get("shift_labels", inputs.get("labels"))
        is_evaluation = not model.training
        # A mean over batches is what Trainer makes of them; an evaluation is one over samples.
        tokens = num_samples if is_evaluation else self._session.settings.train.micro_batch
        counts = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if degree > 1 and not (counts and "shift_labels" in inputs):
            raise LayoutRefusedError(
                f"parallel.cp={degree}: the loss of this model or batch is not the mean over token "
                "labels, so parts of it have no weights; write parallel.cp: 1",
                axis="cp",
            )
        if isinstance(labels, Tensor) and counts:
            shifts = self._loss_shifts_labels and "shift_labels" not in inputs
            tokens = int((labels[..., 1:] if shifts else labels).ne(_IGNORED).sum())
        tokens = tokens if num_samples else 0
        if outputs is None:
            loss = self.compute_loss(model, inputs)
        else:
            # The loss may take the labels out.
            batch = dict(inputs)
            loss, returned = self.compute_loss(model, inputs, return_outputs=True)
            outputs(batch, returned)
        # The mean over no labels is no number, and counts for nothing.
        return loss if tokens else loss.nan_to_num(nan=0.0), tokens

    def _loader(self) -> DataLoader:
        collate, read = self._reader(self.train_dataset, "training")
        loader = DataLoader(
            Samples(self.train_dataset, read),
            collate_fn=lambda held: (held.num_samples, collate(held)),
            num_workers=self.args.dataloader_num_workers,
        )
        loader.epoch = self._epoch.taken, self._epoch.num_positions
        return loader

    def _reader(
        self, dataset: Any, what: str
    ) -> tuple[Callable[[list[Any]], Any], Callable[[Sequence[int]], list[Any]]]:
        """Return how samples become a batch, and how they are read."""
        collate = self._get_collator_with_removed_columns(self.data_collator, description=what)
        many = getattr(dataset, "__getitems__", None)
        return collate, many or (lambda indices: [dataset[index] for index in indices])

    def _make_optimizer(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of the arguments; biases and norms do not decay."""
        kind, given = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
            self.args, self._source
        )
        whole = sorted({"params", "model", "optimizer_dict"} & given.keys())
        if whole or not isinstance(kind, type):
            raise TaskError(f"ElasticTrainer: args.optim={self.args.optim} needs whole matrices")
        decaying = own_names((name, name) for name in self.get_decay_parameter_names(self._source))
        trained = {name: one for name, one in named.items() if one.requires_grad}
        groups = [
            {
                "params": [one for name, one in trained.items() if (name in decaying) == decays],
                "weight_decay": self.args.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        made: torch.optim.Optimizer = kind([group for group in groups if group["params"]], **given)
        return made


@dataclass(slots=True)
class _Sums:
    """Losses of steps: of all, and since the last line of the log."""

    total: float = 0.0
    loss: float = 0.0
    steps: int = 0

    def add(self, loss: float) -> None:
        self.total, self.loss, self.steps = self.total + loss, self.loss + loss, self.steps + 1

    @property
    def mean(self) -> float:
        return self.loss / max(1, self.steps)

    def take_mean(self) -> float:
        mean = self.mean
        self.loss, self.steps = 0.0, 0
        return mean


class _Saved:
    """What is saved of a trainer beside model, optimizer and scheduler."""

    def __init__(self, state: TrainerState, sums: _Sums, callbacks: Sequence[Any]) -> None:
        self._state, self._sums = state, sums
        stateful = [one for one in callbacks if isinstance(one, ExportableState)]
        self._callbacks = {
            f"{number} {type(one).__name__}": one for number, one in enumerate(stateful)
        }

    def state_dict(self) -> dict[str, Any]:
        reached = {name: value for name, value in vars(self._state).items() if name not in _OWN}
        state = json.loads(json.dumps(reached, default=str))
        state["log_history"] = state["log_history"][-_HISTORY:]
        counted = {name: dict(one.state()["attributes"]) for name, one in self._callbacks.items()}
        return {"state": state, "sums": asdict(self._sums), "callbacks": counted}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        state = {name: value for name, value in saved["state"].items() if name not in _OWN}
        vars(self._state).update(state)
        for name, value in saved["sums"].items():
            setattr(self._sums, name, value)
        for name, callback in self._callbacks.items():
            vars(callback).update(saved["callbacks"].get(name, {}))


def _copy_values(model: nn.Module, source: nn.Module) -> None:
    """Put the trained weights and the buffers into the script's own model."""
    drop_gathered(model)
    trained = _values(model)
    with torch.no_grad():
        for name, one in _values(source).items():
            value = trained[name]
            one.copy_(value.full_tensor() if isinstance(value, DTensor) else value)


def _values(model: nn.Module) -> dict[str, Tensor]:
    return own_names((*model.named_parameters(), *model.named_buffers()))
