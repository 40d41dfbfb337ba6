"""The pause of a planned growth, phase by phase, on simulated nodes of this machine.

    python -m tests.benchmarks change [--rounds 5]

Two nodes of two workers train the small preset; one node is lost and comes back, and its workers
join. Once the layout is four ranks of data parallelism and two before that, once it is two stages
of tensor-parallel pairs and one pair before. All times are in ms, and medians over rounds:

- ``pause``: how much longer than a step the workers that trained stood still. To be at most 500.
- ``yield``: from the order to leave until all have left at a step boundary.
- ``decide``, ``re-form``, ``load``, ``first step``: until the next attempt was ordered, its groups
  and its model stood, its state was loaded, and its first step was complete.
- ``step``: a usual step, of both layouts together; ``first step`` has one in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any, Final

from orchestrator.run_directory import read_run
from tests.benchmarks.bench_recovery import Bench, lose_nodes, running
from tests.benchmarks.common import load_average

PAUSE_MS_MAX: Final = 500
LAYOUTS: Final = {
    "dp 2 to 4": [],
    "tp=2 to pp=2 x tp=2": ["parallel.tp=2", "parallel.pp=2", "model.tied=false"],
}


def measure(bench: Bench, rounds: int) -> dict[str, Any]:
    """Lose and return a node, so many times; return what growth took."""
    _, pauses = lose_nodes(bench, rounds)
    incidents = read_run(bench.run.config.run.directory).incidents
    grown = [one for one in incidents if one.kind == "growth" and one.end_s is not None]
    phases = {
        name: statistics.median(one.phases_s[name] for one in grown)
        for name in ("yield", "decide", "re-form", "load", "first step")
    }
    found = {**phases, "step": statistics.median(bench.usual_steps_s())}
    return {
        "pause": round(1e3 * statistics.median(pauses)),
        "longest": round(1e3 * max(pauses)),
        **{name: round(1e3 * value) for name, value in found.items()},
        "reached": 1e3 * statistics.median(pauses) <= PAUSE_MS_MAX,
    }


def main() -> None:
    """Print one JSON object a layout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for name, settings in LAYOUTS.items():
        # No process starts while the run grows, then.
        with running(standby_per_node=0, more=settings) as bench:
            found = measure(bench, options.rounds)
        print(json.dumps({"growth": name, **found, "load_average": load_average()}), flush=True)


if __name__ == "__main__":
    main()
