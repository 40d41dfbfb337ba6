"""Where a training of Trainer continues: after a step of its own run, or of another training.

The latter is a folder ``checkpoint-N`` of Trainer, or a version or a run directory of everstep.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from everstep import Session, TaskError
from ucp_core.errors import UcpError
from ucp_core.native import checkpoint_name, find_committed, open_checkpoint
from ucp_core.storage import join, open_store
from workers.parallel import own_names
from workers.protocol import CHECKPOINTS, STOPPED
from workers.train import registered_state

#: A log line: a run continues with other arguments.
CHANGED: Final = "ElasticTrainer: resumes at step %s with other arguments than it had before: %s"
#: The arguments that decide the training.
_TRAINING: Final = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps",
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim",
    "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm",
    "label_smoothing_factor", "neftune_noise_alpha", "bf16", "seed", "data_seed",
    "dataloader_drop_last", "train_sampling_strategy",
)  # fmt: skip
_WORDS: Final = "train(resume_from_checkpoint={path!r})"

log = logging.getLogger(__name__)


def training_arguments(args: Any) -> dict[str, Any]:
    """Return the arguments that decide the training, as JSON values."""
    every = args.to_dict()
    chosen: dict[str, Any] = json.loads(
        json.dumps({name: every[name] for name in _TRAINING}, default=str)
    )
    return chosen


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the arguments that differ from before, for people."""
    return [
        f"{name}={value!r} (was {before[name]!r})"
        for name, value in now.items()
        if name in before and before[name] != value
    ]


def require_work(
    args: Any,
    steps: int,
    resume: str | bool | None,  # noqa: FBT001  as in Trainer
) -> str:
    """Report how the arguments differ from those of the run that a script alone resumes.

    Return the checkpoint to begin from; "" for none. A run that a callback ended continues if
    ``resume`` requests it.
    """
    path = resume if isinstance(resume, str) else ""
    store, directory = open_store(args.output_dir)
    found = find_committed(store, join(directory, CHECKPOINTS), lineage=())
    if found is None:
        return path
    if path and open_store(path)[1] == found.directory:
        path = ""
    if "trainer" not in found.checkpoint.extra.get("registered", {}):
        return path
    before = registered_state(found.checkpoint, "trainer").get("arguments", {})
    changes = differing(before, training_arguments(args))
    stopped = join(directory, STOPPED)
    told = json.loads(store.read(stopped)) if store.exists(stopped) else {}
    has_ended = (told.get("step"), told.get("attempt")) == (found.step, found.attempt)
    if has_ended and resume is True and found.step < steps:
        store.delete(stopped)
        has_ended = False
    if changes and (has_ended or found.step >= steps):
        why = f": {told['reason']}" if has_ended else ""
        raise TaskError(
            f"ElasticTrainer: {args.output_dir} has a run that ended with step {found.step}{why}, "
            f"with other arguments: {', '.join(changes)}. For a new run name another "
            "args.output_dir, or delete this one; to train on raise args.max_steps or "
            "args.num_train_epochs, or call train(resume_from_checkpoint=True) after an early stop"
        )
    if changes:
        log.warning(CHANGED, found.step, ", ".join(changes))
    return path


@dataclass(frozen=True, slots=True)
class Earlier:
    """A checkpoint of another training."""

    path: str  #: Its folder.
    step: int  #: The step after which it was saved.
    is_trainers: bool  #: Whether it is a folder of Trainer rather than a version of a run.

    @classmethod
    def at(cls, path: str) -> Earlier:
        """Return the checkpoint in a folder."""
        state = Path(path, TRAINER_STATE_NAME)
        if state.is_file():
            step = TrainerState.load_from_json(str(state)).global_step
            return cls(path, step, is_trainers=True)
        try:
            store, directory = open_store(path)
            versions = join(directory, CHECKPOINTS)
            if found := find_committed(store, versions, lineage=()):
                return cls(join(path, CHECKPOINTS, checkpoint_name(found.step)), found.step, False)
            return cls(path, open_checkpoint(store, directory).step, is_trainers=False)
        except UcpError as error:
            raise TaskError(
                f"{_WORDS.format(path=path)}: no checkpoint of Trainer ({TRAINER_STATE_NAME}), no "
                f"version and no run directory of everstep: {error}"
            ) from error

    def begin(self, trainer: Any, session: Session) -> None:
        """Make the session begin after the checkpoint's step; load Trainer's weights."""
        if not self.is_trainers:
            session.continue_from(self.path)
            return
        parallel = session.settings.parallel
        cut = [axis for axis in ("tp", "pp", "ep") if getattr(parallel, axis) > 1]
        file = self._file(OPTIMIZER_NAME)
        if cut or not Path(file).is_file():
            what = f"with parallel.{cut[0]} above 1" if cut else f"without {OPTIMIZER_NAME}"
            raise TaskError(
                f"{_WORDS.format(path=self.path)}: a checkpoint of Trainer {what} cannot be "
                "continued; begin a new run with its weights: run.init_from, or from_pretrained"
            )
        trainer._load_from_checkpoint(self.path)  # noqa: SLF001  as ``Trainer.train`` does
        session.continue_from(self.step)

    def fill(
        self,
        named: Mapping[str, nn.Parameter],
        trainer: Any,
        model: nn.Module,
        scheduler: LRScheduler,
    ) -> None:
        """Give optimizer and scheduler the state of Trainer's.

        ``named`` has the parameters of the optimizer, in the order of Trainer's.
        """
        if not self.is_trainers:
            return
        optimizer = trainer.optimizer
        saved = torch.load(
            self._file(OPTIMIZER_NAME), map_location="cpu", mmap=True, weights_only=True
        )
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        if len(numbers) != len(named):
            raise TaskError(
                f"{_WORDS.format(path=self.path)}: its optimizer has {len(numbers)} parameters, "
                f"and this one {len(named)}"
            )
        shards = own_names(model.named_parameters())
        for number, (name, parameter) in zip(numbers, named.items(), strict=True):
            state = optimizer.state[parameter]
            for slot, value in saved["state"].get(number, {}).items():
                is_whole = isinstance(value, Tensor) and value.dim()
                state[slot] = _part(value, shards[name], parameter) if is_whole else value
        rates = torch.load(self._file(SCHEDULER_NAME), weights_only=True)
        # Trainer's optimizer may have a group without parameters.
        count = len(optimizer.param_groups)
        for key, value in rates.items():
            rates[key] = value[:count] if isinstance(value, list) else value
        scheduler.load_state_dict(rates)
        for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def load_state(self, state: TrainerState, but: Collection[str]) -> int:
        """Fill the trainer's state with Trainer's saved one; return the steps done there."""
        if not self.is_trainers:
            return 0
        saved = vars(TrainerState.load_from_json(self._file(TRAINER_STATE_NAME)))
        vars(state).update({name: value for name, value in saved.items() if name not in but})
        return self.step

    def _file(self, name: str) -> str:
        return str(Path(self.path, name))


def _part(whole: Tensor, like: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return this worker's part of a tensor, cut as a parameter of the model is."""
    local = whole.to(parameter.device)
    if isinstance(like, DTensor):
        local = distribute_tensor(
            local, like.device_mesh, like.placements, src_data_rank=None
        ).to_local()
    return torch.empty_like(parameter, dtype=whole.dtype).copy_(local.view(parameter.shape))
