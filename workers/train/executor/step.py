"""One optimizer step over a global batch of constant size, whatever the number of workers.

Every micro-batch's gradient is the gradient of its summed token losses; sums over micro-batches
and ranks are divided once by the number of tokens of the whole global batch. So the weighting is
exact with uneven quotas and uneven token counts. One all-reduce of numbers per step carries loss
sum, token count, what the workers say to each other, and what the gradient's norm needs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from workers.data import DataOrder
from workers.errors import TaskError
from workers.parallel import drop_gathered, fsdp_modules
from workers.protocol import WorkerPhase
from workers.settings import TrainSettings
from workers.train.agreement import on_host
from workers.train.boundary import Signals
from workers.train.context import Progress
from workers.train.executor.learning_rate import learning_rate
from workers.train.executor.norm import row_squares, scale_gradients, sum_of_squares
from workers.train.executor.parts import Parts
from workers.train.executor.quotas import Pass, Schedule

__all__ = ["Step"]

#: Against a division by a norm of zero; as in torch's clip_grad_norm_.
_NORM_EPS: Final = 1e-6


class Around(Protocol):
    """What a step asks of the boundary behind it, ``workers.train.boundary.boundary.Boundary``."""

    def signals(self) -> Signals:
        """Return what this rank has to say to the others."""

    def before_update(self) -> None:
        """Be told that the weights are about to change."""


class Step:
    """A step under way: iterate ``micro_batches``, call ``backward`` in each, then ``apply``.

    What happens at the boundary behind it (report, save) is ``on_applied``'s.

    Attributes:
        number: This step, counted from 1.
        order_range: Positions of the data order that the step takes, half-open.
        loss: Mean over the tokens of the global batch, on every worker; after ``apply``.
        grad_norm: Norm of the mean gradient before clipping; after ``apply``.
        lr: Learning rate of the step.
        tokens: Tokens in the global batch; after ``apply``.
        is_applied: Whether ``apply`` was called.
        agreed: What the workers said to each other; equal on all; after ``apply``.
    """

    def __init__(
        self,
        number: int,
        *,
        order: DataOrder,
        schedule: Schedule,
        train: TrainSettings,
        parts: Parts,
        page: Progress,
        around: Around,
        on_applied: Callable[[Step], None],
    ) -> None:
        self.number = number
        self.order_range = order.positions(number)
        self.lr = learning_rate(train, number)
        self.loss = self.grad_norm = math.nan
        self.tokens = 0
        self.is_applied = False
        self.agreed = Signals()
        self._order = order
        self._schedule = schedule
        self._train = train
        self._parts = parts
        self._page = page
        self._around = around
        self._on_applied = on_applied
        self._pass: Pass | None = None
        self._sums: dict[int, tuple[Tensor, int]] = {}

    @property
    def leaves(self) -> bool:
        """Return whether any worker was asked to leave; equal on all; after ``apply``."""
        return self.agreed.leaves

    def micro_batches(self) -> Iterator[NDArray[np.int64]]:
        """Yield the samples of each micro-batch of this worker, ``(micro_batch,)`` each.

        Torch's random numbers are keyed by seed, step and micro-batch, not by worker. Where
        workers have unequally many, one may be given a micro-batch again, whose gradient and
        loss do not count.

        Raises:
            TaskError: A micro-batch was left without ``backward``.
        """
        samples = self._order.step(self.number).reshape(-1, self._train.micro_batch)
        num_reductions = 0
        modules = list(fsdp_modules(self._parts.model))
        syncing: bool | None = None
        for number, one in enumerate(self._schedule.passes, start=1):
            if one.syncs is not syncing:
                for module in modules:
                    module.set_requires_gradient_sync(one.syncs, recurse=False)
                syncing = one.syncs
            if self._parts.keeps_gathered:
                is_last = number == len(self._schedule.passes)
                for module in modules:
                    module.set_reshard_after_backward(is_last, recurse=False)
            if one.syncs and self._schedule.nodes:
                num_reductions += 1
                self._parts.reduction.begin(
                    self._schedule.nodes[num_reductions - 1],
                    is_last=num_reductions == len(self._schedule.nodes),
                )
            self._pass = one
            torch.manual_seed(_random_seed(self._train.seed, self.number, one.micro_batch))
            self._page.enter(WorkerPhase.FORWARD)
            yield samples[one.micro_batch]
            if self._is_open():
                raise TaskError(
                    f"a micro-batch of step {self.number} was left without step.backward(loss, "
                    "tokens); call it once for each"
                )
            self._page.micro_batch(number)

    def _is_open(self) -> bool:
        return self._pass is not None

    def backward(self, loss: Tensor, tokens: int) -> None:
        """Add the gradient of a micro-batch.

        Args:
            loss: Mean loss over the micro-batch's tokens, a scalar with its graph.
            tokens: How many tokens (or samples) the mean is over: its weight in the global
                batch.

        Raises:
            TaskError: Called outside a micro-batch, or twice in one.
        """
        one, self._pass = self._pass, None
        if one is None:
            raise TaskError(
                "step.backward was called outside step.micro_batches, or twice in one micro-batch"
            )
        self._page.enter(WorkerPhase.BACKWARD)
        # A weight of zero still takes part in every collective of the pass.
        (loss * float(tokens if one.counts else 0)).backward()
        if one.counts:
            self._sums[one.micro_batch] = (loss.detach().double() * tokens, tokens)

    def apply(self) -> None:
        """Reduce over workers, clip, and update the weights. Every worker calls it once.

        Raises:
            TaskError: Called twice, or not every micro-batch was computed.
        """
        if self.is_applied:
            raise TaskError(f"step.apply was called twice in step {self.number}")
        num_mine = sum(one.counts for one in self._schedule.passes)
        if len(self._sums) != num_mine:
            raise TaskError(
                f"step.apply was called after {len(self._sums)} of {num_mine} micro-batches; "
                "iterate step.micro_batches() to its end first"
            )
        self._page.enter(WorkerPhase.REDUCING)
        square = self._reduce()
        self._page.enter(WorkerPhase.UPDATING)
        self._around.before_update()
        self._update(square)
        self.is_applied = True
        self._on_applied(self)

    def _reduce(self) -> float:
        """Set loss, tokens and agreed; return the square of the summed gradient's norm."""
        parts, deterministic = self._parts, self._train.deterministic
        # With the fixed tree every loss and every row has a place of its own: sums over ranks
        # then add zeros to it, and the order of the rest does not depend on the ranks.
        num_places = self._train.num_micro_batches if deterministic else 1
        losses = torch.zeros(num_places, dtype=torch.float64, device=parts.device)
        tokens = 0
        for micro_batch, (loss, count) in sorted(self._sums.items()):
            losses[micro_batch if deterministic else 0] += loss
            tokens += count
        if deterministic:
            squares = row_squares(parts.pieces, parts.device)
        else:
            squares = sum_of_squares(parts.pieces).reshape(1)
        if parts.mesh.replica > 0:
            squares.zero_()
        said = [tokens, *self._around.signals().numbers()]
        counts = torch.tensor(said, dtype=torch.float64, device=parts.device)
        numbers = torch.cat((counts, losses, squares))
        dist.all_reduce(numbers)
        square = numbers[len(said) + num_places :].sum()
        *head, squared = on_host(torch.cat((numbers[: len(said) + num_places], square.reshape(1))))
        self.tokens, self.agreed = int(head[0]), Signals.from_sums(head[1 : len(said)])
        self.loss = math.fsum(head[len(said) :]) / max(1, self.tokens)
        return squared

    def _update(self, square: float) -> None:
        parts, train = self._parts, self._train
        weight = 1.0 / max(1, self.tokens)
        self.grad_norm = math.sqrt(square) * weight
        factor = weight
        if train.clip_norm:
            factor *= min(1.0, train.clip_norm / (self.grad_norm + _NORM_EPS))
        scale_gradients(parts.pieces, factor)
        for piece in parts.pieces:
            parts.parameters[piece.fqn].grad = piece.gradient
        for group in parts.optimizer.param_groups:
            group["lr"] = self.lr * group.get("lr_scale", 1.0)
        parts.optimizer.step()
        parts.optimizer.zero_grad(set_to_none=True)
        for piece in parts.pieces:
            piece.parameter.grad = None
        drop_gathered(parts.model)


def _random_seed(seed: int, step: int, micro_batch: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{step}/{micro_batch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
