"""The same training in everstep, as its guide's first page writes it."""

from typing import Any

import torch

from everstep import Session, run
from tests.benchmarks.peers.events import Log
from tests.benchmarks.peers.trainer import (
    CLIP_NORM,
    GLOBAL_BATCH,
    LR,
    NUM_SAMPLES,
    PROBE_EVERY,
    build_model,
    probe,
    summed_loss,
)

log = Log()


def train(session: Session) -> None:
    model = session.model(build_model)
    session.optimizer(lambda named: torch.optim.AdamW(named.values(), lr=LR))
    log.start(
        step=session.step, rank=session.rank, world=session.world_size,
        group=f"attempt {session._assignment.attempt}",
    )  # fmt: skip

    taken: set[int] = set()

    def loss_of(samples: Any) -> torch.Tensor:
        loss = summed_loss(model, samples) / len(samples)
        # Behind the model, which is not run when workers only compare what they would compute. A
        # worker may repeat a pass with weight 0 to keep step with the others: the set has it once.
        taken.update(samples)
        return loss

    for step in session.steps(NUM_SAMPLES):
        taken.clear()
        session.train_step(loss_of)
        log.samples(step.number, sorted(taken))
        log.committed(step.number, step.loss)
        if step.number % PROBE_EVERY == 0:
            log.weights(step.number, probe(model.named_parameters()))
        if log.is_over(step.number):
            session.stop("the benchmark has seen enough")


if __name__ == "__main__":
    run(train, steps=1_000_000, global_batch=GLOBAL_BATCH, micro_batch=4, clip_norm=CLIP_NORM)
