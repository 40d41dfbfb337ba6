"""Hugging Face's ``Trainer`` on everstep's loop: a fine-tuning script changes one import.

    from everstep.integrations.transformers import ElasticTrainer as Trainer

The script runs alone as before. Under everstep it is run up to ``trainer.train()``, and its
arguments decide all that the configuration leaves out.

Kept: the data collator, ``compute_loss`` and ``compute_loss_func``, the optimizer and scheduler of
the arguments, callbacks, logging, evaluation with ``compute_metrics``, the best model, ``state``.
An epoch takes each sample once, in everstep's order or that of the arguments' sampler, and its last
step takes the rest. A callback may end the training. Checkpoints are everstep's. The rest is
refused by name when ``train`` is called (see ``refusals``). Weights are sharded in float32;
``bf16=True`` computes in bfloat16.

Code after ``train`` runs once, when the run is complete, with the trained weights in ``model``.
Under everstep rank 0 runs the script again for this, from its top.
"""

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
    SaveStrategy,
    TrainOutput,
    align_special_tokens,
    denumpify_detensorize,
    speed_metrics,
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
from everstep.integrations.resuming import (
    CHANGED,
    Earlier,
    differing,
    require_work,
    training_arguments,
)
from ucp_core.native import checkpoint_name
from ucp_core.storage import join, open_store
from workers.collectives import on_host
from workers.errors import LayoutRefusedError
from workers.launchers import forget_place, take_place
from workers.models import saved_by
from workers.parallel import drop_gathered, own_names
from workers.protocol import CHECKPOINTS
from workers.train import (
    FinishedRun,
    all_agree,
    fill,
    finished_run,
    registered_state,
    runs_alone,
)

#: Lines of ``state.log_history`` that are saved; older ones are in the logs of the callbacks.
_HISTORY: Final = 500
#: Values that come from this worker or the arguments, not from a checkpoint.
_OWN: Final = (
    "is_world_process_zero", "is_local_process_zero", "max_steps", "num_train_epochs",
    "logging_steps", "eval_steps", "save_steps",
)  # fmt: skip
#: Label of tokens that count for no loss.
_IGNORED: Final = -100
#: Settings that follow from the arguments when the script runs alone.
_OVERRIDDEN: Final = {
    "train": ("steps", "global_batch", "micro_batch", "clip_norm", "precision", "seed"),
    "checkpoint": ("every_steps", "keep"),
}

log = logging.getLogger(__name__)

# The session connects the processes that torchrun started. Arguments that find their variables, or
# WORLD_SIZE=2 of another job, would wait for them, too.
if take_place() is None and (forgotten := forget_place(os.environ)):
    log.warning("ElasticTrainer: took %s from the environment", ", ".join(forgotten))


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

        Returns as ``Trainer.train`` does, with the trained weights in ``model``: those of the best
        step if ``args.load_best_model_at_end``. Under everstep it returns on rank 0 of the complete
        run.

        Raises:
            TaskError: The script uses unsupported features; the message names all of them.
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
        args, resume = self.args, resume_from_checkpoint
        self._resume = resume if isinstance(resume, str) else ""
        # A script that runs alone reports differences first; among workers rank 0 does.
        self._is_told = runs_alone()
        if self._is_told:
            self._resume = require_work(args, self._settings().train.steps, resume)
        self._prepare_source()
        self._source = self.model
        run(self._train_elastically, directory=args.output_dir, settings=self._settings())
        self._take_results()
        if finished_run() is not None:
            # The run that trained it logged this after the last version.
            done = {"epoch": self.state.epoch, "step": self.state.global_step}
            self.state.log_history.append(self._train_metrics() | done)
        history = reversed(self.state.log_history)
        metrics = dict(next(line for line in history if "train_runtime" in line))
        return TrainOutput(metrics.pop("step"), metrics["train_loss"], metrics)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Return the loss and metrics of the evaluation data; all workers share it in training."""
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
        # All samples in their order, or samples of similar length together.
        order = list(self._get_eval_sampler(dataset) or range(number))

        def loss_of(indices: NDArray[Any]) -> tuple[Any, ...]:
            inputs = collate(read([order[index] for index in indices]))
            outputs = predictions.add if predictions is not None else None
            found = self._loss(self.model, inputs, len(indices), outputs)
            self._tell("on_prediction_step")
            return found if predictions is None else (*found, predictions.last)

        begun_s, batch = time.monotonic(), self.args.per_device_eval_batch_size
        loss = session.evaluate(
            loss_of,
            number,
            micro_batch=batch,
            of_means=True,
            outputs=predictions.gathered if predictions is not None else None,
        )
        metrics = {f"{metric_key_prefix}_loss": loss}
        if predictions is not None:
            told = denumpify_detensorize(self.compute_metrics(predictions.whole()))
            prefix = f"{metric_key_prefix}_"
            metrics |= {prefix + name.removeprefix(prefix): one for name, one in told.items()}
        num_batches = math.ceil(number / batch)
        taken_s = time.monotonic() - begun_s
        metrics |= _speed(metric_key_prefix, taken_s, number, num_batches)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def predict(self, *args: Any, **given: Any) -> Any:
        """Do as ``Trainer.predict``, before or after the training."""
        self._refuse_in_training("predict")
        return super().predict(*args, **given)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:  # noqa: FBT001, FBT002  as in Trainer
        """Do as ``Trainer.save_model``, before or after the training."""
        self._refuse_in_training("save_model")
        super().save_model(output_dir, _internal_call)

    def is_world_process_zero(self) -> bool:
        """Return whether this worker reports for all."""
        return self._session.rank == 0 if self._session is not None else True

    is_local_process_zero = is_world_process_zero

    def floating_point_ops(self, inputs: Any) -> int:
        """Do as ``Trainer.floating_point_ops``; count the weights of the whole model once."""
        if self._session is None:
            return int(super().floating_point_ops(inputs))
        taken = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        return 6 * taken.numel() * self._num_weights if taken is not None else 0

    def store_flos(self) -> None:
        """Do as ``Trainer.store_flos``; all workers call it in training."""
        session = self._session
        if session is not None and session.world_size > 1:
            counted = torch.tensor([self.current_flos], dtype=torch.float64, device=session.device)
            torch.distributed.all_reduce(counted)
            parallel = session.settings.parallel
            # The workers of a group compute the same batch.
            self.current_flos = on_host(counted)[0] / (parallel.cp * parallel.tp * parallel.pp)
        self.state.total_flos += self.current_flos
        self.current_flos = 0.0

    def _train_metrics(self) -> dict[str, float]:
        """Return the last line of the log, as ``Trainer`` has it, of all attempts together."""
        sums, state = self._sums, self.state
        trained = state.global_step - sums.first
        epochs = (state.epoch or 0.0) * trained / max(1, state.global_step)
        num_samples = epochs * len(self.train_dataset)
        return _speed("train", sums.seconds, num_samples, trained) | {
            "total_flos": state.total_flos,
            "train_loss": sums.total / max(1, trained),
        }

    def _refuse_in_training(self, what: str) -> None:
        if self._session is not None:
            raise TaskError(
                f"ElasticTrainer: {what} while it trains: each worker has a part of the model; "
                "call it after trainer.train(); `everstep export RUN --to FOLDER` writes a "
                "committed step, also during the training"
            )

    def _predictions(self) -> Predictions | None:
        """Return the collector of outputs for ``compute_metrics``; None if it is not needed."""
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
        args, done = self.args, finished_run()
        here = done or FinishedRun(*open_store(args.output_dir))
        best = args.load_best_model_at_end
        if done is not None:
            newest = done.checkpoint()
            self.state, self._sums = TrainerState(), _Sums()
            self.state.compute_steps(args, newest.step)
            self.state.max_steps = newest.step
            saved = _Saved(self.state, self._sums, self.callback_handler.callbacks, {})
            saved.load_state_dict(registered_state(newest, "trainer"))
            self.state.global_step = newest.step
        step = self.state.best_global_step if best else None
        if done is not None or step:
            fill(_values(self.model), here.checkpoint(step))
        if step:
            self.state.best_model_checkpoint = join(args.output_dir, f"best-{step}")
            self.save_model(self.state.best_model_checkpoint)

    def _settings(self) -> Settings:
        """Return the settings of a script that runs alone, from its arguments."""
        args: Any = self.args
        batch = args.per_device_train_batch_size
        global_batch = batch * args.gradient_accumulation_steps
        epoch = Epoch.of(self, batch, args.gradient_accumulation_steps)
        steps = args.max_steps
        if steps <= 0:
            steps = math.ceil(args.num_train_epochs * epoch.num_steps)
        saves: dict[Any, float] = {
            SaveStrategy.EPOCH: epoch.num_steps,
            SaveStrategy.STEPS: args.save_steps
            if args.save_steps >= 1
            else args.save_steps * steps,
        }
        every = saves.get(args.save_strategy)
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
                every_steps="auto" if every is None else math.ceil(every),
                keep=max(2, args.save_total_limit or 3),
            ),
        )

    def _train_elastically(self, session: Session) -> None:
        source, alpha = self._source, self.neftune_noise_alpha
        self._session, self.lr_scheduler = session, None
        noise = None if alpha is None else activate_neftune(source, alpha, self.accelerator)
        try:
            self._train_steps(session, self._build(session))
            if session.world_size == 1:
                _copy_values(self.model, source)
        finally:
            self._session = self.optimizer = self.lr_scheduler = None
            self.model = self.model_wrapped = source
            self._show_callbacks()
            if noise is not None:
                deactivate_neftune(source, noise, self.accelerator)

    def _build(self, session: Session) -> LRScheduler:
        """Make model and optimizer with the state to continue from; return the scheduler."""
        source = self._source
        self._earlier = Earlier.at(self._resume) if self._resume and not session.step else None
        if self._earlier is not None:
            self._earlier.begin(self, session)
        # Deep copies use these parameters in place of the source's, so tied ones stay tied.
        empty = {
            id(one): nn.Parameter(torch.empty_like(one, dtype=torch.float32, device="meta"))
            for one in source.parameters()
        }
        for one in source.parameters():
            empty[id(one)].requires_grad_(one.requires_grad)
        named = own_names(source.named_parameters())

        def initialise(fqn: str, _shape: tuple[int, ...]) -> Tensor:
            return named[fqn].detach().float()

        model = session.model(lambda: copy.deepcopy(source, dict(empty)), initialise)
        optimizer = session.optimizer(self._make_optimizer)
        self.model = self.model_wrapped = model
        self.optimizer = optimizer
        scheduler = self.create_scheduler(session.settings.train.steps, optimizer)
        if not isinstance(scheduler, LRScheduler):
            raise TaskError(
                f"ElasticTrainer: not supported: {type(scheduler).__name__}, "
                "which is no LRScheduler of torch; set another args.lr_scheduler_type"
            )
        if self._earlier is not None:
            self._earlier.fill(self._locals, self, model, scheduler)
        session.register("lr_scheduler", scheduler)
        self._begin_state(session)
        self._show_callbacks()
        optimizer.register_step_pre_hook(lambda *_: self._tell("on_pre_optimizer_step"))
        optimizer.register_step_post_hook(lambda *_: self._tell("on_optimizer_step"))
        return scheduler

    def _train_steps(self, session: Session, scheduler: LRScheduler) -> None:
        self._clock_s = time.monotonic()
        self._tell("on_train_begin")
        if self.args.eval_on_start and not session.step:
            self.evaluate()
        begins_epoch = True
        for step in session.steps(self._loader()):
            if begins_epoch:
                self._tell("on_epoch_begin")
            begins_epoch = self._step(step, self.model, scheduler)
            if self.control.should_training_stop and step.number < session.settings.train.steps:
                session.stop("a callback of the trainer requested it (should_training_stop)")
        self.log(self._train_metrics())
        self._tell("on_train_end")

    def _prepare_source(self) -> None:
        args: Any = self.args
        if args.gradient_checkpointing:
            given = dict(args.gradient_checkpointing_kwargs or {})
            how = {name: given.pop(name) for name in ("every_n_layers", "offload") if name in given}
            self.model.activation_checkpointing_enable(given or None, **how)
        if hasattr(self.processing_class, "special_tokens_map") and hasattr(self.model, "config"):
            align_special_tokens(self.model, self.processing_class)

    def _tell(self, event: str) -> None:
        call = getattr(self.callback_handler, event)
        self.control = call(self.args, self.state, self.control)

    def _show_callbacks(self) -> None:
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))

    def _begin_state(self, session: Session) -> None:
        if session.rank == 0 and hasattr(self.processing_class, "save_pretrained"):
            session.export_with(saved_by(self.processing_class))
        args, steps = self.args, session.settings.train.steps
        if args.eval_on_start or args.eval_strategy != IntervalStrategy.NO:
            # Check now: the first evaluation may be hours away, and by then the layout would have
            # trained.
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
        self.current_flos, self._num_weights = 0.0, _num_weights(self._source)
        if self._earlier is not None:
            self._sums.first = self._earlier.load_state(self.state, but=_OWN)
        callbacks = self.callback_handler.callbacks
        saved = _Saved(self.state, self._sums, callbacks, training_arguments(args))
        session.register("trainer", saved)
        if saved.differing and session.rank == 0 and not self._is_told:
            log.warning(CHANGED, session.step, ", ".join(saved.differing))
        if self._resume and self._earlier is None and self._sums.origin != self._resume:
            raise TaskError(
                f"ElasticTrainer: train(resume_from_checkpoint={self._resume!r}): the run "
                f"directory has steps up to {session.step} that did not begin there; name another "
                "one, or leave the argument out to continue from its newest step"
            )
        self._sums.origin = self._resume
        # The requests of transformers' own callbacks follow from the state, which is equal on all.
        self._votes = any(not type(one).__module__.startswith("transformers.") for one in callbacks)

    def _tell_ignored(self, session: Session) -> None:
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
            # In a pipeline this is called twice for the first batch.
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
        now_s = time.monotonic()
        self._sums.seconds, self._clock_s = self._sums.seconds + now_s - self._clock_s, now_s
        self._tell("on_step_end")
        # Not if only a callback requests a log: that may be on one worker.
        if step.number % max(1, int(state.logging_steps)) == 0:
            self.store_flos()
        self._log_evaluate_save(step, scheduler)
        ends_epoch = step.number % self._epoch.num_steps == 0 or step.number == train.steps
        self._agree_on_control(step, is_last=step.number == train.steps)
        if ends_epoch or self.control.should_training_stop:
            # The version of the last step has all lines.
            self.store_flos()
            self._tell("on_epoch_end")
            self._log_evaluate_save(step, scheduler)
            self._agree_on_control(step, is_last=step.number == train.steps)
        return ends_epoch

    def _agree_on_control(self, step: Step, *, is_last: bool) -> None:
        """Let a request of a callback on one worker hold on all."""
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
                scheduler.step(metrics[self._best_name()])
        if self.control.should_save:
            if self.state.best_global_step:
                best = checkpoint_name(self.state.best_global_step)
                directory = self._session.settings.run.directory
                self.state.best_model_checkpoint = join(directory, CHECKPOINTS, best)
            self._tell("on_save")

    def _loss(
        self,
        model: nn.Module,
        inputs: Any,
        num_samples: int,
        outputs: Callable[[Any, Any], None] | None = None,
    ) -> tuple[Tensor, int]:
        """Return the mean loss of a batch, and its weight: the labels, or 1 per batch.

        ``outputs`` is called with the batch and the model's outputs for it.
        """
        inputs = self._prepare_inputs(inputs)
        assert self._session is not None, "it trains"
        is_evaluation = not model.training
        if num_samples and not is_evaluation:
            self.current_flos += float(self.floating_point_ops(inputs))
        degree = self._session.settings.parallel.cp
        if degree > 1:
            inputs = self._session.part(inputs)
        labels = inputs.get("shift_labels", inputs.get("labels"))
        # Trainer averages over batches in training, and over samples in an evaluation.
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
            # The loss may remove the labels from the batch.
            batch = dict(inputs)
            loss, returned = self.compute_loss(model, inputs, return_outputs=True)
            outputs(batch, returned)
        filters = is_evaluation and self.args.logging_nan_inf_filter
        if filters and not loss.isfinite():
            tokens = 0
        # The mean over no labels is nan and must not count.
        return loss if tokens else loss.nan_to_num(nan=0.0), tokens

    def _loader(self) -> DataLoader:
        collate, read = self._reader(self.train_dataset, "training")
        loader = DataLoader(
            Samples(self.train_dataset, read),
            collate_fn=lambda held: (held.num_samples, collate(held)),
            num_workers=self.args.dataloader_num_workers,
            sampler=self._sampler(),
        )
        loader.epoch = self._epoch.taken, self._epoch.num_positions
        return loader

    def _sampler(self) -> Any:
        """Return the sampler that gives the order; None for everstep's random order."""
        is_own = type(self)._get_train_sampler is not ElasticTrainer._get_train_sampler  # noqa: SLF001  of its class
        is_random = self.args.train_sampling_strategy == "random"
        return None if is_random and not is_own else self._get_train_sampler(self.train_dataset)

    def _reader(
        self, dataset: Any, what: str
    ) -> tuple[Callable[[list[Any]], Any], Callable[[Sequence[int]], list[Any]]]:
        """Return the functions that make a batch of samples and that read samples."""
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
        every = [name for name in own_names(self._source.named_parameters()) if name in trained]
        self._locals = {
            name: trained[name]
            for decays in (True, False)
            for name in every
            if (name in decaying) == decays
        }
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
    """Sums over the steps."""

    total: float = 0.0  #: Sum of the losses of all steps.
    loss: float = 0.0  #: Sum of the losses of the ``steps`` since the last line of the log.
    steps: int = 0
    seconds: float = 0.0  #: Time that attempts trained, up to the saved step.
    first: int = 0  #: Number of steps that were done elsewhere.
    origin: str = ""  #: Where they were done, as given by the script.

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
    """The saved state of a trainer besides model, optimizer and scheduler."""

    def __init__(
        self,
        state: TrainerState,
        sums: _Sums,
        callbacks: Sequence[Any],
        arguments: Mapping[str, Any],
    ) -> None:
        self._state, self._sums, self._arguments = state, sums, arguments
        #: The ``arguments`` that differ from the saved ones, for people.
        self.differing: list[str] = []
        stateful = [one for one in callbacks if isinstance(one, ExportableState)]
        self._callbacks = {
            f"{number} {type(one).__name__}": one for number, one in enumerate(stateful)
        }

    def state_dict(self) -> dict[str, Any]:
        reached = {name: value for name, value in vars(self._state).items() if name not in _OWN}
        state = json.loads(json.dumps(reached, default=str))
        state["log_history"] = state["log_history"][-_HISTORY:]
        counted = {name: dict(one.state()["attributes"]) for name, one in self._callbacks.items()}
        return {
            "state": state, "sums": asdict(self._sums), "callbacks": counted,
            "arguments": self._arguments,
        }  # fmt: skip

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        state = {name: value for name, value in saved["state"].items() if name not in _OWN}
        vars(self._state).update(state)
        for name, value in saved["sums"].items():
            setattr(self._sums, name, value)
        for name, callback in self._callbacks.items():
            vars(callback).update(saved["callbacks"].get(name, {}))
        self.differing = differing(saved.get("arguments", {}), self._arguments)


def _copy_values(model: nn.Module, source: nn.Module) -> None:
    """Put the trained weights and the buffers into the script's own model."""
    drop_gathered(model)
    trained = _values(model)
    with torch.no_grad():
        for name, one in _values(source).items():
            value = trained[name]
            one.copy_(value.full_tensor() if isinstance(value, DTensor) else value)


def _speed(split: str, taken_s: float, num_samples: float, num_steps: int) -> dict[str, float]:
    began_s = time.time() - taken_s  # noqa: TID251  the clock of ``speed_metrics``
    found: dict[str, float] = speed_metrics(split, began_s, num_samples, num_steps)
    return found


def _num_weights(model: nn.Module) -> int:
    """Return the weights that ``Trainer.floating_point_ops`` counts."""
    count = getattr(model, "num_parameters", None)
    return int(count(exclude_embeddings=True)) if count is not None else 0


def _values(model: nn.Module) -> dict[str, Tensor]:
    return own_names((*model.named_parameters(), *model.named_buffers()))
