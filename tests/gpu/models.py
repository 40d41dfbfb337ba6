"""Memory and time of a step by model, precision and checkpointing: what a planner starts from.

``measured.json`` beside this file keeps the points of every card that was at hand.
"""

import functools
import gc
import itertools
import json
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.benchmarks.steps import batch
from tests.gpu.parts import Lab
from tests.gpu.rows import note, tell
from ucp_core.storage import MemoryStore
from workers.models import PRESETS, Decoder, mean_loss
from workers.protocol import Completed
from workers.settings import CheckpointSettings, Settings, SnapshotSettings, TrainSettings
from workers.train import Session, attempt_alone
from workers.train.lm import adamw

MEASURED: Final = Path(__file__).with_name("measured.json")
SEQUENCE_LENGTH: Final = 1024
#: With stand-ins for the GPU: figures of a CPU say nothing, and a long sequence takes it seconds.
STAND_IN_LENGTH: Final = 64
MICRO_BATCH: Final = 4
#: The first one allocates, and compiles nothing.
STEPS: Final = 4


def models(lab: Lab) -> None:
    """Tell the points, and write them to the file if they are of a card."""
    names = ("tiny",) if lab.on_cpu else ("125m", "350m", "1b") if lab.full else ("125m",)
    points = []
    for name, precision, checkpointed in itertools.product(names, ("bf16", "fp32"), (False, True)):
        point = measure(lab, name, precision, checkpointed=checkpointed)
        points.append(point)
        if not lab.on_cpu:
            # At once: a card may be lent for minutes.
            known = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
            known[torch.cuda.get_device_name()] = {"torch": torch.__version__, "points": points}
            MEASURED.write_text(json.dumps(known, indent=1) + "\n")
        what = f"{name}, {precision}{', checkpointed' if checkpointed else ''}"
        if "why_not" in point:
            tell("models", what, point["why_not"])
            continue
        peak, step_s = point["peak_bytes"] / 1e9, point["step_s"]
        tell("models", what, f"{peak:.2f} GB, {1e3 * step_s:.0f} ms, state "
             f"{point['state_bytes'] / 1e9:.2f} GB")  # fmt: skip


def measure(lab: Lab, name: str, precision: Any, *, checkpointed: bool) -> dict[str, Any]:
    """Return what a step of one worker takes, for a model of ``PRESETS``."""
    point: dict[str, Any] = {
        "model": name, "precision": precision, "checkpointed": checkpointed,
        "micro_batch": MICRO_BATCH,
        "sequence_length": STAND_IN_LENGTH if lab.on_cpu else SEQUENCE_LENGTH,
    }  # fmt: skip
    settings = Settings(
        train=TrainSettings(
            steps=STEPS, global_batch=2 * MICRO_BATCH, micro_batch=MICRO_BATCH, warmup_steps=0,
            schedule="constant", precision=precision,
        ),
        checkpoint=CheckpointSettings(every_steps=10**9),
        snapshot=SnapshotSettings(every_steps=0),
    )  # fmt: skip
    task = functools.partial(_train, point=point, name=name, checkpointed=checkpointed)
    if not lab.on_cpu:
        torch.cuda.reset_peak_memory_stats()
    outcome = attempt_alone(settings, MemoryStore(), "models", attempt=1, task=task)
    if not isinstance(outcome, Completed):
        point["why_not"] = str(getattr(outcome, "error", outcome))[:200]
    gc.collect()
    note(f"{point}")
    return point


def _train(session: Session, *, point: dict[str, Any], name: str, checkpointed: bool) -> None:
    shape = PRESETS[name]
    is_cuda = session.device.type == "cuda"

    def build() -> nn.Module:
        decoder = Decoder(shape)
        for key, layer in decoder.layers.items() if checkpointed else ():
            decoder.layers[key] = checkpoint_wrapper(layer)
        return decoder

    model = session.model(build)
    session.optimizer(lambda parameters: adamw(parameters, session.settings.train))
    begun_s, times_s = time.perf_counter(), []
    for step in session.steps(1 << 20):
        for samples in step.micro_batches():
            drawn = batch(samples.tolist(), shape.vocab_size, point["sequence_length"])
            inputs, targets = (each.to(session.device) for each in drawn)
            step.backward(mean_loss(model(inputs), targets), targets.numel())
        step.apply()
        # Its loss is read, so the device has done the step.
        times_s.append(time.perf_counter() - begun_s)
        begun_s = time.perf_counter()
    point["step_s"] = round(min(times_s[1:]), 5)
    point["state_bytes"] = 12 * sum(parameter.numel() for parameter in model.parameters())
    point["peak_bytes"] = torch.cuda.max_memory_allocated() if is_cuda else 0
