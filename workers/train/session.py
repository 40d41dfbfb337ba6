"""A training script's view of one attempt: model, optimizer, steps.

``everstep`` documents the contract. The built-in training (``workers.train.lm``) also uses the
session. A session belongs to one thread and one attempt.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ucp_core.storage import join
from workers import collectives
from workers.data import DataLoader, Dataset, as_data, draw_for_part
from workers.errors import DataError, LayoutRefusedError, TaskError
from workers.parallel import Mesh, ModelPlan, drop_gathered
from workers.protocol import BESIDE, VALIDATION, VALUES, Assignment, Formed, WorkerPhase
from workers.settings import VALIDATION_LOSS, Settings
from workers.snapshot import SnapshotMemory
from workers.state import (
    HostBuffer,
    Stateful,
    adopt,
    in_whole_vectors,
    local_parameters,
    refuse_unfit,
    saying_whole_shapes,
    take_whole_vectors,
)
from workers.train.boundary import UNWRITTEN, Boundary, Marks, StorageWriter
from workers.train.building import as_optimizers, assemble, build_model
from workers.train.context import WorkerContext
from workers.train.evaluation import mean_over_samples
from workers.train.executor import AverageOfWeights, BuiltModel, ShardedModel, Step
from workers.train.loading import Initialise, Restored, StateLoader
from workers.train.state_dicts import guard_optimizer, guard_parts
from workers.train.steps import Steps
from workers.train.whole_weights import path_to_save, write_weights

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Session:
    """One attempt, as a training script sees it. Made by ``workers.train.loop``.

    Attributes:
        settings: The run's settings.
        device: The device to compute on.
        rank: This worker's rank.
        world_size: Number of workers in the attempt.
    """

    def __init__(
        self,
        assignment: Assignment,
        context: WorkerContext,
        mesh: Mesh,
        buffer: HostBuffer,
        memory: SnapshotMemory | None = None,
    ) -> None:
        self.settings: Settings = context.settings
        self.device = torch.device(mesh.sharding.device_type)
        self.rank = assignment.rank
        self.world_size = assignment.layout.world_size
        self._assignment = assignment
        self._context = context
        self._mesh = mesh
        self._state = StateLoader(assignment, context, mesh, buffer, self.device)
        self._built: BuiltModel | None = None
        self._unfilled: Marks | None = None
        self._sharded: ShardedModel | None = None
        self._steps: Steps | None = None
        self._validation_loss = math.nan
        self._evaluates_badly = False
        self._storage = StorageWriter(
            store=context.store,
            directory=context.directory,
            assignment=assignment,
            settings=context.settings.checkpoint,
            fenced=lambda: context.fenced(assignment.attempt),
            moved=context.progress.moved,
        )
        self._boundary = Boundary(
            assignment,
            context,
            device=self.device,
            buffer=buffer,
            memory=memory,
            storage=self._storage,
        )

    @property
    def step(self) -> int:
        """Return the last completed step; before the first, the one from which the run resumed."""
        return self._steps.step if self._steps is not None else self._state.step

    @property
    def ended(self) -> str:
        """Return why the run has ended before its last step; "" if it has not."""
        return self._boundary.ending.reason

    def model(
        self,
        build: Callable[[], nn.Module],
        initialise: Initialise | None = None,
        *,
        plan: ModelPlan | None = None,
        average_buffers: Sequence[str] = (),
    ) -> Any:
        """Return the model that ``build`` makes, sharded over the workers, without values.

        Args:
            build: Makes the whole model; called on the meta device, where it needs no memory. An
                ``nn.ModuleDict`` is several models, each of which the script calls: the two of a
                GAN, a student and its frozen teacher, a model and its average.
            initialise: Returns the whole initial value of a parameter from its name and shape,
                the same on every worker. Without it ``build`` is called again on the CPU, with a
                seed, and its values are used; then the whole model must fit into memory briefly.
            plan: How tensor, pipeline and context parallelism cut it; not needed without these.
            average_buffers: Names, with ``*``, of persistent buffers that depend on the samples,
                such as BatchNorm's ``*.running_mean`` and ``*.running_var``: after a step they are
                the mean over the results of its micro-batches. Others must not depend on samples.

        Raises:
            TaskError: The model cannot be sharded, or a buffer would depend on the workers.
        """
        if self._built is not None:
            raise TaskError("session.model was called twice in one attempt; call it once")
        self._built = build_model(
            build,
            plan or ModelPlan(),
            mesh=self._mesh,
            settings=self.settings,
            device=self.device,
            averaged=average_buffers,
        )
        self.export_with(self._built.documents)
        self._state.prepare(build, initialise)
        self._unfilled = Marks(self._built.shards)
        guard_parts(self._built.model)
        return self._built.called

    def continue_from(self, earlier: str | int) -> None:
        """Make a new run continue after a step of another training; call it before ``model``.

        A run with steps of its own continues from those.

        Args:
            earlier: A version of a run, ``RUN/checkpoints/step-...``: its weights, its optimizers,
                registered state and its place in the data are loaded. Or the number of steps that
                were done elsewhere, whose state the script provides.

        Raises:
            TaskError: There is no such version, or no step is left to train.
        """
        if self._built is not None:
            raise TaskError("call session.continue_from before session.model")
        self._state.continue_from(earlier)

    def export_with(self, files: Mapping[str, bytes]) -> None:
        """Put files beside the weights in every export of the run to Hugging Face.

        A model of ``transformers`` provides its configurations; this is for other files, such as a
        tokenizer's. They are written once: an existing file of the run directory stays.

        Args:
            files: Contents by plain names.
        """
        if self.rank == 0 and files:
            self._storage.write_once(BESIDE, files)

    def optimizer(
        self,
        make: Callable[[Mapping[str, nn.Parameter]], _T],
        *,
        elementwise: bool = False,
    ) -> _T:
        """Return the optimizer that ``make`` builds, after loading the state of both.

        Args:
            make: Builds a torch optimizer over parameters given by name, or a list of several over
                different ones. They have the shapes of the whole weights, and the values of this
                worker's shards: an optimizer must treat every element alike, as SGD and Adam do.
            elementwise: Declares that it treats every element alike, if its class is not torch's
                own. An optimizer of whole matrices (Muon, LAMB, SOAP, Shampoo) would depend on the
                number of workers.

        Raises:
            TaskError: There is no model yet, or something wrote to its weights before this fills
                them.
            StateError: The optimizer cannot work on shards, or its state cannot be saved.
        """
        if self._built is None:
            raise TaskError("call session.model before session.optimizer")
        self._context.progress.enter(WorkerPhase.LOADING)
        began_s = time.monotonic()
        shards = self._built.shards
        parameters = local_parameters(shards)
        if self._unfilled is not None:
            self._unfilled.refuse_written()
            self._unfilled = None
        assembled = partial(
            assemble,
            self._built,
            parameters,
            assignment=self._assignment,
            train=self.settings.train,
        )
        # ``make`` may read the weights, so they need their values.
        self._state.fill_new(lambda: assembled([]))
        deterministic = self.settings.train.deterministic
        if deterministic and elementwise:
            in_whole_vectors(parameters.values())
        before = Marks(shards)
        with saying_whole_shapes(shards, parameters):
            made = make(parameters)
        before.refuse_written()
        every = as_optimizers(made)
        for one in every:
            refuse_unfit(one, self._mesh.layout, elementwise=elementwise)
            adopt(one, shards, parameters)
            if any(shard.local.shape != shard.shape for shard in shards):
                guard_optimizer(one)
            if deterministic:
                take_whole_vectors(one)
        self._sharded = assembled(every)
        restored = self._load(self._sharded)
        collectives.set_timeout(self.settings.parallel.collective_timeout_s)
        self._context.progress.resumed(self.step)
        self._context.on_formed(
            Formed(
                attempt=self._assignment.attempt,
                load_s=time.monotonic() - began_s,
                sources=restored.sources,
                found=restored.found,
            )
        )
        return made

    def register(self, name: str, stateful: Stateful) -> Any:
        """Return ``stateful``, whose state is saved and loaded with the model from now on.

        With something registered, a step is saved when the loop's body ends instead of in
        ``step.apply``: what the body does after ``apply`` is then part of the step. A torch
        scheduler of learning rates replaces ``train.schedule``.

        Args:
            name: Its name in checkpoints.
            stateful: Anything with ``state_dict`` and ``load_state_dict``: a scheduler, an average,
                a curriculum. Its state must be small, and the same on every worker.

        Raises:
            TaskError: The optimizer is not there yet, a step has begun, the name is taken, or the
                state cannot be saved or loaded.
        """
        if self._steps is None or self._steps.has_begun:
            raise TaskError(
                f"session.register: call it for {name!r} after session.optimizer and before "
                "session.steps"
            )
        self._steps.register(name, stateful)
        return stateful

    def average(self, *, decay: float, every: int = 1) -> AverageOfWeights:
        """Return an exponential moving average of the weights, which the session keeps.

        It is sharded like the weights, in float32, saved with every version and loaded with it.
        ``with average.swapped():`` puts it into the model, for an evaluation or ``session.save``;
        ``everstep export RUN --average`` writes it. It starts with the current weights.

        Args:
            decay: How much of the average an update keeps, such as 0.999.
            every: It is updated after each step whose number this divides.

        Raises:
            TaskError: The optimizer is not there yet, a step has begun, it was called before, or a
                value is out of range.
        """
        if self._sharded is None or self._steps is None or self._steps.has_begun:
            raise TaskError(
                "session.average: call it after session.optimizer and before session.steps"
            )
        sharded = self._sharded
        sharded.trained.agree("in session.average")
        sharded.average.begin(decay, every, sharded.trained.updated)
        self._state.restore_average(sharded)
        sharded.state.add(sharded.average.entries())

        def swap() -> None:
            sharded.average.swap()
            drop_gathered(sharded.model)

        return AverageOfWeights(lambda: self._boundary.lent(swap))

    def keep_best(self, value: str, *, mode: Literal["min", "max"] = "min", keep: int = 1) -> None:
        """Keep checkpoints of the steps after which a value was best; see ``checkpoint.best``.

        Every worker calls it, before ``session.steps``. The configuration overrides it.

        Raises:
            TaskError: The configuration has another value or mode.
        """
        self._boundary.best.choose(value, mode, keep)

    def steps(
        self, data: int | DataLoader | Dataset | Iterable[Any], *, data_digest: str = ""
    ) -> Iterator[Step]:
        """Yield the remaining steps, one at a time; call ``train_step`` in each.

        Between two steps the session saves, reports, and leaves on request.

        Args:
            data: The number of samples of the training data, whose indices are below it; or a
                ``DataLoader``, whose batches the steps then yield; or a dataset for one.
            data_digest: Identifies the data; workers with different digests refuse to start.

        Raises:
            DataError: Workers, or this run and its checkpoint, have different data.
            TaskError: A step was left without ``apply``, or workers registered different state.
        """
        yield from self._ready().each(data, data_digest)

    def train_step(
        self,
        loss_of: Callable[[Any], Tensor | tuple[Tensor, int]],
        *,
        optimizers: Sequence[torch.optim.Optimizer] | None = None,
    ) -> Step:
        """Do the current step of ``steps``, and return it: its ``loss`` is then known.

        It computes the micro-batches of this worker, reduces gradients over workers, clips them
        and updates the weights. The open loop over ``step.micro_batches()``, with
        ``step.backward`` and ``step.apply``, does the same.

        Args:
            loss_of: Returns the mean loss of a micro-batch, a scalar with its graph. If
                micro-batches have different numbers of tokens, returns ``(loss, tokens)``; the
                tokens in the mean are its weight in the global batch.
            optimizers: The optimizers that update in this step; gradients of the others are
                dropped. By default all whose parameters get gradients.

        Raises:
            TaskError: There is no step, it has already begun, ``loss_of`` returned something else,
                or nothing has a gradient.
        """
        current = self._steps.current if self._steps is not None else None
        if current is None:
            raise TaskError("session.train_step: call it in `for step in session.steps(...)`")
        self._ready().compare(current, loss_of)
        current.train(loss_of, optimizers)
        return current

    def part(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return this worker's part of the sequences of ``batch``, with labels shifted.

        With ``parallel.cp`` above 1 workers have parts of the same sequences. A script calls this
        on each batch of whole ones, also in an evaluation; the loss and its tokens are then those
        of the part. With ``parallel.cp: 1`` only labels change.

        Args:
            batch: A batch in which the entries that ``ModelPlan.sequence`` names (for a model of
                ``transformers``: ``input_ids``, ``labels`` and ``position_ids``) are tensors with
                positions along dim 1. In place of ``labels`` the result has ``shift_labels``, the
                label of the next position, also under the old name; the last one is -100. With
                ``parallel.cp`` above 1 it has ``position_ids``, and no ``attention_mask``, which
                may only hide the ends of sequences. Other entries stay.

        Raises:
            LayoutRefusedError: Sequences cannot be cut this way.
            TaskError: There is no model yet, or no such entry.
        """
        if self._built is None:
            raise TaskError("call session.model before session.part")
        found = self._built.sequence.of(batch)
        draw_for_part(self._built.mesh.part)
        return found

    def evaluate(
        self,
        loss_of: Callable[[Any], Any],
        data: int | DataLoader | Dataset,
        *,
        micro_batch: int | None = None,
        of_means: bool = False,
        outputs: dict[int, list[Tensor]] | None = None,
    ) -> float:
        """Return the mean loss per token, or per sample, over held-out data, on every worker.

        Every worker calls it. The result does not depend on their number.

        Args:
            loss_of: Returns the mean loss over a micro-batch, or ``(loss, tokens)`` if
                micro-batches have different numbers of tokens.
            data: The number of held-out samples, whose indices are below it; or a ``DataLoader``
                with their batches, or a dataset for one. Each sample is read once, in order; with a
                sampler, the samples of its first epoch. The last micro-batch may be smaller.
            micro_batch: Samples of a micro-batch; by default ``train.micro_batch``.
            of_means: Whether samples count equally, each with the mean loss of its micro-batch,
                instead of tokens.
            outputs: Filled on every worker, by micro-batch in the order of the samples, with the
                tensors of a list that ``loss_of`` then returns after the tokens, on the host. Not
                possible with ``parallel.pp`` or ``parallel.cp`` above 1.

        Raises:
            LayoutRefusedError: No worker has the whole outputs.
            DataError: It is a stream, or cannot be read by index.
            TaskError: ``loss_of`` returned something else.
        """
        loss_of, num_samples = _by_index(loss_of, data, self.settings.data.seed)
        for axis in ("pp", "cp") if outputs is not None else ():
            if getattr(self._mesh.layout, axis) > 1:
                raise LayoutRefusedError(
                    f"parallel.{axis}={getattr(self._mesh.layout, axis)}: session.evaluate with "
                    f"outputs needs those of the whole model; write parallel.{axis}: 1",
                    axis=axis,
                )
        sharded, progress = self._ready().sharded, self._context.progress
        progress.enter(WorkerPhase.SCRIPT)
        loss, bad = mean_over_samples(
            loss_of,
            num_samples,
            micro_batch=min(micro_batch or self.settings.train.micro_batch, num_samples),
            sharded=sharded,
            done=progress.micro_batch,
            of_means=of_means,
            outputs=outputs,
        )
        if bad and not self._evaluates_badly:
            what = f"the loss of an evaluation after step {self.step} is not finite: {bad}"
            self._boundary.tell(self.step, what)
        self._evaluates_badly = bool(bad)
        self._validation_loss = loss
        self._boundary.best.note(VALIDATION_LOSS, loss)
        progress.evaluated(loss)
        if self.rank == 0:
            self._storage.append(VALIDATION, self._boundary.line(self.step, loss=loss))
        return loss

    def save(self, name: str) -> str:
        """Write the whole weights to ``RUN_DIR/saved/NAME/model.safetensors``; return its path.

        Every worker calls it, at any time between two steps. This blocks until the whole file is
        written, in place of an older one of that name. It holds the ``state_dict()`` of the whole
        model after the last completed step, whose number is in its metadata.

        Args:
            name: A file name, such as ``best``.

        Raises:
            ApartError: Not every worker calls it.
            StorageError: It cannot be written.
            TaskError: There is no model yet, or ``name`` is not a plain name.
        """
        sharded, progress = self._ready().sharded, self._context.progress
        path = path_to_save(name)
        progress.enter(WorkerPhase.SAVING)
        write_weights(
            sharded,
            lambda chunks: self._storage.write(path, chunks),
            step=str(self.step),
            attempt=str(self._assignment.attempt),
        )
        progress.enter(WorkerPhase.SCRIPT)
        return join(self._context.directory, path)

    def stop(self, reason: str) -> None:
        """End the run before its last step, as complete; one worker's call is enough.

        If all call it in the body of one step, that is the last one. If only some do, or one does
        before the step is applied, the last step is the one in which all learn of it. The loop ends
        there on all workers, and the step is committed.

        Args:
            reason: For people: in the terminal, the summary and the status.
        """
        self._ready()
        self._boundary.ending.ask(reason)

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Write the script's own numbers to the run's metrics, and so to its loggers.

        They belong to the step whose body is running, or otherwise to the last one. Only rank 0's
        values count, so reduce values that differ between workers. Logging a tensor waits for the
        device.

        Args:
            values: Single numbers by name, such as ``{"accuracy": 0.9}``. A later value of the same
                name and step replaces the first.

        Raises:
            TaskError: A value is not a single number.
        """
        numbers: dict[str, float | None] = {}
        for name, value in values.items():
            try:
                number = float(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise TaskError(
                    f"session.log: {name} is {type(value).__name__}, which is not a single number"
                ) from error
            numbers[name] = number if math.isfinite(number) else None
            self._boundary.best.note(name, number)
        if self.rank == 0:
            current = self._steps.current if self._steps is not None else None
            step = current.number if current is not None else self.step
            self._storage.append(VALUES, self._boundary.line(step, values=numbers))

    def finish(self) -> None:
        """Write the run's result. Every worker calls it when its script has ended.

        Raises:
            TaskError: The script ended before the last step, without ``stop``.
        """
        if self._sharded is None or self._steps is None:
            raise TaskError("the script ended without session.model and session.optimizer")
        self._steps.finish()
        self._boundary.finish(
            self.step,
            loss=self._steps.loss,
            validation_loss=self._validation_loss,
            sharded=self._sharded,
        )

    def take_final(self) -> None:
        """Leave a final snapshot of the last step in memory if possible. Never fails."""
        self._boundary.take_final()

    def close(self) -> bool:
        """Release the model and end writing; return whether all memory is free again."""
        if self._sharded is not None:
            self._sharded.rank_calls.end()
        if self._steps is not None:
            self._steps.close()
        self._built = self._unfilled = self._sharded = self._steps = None
        is_closed, is_written = self._boundary.close(), self._storage.close()
        if is_closed and not is_written:
            # The write still reads the memory of snapshots; it is freed afterwards.
            self._boundary.leave_memory()
        return is_closed and is_written

    def _ready(self) -> Steps:
        if self._steps is None:
            raise TaskError("call session.model and session.optimizer first")
        return self._steps

    def _load(self, sharded: ShardedModel) -> Restored:
        """Load all that ``StateLoader.fill_new`` did not fill; return what was loaded."""
        loader = self._state
        restored = loader.restore(sharded)
        for path, line in restored.extra.pop(UNWRITTEN, ()):
            self._storage.append_text(path, line)
        if restored.step:
            self._boundary.begin(restored.step, sharded, restored.extra)
        restored = loader.fill_rest(sharded, restored)
        drop_gathered(sharded.model)
        self._boundary.loaded(sharded, loader.extra)
        self._steps = Steps(
            loader.step,
            loader.extra,
            context=self._context,
            sharded=sharded,
            boundary=self._boundary,
        )
        return restored


def _by_index(
    loss_of: Callable[[Any], Any], data: int | DataLoader | Dataset, seed: int
) -> tuple[Callable[[Any], Any], int]:
    """Return a loss function of samples by their indices, and their number."""
    read = as_data(data)
    if isinstance(read, int):
        return loss_of, read
    if read.is_stream:
        raise DataError(
            "session.evaluate reads samples by index, and a stream has none: pass a list of "
            "held-out samples"
        )
    if read.sampled is not None:
        chosen = read.sampled.begin(seed)
        return lambda places: loss_of(read.read(chosen[places].tolist())), len(chosen)
    return lambda indices: loss_of(read.read(indices.tolist())), len(read)
