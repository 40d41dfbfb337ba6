"""Trains, saves and loads with Megatron-core itself, on the CPU; several cases in one launch.

``python -m tests.support.train_megatron JOB OUT``, run by torchrun or forked: JOB is a JSON list of
cases, OUT a folder that gets ``<name>``, a checkpoint, and ``<name>.json``.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tests.support.megatron_on_cpu  # noqa: F401 - Megatron looks for a device otherwise
from tests.support.megatron_files import batch

# isort: split
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

SEQUENCE, VOCABULARY, GLOBAL_BATCH = 16, 128, 4


class Training:
    """A GPTModel with Megatron's distributed optimizer.

    Args:
        case: ``tp``, ``pp``, ``ep``: ranks; ``experts``: how many; ``bf16``; ``seed``.
    """

    def __init__(self, case: dict[str, Any]) -> None:
        self.step = 0
        tp, pp, ep = (case.get(axis, 1) for axis in ("tp", "pp", "ep"))
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
        model_parallel_cuda_manual_seed(case["seed"])
        torch.manual_seed(case["seed"])
        bf16 = case.get("bf16", False)
        dtype = torch.bfloat16 if bf16 else torch.float32
        experts = case.get("experts")
        of_experts: dict[str, Any] = {
            "num_moe_experts": experts,
            "moe_router_topk": 2,
            "moe_aux_loss_coeff": 0.0,
            "moe_token_dispatcher_type": "allgather",
            "expert_model_parallel_size": ep,
        }
        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            num_query_groups=2,
            ffn_hidden_size=88,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            normalization="RMSNorm",
            use_cpu_initialization=True,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=bf16,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            persist_layer_norm=False,
            deallocate_pipeline_outputs=False,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            **(of_experts if experts else {}),
        )
        self.model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(
                num_experts=experts, normalization="RMSNorm"
            ),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )
        if bf16:
            self.model.bfloat16()
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True
        )
        self.replicated = DistributedDataParallel(config, ddp, self.model)
        options = OptimizerConfig(
            optimizer="adam",
            lr=case.get("lr", 1e-2),
            weight_decay=0.1,
            adam_beta1=case.get("beta1", 0.9),
            bf16=bf16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        self.optimizer = get_megatron_optimizer(options, [self.replicated])

    def _batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        tokens = batch(self.step, rows=GLOBAL_BATCH, length=SEQUENCE, vocabulary=VOCABULARY)
        ranks = parallel_state.get_data_parallel_world_size()
        for row in tokens.chunk(ranks)[parallel_state.get_data_parallel_rank()]:
            yield row[None, :-1].contiguous(), row[None, 1:].contiguous()

    def train(self, num_steps: int) -> list[float]:
        """Make steps, and return the loss of each: the mean of its global batch."""
        return [self._train_step() for _ in range(num_steps)]

    def _train_step(self) -> float:
        places = torch.arange(SEQUENCE)[None]
        mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)

        def forward(batches: Any, model: Any) -> Any:
            tokens, labels = next(batches)

            def loss(output: torch.Tensor) -> Any:
                mean = output.float().mean()
                return mean, {"loss": mean.detach().clone()}

            return model(tokens, places, mask, labels=labels), loss

        self.replicated.zero_grad_buffer()
        self.optimizer.zero_grad()
        ranks = parallel_state.get_data_parallel_world_size()
        told = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=self._batches(),
            model=[self.replicated],
            num_microbatches=GLOBAL_BATCH // ranks,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        finalize_model_grads([self.replicated], None)
        self.optimizer.step()
        self.step += 1
        mean = torch.tensor([sum(float(one["loss"]) for one in told) / GLOBAL_BATCH])
        dist.all_reduce(mean)
        copies: int = parallel_state.get_tensor_model_parallel_world_size()
        return float(mean) / copies

    def _state(self, sharding: str, *, is_loading: bool) -> dict[str, Any]:
        metadata = {"distrib_optim_sharding_type": sharding, "chained_optim_avoid_prefix": True}
        model = self.model.sharded_state_dict()
        optimizer = self.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=metadata
        )
        return {"model": model, "optimizer": optimizer, "iteration": self.step}

    def save(self, directory: Path, sharding: str) -> None:
        """Save everything."""
        if dist.get_rank() == 0:
            directory.mkdir()
        dist.barrier()
        dist_checkpointing.save(self._state(sharding, is_loading=False), str(directory))

    def load(self, directory: Path) -> None:
        """Load everything, in the form ``fully_reshardable``."""
        # Without Apex an optimizer has a state after its first step only.
        self.train(1)
        loaded = dist_checkpointing.load(
            self._state("fully_reshardable", is_loading=True), str(directory)
        )
        self.model.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        self.step = loaded["iteration"]
        for optimizer in self.optimizer.chained_optimizers:
            for state in optimizer.optimizer.state.values():
                # All have the same tensor, which torch's Adam would count up for each.
                state["step"] = state["step"].clone()


def _keep_step() -> None:
    """Leave out torch's step where Megatron copies a state: its checkpoints have it elsewhere."""
    kept = DistributedOptimizer._set_main_param_and_optimizer_states

    def copied(self: Any, param: Any, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[param]
        main = self.optimizer.param_groups[group]["params"][order]
        with torch.no_grad():
            kept(self, param, {"step": self.optimizer.state[main]["step"], **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = copied


def main(job: str, out: Path) -> None:
    """Run the cases of a job."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _keep_step()
    for case in json.loads(Path(job).read_text()):
        training = Training(case)
        if case["do"] == "train":
            training.train(case["steps"])
            training.save(out / case["name"], case["sharding"])
        else:
            training.load(Path(case["directory"]))
            training.save(out / case["name"], "fully_reshardable")
        losses = training.train(case["steps"])
        if dist.get_rank() == 0:
            (out / f"{case['name']}.json").write_text(json.dumps({"losses": losses}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
