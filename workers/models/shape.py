"""Sizes of the reference decoder: presets and exact parameter counts.

Pure arithmetic. ``workers.models.decoder`` builds the modules, and a test compares the counts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Final

#: Bytes 0 to 255 and an end-of-document token, rounded up to a multiple of 8.
BYTE_VOCAB_SIZE = 264
#: Maximum number of float32 logits that a loss holds at a time; it holds each three times.
LOGITS_MAX: Final = 1 << 25


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder, in elements."""

    vocab_size: int  #: Rows of the embedding.
    dim: int  #: Width of the residual stream.
    num_layers: int  #: Decoder blocks.
    num_heads: int  #: Query heads; ``dim / num_heads`` is the size of a head.
    num_kv_heads: int  #: Key and value heads; each serves ``num_heads / num_kv_heads`` query heads.
    ffn_dim: int  #: Width inside the feed-forward part.
    tied: bool  #: Whether the output layer shares the embedding.
    rope_theta: float = 10_000.0  #: Base of the rotary position frequencies.

    @property
    def head_dim(self) -> int:
        """Return the size of an attention head."""
        return self.dim // self.num_heads


def _shape(*sizes: int, tied: bool, rope_theta: float = 10_000.0) -> ModelShape:
    names = (field.name for field in fields(ModelShape))
    return ModelShape(**dict(zip(names, sizes, strict=False)), tied=tied, rope_theta=rope_theta)


#: Two CPU cores train the smallest one in a minute. 125m has the width, depth and vocabulary of
#: GPT-2 small; 1b and 3b are the shapes of Llama 3.2, 8b to 405b those of Llama 3.1.
PRESETS: Mapping[str, ModelShape] = MappingProxyType(
    {
        "tiny": _shape(BYTE_VOCAB_SIZE, 64, 2, 4, 2, 160, tied=True),
        "small": _shape(BYTE_VOCAB_SIZE, 192, 2, 6, 2, 512, tied=True),
        "10m": _shape(BYTE_VOCAB_SIZE, 384, 6, 6, 2, 1024, tied=True),
        "125m": _shape(50_304, 768, 12, 12, 12, 2048, tied=True),
        "350m": _shape(32_000, 1024, 24, 16, 8, 2816, tied=True),
        "1b": _shape(128_256, 2048, 16, 32, 8, 8192, tied=True, rope_theta=500_000.0),
        "3b": _shape(128_256, 3072, 28, 24, 8, 8192, tied=True, rope_theta=500_000.0),
        "8b": _shape(128_256, 4096, 32, 32, 8, 14_336, tied=False, rope_theta=500_000.0),
        "70b": _shape(128_256, 8192, 80, 64, 8, 28_672, tied=False, rope_theta=500_000.0),
        "405b": _shape(128_256, 16_384, 126, 128, 8, 53_248, tied=False, rope_theta=500_000.0),
    }
)


def shape_problems(shape: ModelShape) -> list[str]:
    """Return every problem of ``shape``, one line each, with the field first."""
    problems = [
        f"{field.name}: {getattr(shape, field.name)} must be at least 1"
        for field in fields(shape)
        if field.name not in {"tied", "rope_theta"} and getattr(shape, field.name) < 1
    ]
    if problems:
        return problems
    if shape.dim % shape.num_heads:
        problems.append(f"num_heads: {shape.num_heads} does not divide dim={shape.dim}")
    elif shape.head_dim % 2:
        problems.append(
            f"num_heads: {shape.num_heads} leaves heads of {shape.head_dim} elements; rotary "
            "positions need an even number"
        )
    if shape.num_heads % shape.num_kv_heads:
        problems.append(
            f"num_kv_heads: {shape.num_kv_heads} does not divide num_heads={shape.num_heads}"
        )
    return problems


def num_parameters(shape: ModelShape) -> int:
    """Return the number of trained elements; count a tied output layer once."""
    embeddings = shape.vocab_size * shape.dim * (1 if shape.tied else 2)
    return embeddings + shape.num_layers * block_parameters(shape) + shape.dim


def block_parameters(shape: ModelShape) -> int:
    """Return the number of trained elements per layer."""
    dim, kv_dim = shape.dim, shape.num_kv_heads * shape.head_dim
    return 2 * dim * dim + 2 * kv_dim * dim + 3 * shape.ffn_dim * dim + 2 * dim


def chunks_of(num_tokens: int, vocab_size: int) -> int:
    """Return the number of chunks of tokens in which ``mean_loss`` computes logits."""
    return math.ceil(num_tokens / max(1, LOGITS_MAX // vocab_size))


def stage_layers(num_layers: int, number: int, num_stages: int, head: float = 0.0) -> range:
    """Return the layers of pipeline stage ``number``, at least one, so that stages have equal work.

    ``head`` is the cost of the output layer, in layers: the last stage gets that many fewer.
    """
    share = (num_layers + head) / num_stages

    def end(stage: int) -> int:
        return max(min(int(share * stage), num_layers - (num_stages - stage)), 0)

    return range(end(number), end(number + 1))


def resolve(preset: str, overrides: Mapping[str, Any]) -> ModelShape:
    """Return the preset with ``overrides``; raise ``KeyError`` if it does not exist."""
    base = PRESETS[preset]
    values = {field.name: getattr(base, field.name) for field in fields(base)}
    return ModelShape(**{**values, **overrides})
