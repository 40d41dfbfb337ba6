"""The script of README, which notes its samples; run by torchrun, or alone.

Arguments: a step after which it waits to be killed, 0 for none; and "raise", for an error of rank 1
in step 3, or "odd", for other kernels on rank 1.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from everstep import CheckpointSettings, Session, Settings, run

WAITS_AFTER = int(sys.argv[1]) if len(sys.argv) > 1 else 0
RAISES = sys.argv[2:] == ["raise"]
if sys.argv[2:] == ["odd"] and os.environ["RANK"] == "1":
    # As on a processor without AVX2; torch reads it before its first kernel.
    os.environ["ATEN_CPU_CAPABILITY"] = "default"


inputs = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
targets = (inputs.sum(1) > 0).long()


def build_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))


def train(session: Session) -> None:
    model = session.model(build_model)
    session.optimizer(lambda parameters: torch.optim.AdamW(parameters.values()))
    with Path(f"samples-{os.getpid()}.jsonl").open("a", buffering=1) as notes:

        def loss_of(samples: Any) -> Any:
            if RAISES and session.step == 2 and session.rank == 1:
                raise ValueError("rank 1 of the script")
            note = {
                "step": session.step + 1,
                "samples": samples.tolist(),
                "world": session.world_size,
                "ray": "ray" in sys.modules,
            }
            notes.write(json.dumps(note) + "\n")
            return cross_entropy(model(inputs[samples]), targets[samples])

        for step in session.steps(len(inputs)):
            session.train_step(loss_of)
            if step.number == WAITS_AFTER:
                threading.Event().wait()


run(
    train,
    directory="run",
    settings=Settings(checkpoint=CheckpointSettings(every_steps=3, keep=0)),
    steps=40,
    global_batch=32,
    micro_batch=8,
    lr=1e-3,
    deterministic=True,
)
print("behind run")
