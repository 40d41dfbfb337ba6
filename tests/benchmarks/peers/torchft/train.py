"""Fault-tolerant DDP, as torchft's ``train_ddp.py`` and its README write it.

Two things differ. Gradients are reduced in one bucket by hand, since torchft's own DDP fails an
assertion after an error with this torch. And the samples follow from the number of the step, so
that a replica group that returns does not begin its data again.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torchft import Manager, Optimizer, ProcessGroupGloo

from tests.benchmarks.peers.events import Log
from tests.benchmarks.peers.trainer import (
    CLIP_NORM,
    LR,
    PROBE_EVERY,
    build_model,
    order,
    probe,
    summed_loss,
)

NUM_GROUPS = 4
SAVE_EVERY = 10


def main() -> None:
    log = Log()
    replica_group = int(os.environ["REPLICA_GROUP_ID"])
    model = build_model()
    inner = torch.optim.AdamW(model.parameters(), lr=LR)

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"train_{replica_group}",
    )
    optimizer = Optimizer(manager, inner)
    checkpoint = log.directory / "checkpoints" / "state.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        load_state_dict(saved["user"])
        manager.load_state_dict(saved["manager"])

    world = 0
    while not log.is_over(manager.current_step()):
        optimizer.zero_grad()
        step = manager.current_step() + 1
        samples = order(step)[replica_group::NUM_GROUPS]
        loss = summed_loss(model, samples) / len(samples)
        loss.backward()
        reduce_gradients(manager, model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        is_in = manager.current_step() > step - 1 and manager.is_participating()
        if not is_in:
            continue
        step = manager.current_step()
        if manager.num_participants() != world:
            world = manager.num_participants()
            rank = manager.participating_rank() or 0
            log.start(step=step - 1, rank=rank, world=world, group=f"of {world}")
        log.samples(step, samples)
        log.committed(step, loss.item())
        if step % PROBE_EVERY == 0:
            log.weights(step, probe(model.named_parameters()))
        if step % SAVE_EVERY == 0 and manager.participating_rank() == 0:
            save({"user": state_dict(), "manager": manager.state_dict()}, checkpoint)


def reduce_gradients(manager: Manager, model: torch.nn.Module) -> None:
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    flat = torch.cat([one.flatten() for one in gradients])
    manager.allreduce(flat).wait()
    parts = flat.split([one.numel() for one in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def save(state: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    torch.save(state, part)
    part.rename(path)


if __name__ == "__main__":
    main()
