"""Fill the model and the optimizer of one attempt, in the order in which a script makes them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ucp_core.errors import UcpError
from ucp_core.native import RELATIONS, checkpoint_name, open_checkpoint
from ucp_core.storage import join, open_store
from workers.errors import TaskError
from workers.parallel import Mesh
from workers.protocol import CHECKPOINTS, Assignment
from workers.state import CHANGED, UNSTARTED, HostBuffer, StateEntry
from workers.train.context import WorkerContext
from workers.train.executor import ShardedModel
from workers.train.loading.filling import Initialise, fill, set_optimizer, start_from
from workers.train.loading.init_from import INITIAL, Initial
from workers.train.loading.restore import Restored, UnloadableSignal, restore_state


class StateLoader:
    """Load the version from which an attempt resumes, or fill a new run."""

    def __init__(
        self,
        assignment: Assignment,
        context: WorkerContext,
        mesh: Mesh,
        buffer: HostBuffer,
        device: torch.device,
    ) -> None:
        #: The step from which the attempt resumes; 0 for a new run.
        self.step = assignment.resume_step
        self.extra: dict[str, Any] = {}  #: The small named values of its version.
        self._assignment, self._context = assignment, context
        #: The place of a version to load, and its directory.
        self._source = assignment, context
        self._num_done = 0
        self._mesh, self._buffer, self._device = mesh, buffer, device
        self._build: Callable[[], nn.Module] | None = None
        self._initialise: Initialise | None = None
        self._initial: Initial | None = None

    def prepare(self, build: Callable[[], nn.Module], initialise: Initialise | None) -> None:
        """Record how the model gets values that no checkpoint holds; see ``Session.model``."""
        self._build, self._initialise = build, initialise

    def continue_from(self, earlier: str | int) -> None:
        """Start a new run after a step of another training; see ``Session.continue_from``."""
        assignment, context = self._source
        if assignment.resume_step:
            return
        if isinstance(earlier, int):
            self._num_done = step = earlier
        else:
            try:
                store, path = open_store(earlier)
                version = open_checkpoint(store, path)
            except UcpError as error:
                raise TaskError(f"session.continue_from: {error}", path=earlier) from error
            step = version.step
            directory = path.rpartition("/")[0].rpartition("/")[0]
            if join(directory, CHECKPOINTS, checkpoint_name(step)) != path:
                raise TaskError(
                    f"session.continue_from: {earlier} is not a version in the {CHECKPOINTS} of "
                    "a run",
                    path=earlier,
                )
            self._source = (
                replace(assignment, resume_step=step, resume_attempt=version.attempt),
                replace(context, store=store, directory=directory),
            )
        if step >= context.settings.train.steps:
            raise TaskError(
                f"session.continue_from: {step} steps are done there, and train.steps="
                f"{context.settings.train.steps}: raise it to train on"
            )

    def fill_new(self, assemble: Callable[[], ShardedModel]) -> None:
        """Fill the weights of a new run, unless they come with the state of an optimizer.

        ``assemble`` returns the model without optimizers.
        """
        start = self._context.settings.start
        if self._source[0].resume_step or (start.init_from and start.init_state == "all"):
            return
        sharded = assemble()
        if start.init_from:
            self._start_from(sharded)
        self._fill(sharded)

    def restore(self, sharded: ShardedModel) -> Restored:
        """Load the version from which the attempt resumes, if there is one."""

        def to_fill() -> Sequence[StateEntry]:
            sharded.prime()
            return sharded.state.entries()

        assignment, context = self._source
        read = partial(
            restore_state,
            assignment,
            to_fill,
            names={*sharded.shapes, *sharded.relations["buffers"]},
            context=context,
            buffer=self._buffer,
            device=self._device,
            replicas=self._mesh.replicas,
        )
        try:
            restored = read()
        except UnloadableSignal as signal:
            if assignment is self._assignment:
                raise
            # No version of the run is bad.
            raise TaskError(f"session.continue_from: {signal}") from None
        relations = restored.extra.get(RELATIONS)
        if relations is not None:
            with sharded.trained.growing(relations.get("frozen", ())) as grown:
                # Optimizer state of a parameter that began to train later.
                restored = read() if grown else restored
        self.step, self.extra = restored.step or self._num_done, restored.extra
        if restored.step:
            set_optimizer(
                sharded,
                restored.without_state,
                restored.extra["optimizer"],
                restored.extra.get(CHANGED, ()),
                unstarted=restored.extra.get(UNSTARTED, False),
            )
        return restored

    def restore_average(self, sharded: ShardedModel) -> None:
        """Load those averages of weights that the version has.

        Every worker calls it.
        """
        saved = set(self.extra.get(RELATIONS, {}).get("extra", ()))
        if not self.step or not saved:
            return
        assignment, context = self._source
        restore_state(
            assignment,
            lambda: [entry for entry in sharded.average.entries() if entry.fqn in saved],
            context=context,
            buffer=self._buffer,
            device=self._device,
            replicas=self._mesh.replicas,
        )

    def fill_rest(self, sharded: ShardedModel, restored: Restored) -> Restored:
        """Fill the rest, after ``fill_new`` and ``restore``; return all that was loaded."""
        if restored.step:
            self._fill(sharded)
            return restored
        sharded.try_unknown()
        if not self._context.settings.start.init_from:
            return restored
        if self._initial is None:
            self._start_from(sharded)
            self._fill(sharded)
        assert self._initial is not None, "it was loaded"
        return replace(restored, sources=((INITIAL, self._initial.size_bytes),))

    def _start_from(self, sharded: ShardedModel) -> None:
        is_first = self._assignment.rank == 0
        self._initial = start_from(sharded, self._context, self._buffer, tell=is_first)

    def _fill(self, sharded: ShardedModel) -> None:
        assert self._build is not None, "session.model was called"
        fill(
            sharded,
            self._build,
            self._initialise,
            seed=self._context.settings.train.seed,
            is_new=self.step in (0, self._num_done),
            initial=self._initial,
        )
