"""How fast the controller's core decides: histories per second, and the cost of an event.

    python -m tests.benchmarks core [--histories 2000] [--workers 16 1000 10000]

One process, one core. A ``fleet`` row starts ``nodes`` nodes with one worker each, kills a worker
and re-forms the run on the rest. Costs are per event, with the slowest event beside them.
"""

from __future__ import annotations

import argparse
import json
from time import perf_counter, process_time
from typing import Any

from orchestrator.core import RunRules, RunState, step
from orchestrator.core import events as ev
from tests.simulation.campaign import run_campaign


class Timed:
    """Folds events and notes what each took."""

    def __init__(self, rules: RunRules) -> None:
        self.rules = rules
        self.state = RunState()
        self.durations_s: list[float] = []

    def fold(self, event: ev.Event) -> None:
        """Fold one event."""
        began_s = perf_counter()
        self.state, _ = step(self.state, event, rules=self.rules)
        self.durations_s.append(perf_counter() - began_s)

    def report(self) -> dict[str, float]:
        """Return the costs since the last call."""
        durations_s, self.durations_s = self.durations_s, []
        return {
            "events": len(durations_s),
            "total_s": round(sum(durations_s), 4),
            "mean_us": round(1e6 * sum(durations_s) / len(durations_s), 1),
            "max_ms": round(1e3 * max(durations_s), 2),
        }


def time_fleet(num_workers: int) -> dict[str, Any]:
    """Return the cost of start, steady state and one recovery of ``num_workers`` workers."""
    rules = RunRules(run="bench", min_workers=1, max_workers=num_workers, total_steps=10**9)
    timed = Timed(rules)
    names = [f"w{n:04d}" for n in range(1, num_workers + 1)]
    timed.fold(ev.ControllerStarted(at_s=0.0, incarnation=1))
    for n in range(1, num_workers + 1):
        timed.fold(ev.ReservationGranted(at_s=1.0, reservation=n, node=f"n{n}"))
    for n, name in enumerate(names, start=1):
        timed.fold(ev.WorkerReady(at_s=2.0, worker=name, node=f"n{n}", pid=n))
    for name in names:
        timed.fold(ev.WorkerFormed(at_s=3.0, attempt=1, worker=name))
    start = timed.report()
    for number in range(1, 1001):
        at_s = 3.0 + number
        timed.fold(ev.StepCompleted(at_s=at_s, attempt=1, step=number, step_s=1.0))
        timed.fold(ev.CheckpointCommitted(at_s=at_s, attempt=1, step=number))
        timed.fold(ev.Ticked(at_s=at_s))
    steady = timed.report()
    timed.fold(ev.WorkerExited(at_s=2000.0, worker=names[0], cause="crash", detail=""))
    for name in names[1:]:
        left = ev.WorkerLeft(
            at_s=2000.0, attempt=1, worker=name, how=ev.Leaving.FENCED, step=1000, detail=""
        )
        timed.fold(left)
    for name in names[1:]:
        timed.fold(ev.WorkerFormed(at_s=2001.0, attempt=2, worker=name))
    timed.fold(ev.StepCompleted(at_s=2002.0, attempt=2, step=1001, step_s=1.0))
    assert timed.state.attempt.number == 2
    assert timed.state.attempt.stepped
    return {"workers": num_workers, "start": start, "steady": steady, "recovery": timed.report()}


def time_histories(num_histories: int) -> dict[str, Any]:
    """Return histories and events per second of the simulation."""
    # Processor time, not wall time: other processes on the machine are not what is measured.
    began_s = process_time()
    campaign = run_campaign(range(num_histories))
    duration_s = process_time() - began_s
    return {
        "histories": num_histories,
        "violations": len(campaign.failures),
        "histories_per_s": round(num_histories / duration_s, 1),
        "events_per_history": round(campaign.num_events / num_histories, 1),
        "events_per_s": round(campaign.num_events / duration_s),
        "faults_per_history": round(campaign.num_faults / num_histories, 2),
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description="Time the controller's core.")
    parser.add_argument("--histories", type=int, default=2000)
    parser.add_argument("--workers", type=int, nargs="*", default=[16, 1000, 10_000])
    options = parser.parse_args()
    report = {
        "simulation": time_histories(options.histories),
        "fleet": [time_fleet(num_workers) for num_workers in options.workers],
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
