"""The interface for training scripts.

The same script runs alone and under everstep. A torch script becomes elastic by passing three
functions: one builds the model, one builds the optimizer, and one computes the loss of given
samples. Run it alone with ``python train.py``, or under everstep with ``run.script: train.py`` in
the configuration. ``torchrun train.py`` trains on all its ranks without Ray, and resumes on any
number of them when it is started again::

    import torch
    from torch.nn import functional

    from everstep import Session, run

    def train(session: Session) -> None:
        inputs, targets = load_data()
        model = session.model(build_model)
        session.optimizer(lambda parameters: torch.optim.AdamW(parameters.values()))
        for step in session.steps(len(inputs)):
            session.train_step(
                lambda samples: functional.cross_entropy(model(inputs[samples]), targets[samples])
            )
            if session.rank == 0 and step.number % 50 == 0:
                print(step.number, step.loss)

    if __name__ == "__main__":
        run(train, directory="runs/mine", steps=200, global_batch=32, micro_batch=8, lr=1e-3)

The contract:

- Under everstep the configuration decides. If it leaves out ``train.steps``, ``train.global_batch``
  or ``train.micro_batch``, ``everstep run`` asks the script first, and the arguments of ``run``
  decide all that the configuration leaves out.
- Every attempt calls ``train`` again, in the same process. When a worker dies or joins, an
  exception ends the loop and passes through ``train``. Do not catch ``BaseException``. Keep what
  must outlive an attempt outside ``train``.
- ``session.model`` builds the model on the meta device and shards it over all workers.
  ``session.optimizer`` loads the newest safe state, from the memory of the nodes or from storage.
  ``session.steps`` continues from there and saves the state after every step.
- A step takes the same samples for any number of workers. ``session.train_step`` takes the mean
  loss of one micro-batch. If micro-batches have different numbers of tokens, return ``(loss,
  tokens)``: the mean over the global batch is then exact.
- The open loop is the same step: iterate ``step.micro_batches()``, call ``step.backward(loss,
  tokens)`` in each, then ``step.apply()``.
- The settings decide the learning rate (warm-up and decay), not the optimizer's argument. An
  optimizer group may set ``lr_scale``, a factor on the learning rate. A torch scheduler takes over
  once it is registered: ``scheduler = session.register("lr", StepLR(optimizer, 100))``. Call
  ``scheduler.step()`` after the step, as usual.
- ``session.register(name, stateful)`` saves and loads any small object with ``state_dict`` and
  ``load_state_dict``. A step is then saved when the body of the loop has ended.
- Every worker updates a part of each parameter, so an optimizer must treat every element alike. An
  optimizer class of your own must say so: ``session.optimizer(make, elementwise=True)``.
- ``session.model`` takes an ``nn.ModuleDict`` as several models, and the function that makes the
  optimizer may return a list. ``session.train_step(loss_of, optimizers=[...])`` updates some.
- A ``forward`` that calls ``torch.distributed`` for ranks or their number is refused by name,
  unless its class sets ``depends_on_ranks = False``.
- Within a micro-batch, random numbers of torch, NumPy and Python are the same for any number of
  workers. NumPy's and Python's are your own between the steps.
- Checkpoints hold parameters, persistent buffers, optimizer state and registered objects. A buffer
  changes once in a step, as one micro-batch changes it. One that depends on the samples (running
  statistics) is refused by name, or averaged if ``session.model(build, average_buffers=[...])``
  names it. Buffers registered with ``persistent=False`` are for caches: they may change freely.
- Only the step may change weights. A script that changes them elsewhere is refused at the
  next step, because no snapshot of the last step has the change. To change weights after every
  update (to clamp them, for example), use ``optimizer.register_step_post_hook``. Writes through
  ``.data`` are not noticed.
- ``DataLoader(dataset, num_workers=2)`` reads ahead: ``session.steps(loader)`` then gives batches
  instead of indices, in an order that does not depend on the number of workers. If you make it
  outside of ``train``, its processes survive from attempt to attempt.
- ``JsonLines(paths)`` and ``ParquetRows(paths)`` are datasets of files, local or behind URLs;
  ``pack(dataset, length)`` fills rows with documents. A dataset that can only be iterated is a
  stream: every worker reads it and keeps its part.
- A new run may start from a checkpoint that exists, in any format that ``ucp`` opens:
  ``run(train, init_from=PATH)``, or ``run.init_from`` in the configuration.
- With ``parallel.tp`` or ``parallel.pp`` above 1, a model of your own needs a plan:
  ``session.model(build, plan=ModelPlan(tensor={"layers.*.up": ColwiseParallel()}, ...))``. One of
  ``transformers`` brings its own. Pipeline stages need ``session.train_step``, whose function must
  call the model once.
- With ``parallel.cp`` above 1 workers have parts of the same sequences: ``loss_of`` begins with
  ``batch = session.part(batch)``, and returns ``(loss, tokens)`` of that. A model of your own names
  the inputs to cut, ``ModelPlan(sequence=("input_ids", "labels"))``, and calls ``causal_attention``
  or ``bidirectional_attention``.
- ``session.save("best")``, on every worker, writes the whole weights to one file.
  ``model.state_dict()`` has a worker's part of each weight, and raises if only some workers call
  it.
- ``session.stop(reason)``, on any worker, ends the run with this step or the next one; so does
  ``break`` on every worker.
- An update that is not finite is skipped on all workers (``not_finite``); the third in a row ends
  the run. ``step.is_skipped`` shows it.
- Code after the loop runs once on each worker, when the last step is committed. Code after ``run``
  runs once, when the run is complete: rank 0 runs the script again from its top, and ``run``
  returns at once.
- ``step.loss`` is the mean over the global batch; a loss that you compute is of one micro-batch.
  A worker may repeat a micro-batch to keep pace with the others; such a loss does not count.
- ``print`` works as usual. Under everstep the output of every rank goes to
  ``RUN_DIR/logs/attempt-NNNN/rankN.log`` as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from workers.data import DataLoader, JsonLines, ParquetRows, pack
    from workers.errors import (
        ApartError,
        DataError,
        NotFiniteError,
        SettingsError,
        StateError,
        TaskError,
        WorkerError,
    )
    from workers.models import bidirectional_attention, causal_attention
    from workers.parallel import ModelPlan
    from workers.settings import (
        BestSettings,
        CheckpointSettings,
        DataSettings,
        ModelSettings,
        NotFiniteSettings,
        ParallelSettings,
        RunSettings,
        Settings,
        SnapshotSettings,
        TrainSettings,
    )
    from workers.train import Session, Step, Task, run

__all__ = [
    "ApartError",
    "BestSettings",
    "CheckpointSettings",
    "DataError",
    "DataLoader",
    "DataSettings",
    "JsonLines",
    "ModelPlan",
    "ModelSettings",
    "NotFiniteError",
    "NotFiniteSettings",
    "ParallelSettings",
    "ParquetRows",
    "RunSettings",
    "Session",
    "Settings",
    "SettingsError",
    "SnapshotSettings",
    "StateError",
    "Step",
    "Task",
    "TaskError",
    "TrainSettings",
    "WorkerError",
    "__version__",
    "bidirectional_attention",
    "causal_attention",
    "pack",
    "run",
]

__version__ = "0.1.0"

_load = lazy_door(__name__)


def __getattr__(name: str) -> Any:
    try:
        return _load(name)
    except ModuleNotFoundError as error:
        from workers.errors import missing_extra

        hint = missing_extra(error)
        raise (ModuleNotFoundError(f"everstep.{name}: {hint}") if hint else error) from error
