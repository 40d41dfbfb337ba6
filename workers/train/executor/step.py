"""One optimizer step over a global batch of constant size, for any number of workers.

The gradient of a micro-batch is the gradient of its summed token losses. Sums over micro-batches
and ranks are divided once, by the number of tokens of the whole global batch, so weights are exact
with uneven quotas and uneven token counts. One all-reduce per step carries the loss sum, the token
count, the ranks' signals, and the squares for the gradient norm.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from workers import collectives
from workers.data import keeping_host_numbers, num_tokens, random_seed, seed_all
from workers.errors import LayoutRefusedError, TaskError
from workers.parallel import PassHooks, Pipeline, drop_gathered
from workers.protocol import WorkerPhase
from workers.settings import TrainSettings
from workers.state import fitted
from workers.telemetry import ProgressRecord
from workers.train.executor.gradient_sums import GradientSums
from workers.train.executor.norm import (
    ordered_sum,
    row_squares,
    scale_gradients,
    sum_of_squares,
)
from workers.train.executor.not_finite import Finiteness
from workers.train.executor.own_changes import Changes, refuse_clipped
from workers.train.executor.quotas import Pass
from workers.train.executor.recheck import Recheck
from workers.train.executor.sharded_model import ShardedModel
from workers.train.executor.signals import Signals, refuse_readings

#: Why FSDP2 gathers no parameters for a backward pass, or reduces no gradient.
CHANGED_IN_PLACE: Final = (
    "An output of the model, or of a layer, may not be changed in place: write `out = out + x` for "
    "`out += x`"
)


class StepBoundary(Protocol):
    """The calls of a step to the boundary after it: ``workers.train.boundary.Boundary``."""

    finiteness: Finiteness  #: Decides about updates that are not finite.

    def signals(self) -> Signals:
        """Return this rank's signals to the others."""

    def before_update(self) -> None:
        """Note that the weights are about to change."""


class Step:
    """One step: ``train``, or iterate ``micro_batches``, call ``backward`` in each, then ``apply``.

    ``on_applied`` does the work of the boundary after it (report, save).

    Attributes:
        number: This step, counted from 1.
        order_range: Positions of the data order that the step takes, half-open.
        loss: Mean over the tokens of the global batch, on every worker; set by ``apply``. It is nan
            without tokens.
        grad_norm: Norm of the mean gradient before clipping; set by ``apply``.
        lr: Learning rate of the step; that of the first optimizer if they differ.
        tokens: Tokens in the global batch; set by ``apply``. Without any, the samples count.
        data_s: Time for which this rank has waited for data.
        is_applied: Whether ``apply`` was called.
        is_skipped: Whether the update was skipped because it was not finite, or overflowed under a
            ``GradScaler``; set by ``apply``.
        agreed: The signals of all workers, equal on all; set by ``apply``.
        recheck: Compares what workers compute; None if nothing is compared.
        passes: The passes of this rank.
        sums: The sum of losses and the tokens of each micro-batch that this rank has computed.
        num_micro_batches: Micro-batches of the step on all ranks.
    """

    def __init__(
        self,
        number: int,
        *,
        samples: Iterator[Any],
        gradient_sums: GradientSums,
        train: TrainSettings,
        sharded: ShardedModel,
        progress: ProgressRecord,
        boundary: StepBoundary,
        on_applied: Callable[[Step], None],
    ) -> None:
        self.number = number
        self.order_range = (number - 1) * train.global_batch, number * train.global_batch
        self.lr = learning_rate(train, number)
        first = sharded.optimizers.every[0]
        if sharded.registered.schedule(first):
            self.lr = float(first.param_groups[0]["lr"])
        self.loss = self.grad_norm = math.nan
        self.tokens = 0
        self.data_s = 0.0
        self.is_applied = self.is_skipped = False
        self.agreed = Signals()
        self._samples = samples
        self._has_begun = False
        self._gradient_sums = gradient_sums
        self.passes, self._nodes = gradient_sums.quota.passes, gradient_sums.quota.nodes
        self.num_micro_batches = train.num_micro_batches
        self._train = train
        self._sharded = sharded
        self._progress = progress
        self._boundary = boundary
        self._on_applied = on_applied
        self.recheck: Recheck | None = None
        self._pass: Pass | None = None
        self._number_of_pass = 0
        self._tokens_read = 0
        self.sums: dict[int, tuple[Tensor, int]] = {}
        self._changes = Changes(())

    @property
    def own_tokens(self) -> float:
        """Return this rank's part of the tokens of the step; nan if the script has none.

        They are the tokens of its batches. If the batches show none, they are the numbers that the
        script returned with its losses, unless these count samples.
        """
        mesh, num_samples = self._sharded.mesh, len(self.sums) * self._train.micro_batch
        if not (mesh.counts and num_samples):
            return 0.0
        if self._tokens_read:
            return self._tokens_read / mesh.layout.cp
        given = sum(count for _, count in self.sums.values())
        return math.nan if given == num_samples else float(given)

    def micro_batches(self) -> Iterator[Any]:
        """Yield the samples of each micro-batch of this worker, ``(micro_batch,)`` each.

        With a ``DataLoader`` these are its batches; otherwise they are indices.

        Random numbers of torch, NumPy and Python are keyed by seed, step and micro-batch, not by
        worker. NumPy's and Python's afterwards continue as before. With uneven quotas a worker may
        repeat a micro-batch, and with ``train.recheck`` it sometimes gets one of another worker;
        its gradient and loss do not count.

        Raises:
            TaskError: A micro-batch was left without ``backward``, or this was called before.
        """
        if self._sharded.pipeline is not None:
            raise LayoutRefusedError(
                "with parallel.pp above 1 a script cannot compute single micro-batches: call "
                "session.train_step, which runs them through the pipeline",
                axis="pp",
            )
        self._begin()
        with keeping_host_numbers():
            if self.recheck is not None:
                yield from self._rechecked(self.recheck)
            for number, one in enumerate(self.passes):
                yield from self._opened(one, number, self._read(number))

    def _begin(self) -> None:
        if self._has_begun:
            raise TaskError(f"step {self.number} was already computed; compute it once")
        self._has_begun = True
        self._sharded.buffers.begin_step(self.number)
        self._sharded.rank_calls.begin()
        for units in self._sharded.units.values():
            units.begin_step()
        self._sharded.trained.begin_step(self.number)

    def _opened(self, one: Pass, number: int, samples: Any) -> Iterator[Any]:
        """Yield the samples of a pass of a whole model, which ``backward`` computes."""
        sharded = self._sharded
        self._pass, self._number_of_pass = one, number
        sharded.buffers.begin_pass()
        self._begin_forward(0, number, one.micro_batch)
        yield samples
        self._refuse_open()
        counts = one.counts and sharded.mesh.counts
        sharded.buffers.end_pass(one.micro_batch if counts else None, self.number)

    def _refuse_open(self) -> None:
        if self._pass is not None:
            raise TaskError(
                f"a micro-batch of step {self.number} was left without step.backward(loss, "
                "tokens); call it once for each"
            )

    def _rechecked(self, recheck: Recheck) -> Iterator[Any]:
        """Yield the micro-batch that all workers compute in this step, if one is due."""
        sharded = self._sharded
        for number, samples in recheck.passes(self.number, sharded.shards):
            for module in sharded.units[0].modules:
                module.set_requires_gradient_sync(True, recurse=False)
                if sharded.keeps_gathered:
                    module.set_reshard_after_backward(False, recurse=False)
            sharded.reduction.see = recheck.see
            yield from self._opened(Pass(micro_batch=number, counts=False, syncs=True), 0, samples)
            sharded.reduction.see = None

    def _read(self, number: int) -> Any:
        """Return the samples of a pass.

        They may have been read ahead, with separate random numbers.
        """
        self._span("data", number)
        begun_s = time.perf_counter()
        samples = next(self._samples)
        self.data_s += time.perf_counter() - begun_s
        tokens = num_tokens(samples)
        self._span("", tokens=tokens)
        if self.passes[number].counts:
            self._tokens_read += tokens
        return samples

    def _span(self, op: str, number: int = 0, *, tokens: int = 0) -> None:
        """Record that ``op`` of a pass begins, or with "" that the last one ends."""
        collectives.span(op, step=self.number, micro_batch=number, tokens=tokens)

    def _begin_forward(self, stage: int, number: int, micro_batch: int) -> None:
        # A fence must end a step here, because not every pass has a collective.
        collectives.check()
        # The same on all stages and parts, which call the loss function on the same samples.
        seed_all(random_seed(self._train.seed, self.number, micro_batch))
        self._progress.enter(WorkerPhase.FORWARD)
        self._span("forward", number)
        self._sharded.units[stage].begin_forward(number)

    def _begin_backward(self, stage: int, number: int) -> None:
        if self._sharded.reduction.see is None:
            self._set_reduction(stage, number)
        self._sharded.units[stage].begin_backward(number)
        self._progress.enter(WorkerPhase.BACKWARD)
        self._span("backward", number)

    def _set_reduction(self, stage: int, number: int) -> None:
        """Set whether FSDP2 reduces gradients in a pass and keeps gathered parameters."""
        sharded, passes, nodes = self._sharded, self.passes, self._nodes
        modules = sharded.units[stage].modules
        syncs = passes[number].syncs
        if number == 0 or syncs is not passes[number - 1].syncs:
            for module in modules:
                module.set_requires_gradient_sync(syncs, recurse=False)
        is_last = number == len(passes) - 1
        if syncs and sharded.mesh.replicas is not None and not nodes:
            # Gradients in one copy of the model are added up: copies are summed once.
            for module in modules:
                module.set_requires_all_reduce(is_last, recurse=False)
        if sharded.keeps_gathered:
            for module in modules:
                module.set_reshard_after_backward(is_last, recurse=False)
        if syncs:
            sharded.reduction.probe.begin(number)
        if syncs and nodes:
            place = sum(one.syncs for one in passes[:number])
            sharded.reduction.begin(nodes[place], is_last=place == len(nodes) - 1)

    def _end_backward(self, stage: int, number: int, one: Pass) -> None:
        sharded = self._sharded
        sharded.units[stage].end_backward()
        self._span("")
        if sharded.reduction.see is not None:
            sharded.reduction.see(sharded.whole.drop_pass())
        sharded.whole.end_pass(one.micro_batch if one.counts else None)
        # A backward pass ends with the first of a rank's stages.
        if stage == sharded.mesh.stage and sharded.reduction.see is None:
            self._progress.micro_batch(number + 1)

    def train(
        self,
        loss_of: Callable[[Any], Tensor | tuple[Tensor, int]],
        optimizers: Sequence[torch.optim.Optimizer] | None = None,
    ) -> None:
        """Do the whole step: every micro-batch of this worker, then ``apply``."""
        if self._sharded.pipeline is not None:
            self._train_stages(self._sharded.pipeline, loss_of)
        else:
            for batch in self.micro_batches():
                self.backward(*self._loss_and_tokens(loss_of(batch)))
        self.apply(optimizers)

    def _train_stages(self, pipeline: Pipeline, loss_of: Callable[[Any], Any]) -> None:
        self._begin()
        passes = self.passes
        hooks = PassHooks(
            begin=lambda stage, number: self._begin_forward(
                stage, number, passes[number].micro_batch
            ),
            weigh=lambda number, returned: self._weigh(
                *self._loss_and_tokens(returned), passes[number]
            ),
            end_forward=lambda: self._span(""),
            computed=self._sharded.reduction.probe.see_output,
            begin_backward=self._begin_backward,
            end=lambda stage, number: self._end_backward(stage, number, passes[number]),
        )
        with keeping_host_numbers():
            batches = [self._read(number) for number in range(len(passes))]
            pipeline.train(batches, loss_of, hooks)
        self._sharded.whole.end_passes()
        # Several passes are open at a time, so none can begin with the values from before the step.
        self._sharded.buffers.refuse_changes(self.number)

    def backward(self, loss: Tensor, tokens: int) -> None:
        """Add the gradient of a micro-batch.

        Args:
            loss: Mean loss over the micro-batch's tokens, a scalar with its graph.
            tokens: Number of tokens (or samples) in the mean: its weight in the global batch.

        Raises:
            TaskError: This was called outside a micro-batch, or twice in one.
        """
        if self._pass is None:
            raise TaskError(
                "step.backward was called outside step.micro_batches, or twice in one micro-batch"
            )
        one, self._pass = self._pass, None
        self._begin_backward(0, self._number_of_pass)
        try:
            self._weigh(loss, tokens, one).backward()
        except RuntimeError as error:
            if "out of bounds for storage of size 0" in str(error):
                error.add_note(f"everstep: in step {self.number}: {CHANGED_IN_PLACE}")
            raise
        self._end_backward(0, self._number_of_pass, one)
        if one is self.passes[-1]:
            self._sharded.whole.end_passes()
            self._changes = Changes(self._sharded.shards)

    def _weigh(self, loss: Tensor, tokens: int, one: Pass) -> Tensor:
        """Record the loss of a pass; return the scalar to differentiate."""
        if one.counts:
            # The mean over no tokens is nan, and not part of the sum.
            summed = loss.detach().double() * tokens if tokens else torch.zeros(())
            self.sums[one.micro_batch] = (summed, tokens)
        # Even with a weight of zero, the rank takes part in every collective of the pass.
        see = self._sharded.reduction.see
        if see is not None:
            see(loss.detach().reshape(1))
        weighted = loss * float(tokens if one.counts or see is not None else 0)
        scaler = self._sharded.registered.scaler
        return scaler.scale(weighted) if scaler is not None else weighted

    def _loss_and_tokens(self, returned: Any) -> tuple[Tensor, int]:
        """Return the result of a script's loss function; without tokens, samples count."""
        is_pair = isinstance(returned, tuple)
        if not is_pair and self._sharded.mesh.context is not None:
            raise LayoutRefusedError(
                f"parallel.cp={self._sharded.mesh.layout.cp}: the parts of a micro-batch may have "
                "different numbers of tokens; return (loss, tokens), or write parallel.cp: 1",
                axis="cp",
            )
        loss, tokens = returned if is_pair else (returned, self._train.micro_batch)
        if isinstance(loss, Tensor) and loss.numel() == 1 and isinstance(tokens, int):
            return loss.reshape(()), tokens
        kinds = ", ".join(type(one).__name__ for one in (loss, tokens))
        shape = f" of shape {list(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise TaskError(
            f"session.train_step: the function returned ({kinds}){shape}; return the mean loss of "
            "the micro-batch, a scalar tensor, or (loss, number of tokens in the mean)"
        )

    def apply(self, optimizers: Sequence[torch.optim.Optimizer] | None = None) -> None:
        """Reduce over workers, clip, and update the weights. Every worker calls it once.

        Args:
            optimizers: The optimizers that update; gradients of the others are dropped. By default
                all whose parameters have gradients.

        Raises:
            TaskError: This was called twice, a micro-batch was not computed, there is no gradient,
                the model depends on the number of workers, or the script changed gradients or
                rates.
            NotFiniteError: The update is not finite, and the run ends for it.
        """
        if self.is_applied:
            raise TaskError(f"step.apply was called twice in step {self.number}")
        num_mine = sum(one.counts for one in self.passes)
        if self._sharded.pipeline is None and len(self.sums) != num_mine:
            raise TaskError(
                f"step.apply was called after {len(self.sums)} of {num_mine} micro-batches; "
                "iterate step.micro_batches() to its end first"
            )
        self._sharded.rank_calls.refuse()
        self._sharded.sequence.refuse_unused()
        self._changes.refuse(self.number)
        self._sharded.optimizers.refuse_rates(self.number, self._sharded.registered.schedule)
        self._progress.enter(WorkerPhase.REDUCING)
        self._sharded.tensor_replicas.refuse(
            self._sharded.shards, self._sharded.device, self.number
        )
        self._choose(optimizers)
        self._reduce()
        self.is_skipped = self._boundary.finiteness.leaves_out(self, self._sharded)
        self._sharded.reduction.probe.clear()
        self._progress.enter(WorkerPhase.UPDATING)
        self._boundary.before_update()
        if self.recheck is not None:
            self.recheck.before_update(self._sharded.shards)
        if self.agreed.buffers and self._boundary.finiteness.in_a_row and self.is_skipped:
            self._sharded.buffers.restore()
        elif self.agreed.buffers:
            self._sharded.buffers.end_step(
                self.number, self._train.num_micro_batches, in_order=self._train.deterministic
            )
        self._span("optimizer")
        self._update()
        self._span("")
        if self.recheck is not None:
            self.recheck.after_update(self._sharded.shards)
        self._boundary.finiteness.updated(self.number, self._sharded)
        self.is_applied = True
        self._on_applied(self)

    def _choose(self, chosen: Sequence[torch.optim.Optimizer] | None) -> None:
        """Drop the gradients that no optimizer in ``chosen`` takes."""
        sharded = self._sharded
        for one in chosen or ():
            if not any(one is held for held in sharded.optimizers.every):
                raise TaskError(
                    f"step {self.number}: {type(one).__name__} in optimizers is none of those that "
                    "session.optimizer returned"
                )
        for shard in () if chosen is None else sharded.shards:
            owner = sharded.optimizers.owner(sharded.parameters[shard.fqn])
            if not any(owner is one for one in chosen or ()):
                shard.parameter.grad = None
        if all(shard.parameter.grad is None for shard in sharded.shards):
            self._refuse_unused()

    def _refuse_unused(self) -> NoReturn:
        raise TaskError(
            f"step {self.number}: no parameter that an optimizer updates has a gradient; the "
            f"loss must depend on one with requires_grad. {CHANGED_IN_PLACE}"
        )

    def _reduce(self) -> None:
        """Set loss, tokens, grad_norm and agreed; scale the gradients.

        The host waits for the sums before the update: if a collective was aborted, the gradients
        are wrong, and the state must stay that of the step before. Meanwhile a device scales the
        gradients.
        """
        sharded, deterministic = self._sharded, self._train.deterministic
        losses, tokens = self._own_losses()
        rank, device = sharded.mesh.rank, sharded.device
        if deterministic:
            column = sharded.mesh.tensor_rank, sharded.mesh.layout.tp
            squares = row_squares(sharded.shards, sharded.shapes, rank, device, column)
        else:
            squares = sum_of_squares(sharded.shards, rank, device).reshape(1)
        signals = replace(
            self._boundary.signals(),
            buffers=sharded.buffers.have_changed,
            freezes=sharded.trained.has_changed(),
            lacks_room=self._gradient_sums.lacks_room(),
        )
        said = [tokens, *signals.numbers()]
        num_said, whole = len(said), sharded.whole
        said += whole.exist()
        counts = torch.tensor(said, dtype=torch.float64)
        counts = torch.cat((counts, sharded.used.numbers())).to(device)
        num_counts, first = len(counts), len(counts) + 1
        changed, end = self._changes.are_seen(device), first + len(losses)
        numbers = torch.cat((counts, changed, losses, whole.sums(), squares))
        dist.all_reduce(numbers)
        square = whole.put(numbers[end : end + whole.num_sums])
        square = square + ordered_sum(numbers[end + whole.num_sums :])
        read = collectives.reading(torch.cat((numbers[:end], square.reshape(1))))
        scaler = sharded.registered.scaler
        scale = scaler.get_scale() if scaler is not None else 1.0
        scale_gradients(sharded.shards, square, numbers[0] * scale, self._train.clip_norm)
        *head, squared = read()
        if head[num_counts]:
            refuse_clipped(self.number)
        whole.drop(head[num_said : len(said)])
        if not sharded.used.drop_unused(head[len(said) : num_counts]) and sharded.pipeline is None:
            self._refuse_unused()
        self.tokens, self.agreed = int(head[0]), Signals.from_sums(head[1:num_said])
        self._gradient_sums.agree(lacks_room=self.agreed.lacks_room)
        refuse_readings(self.agreed, signals, step=self.number, device=device)
        if self.agreed.freezes:
            sharded.trained.agree(f"in step {self.number}")
        self.loss = math.fsum(head[first:]) / self.tokens if self.tokens else math.nan
        self.grad_norm = math.sqrt(squared) * (1.0 / (max(1, self.tokens) * scale))

    def _own_losses(self) -> tuple[Tensor, int]:
        """Return the sums of this rank's losses, float64, and its tokens.

        In deterministic mode each loss and each row has its own element: a sum over ranks adds
        zeros to it, and the elements are then added in an order that ignores the ranks.
        """
        deterministic = self._train.deterministic
        num_places = self._train.num_micro_batches if deterministic else 1
        losses = torch.zeros(num_places, dtype=torch.float64, device=self._sharded.device)
        tokens = 0
        for micro_batch, (loss, count) in sorted(self.sums.items()):
            if self._sharded.mesh.counts:
                losses[micro_batch if deterministic else 0] += loss
                tokens += count
        return losses, tokens

    def _update(self) -> None:
        sharded = self._sharded
        for shard in sharded.shards:
            parameter = sharded.parameters[shard.fqn]
            parameter.grad = fitted(shard.gradient, parameter)
        if sharded.registered.scaler is not None:
            self._adapt(sharded.registered.scaler)
        if not self.is_skipped:
            self._step_optimizers()
            sharded.average.update(self.number)
        for shard in sharded.shards:
            sharded.parameters[shard.fqn].grad = shard.parameter.grad = None
        drop_gathered(sharded.model)

    def _adapt(self, scaler: GradScaler) -> None:
        """Adapt the scale to whether a gradient overflowed, equally on all workers."""
        fits = math.isfinite(self.grad_norm)
        flag = nn.Parameter(torch.zeros(1, device=self._sharded.device))
        flag.grad = torch.full_like(flag, 0.0 if fits else math.inf)
        # A stage without a loss has scaled nothing so far.
        scaler.scale(flag.detach())
        scaler.unscale_(torch.optim.SGD([flag], lr=0.0))
        scaler.update()

    def _step_optimizers(self) -> None:
        sharded, lr = self._sharded, learning_rate(self._train, self.number)
        sharded.optimizers.begin()
        for optimizer in sharded.optimizers.every:
            groups = optimizer.param_groups
            if all(one.grad is None for group in groups for one in group["params"]):
                continue
            if not sharded.registered.schedule(optimizer):
                sharded.optimizers.set_rates(optimizer, lr)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def learning_rate(train: TrainSettings, step: int) -> float:
    """Return the learning rate of ``step``, counted from 1.

    It rises linearly over the warm-up to ``lr``, then falls to ``lr * lr_min_ratio`` at the
    last step, by half a cosine or a line; "constant" stays at ``lr``.
    """
    warmup_steps = train.num_warmup_steps
    if step <= warmup_steps:
        return train.lr * step / warmup_steps
    if train.schedule == "constant":
        return train.lr
    done = min(1.0, (step - warmup_steps) / max(1, train.steps - warmup_steps))
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if train.schedule == "cosine" else 1.0 - done
    return train.lr * (train.lr_min_ratio + (1.0 - train.lr_min_ratio) * left)
