"""What a training script imports: one function, run alone or under everstep, unchanged.

A plain torch script becomes elastic by handing over its pieces: how the model is built, how the
optimizer is built, and the loss of the samples it is given. It runs alone with
``python train.py`` and under everstep with ``run.script: train.py`` in the configuration::

    import torch
    from torch.nn import functional

    from workers.api import Session, run

    def train(session: Session) -> None:
        inputs, targets = load_data()
        model = session.model(build_model)
        session.optimizer(lambda parameters: torch.optim.AdamW(parameters.values()))
        for step in session.steps(num_samples=len(inputs)):
            for samples in step.micro_batches():
                loss = functional.cross_entropy(model(inputs[samples]), targets[samples])
                step.backward(loss, tokens=len(samples))
            step.apply()
            if session.rank == 0 and step.number % 50 == 0:
                print(step.number, step.loss)

    if __name__ == "__main__":
        run(train, directory="runs/mine", steps=200, global_batch=32, micro_batch=8, lr=1e-3)

What happens to it under everstep:

- ``train`` is called anew for every attempt, in the same process. Whenever a worker dies or
  joins, the loop ends by an exception that passes through ``train``: do not catch
  ``BaseException``, and put what is to be kept outside ``train``.
- ``session.model`` builds on the meta device and shards over all workers; ``session.optimizer``
  loads the newest state that is safe, from the memory of the nodes or from storage;
  ``session.steps`` goes on from there, and keeps the state after every step safe.
- A step takes the same samples whatever the number of workers. Weigh each loss by ``tokens``
  (or samples): the mean over the global batch is then exact.
- The learning rate follows the settings (warm-up and decay), not the optimizer's argument.
  An optimizer group may have ``lr_scale`` to depart from it by a factor.
- Parameters and what the optimizer keeps of them are saved, buffers are not. A model that
  changes a buffer in ``forward`` (running statistics, ``spectral_norm``) is refused, unless the
  buffer is registered with ``persistent=False``.
- What follows the loop runs once, when the last step is committed.
- ``step.loss`` is the mean over the global batch; a loss that you compute is of one
  micro-batch, and one that a worker repeats to keep step with the others does not count.
- Under everstep the configuration decides; the arguments of ``run`` are for running alone.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ucp_core.checkpoint import find_committed
from ucp_core.layout import ParallelLayout
from ucp_core.storage import open_store
from ucp_core.storage.base import join
from workers.errors import SettingsError, TaskError
from workers.progress import ProgressPage
from workers.protocol import Assignment, Completed, Outcome, Raised
from workers.train.loop import WorkerContext, run_attempt
from workers.train.script import Task, hand_over
from workers.train.session import Session
from workers.train.settings import Settings, TrainSettings, problems
from workers.train.step import Step
from workers.train.storing import CHECKPOINTS

__all__ = ["Session", "Settings", "Step", "Task", "TrainSettings", "run"]


def run(
    train: Task,
    *,
    directory: str = "run",
    settings: Settings | None = None,
    **train_settings: Any,
) -> None:
    """Train alone in this process, or hand ``train`` over to the worker that runs the script.

    Alone it goes on from the newest checkpoint in ``directory``; delete that to begin anew.

    Args:
        train: Called with a session; see above.
        directory: Run directory, a path or an fsspec URL.
        settings: Everything that can be set; defaults if left out.
        **train_settings: In place of fields of ``settings.train``, as ``steps`` or ``lr``.

    Raises:
        SettingsError: What was asked for cannot work; every problem at once.
        TaskError: ``train`` raised; the message ends with its traceback.
    """
    hand_over(train)
    settings = settings or Settings()
    try:
        settings = replace(settings, train=replace(settings.train, **train_settings))
    except TypeError as error:
        raise SettingsError(f"run: {error}", problems=[str(error)]) from error
    found = problems(settings)
    if found:
        raise SettingsError("; ".join(found), problems=found)
    outcome = _run_alone(train, settings, directory)
    if isinstance(outcome, Raised):
        raise TaskError(f"training failed in step {outcome.step}\n{outcome.traceback}")
    assert isinstance(outcome, Completed), f"alone there is nobody to leave: {outcome}"


def _run_alone(train: Task, settings: Settings, directory: str) -> Outcome:
    store, path = open_store(directory)
    found = find_committed(store, join(path, CHECKPOINTS), lineage=())
    step, before = (found.step, found.attempt) if found is not None else (0, 0)
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="everstep-") as scratch:
        page = ProgressPage.create(Path(scratch) / "page", worker="alone")
        context = WorkerContext(
            worker="alone",
            settings=settings,
            store=store,
            directory=path,
            page=page,
            ring_path=str(Path(scratch) / "ring"),
            yield_requested=lambda _attempt: False,
            fenced=lambda _attempt: False,
        )
        assignment = Assignment(
            attempt=before + 1,
            rank=0,
            layout=ParallelLayout(),
            store_host="127.0.0.1",
            store_port=rendezvous.port,
            resume_step=step,
            resume_attempt=before,
            lineage=((before + 1, step),),
        )
        try:
            return run_attempt(assignment, context, train)
        finally:
            page.close()
