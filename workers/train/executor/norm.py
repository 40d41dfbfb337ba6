"""The norm of a sharded gradient, and scaling it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workers.parallel import Piece

__all__ = ["num_rows", "row_squares", "scale_gradients", "sum_of_squares"]


def sum_of_squares(pieces: Sequence[Piece]) -> Tensor:
    """Return the sum of squares of this rank's gradients, a float64 scalar."""
    norms: Any = torch._foreach_norm(gradients(pieces))  # noqa: SLF001  as torch's own clipping
    return torch.stack(norms).double().square().sum()


def num_rows(pieces: Sequence[Piece]) -> int:
    """Return the number of rows of all parameters; a vector's elements are rows."""
    return sum(piece.shape[0] if piece.shape else 1 for piece in pieces)


def row_squares(pieces: Sequence[Piece], device: torch.device) -> Tensor:
    """Return the sum of squares of every row of the whole gradient, float64, ``(num_rows,)``.

    Rows of other ranks are zero, so that a sum over ranks changes no bit of any row, and a sum
    over all rows has one order whatever the layout.
    """
    rows = torch.zeros(num_rows(pieces), dtype=torch.float64, device=device)
    first = 0
    for piece in pieces:
        gradient = piece.gradient
        extent = piece.shape[0] if piece.shape else 1
        if gradient is not None and gradient.numel():
            start = first + (piece.box.start[0] if piece.shape else 0)
            squares = gradient.double().square_().reshape(gradient.shape[0] or 1, -1).sum(dim=1)
            rows[start : start + len(squares)] = squares
        first += extent
    return rows


def scale_gradients(pieces: Sequence[Piece], factor: float) -> None:
    """Multiply this rank's gradients by ``factor`` in place."""
    torch._foreach_mul_(gradients(pieces), factor)


def gradients(pieces: Sequence[Piece]) -> list[Tensor]:
    """Return the local gradients there are."""
    return [piece.gradient for piece in pieces if piece.gradient is not None]
