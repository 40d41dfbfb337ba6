"""Attention, also over sequences that are split across ranks (context parallelism).

Each rank holds the queries, keys and values of its part of every sequence. If the heads divide
evenly, an all-to-all gives each rank some heads of whole sequences (DeepSpeed Ulysses, arXiv
2309.14509). Otherwise each rank gathers the keys and values of all parts (Llama 3, arXiv
2407.21783, section 3.3.2).

Shape letters: B sequences, H heads, K key/value heads, T positions of this rank, E ``head_dim``.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from workers.errors import LayoutRefusedError

#: The name under which ``transformers`` knows this attention.
HUB_NAME: Final = "everstep"
#: Arguments with which a model of ``transformers`` requests more than causal attention.
_UNUSUAL: Final = ("position_bias", "s_aux", "softcap")
_HEADS, _POSITIONS = 1, 2


@dataclass(slots=True)
class Context:
    """The ranks that share the same sequences."""

    group: ProcessGroup  #: Those ranks, in the order of their parts.
    is_used: bool = False  #: Whether the model's attention ran over them.


class _ProcessContext:
    """Process groups belong to the process, and so does this."""

    context: Context | None = None


def use_context(context: Context | None) -> None:
    """Run attention over the ranks of ``context`` from now on; None means whole sequences."""
    _ProcessContext.context = context


def first_position(length: int) -> int:
    """Return the position of this rank's first token if its part has ``length`` tokens."""
    context = _ProcessContext.context
    return context.group.rank() * length if context is not None else 0


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """Return the attention of each position to itself and those before it, ``(B, H, T, E)``.

    With ``parallel.cp`` above 1, every rank with a part of the sequences must call it, with equal
    shapes.

    Args:
        query: ``(B, H, T, E)``.
        key: ``(B, K, T, E)``; each key head serves ``H / K`` query heads.
        value: Likewise.
        dropout: Probability of dropping a weight.
        scale: Factor of the scores; None for ``E ** -0.5``.
    """
    return _mixed(query, key, value, dropout=dropout, scale=scale, is_causal=True)


def bidirectional_attention(
    query: Tensor, key: Tensor, value: Tensor, *, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """Return the attention of each position to all positions; else as ``causal_attention``.

    Rows must have no padding.
    """
    return _mixed(query, key, value, dropout=dropout, scale=scale, is_causal=False)


def _mixed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout: float,
    scale: float | None,
    is_causal: bool,
) -> Tensor:
    attend = partial(
        functional.scaled_dot_product_attention,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=query.shape[_HEADS] != key.shape[_HEADS],
    )
    context = _ProcessContext.context
    # A stage that only computes shapes has no values and no peers.
    if context is None or query.is_meta:
        return attend(query, key, value, is_causal=is_causal)
    context.is_used = True
    group, size = context.group, context.group.size()
    if not query.shape[_HEADS] % size and not key.shape[_HEADS] % size:
        parts = (_exchanged(one, group, _HEADS, _POSITIONS) for one in (query, key, value))
        return _exchanged(attend(*parts, is_causal=is_causal), group, _POSITIONS, _HEADS)
    keys, values = (_gathered(one.contiguous(), group) for one in (key, value))
    if not is_causal:
        return attend(query, keys, values)
    length = query.shape[_POSITIONS]
    end = first_position(length) + length
    mask = causal_lower_right(length, end)
    return attend(query, keys[:, :, :end], values[:, :, :end], attn_mask=mask)


def hub_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,  # noqa: FBT001  as transformers calls it
    **more: Any,
) -> tuple[Tensor, None]:
    """Return the attention, ``(B, T, H, E)``, by the interface of ``transformers``."""
    size = _ProcessContext.context.group.size() if _ProcessContext.context is not None else 1
    window = more.get("sliding_window")
    length = size * query.shape[_POSITIONS]
    asked = [name for name in _UNUSUAL if more.get(name) is not None]
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        asked.append("attention to later tokens")
    if attention_mask is not None or key.shape[_POSITIONS] != query.shape[_POSITIONS]:
        asked.append("a mask of its own")
    if window is not None and window < length:
        asked.append(f"sliding_window={window} of {length} positions")
    if asked:
        raise LayoutRefusedError(
            f"parallel.cp={size}: the attention of model part {type(module).__name__} uses "
            f"{', '.join(asked)}, which attention over parts does not support; write "
            "parallel.cp: 1",
            axis="cp",
        )
    mixed = causal_attention(query, key, value, dropout=dropout, scale=scaling)
    return mixed.transpose(_HEADS, _POSITIONS).contiguous(), None


def _exchanged(whole: Tensor, group: ProcessGroup, split: int, joined: int) -> Tensor:
    exchanged: Tensor = _Exchange.apply(whole, group, split, joined)
    return exchanged


def _gathered(part: Tensor, group: ProcessGroup) -> Tensor:
    gathered: Tensor = _Gather.apply(part, group)
    return gathered


class _Exchange(torch.autograd.Function):
    """Splits a tensor along dim ``split`` over the ranks, and joins parts along ``joined``."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: ProcessGroup, split: int, joined: int) -> Tensor:
        ctx.group, ctx.split, ctx.joined = group, split, joined
        sent = torch.stack(whole.chunk(group.size(), split))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), joined)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradient, ctx.group, ctx.joined, ctx.split), None, None, None


class _Gather(torch.autograd.Function):
    """Joins the parts of all ranks along the positions; gradients are summed over them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, _POSITIONS)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # gloo has no reduce-scatter that is as fast as this.
        sent = torch.stack(gradient.chunk(ctx.group.size(), _POSITIONS))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ctx.group)
        return received.sum(dim=0), None
