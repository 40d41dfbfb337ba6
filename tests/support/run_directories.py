"""Write run directories as a run leaves them, without running anything."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEP_S = 0.25


@dataclass(frozen=True, kw_only=True)
class Fault:
    """After ``step`` something happens that costs ``pause_s`` and the last ``lost_steps`` steps."""

    step: int
    kind: str
    guilty: Sequence[str]
    pause_s: float
    lost_steps: int
    workers_after: int


def write_run(
    directory: Path,
    *,
    steps: int = 60,
    faults: Sequence[Fault] = (),
    digest: str = "5f" * 32,
    validation_loss: float = 1.875,
    finished: bool = True,
    price: float = 0.0,
    device_bytes: float = 0.0,
) -> Path:
    """Write a run of ``steps`` steps that went through ``faults`` into ``directory``.

    It starts up for 5.5 s, and ``price`` is in dollars an hour. A run on devices has
    ``device_bytes``.
    """
    at_s, attempt, workers, step = 105.5, 1, 4, 0
    journal: list[dict[str, Any]] = [
        {"at_s": 100.0, "wall_time": 1.7e9, "kind": "ControllerStarted", "incarnation": 1},
        {"at_s": 100.0, "kind": "RequestReservation", "reservation": 1, "usd_per_hour": price},
        {"at_s": 104.0, "kind": "ReservationGranted", "reservation": 1},
        *_attempt(104.0, at_s, attempt, workers, step),
    ]
    metrics: list[dict[str, Any]] = []
    incidents: list[dict[str, Any]] = []
    pending = list(faults)
    while step < steps:
        step += 1
        at_s += STEP_S * 4 / workers
        kind = {"at_s": at_s, "attempt": attempt, "kind": "StepCompleted"}
        journal.append({**kind, "step": step, "step_s": STEP_S})
        held = {"device_bytes": device_bytes} if device_bytes else {}
        metrics.append({**_metrics_line(step, attempt, workers), **held})
        if pending and pending[0].step == step:
            fault = pending.pop(0)
            incidents.append(_incident(fault, at_s, workers) | {"attempt": attempt})
            journal.append({"at_s": at_s, "kind": "FenceAttempt"})
            attempt, workers, step = attempt + 1, fault.workers_after, step - fault.lost_steps
            begun_s = at_s + 0.16 * fault.pause_s
            at_s += fault.pause_s - STEP_S * 4 / workers
            journal += _attempt(begun_s, at_s, attempt, workers, step)
    if finished:
        over = {"at_s": at_s, "kind": "FinishRun", "outcome": "completed"}
        journal.append({**over, "reason": f"step {steps} is committed"})
    _write(directory, journal, metrics, incidents)
    if finished:
        summary = {
            "steps": steps,
            "final_loss": metrics[-1]["loss"],
            "validation_loss": validation_loss,
            "weights_digest": digest,
            "samples_seen": 32 * steps,
            "attempts": attempt,
            "lost_steps": sum(fault.lost_steps for fault in faults),
            "goodput": 0.93,
            "wall_s": at_s - 100.0,
        }
        (directory / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return directory


def _attempt(
    begun_s: float, formed_s: float, attempt: int, workers: int, step: int
) -> list[dict[str, Any]]:
    placed = [[f"n{rank}", [rank], [rank]] for rank in range(workers)]
    start = {"at_s": begun_s, "kind": "StartAttempt", "attempt": attempt, "placed": placed}
    formed = {"at_s": formed_s, "kind": "WorkerFormed", "attempt": attempt}
    return [
        {**start, "resume_step": step, "layout": {"dp_shard": workers}},
        *({**formed, "worker": f"w{rank:04d}"} for rank in range(workers)),
    ]


def _metrics_line(step: int, attempt: int, workers: int) -> dict[str, Any]:
    loss = 1.7 + 3.8 * math.exp(-step / 14) + 0.05 * math.sin(step * 1.7)
    return {
        "step": step,
        "attempt": attempt,
        "loss": loss,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 4096,
        "samples": 32,
        "step_s": STEP_S,
        "num_workers": workers,
        "layout": f"dp_shard={workers}",
    }


def _incident(fault: Fault, at_s: float, workers: int) -> dict[str, Any]:
    shares = {
        "t_detect_s": 0.08,
        "t_fence_s": 0.15,
        "t_decide_s": 0.16,
        "t_reform_s": 0.5,
        "t_load_s": 0.75,
        "t_first_step_s": 1.0,
    }
    return {
        "kind": fault.kind,
        "guilty": list(fault.guilty),
        "evidence": f"process of {', '.join(fault.guilty) or 'no worker'} is gone",
        "t_fault_s": at_s,
        **{name: at_s + share * fault.pause_s for name, share in shares.items()},
        "lost_steps": fault.lost_steps,
        "layout_before": f"dp_shard={workers}",
        "layout_after": f"dp_shard={fault.workers_after}",
        "sources": {"checkpoint": 12_345_678},
        "places": [[3, who, f"{int(who[1:]):0<12}"] for who in fault.guilty],
    }


def _write(
    directory: Path,
    journal: Sequence[Mapping[str, Any]],
    metrics: Sequence[Mapping[str, Any]],
    incidents: Sequence[Mapping[str, Any]],
) -> None:
    for name, records in (("journal/000001", journal), ("metrics/rank0", metrics)):
        path = directory / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    for number, incident in enumerate(incidents, start=1):
        path = directory / "incidents" / f"{number:04d}" / "incident.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(incident), encoding="utf-8")
    config = "run: {name: demo, directory: runs/demo}\nworkers: {max: 4}\ntrain: {steps: 60}\n"
    (directory / "config.yaml").write_text(config, encoding="utf-8")
