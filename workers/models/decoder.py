"""The reference decoder: RoPE, grouped-query attention, RMSNorm, SwiGLU, optionally tied.

Shape letters: B sequences, T positions, D ``dim``, H heads, K key/value heads, E ``head_dim``,
F ``ffn_dim``, V ``vocab_size``.
"""

import hashlib
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from workers.models.attention import causal_attention, first_position
from workers.models.shape import ModelShape, block_parameters, chunks_of, stage_layers

NORM_EPS = 1e-5


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key/value heads."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        kv_dim = shape.num_kv_heads * shape.head_dim
        self.query = nn.Linear(shape.dim, shape.dim, bias=False)
        self.key = nn.Linear(shape.dim, kv_dim, bias=False)
        self.value = nn.Linear(shape.dim, kv_dim, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(
        self,
        x_BTD: Tensor,  # noqa: N803  shape letters, see the top of the file
        rotary: tuple[Tensor, Tensor],  # cosines and sines, (T, E / 2) each
    ) -> Tensor:
        """Return the mixed positions, (B, T, D)."""
        batch, length, _ = x_BTD.shape
        heads = (batch, length, -1, self.head_dim)
        query = self.query(x_BTD).view(heads).transpose(1, 2)
        key = self.key(x_BTD).view(heads).transpose(1, 2)
        value = self.value(x_BTD).view(heads).transpose(1, 2)
        mixed = causal_attention(_rotate(query, rotary), _rotate(key, rotary), value)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU: a gate scales each hidden value."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.up = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.down = nn.Linear(shape.ffn_dim, shape.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:  # noqa: N803
        """Return (B, T, D)."""
        return self.down(functional.silu(self.gate(x_BTD)) * self.up(x_BTD))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=NORM_EPS)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=NORM_EPS)
        self.ffn = FeedForward(shape)

    def forward(
        self,
        x_BTD: Tensor,  # noqa: N803
        rotary: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Return (B, T, D)."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotary)  # noqa: N806
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A decoder-only language model. Each of ``layers`` is an FSDP unit."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding: nn.Embedding | None = nn.Embedding(shape.vocab_size, shape.dim)
        # Layers are keyed by name, not position: a subset keeps its names.
        self.layers = nn.ModuleDict({str(i): Block(shape) for i in range(shape.num_layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(shape.dim, eps=NORM_EPS)
        self.head: nn.Linear | None = nn.Linear(shape.dim, shape.vocab_size, bias=False)
        self.tie()
        self._rotary: tuple[Tensor, Tensor] | None = None

    def tie(self) -> None:
        """Tie the output layer and the embedding if ``shape.tied``. Call it after ``to_empty``."""
        if self.shape.tied and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight

    def keep_stage(self, number: int, num_stages: int) -> None:
        """Remove what a pipeline stage does not have; stages have about equal work.

        The first stage keeps the embedding, the last one the output layer.
        """
        num_layers = self.shape.num_layers
        head = self.shape.vocab_size * self.shape.dim / block_parameters(self.shape)
        kept = stage_layers(num_layers, number, num_stages, head)
        for layer in set(range(num_layers)).difference(kept):
            del self.layers[str(layer)]
        if number > 0:
            self.embedding = None
        if number < num_stages - 1:
            self.norm = self.head = None

    def forward(
        self,
        tokens_BT: Tensor,  # noqa: N803
        targets_BT: Tensor | None = None,  # noqa: N803
    ) -> Tensor:
        """Return the logits of the next token, (B, T, V), of this rank's part of the sequences.

        With ``targets_BT``, return ``mean_loss`` of the logits. Every stage but the last returns
        (B, T, D), and every stage but the first takes that instead of token ids.
        """
        x_BTD = self.embedding(tokens_BT) if self.embedding is not None else tokens_BT  # noqa: N806
        rotary = self._rotary_for(tokens_BT.shape[1], x_BTD)
        for layer in self.layers.values():
            x_BTD = layer(x_BTD, rotary)  # noqa: N806
        if self.norm is None or self.head is None:
            return x_BTD
        x_BTD = self.norm(x_BTD)  # noqa: N806
        if targets_BT is None:
            return self.head(x_BTD)  # type: ignore[no-any-return]
        return mean_loss(x_BTD, targets_BT, self.head, self.shape.vocab_size)

    def _rotary_for(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        held = self._rotary
        if held is None or held[0].shape[0] != length or held[0].dtype != like.dtype:
            head_dim = self.shape.head_dim
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
            frequencies = self.shape.rope_theta**-exponents
            positions = first_position(length) + torch.arange(length, dtype=torch.float64)
            angles = torch.outer(positions, frequencies)
            held = self._rotary = (angles.cos().to(like), angles.sin().to(like))
        return held


def _rotate(
    x_BHTE: Tensor,  # noqa: N803
    rotary: tuple[Tensor, Tensor],
) -> Tensor:
    cosines, sines = rotary
    first, second = x_BHTE.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, first * sines + second * cosines), dim=-1)


def tensor_plan() -> dict[str, ParallelStyle]:
    """Return how tensor parallelism cuts a decoder: heads, hidden features and vocabulary.

    Each rank has whole heads and gets all logits. Norms are whole on every rank.
    """
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.attention.query": ColwiseParallel(),
        "layers.*.attention.key": ColwiseParallel(),
        "layers.*.attention.value": ColwiseParallel(),
        "layers.*.attention.out": RowwiseParallel(),
        "layers.*.ffn.gate": ColwiseParallel(),
        "layers.*.ffn.up": ColwiseParallel(),
        "layers.*.ffn.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def mean_loss(
    x_BTD: Tensor,  # noqa: N803  any float dtype
    targets_BT: Tensor,  # noqa: N803  int64 token ids
    head: Callable[[Tensor], Tensor] | None = None,
    vocab_size: int = 0,
) -> Tensor:
    """Return the mean cross entropy over all tokens, a scalar in float32.

    If there are many logits, compute them in chunks of tokens and again in the backward pass, so
    that only one chunk is held at a time.

    Args:
        head: Computes the logits of ``x_BTD``; None if they are given.
        vocab_size: The number of logits per token.
    """
    x, targets = x_BTD.flatten(0, -2), targets_BT.flatten()
    num_chunks = chunks_of(len(targets), vocab_size or x.shape[-1])
    if num_chunks == 1:
        return _loss(head, x, targets, "mean")
    again = partial(checkpoint, _loss, use_reentrant=False, preserve_rng_state=False)
    parts = zip(x.chunk(num_chunks), targets.chunk(num_chunks), strict=True)
    sums = [again(head, *part, "sum") for part in parts]
    return torch.stack(sums).sum() / len(targets)


def _loss(
    head: Callable[[Tensor], Tensor] | None, x: Tensor, targets: Tensor, reduction: str
) -> Tensor:
    logits = head(x) if head is not None else x
    return functional.cross_entropy(logits.float(), targets, reduction=reduction)


def initial_value(fqn: str, size: tuple[int, ...], *, seed: int, num_layers: int) -> Tensor:
    """Return the whole initial value of one parameter, float32 on the CPU.

    Each parameter has its own generator, seeded with the seed and the name. So the value
    does not depend on the layout or on the other parameters of this rank. Norms are 1; matrices are
    normal with standard deviation 0.02, divided by ``sqrt(2 * num_layers)`` for those that write to
    the residual stream (GPT-2, section 2.3).
    """
    if len(size) == 1:
        return torch.ones(size)
    key = hashlib.sha256(f"{seed}/{fqn}".encode()).digest()
    # torch takes a signed seed, hence 63 bits.
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    deviation = 0.02
    if fqn.endswith(("attention.out.weight", "ffn.down.weight")):
        deviation /= math.sqrt(2 * num_layers)
    return torch.randn(size, generator=generator) * deviation
