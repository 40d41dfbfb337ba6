"""Features of ``Trainer`` that ``ElasticTrainer`` refuses, by name."""

from typing import Any, Final

import torch
from transformers import Trainer
from transformers.training_args import OptimizerNames

#: Arguments that are refused if set, each with the alternative.
_ARGUMENTS: Final = {
    "fp16": "use bf16",
    "push_to_hub": "call trainer.push_to_hub() after train()",
    "batch_eval_metrics": "compute_metrics gets all batches at once",
    "include_for_metrics": "compute_metrics gets predictions and labels",
    "deepspeed": "everstep shards",
    "fsdp": "everstep shards",
    "parallelism_config": "everstep shards",
    "torch_compile": "compile the model where it is made",
    "use_liger_kernel": "apply the kernels where the model is made",
    "auto_find_batch_size": "set per_device_train_batch_size",
    "enable_jit_checkpoint": "everstep saves when a worker must leave",
    "restore_callback_states_from_checkpoint": "everstep restores them",
    "debug": "everstep skips and reports updates that are not finite: train.not_finite",
}
#: Methods that may be overridden because training calls them.
_CALLED: Final = (
    "compute_loss", "create_scheduler", "evaluate", "get_decay_parameter_names",
    "get_optimizer_cls_and_kwargs", "log", "_get_train_sampler", "_get_eval_sampler",
    "floating_point_ops",
)  # fmt: skip
#: Other methods that are called, or that only the script or ``Trainer.__init__`` calls.
_KEPT: Final = frozenset(
    (
        *_CALLED, "train", "predict", "save_model", "_save", "push_to_hub", "create_model_card",
        "add_callback", "pop_callback", "remove_callback", "is_local_process_zero",
        "is_world_process_zero", "num_examples",
        "get_test_dataloader", "call_model_init", "init_hf_repo", "_prepare_input",
        "_prepare_inputs", "_get_collator_with_removed_columns",
        "_set_signature_columns_if_needed", "_move_model_to_device", "_validate_args",
        "_build_accelerator_args", "create_accelerator_and_postprocess",
    )
)  # fmt: skip


def refusals(
    trainer: Any, base: type, *, resume: Any, trial: Any, ignored: list[str] | None
) -> list[str]:
    """Return the unsupported features that a script uses; ``base`` is the class whose code runs."""
    args: Any = trainer.args
    counted = args.include_num_input_tokens_seen
    given = {
        "train(resume_from_checkpoint=False) (for a new run, delete args.output_dir)": resume
        is False,
        "train(trial=...) (start a run for each trial)": trial is not None,
        "train(ignore_keys_for_eval=...) (name them in model.config.keys_to_ignore_at_inference)": (
            ignored is not None
        ),
        "an optimizer (use args.optim)": trainer.optimizer is not None,
        "optimizers=(..., scheduler) (use args.lr_scheduler_type)": trainer.lr_scheduler
        is not None,
        "a train_dataset without a length (session.steps takes streams)": not hasattr(
            trainer.train_dataset, "__len__"
        ),
        **{
            f"args.{name} ({advice})": bool(getattr(args, name, None))
            for name, advice in _ARGUMENTS.items()
        },
        "args.train_sampling_strategy=batch_rebalance (it makes batches for ranks)": (
            args.train_sampling_strategy == "batch_rebalance"
        ),
        "args.optim=adafactor (its sums over rows cannot be saved; use adamw_torch)": (
            args.optim == OptimizerNames.ADAFACTOR
        ),
        "args.use_cpu on a machine with a GPU (set CUDA_VISIBLE_DEVICES= to hide it)": (
            args.use_cpu and torch.cuda.is_available()
        ),
        "args.include_num_input_tokens_seen (metrics/rank0.jsonl has tokens)": counted != "no",
    }
    overridden = [name for name in vars(Trainer) if _is_overridden(trainer, base, name)]
    given[
        f"overriding {', '.join(overridden)} (not called; training calls {', '.join(_CALLED)} and "
        "callbacks)"
    ] = bool(overridden)
    return [what for what, is_given in given.items() if is_given]


def _is_overridden(trainer: Any, base: type, name: str) -> bool:
    """Return whether a method of ``base`` that training does not call is overridden."""
    if name.startswith("__") or name in _KEPT or not callable(getattr(base, name)):
        return False
    return name in vars(trainer) or getattr(type(trainer), name) is not getattr(base, name)
