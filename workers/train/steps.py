"""The loop over the steps of one attempt: its data, the work between two steps, and the end."""

import itertools
import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any, Final

from ucp_core.native import RELATIONS
from workers import collectives
from workers.data import DataLoader, DataOrder, Dataset, as_data, micro_batches_of
from workers.errors import TaskError
from workers.models import adapter_documents
from workers.protocol import WorkerPhase
from workers.state import Stateful
from workers.train.agreement import agree_on_data, agree_on_registered
from workers.train.boundary import Boundary
from workers.train.context import WorkerContext
from workers.train.executor import GradientSums, Recheck, ShardedModel, Step, room_of
from workers.train.same_samples import SameSamples, contents, inputs
from workers.train.script_locals import ScriptLocals

log = logging.getLogger(__name__)

#: A version keeps here the state that a script registered.
_REGISTERED: Final = "registered"
#: The key of a version for its record of a few samples.
_SAMPLES: Final = "samples"
#: A version keeps here the place in a stream.
_STREAM: Final = "stream"


class Steps:
    """The loop over the steps of an attempt."""

    def __init__(
        self,
        step: int,
        restored: Mapping[str, Any],
        *,
        context: WorkerContext,
        sharded: ShardedModel,
        boundary: Boundary,
    ) -> None:
        loss = restored.get("loss")
        #: ``step``: Last completed step.
        #: ``loss``: Its loss; nan if it is not known.
        self.step, self.loss = step, math.nan if loss is None else loss
        self.current: Step | None = None  #: The step that was yielded last; None before the first.
        self.has_begun = False  #: Whether the script has requested the first step.
        self.sharded = sharded
        self._restored = restored
        self._settings, self._node = context.settings, context.node
        self._boundary, self._progress = boundary, context.progress
        self._first_step = step + 1
        self._timeout_s = context.settings.parallel.collective_timeout_s
        self._cursor: Mapping[str, Any] = {}
        self._stream: DataLoader | None = None
        self._batches: Generator[Any] | None = None
        self._begun_s = self._step_s = 0.0
        #: A step whose body has not ended, so that registered state may still change.
        self._open: Step | None = None
        self._is_left = False
        self._locals = ScriptLocals()
        #: Compares samples; None if they are not compared.
        self._same: SameSamples | None = None
        #: Compares results; None without ``train.recheck``.
        self._recheck: Recheck | None = None

    def compare(self, step: Step, loss_of: Callable[[Any], Any]) -> None:
        """Check in some steps that a script reads the same samples on every worker as before."""
        if self._same is not None and self._batches is None:
            seed, model = self._settings.train.seed, self.sharded.called
            self._same.compare(step.number, partial(inputs, loss_of, model, seed=seed))

    def register(self, name: str, stateful: Stateful) -> None:
        """Save and load the state of ``stateful`` with the model from now on."""
        saved = self._restored.get(_REGISTERED, {}).get(name)
        # A step that was trained elsewhere has no version.
        if saved is None and self._restored and self.sharded.mesh.rank == 0:
            log.warning("step %s was saved without the state of %s", self.step, name)
        self.sharded.registered.add(name, stateful, saved)

    def each(self, data: int | DataLoader | Dataset | Iterable[Any], digest: str) -> Iterator[Step]:
        """Yield the remaining steps; see ``Session.steps``."""
        self.has_begun = True
        samples, gradient_sums = self._read(data, digest)
        self._boundary.reads(self._stream)
        train = self._settings.train
        if self._boundary.has_ended():
            self._boundary.end(self.step, self.sharded, self._restored)
            return
        if self.step >= train.steps:
            log.warning("resumed at step %s of %s: no step is left", self.step, train.steps)
            return
        self._boundary.commit_loaded(self.step, self.sharded, self._restored)
        self._begun_s = time.perf_counter()
        self._is_left = True
        while self.step < train.steps:
            self.current = step = Step(
                self.step + 1,
                samples=samples,
                gradient_sums=gradient_sums,
                train=train,
                sharded=self.sharded,
                progress=self._progress,
                boundary=self._boundary,
                on_applied=self._applied,
            )
            step.recheck = self._recheck
            yield step
            if self._ends(step):
                break
        self._is_left = False
        if not self._boundary.ending.reason:
            self._boundary.commit(self.step)

    def _read(
        self, data: int | DataLoader | Dataset | Iterable[Any], digest: str
    ) -> tuple[Iterator[Any], GradientSums]:
        """Return this rank's micro-batches from the next step on, and the passes of each step."""
        train, sharded, restored = self._settings.train, self.sharded, self._restored
        relations = restored.get(RELATIONS)
        frozen = relations.get("frozen", ()) if relations is not None else None
        sharded.trained.begin(frozen, restored)
        agree_on_registered(sharded, restored.get(_REGISTERED, {}), step=self.step)
        read = as_data(data)
        loader = read if isinstance(read, DataLoader) else None
        sampled = loader.sampled if loader is not None else None
        length = len(sampled.begin(self._settings.data.seed)) if sampled is not None else 0
        order = DataOrder(
            seed=self._settings.data.seed,
            num_samples=read if isinstance(read, int) else 1 if read.is_stream else len(read),
            global_batch=train.global_batch,
            epoch=(loader.epoch if loader is not None else None)
            or ((length, length) if length else None),
            given=sampled.epoch if sampled is not None else None,
        )
        cursor = agree_on_data(
            read,
            order,
            digest,
            restored=restored,
            step=self.step,
            sharded=sharded,
            train=train,
            node=self._node,
        )
        self._cursor = cursor | adapter_documents(sharded.model)
        self._stream = loader if loader is not None and loader.is_stream else None
        layout = sharded.mesh.layout
        sums = GradientSums(
            train,
            sharded.model,
            sharded.shapes,
            layout,
            sharded.mesh.data_rank,
            round_of=layout.pp if self._settings.parallel.stages_per_worker > 1 else 1,
            room=lambda: room_of(
                sharded.device, share=self._settings.gpu_share, num_workers=layout.world_size
            ),
        )
        numbers = [one.micro_batch for one in sums.quota.passes]
        first = {"micro_batch": train.micro_batch, "first_step": self.step + 1}
        is_named = bool(cursor["data_digest"])
        if self._stream is None and not (is_named and loader is None):
            self._same = SameSamples(
                order,
                size=train.micro_batch if loader is None else 0,
                step=self.step,
                kept=None if is_named else restored.get(_SAMPLES, {}),
                mesh=sharded.mesh,
                device=sharded.device,
            )
        self._recheck = self._recheck_of(order, loader)
        if loader is None:
            upcoming = micro_batches_of(order, numbers=numbers, **first)
            return (samples for _, _, samples in upcoming), sums
        self._batches = loader.batches(
            order, seed=train.seed, numbers=numbers, state=restored.get(_STREAM), **first
        )
        if self._same is not None:
            self._batches = self._compared(self._same, loader, self._batches, len(numbers))
        return self._batches, sums

    def _recheck_of(self, order: DataOrder, loader: DataLoader | None) -> Recheck | None:
        """Return the comparison of workers' results, if the configuration requests it."""
        train, mesh = self._settings.train, self.sharded.mesh
        if not train.recheck:
            return None
        if self._stream is not None:
            raise TaskError(
                "train.recheck has all workers compute the same micro-batch, and from a stream "
                "each reads its own: pass samples by index, or write train.recheck: 0"
            )
        size = train.micro_batch

        def read(step: int, number: int) -> Any:
            if loader is not None:
                which = {"micro_batch": size, "step": step, "number": number}
                return loader.read_one(order, seed=train.seed, **which)
            start = order.positions(step)[0] + number * size
            return order.samples(start, start + size)

        where = mesh, self.sharded.device
        return Recheck(train, *where, read=read, restored=self._restored, step=self.step)

    def _compared(
        self, same: SameSamples, loader: DataLoader, batches: Generator[Any], num: int
    ) -> Generator[Any]:
        """Yield the batches, ``num`` a step; before a step compare samples if that is due."""
        read = partial(contents, loader, seed=self._settings.train.seed)
        with closing(batches):
            for number in itertools.count(self._first_step):
                same.compare(number, read)
                yield from itertools.islice(batches, num)

    def close(self) -> None:
        """End the reading of data."""
        if self._batches is not None:
            self._batches.close()

    def finish(self) -> None:
        """End the run where the script left its loop; every worker calls it after the script."""
        steps = self._settings.train.steps
        if self._is_left and self.step:
            self._boundary.ending.leave_loop(self.step)
            self._complete_open()
            self._boundary.end(self.step, self.sharded, self._restored)
        elif self.step < steps and not self._boundary.ending.reason:
            raise TaskError(
                f"the script ended after step {self.step} of train.steps={steps}; iterate "
                "session.steps() to its end"
            )

    def _applied(self, step: Step) -> None:
        self.step, self.loss = step.number, step.loss
        now_s = time.perf_counter()
        self._step_s, self._begun_s = now_s - self._begun_s, now_s
        if step.number > self._first_step:
            self._extend_timeout()
        self._open = step
        is_waited_for = self.sharded.registered or self.sharded.trained.may_grow
        if not is_waited_for and not self._boundary.best.settings.value:
            self._complete_open()
        self._progress.enter(WorkerPhase.SCRIPT)

    def _complete_open(self) -> None:
        """Report and save the step that was applied last, unless that is done."""
        step, self._open = self._open, None
        if step is None:
            return
        # JSON has no nan, and such a step is saved, too.
        loss = step.loss if math.isfinite(step.loss) else None
        extra = {
            **self._cursor,
            "order_position": step.order_range[1],
            "loss": loss,
            **self._boundary.finiteness.values(),
            **self._boundary.best.take(step.number),
        }
        if self._same is not None:
            extra[_SAMPLES] = self._same.values()
        if self._recheck is not None:
            extra |= self._recheck.values()
        if self._stream is not None:
            extra[_STREAM] = self._stream.state()
        registered = self.sharded.registered.values()
        if registered:
            extra[_REGISTERED] = registered
        # The wait for protection happens once, so it does not count as time of the next step.
        self._begun_s += self._boundary.completed(step, self._step_s, self.sharded, extra)
        if self._boundary.best.is_new:
            waits_s = time.perf_counter()
            self._boundary.commit(step.number)
            self._begun_s += time.perf_counter() - waits_s

    def _ends(self, step: Step) -> bool:
        """Do the work that is due after the body of the loop; return whether the run ends here."""
        if not step.is_applied:
            raise TaskError(f"step {step.number} was left without step.apply(); call it once")
        if self._open is not None:
            # The script's work after ``apply``, such as a scheduler's step, belongs to the step.
            self._complete_open()
            self._progress.enter(WorkerPhase.SCRIPT)
        elif self.sharded.trained.has_changed():
            text = (
                f"parameters were frozen after step.apply() of step {step.number}, which was "
                "saved before: a run that resumes from it trains them. Freeze them before "
                f"session.train_step, under `if step.number > {step.number}:`"
            )
            self._boundary.tell(step.number, text)
        for name in self._locals.look(self.sharded) if self._first_step == 1 else ():
            text = (
                f"`{name}` changes in each step and is not registered: it begins again after a "
                "fault. For an average of the weights call session.average(decay=0.999); compute a "
                "count from step.number; keep anything else in an object with state_dict and "
                f'load_state_dict, and session.register("{name}", ...) it'
            )
            self._boundary.tell(step.number, text)
        if step.number == self._settings.train.steps:
            return False
        if self._boundary.ending.is_due(agreed=step.agreed.stops):
            self._boundary.end(step.number, self.sharded, self._restored)
            return True
        if step.agreed.leaves:
            self._boundary.leave(step.number)
        return False

    def _extend_timeout(self) -> None:
        """Make collectives wait for longer than it takes to find a hung rank."""
        timeout_s = self._settings.parallel.timeout_s(self._step_s)
        if timeout_s > self._timeout_s:
            self._timeout_s = timeout_s
            collectives.set_timeout(timeout_s)
