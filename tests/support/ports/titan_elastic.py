"""Pre-train a small decoder with FSDP2, in the manner of torchtitan."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from everstep import DataLoader, Session, run


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


def build_model(job: JobConfig) -> Transformer:
    model = Transformer(job)
    model.init_weights()
    if job.activation_checkpoint:
        apply_ac(model)
    if job.compile:
        apply_compile(model)
    return model


class Trainer:
    def __init__(self, job: JobConfig, session: Session) -> None:
        self.job, self.session = job, session
        self.model = session.model(lambda: build_model(job))
        self.optimizer = session.optimizer(self.build_optimizer)
        lr_scheduler = LambdaLR(self.optimizer, self.lr_factor)
        self.lr_scheduler = session.register("lr_scheduler", lr_scheduler)
        self.loader = DataLoader(TextDataset(job))
        self.ntokens_seen, self.begun_s = 0, time.monotonic()
        session.register("trainer", self)

    def build_optimizer(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(named.values(), lr=self.job.lr, fused=True)

    def lr_factor(self, step: int) -> float:
        if step < self.job.warmup_steps:
            return (step + 1) / self.job.warmup_steps
        return max(0.1, (self.job.steps - step) / (self.job.steps - self.job.warmup_steps))

    def state_dict(self) -> dict[str, Any]:
        return {"ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ntokens_seen = state["ntokens_seen"]

    def loss_of(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        inputs, labels = batch
        logits = self.model(inputs).flatten(0, 1)
        loss = functional.cross_entropy(logits, labels.flatten(), ignore_index=-100)
        return loss, int((labels != -100).sum())

    def train(self) -> None:
        for step in self.session.steps(self.loader):
            self.session.train_step(self.loss_of)
            self.lr_scheduler.step()
            self.ntokens_seen += step.tokens
            if step.number % self.job.log_freq == 0:
                tps = self.ntokens_seen / (time.monotonic() - self.begun_s)
                print(f"step {step.number}: loss {step.loss:.4f}, {tps:.0f} tokens/s")


if __name__ == "__main__":
    job = JobConfig()
    run(
        lambda session: Trainer(job, session).train(),
        directory=job.dump_folder,
        steps=job.steps,
        global_batch=job.global_batch_size,
        micro_batch=job.local_batch_size,
        clip_norm=job.max_norm,
    )
