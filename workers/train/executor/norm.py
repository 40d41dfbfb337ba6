"""Compute the norm of a sharded gradient, and scale the gradient."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from workers.parallel import LocalShard, is_whole

#: Avoids a division by a norm of zero, as in torch's clip_grad_norm_.
_NORM_EPS: Final = 1e-6


def sum_of_squares(shards: Sequence[LocalShard], rank: int, device: torch.device) -> Tensor:
    """Return the sum of squares of this rank's gradients, a float64 scalar.

    If there are replicas, only the first counts. Gradients of ``WholeGradients`` do not count.
    """
    counted = gradients(
        [one for one in shards if one.replicas[0] == rank and not is_whole(one.shape)]
    )
    if not counted:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms: Any = torch._foreach_norm(counted)  # noqa: SLF001  as torch's own clipping
    return torch.stack(norms).double().square().sum()


def row_squares(
    shards: Sequence[LocalShard],
    shapes: Mapping[str, tuple[int, ...]],
    rank: int,
    device: torch.device,
    column: tuple[int, int] = (0, 1),
) -> Tensor:
    """Return the sums of squares of all rows of the whole gradient, float64, for ``ordered_sum``.

    A vector's elements are rows. ``shapes`` has the shape of every parameter of the model, by name.
    ``column`` is this rank's place on the axis that may cut rows, and its degree, which is fixed
    for a run: the result has an element for each row and place.

    Rows of other ranks are zero, and so are the rows of all replicas but the first. So a sum over
    ranks changes no bit.
    """
    first: dict[str, int] = {}
    num_rows = 0
    for fqn, shape in sorted(shapes.items()):
        first[fqn] = num_rows
        num_rows += shape[0] if shape else 1
    place, degree = column
    every = torch.zeros(degree, num_rows, dtype=torch.float64, device=device)
    rows = every[place]
    for shard in shards:
        gradient = shard.gradient
        if gradient is not None and gradient.numel() and shard.replicas[0] == rank:
            if is_whole(shard.shape):
                continue
            for box, piece in shard.pieces(gradient):
                start = first[shard.fqn] + (box.start[0] if box.start else 0)
                squares = piece.double().square_().reshape(piece.shape[0] if box.start else 1, -1)
                rows[start : start + len(squares)] += ordered_sum(squares)
    return every.reshape(-1)


def ordered_sum(values: Tensor) -> Tensor:
    """Return the sums over the last dim of ``values``, which it overwrites.

    The order depends on the length only. That of ``Tensor.sum`` depends on the number of sums, with
    several threads (torch 2.13, above 32,768 elements) and on a GPU.
    """
    while (length := values.shape[-1]) > 1:
        half = length // 2
        if length % 2:
            values[..., 0] += values[..., -1]
        values = values[..., :half].add_(values[..., half : 2 * half])
    return values[..., 0]


def scale_gradients(
    shards: Sequence[LocalShard], square: Tensor, tokens: Tensor, clip_norm: float
) -> None:
    """Turn this rank's summed gradients into clipped means over tokens, in place.

    This waits for no device: the factor is computed where the gradients are. ``square`` is the
    square of the norm of the gradient summed over all ranks, ``tokens`` the number of tokens in the
    global batch, both float64 scalars. A ``clip_norm`` of 0 allows any norm.
    """
    factor = tokens.clamp(min=1.0).reciprocal()
    if clip_norm:
        # A number divided by a tensor would be multiplied by a reciprocal, which gives different
        # bits.
        ratio = torch.full_like(square, clip_norm) / (square.sqrt() * factor + _NORM_EPS)
        # This is no clamp, because a NaN norm must not spread to all gradients.
        factor = factor * torch.where(ratio < 1.0, ratio, 1.0)
    torch._foreach_mul_(gradients(shards), factor.float())


def gradients(shards: Sequence[LocalShard]) -> list[Tensor]:
    """Return the local gradients that exist."""
    return [shard.gradient for shard in shards if shard.gradient is not None]
