"""The training of all arms: a small decoder, its data, their order, and the global batch.

It needs torch and nothing else, since each arm runs in an environment of its own.
"""

import hashlib
import random
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCAB, WIDTH, HEADS, LAYERS, SEQUENCE = 256, 192, 6, 2, 64
GLOBAL_BATCH: Final = 16
NUM_SAMPLES: Final = 1 << 20
LR: Final = 1e-3
CLIP_NORM: Final = 1.0
#: After each so many steps the whole weights are put on record.
PROBE_EVERY: Final = 50
_NUM_PROBED: Final = 256


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the next block takes."""
        batch, length, _ = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            parts[0], parts[1], parts[2], is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        result: Tensor = x + self.down(functional.silu(self.up(self.norm_2(x))))
        return result


class Decoder(nn.Module):
    """A decoder of about a million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of the token behind each of ``inputs``."""
        x = self.embed(inputs) + self.places.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build_model() -> Decoder:
    """Return the model with the same values in every process."""
    torch.manual_seed(0)
    return Decoder()


def tokens(samples: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of samples: counting in steps that the sample decides on."""
    which = torch.tensor(samples)[:, None]
    line = which * 7 + torch.arange(SEQUENCE + 1) * (which % 5 + 1)
    line %= VOCAB
    return line[:, :-1], line[:, 1:]


def order(step: int) -> list[int]:
    """Return the samples of ``step`` (from 1): each of ``NUM_SAMPLES`` comes once."""
    first = (step - 1) * GLOBAL_BATCH
    # Odd, so that it visits all of a power of two.
    return [(first + at) * 386_003 % NUM_SAMPLES for at in range(GLOBAL_BATCH)]


def summed_loss(model: nn.Module, samples: Sequence[int]) -> Tensor:
    """Return the sum of the samples' losses, each a mean over its tokens."""
    inputs, targets = tokens(samples)
    loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    return loss / SEQUENCE


def probe(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a digest of the whole weights and some of them; all ranks of a sharded model call."""
    digest, whole = hashlib.sha256(), []
    for _, parameter in sorted(named, key=lambda pair: pair[0]):
        value = parameter.detach()
        value = (value.full_tensor() if hasattr(value, "full_tensor") else value).float().flatten()
        digest.update(value.numpy().tobytes())
        whole.append(value)
    flat = torch.cat(whole)
    chosen = random.Random(0).sample(range(flat.numel()), _NUM_PROBED)
    return {"digest": digest.hexdigest()[:16], "probed": flat[chosen].tolist()}
