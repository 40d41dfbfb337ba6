"""A script whose ranks break their device as its plan says, each fault once."""

import json
import os
import sys
import threading
from pathlib import Path

import torch
from torch import nn

from everstep import Session, run

FOLDER = Path(sys.argv[1])
PLAN = json.loads((FOLDER / "plan.json").read_text())


#: Writes where there is no memory.
ILLEGAL = 'extern "C" __global__ void illegal(char* at) { at[1ll << 46] = 1; }'


def fail(kind: str, device: torch.device) -> None:
    on_cpu = PLAN["on_cpu"]
    match kind:
        case "illegal" if on_cpu:
            os._exit(70)
        case "illegal":
            write = torch.cuda._compile_kernel(ILLEGAL, "illegal")
            tensor = torch.zeros(1, dtype=torch.uint8, device=device)
            write((1, 1, 1), (1, 1, 1), (tensor,))
            tensor.item()
        case "hang" if on_cpu:
            threading.Event().wait()
        case "hang":
            torch.cuda._sleep(1 << 60)
        case "out of memory" if on_cpu:
            raise torch.OutOfMemoryError("stand-in")
        case "out of memory":
            torch.empty(1 << 40, device=device)
        case "assert" if on_cpu:
            raise RuntimeError("CUDA error: device-side assert triggered")
        case "assert":
            torch.zeros(4, device=device)[torch.tensor([9], device=device)].sum().item()


def train(session: Session) -> None:
    torch.manual_seed(0)
    model = session.model(lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
    session.optimizer(lambda named: torch.optim.AdamW(named.values()))
    device = next(model.parameters()).device
    for step in session.steps(4096):
        rank, kind = PLAN["faults"].get(str(step.number), (None, ""))
        done = FOLDER / f"{step.number}.done"
        is_last = str(step.number) == max(PLAN["faults"], key=int)
        if rank in {session.rank, -1} and (is_last or not done.exists()):
            done.touch()
            fail(kind, device)
        for samples in step.micro_batches():
            inputs = torch.ones(len(samples), 64, device=device)
            step.backward(model(inputs).square().mean(), tokens=len(samples))
        step.apply()


run(train)
