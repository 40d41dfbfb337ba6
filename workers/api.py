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
- ``step.apply`` alone changes weights: a script that does so elsewhere is refused at the next
  step, since no snapshot of the last one has it. What is to be done after every update, such as
  to clamp weights, goes into a hook of the optimizer (``register_step_post_hook``). Writes
  through ``.data`` are not noticed.
- What follows the loop runs once, when the last step is committed.
- ``step.loss`` is the mean over the global batch; a loss that you compute is of one
  micro-batch, and one that a worker repeats to keep step with the others does not count.
- Under everstep the configuration decides; the arguments of ``run`` are for running alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workers.errors import SettingsError, TaskError
from workers.protocol import Completed, PeerLost, Raised
from workers.settings import Settings, TrainSettings, problems
from workers.train import Session, Step, Task, hand_over, run_alone

__all__ = ["Session", "Settings", "Step", "Task", "TrainSettings", "run"]


def run(
    train: Task,
    *,
    directory: str = "run",
    settings: Settings | None = None,
    **train_settings: Any,
) -> None:
    """Train alone in this process, or hand ``train`` over to the worker that runs the script.

    Alone it goes on from the newest checkpoint in ``directory``; delete that to begin anew. One
    that is damaged is passed over with a warning, and ``train`` called again with an older one.

    Args:
        train: Called with a session; see above.
        directory: Run directory, a path or an fsspec URL.
        settings: Everything that can be set; defaults if left out.
        **train_settings: In place of fields of ``settings.train``, as ``steps`` or ``lr``.

    Raises:
        SettingsError: What was asked for cannot work; every problem at once.
        StateError: The newest checkpoint is of another model, or no checkpoint can be loaded.
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
    outcome = run_alone(train, settings, directory)
    if isinstance(outcome, Raised):
        raise TaskError(f"training failed in step {outcome.step}\n{outcome.traceback}")
    if isinstance(outcome, PeerLost):
        # The script has a store or a group of its own, or the device's transport failed.
        raise TaskError(f"training failed after step {outcome.step}: {outcome.detail}")
    assert isinstance(outcome, Completed), f"alone there is nobody to leave: {outcome}"
