"""Lets Megatron-core run on the CPU: whatever it takes from ``torch.cuda`` means the CPU here.

Neither its arithmetic nor its checkpoints are touched. Import this before any part of Megatron.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


class _Stream:
    """Stands in for a stream and for an event of a device: all work is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, _: str) -> Callable[..., _Stream]:
        return lambda *_, **__: self


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return made


def _without_device() -> None:
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = _Stream
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.current_stream = lambda *_: _Stream()
    cuda.current_device = lambda: torch.device("cpu")
    cuda.get_device_properties = lambda *_: SimpleNamespace(major=8, minor=0)
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.default_generators = [torch.default_generator]
    cuda.manual_seed = torch.manual_seed
    for name in ("synchronize", "empty_cache", "is_current_stream_capturing"):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("FloatTensor", "IntTensor", "LongTensor", "BFloat16Tensor"):
        setattr(cuda, name, getattr(torch, name))
    for name in ("zeros", "ones", "empty", "full", "tensor", "arange", "zeros_like", "empty_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    kind = tensor.type
    tensor.type = lambda self, *args, **kwargs: (
        kind(self, *args, **kwargs) if args or kwargs else f"torch.cuda.{kind(self)[6:]}"
    )


_without_device()

from megatron.core.transformer.moe import moe_utils  # noqa: E402 - after the stand-ins

# It is named without a check, though Transformer Engine is optional.
moe_utils.te_general_gemm = None
