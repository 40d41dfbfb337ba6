"""Pre-train a small decoder with FSDP2, in the manner of torchtitan."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@dataclass(kw_only=True, slots=True)
class JobConfig:
    dim: int = 32
    n_layers: int = 2
    n_heads: int = 2
    vocab_size: int = 128
    seq_len: int = 32
    steps: int = 40
    global_batch_size: int = 16
    local_batch_size: int = 2
    lr: float = 5e-3
    warmup_steps: int = 5
    max_norm: float = 1.0
    compile: bool = False
    activation_checkpoint: bool = True
    log_freq: int = 10
    checkpoint_interval: int = 20
    dump_folder: str = "outputs"


class Attention(nn.Module):
    def __init__(self, job: JobConfig) -> None:
        super().__init__()
        self.n_heads = job.n_heads
        self.wqkv = nn.Linear(job.dim, 3 * job.dim, bias=False)
        self.wo = nn.Linear(job.dim, job.dim, bias=False)

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        bs, seqlen, dim = x.shape
        xq, xk, xv = self.wqkv(x).view(bs, seqlen, 3, self.n_heads, -1).transpose(1, 3).unbind(2)
        xq, xk = apply_rotary(xq, freqs), apply_rotary(xk, freqs)
        output = functional.scaled_dot_product_attention(xq, xk, xv, is_causal=True)
        return self.wo(output.transpose(1, 2).reshape(bs, seqlen, dim))  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    def __init__(self, job: JobConfig) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(job.dim), nn.RMSNorm(job.dim)
        self.attention = Attention(job)
        self.w1 = nn.Linear(job.dim, 4 * job.dim, bias=False)
        self.w2 = nn.Linear(4 * job.dim, job.dim, bias=False)

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), freqs)
        return h + self.w2(functional.silu(self.w1(self.ffn_norm(h))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self, job: JobConfig) -> None:
        super().__init__()
        self.job = job
        self.tok_embeddings = nn.Embedding(job.vocab_size, job.dim)
        self.layers = nn.ModuleDict({str(i): TransformerBlock(job) for i in range(job.n_layers)})
        self.norm = nn.RMSNorm(job.dim)
        self.output = nn.Linear(job.dim, job.vocab_size, bias=False)
        self.register_buffer("freqs", self.precompute_freqs(), persistent=False)

    def precompute_freqs(self) -> Tensor:
        head_dim = self.job.dim // self.job.n_heads
        inverse = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        return torch.outer(torch.arange(self.job.seq_len), inverse)

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear | nn.Embedding):
                nn.init.trunc_normal_(module.weight, std=0.02)
        with torch.device(self.tok_embeddings.weight.device):
            self.freqs = self.precompute_freqs()

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.freqs)
        return self.output(self.norm(h))  # type: ignore[no-any-return]


def apply_rotary(x: Tensor, freqs: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = freqs.cos(), freqs.sin()
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class TextDataset(Dataset[tuple[Tensor, Tensor]]):
    """Lines of text; what pads them has the label -100."""

    def __init__(self, job: JobConfig) -> None:
        self.seq_len = job.seq_len
        self.lines = [f"{n} plus {n * n % 97} is {n + n * n % 97}" for n in range(400)]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = torch.tensor([ord(one) for one in self.lines[index]][: self.seq_len + 1])
        padding = (0, self.seq_len + 1 - len(tokens))
        inputs = functional.pad(tokens, padding)[:-1]
        return inputs, functional.pad(tokens, padding, value=-100)[1:]


def apply_ac(model: Transformer) -> None:
    for name, block in model.layers.named_children():
        model.layers.register_module(name, checkpoint_wrapper(block))


def apply_compile(model: Transformer) -> None:
    for block in model.layers.values():
        block.compile()


def apply_fsdp(model: Transformer, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def build_model(job: JobConfig, mesh: DeviceMesh) -> Transformer:
    with torch.device("meta"):
        model = Transformer(job)
    if job.activation_checkpoint:
        apply_ac(model)
    if job.compile:
        apply_compile(model)
    apply_fsdp(model, mesh)
    model.to_empty(device=mesh.device_type)
    with torch.no_grad():
        model.init_weights()
    return model


class Trainer:
    def __init__(self, job: JobConfig) -> None:
        self.job = job
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (self.world_size,), mesh_dim_names=("dp_shard",))
        self.model = build_model(job, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=job.lr, fused=True)
        self.lr_scheduler = LambdaLR(self.optimizer, self.lr_factor)
        self.accumulation = job.global_batch_size // (job.local_batch_size * self.world_size)
        self.dataset = TextDataset(job)
        self.step, self.ntokens_seen, self.begun_s = 0, 0, time.monotonic()
        self.load()

    def lr_factor(self, step: int) -> float:
        if step < self.job.warmup_steps:
            return (step + 1) / self.job.warmup_steps
        return max(0.1, (self.job.steps - step) / (self.job.steps - self.job.warmup_steps))

    def batch_generator(self) -> Iterator[tuple[Tensor, Tensor]]:
        sampler: DistributedSampler[Any] = DistributedSampler(
            self.dataset, self.world_size, self.rank
        )
        loader = DataLoader(self.dataset, self.job.local_batch_size, sampler=sampler)
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ntokens_seen = state["ntokens_seen"]

    def save(self) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        folder = Path(self.job.dump_folder, f"step-{self.step}")
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        if self.rank == 0:
            extra = {**self.state_dict(), "step": self.step, "lr": self.lr_scheduler.state_dict()}
            folder.joinpath("train.json").write_text(json.dumps(extra, default=str))

    def load(self) -> None:
        found = list(Path(self.job.dump_folder).glob("step-*/train.json"))
        if not found:
            return
        newest = max(found, key=os.path.getmtime)
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=newest.parent)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )
        extra = json.loads(newest.read_text())
        self.step = extra["step"]
        self.load_state_dict(extra)
        for _ in range(self.step):
            self.lr_scheduler.step()

    def loss_of(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        inputs, labels = batch
        logits = self.model(inputs).flatten(0, 1)
        loss = functional.cross_entropy(logits, labels.flatten(), ignore_index=-100)
        return loss, int((labels != -100).sum())

    def train_step(self, batches: Iterator[tuple[Tensor, Tensor]]) -> float:
        microbatches = [next(batches) for _ in range(self.accumulation)]
        valid = torch.tensor(float(sum((labels != -100).sum() for _, labels in microbatches)))
        dist.all_reduce(valid)
        total = torch.zeros(())
        for number, batch in enumerate(microbatches, start=1):
            self.model.set_requires_gradient_sync(number == self.accumulation)  # type: ignore[operator]
            loss, tokens = self.loss_of(batch)
            # FSDP divides by the number of ranks.
            (loss * tokens * self.world_size / valid).backward()
            total += loss.detach() * tokens / valid
        nn.utils.clip_grad_norm_(self.model.parameters(), self.job.max_norm, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        self.ntokens_seen += int(valid)
        return float(total)

    def train(self) -> None:
        batches = self.batch_generator()
        while self.step < self.job.steps:
            self.step += 1
            loss = self.train_step(batches)
            self.lr_scheduler.step()
            if self.step % self.job.log_freq == 0:
                tps = self.ntokens_seen / (time.monotonic() - self.begun_s)
                print(f"step {self.step}: loss {loss:.4f}, {tps:.0f} tokens/s")
            if self.step % self.job.checkpoint_interval == 0:
                self.save()
        dist.destroy_process_group()


if __name__ == "__main__":
    Trainer(JobConfig()).train()
