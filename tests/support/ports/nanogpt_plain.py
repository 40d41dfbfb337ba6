"""Train a small GPT on characters, in one file."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

BLOCK_SIZE, BATCH, MICRO_BATCH = 32, 16, 4
MAX_ITERS, WARMUP_ITERS, EVAL_INTERVAL = 60, 6, 20
LEARNING_RATE, MIN_LR, GRAD_CLIP = 1e-2, 1e-3, 1.0
N_LAYER, N_HEAD, N_EMBD, VOCAB_SIZE = 2, 2, 32, 128

text = " ".join(f"{n} times {n} is {n * n}." for n in range(400))
data = torch.tensor([ord(one) for one in text])
train_data, val_data = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(N_EMBD), nn.LayerNorm(N_EMBD)
        self.c_attn, self.c_proj = nn.Linear(N_EMBD, 3 * N_EMBD), nn.Linear(N_EMBD, N_EMBD)
        self.mlp = nn.Sequential(
            nn.Linear(N_EMBD, 4 * N_EMBD), nn.GELU(), nn.Linear(4 * N_EMBD, N_EMBD)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:2], N_HEAD, N_EMBD // N_HEAD)
        q, k, v = (one.view(heads).transpose(1, 2) for one in self.c_attn(self.ln_1(x)).chunk(3, 2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB_SIZE, N_EMBD), nn.Embedding(BLOCK_SIZE, N_EMBD)
        self.h = nn.ModuleList(Block() for _ in range(N_LAYER))
        self.ln_f, self.lm_head = nn.LayerNorm(N_EMBD), nn.Linear(N_EMBD, VOCAB_SIZE, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe.weight[: idx.shape[1]]
        for block in self.h:
            x = block(x)
        return functional.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())


def configure_optimizer(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    decays = [one for one in named.values() if one.dim() >= 2]
    others = [one for one in named.values() if one.dim() < 2]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))


def get_batch(source: Tensor, ix: Tensor) -> tuple[Tensor, Tensor]:
    x = torch.stack([source[i : i + BLOCK_SIZE] for i in ix])
    y = torch.stack([source[i + 1 : i + 1 + BLOCK_SIZE] for i in ix])
    return x, y


def lr_factor(it: int) -> float:
    if it < WARMUP_ITERS:
        return (it + 1) / WARMUP_ITERS
    ratio = (it - WARMUP_ITERS) / (MAX_ITERS - WARMUP_ITERS)
    low = MIN_LR / LEARNING_RATE
    return low + 0.5 * (1 + math.cos(math.pi * min(1.0, ratio))) * (1 - low)


@torch.no_grad()
def estimate_loss(model: nn.Module) -> float:
    batches = torch.arange(len(val_data) - BLOCK_SIZE - 1)[::16].split(MICRO_BATCH)
    losses = [model(*get_batch(val_data, ix)).item() for ix in batches]
    return float(sum(losses) / len(losses))


def main() -> None:
    torch.manual_seed(1337)
    model = GPT()
    optimizer = configure_optimizer(dict(model.named_parameters()))
    scheduler = LambdaLR(optimizer, lr_factor)
    for it in range(1, MAX_ITERS + 1):
        for _ in range(BATCH // MICRO_BATCH):
            ix = torch.randint(len(train_data) - BLOCK_SIZE, (MICRO_BATCH,))
            loss = model(*get_batch(train_data, ix))
            (loss * MICRO_BATCH / BATCH).backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        if it % EVAL_INTERVAL == 0:
            print(f"iter {it}: train {loss.item():.4f}, val {estimate_loss(model):.4f}")
            torch.save({"model": model.state_dict(), "it": it}, "ckpt.pt")


if __name__ == "__main__":
    main()
