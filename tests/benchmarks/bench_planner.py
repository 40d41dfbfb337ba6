"""The planner on the spot market, beside an oracle: arithmetic, no processes.

    python -m tests.benchmarks planner

The hours of AWS's p3 market that Parcae (arXiv 2403.14097) replays, and all of that trace: nodes
with a V100 each come and go. GPT of 1.5 B and of 6.7 B parameters train there, with the batches of
Parcae and parameters gathered once a step. The wish is what ``everstep plan`` finds for 32 nodes,
or ``--nodes``.

Everybody pays for a change what was measured (``--loss`` and ``--growth``, from ``RESULTS.md``),
and the time to load the state of the new layout by the network. Workers of new nodes are ready
after ``--join`` seconds. Samples are those of the oracle, which knows all that comes, as a share:

- planner: our policy, with the steps that it has seen;
- unlearned: the same, without them;
- degrees: keeps those of the wish;
- greedy: knows what each layout can do, and takes the fastest at once.

``of any`` is the planner beside an oracle that may have any number of stages, not only divisors of
the wish's. The last line is what a choice costs among 1,024 GPUs.
"""

import argparse
import json
import time
from functools import partial

from orchestrator.policies import GPUS, Job, LayoutRules, choose, forecasts, rooms_of
from tests.support.layout_replay import (
    Cluster,
    Replay,
    Stretch,
    by_degrees,
    by_planner,
    greedy,
    oracle,
    stretches,
    unlearned,
)
from tests.support.spot_traces import Change, Costs, piece, spot_trace
from ucp_core.layout import ParallelLayout
from workers.models import ModelShape

#: Hours of p3, named as Parcae names them: high or low availability, high or low preemption.
HOURS = {"hh": (5.5, 6.5), "hl": (1.5, 2.5), "lh": (8.0, 9.0), "ll": (10.0, 11.0), "all": (0, 11.3)}
NUM_NODES = 32
_GPT = partial(ModelShape, vocab_size=50304, tied=False)
#: With widths of the feed-forward part that give the parameters of GPT, and the global batch.
MODELS = {
    "1.5b": (_GPT(dim=1600, num_layers=48, num_heads=25, num_kv_heads=25, ffn_dim=4288), 128),
    "6.7b": (_GPT(dim=4096, num_layers=32, num_heads=32, num_kv_heads=32, ffn_dim=10944), 64),
}
#: A lost node and a growth, to the next step, and until a new worker is ready (``RESULTS.md``).
MEASURED = Costs(loss=0.8, growth=0.3, join=8.0)


def cluster_of(model: str, costs: Costs, num_nodes: int = NUM_NODES) -> Cluster:
    """Return what trains a model, with the layout that a plan for so many nodes finds."""
    shape, global_batch = MODELS[model]
    job = Job(
        shape=shape,
        sequence_length=1024,
        micro_batch=1,
        num_micro_batches=global_batch,
        compute_bytes=2,
        reshards=False,
        recomputes=True,
    )
    best = forecasts(job, GPUS["v100"], num_nodes, 1)[0].layout
    return Cluster(job, GPUS["v100"], best, costs)


def hour(name: str, join_s: float) -> list[Stretch]:
    """Return a piece of the market's trace."""
    begin, end = HOURS[name]
    changes = [Change(one.at * 3600, one.num_nodes) for one in piece(spot_trace("p3"), begin, end)]
    return stretches(changes, (end - begin) * 3600, join_s)


def measure(
    model: str, name: str, costs: Costs, num_nodes: int = NUM_NODES
) -> dict[str, float | str]:
    """Return the samples of each policy, as a share of the oracle's."""
    cluster, trace = cluster_of(model, costs, num_nodes), hour(name, costs.join)
    most = oracle(cluster, trace, any_stages=False)
    made = {
        "planner": Replay(cluster, by_planner).run(trace),
        "unlearned": Replay(cluster, unlearned).run(trace),
        "degrees": Replay(cluster, by_degrees).run(trace),
        "greedy": greedy(cluster, trace),
    }
    return {
        "model": model,
        "hours": name,
        "wish": str(cluster.wish),
        "samples": round(made["planner"] * cluster.job.num_micro_batches),
        **{policy: round(steps / most, 3) for policy, steps in made.items()},
        "of any": round(made["planner"] / oracle(cluster, trace, any_stages=True), 3),
    }


def choice_ms() -> float:
    """Return the milliseconds of a choice among 1,024 GPUs on nodes of 8, with 20 layouts seen."""
    steps = tuple((ParallelLayout(tp=8, pp=16, dp_shard=one), 1.0 + one) for one in range(1, 21))
    rules = LayoutRules(tp=8, pp=16, dp_replicate=4, num_micro_batches=512, steps=steps)
    rooms = rooms_of([8] * 120 + [7] * 5 + [3] * 3)
    begun = time.process_time()
    choose(rooms, 1024, rules)
    return round((time.process_time() - begun) * 1e3, 2)


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("loss", "growth", "join"):
        parser.add_argument(f"--{name}", type=float, default=getattr(MEASURED, name), help="in s")
    parser.add_argument("--nodes", type=int, default=NUM_NODES, help="that the wish is for")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    costs = Costs(loss=options.loss, growth=options.growth, join=options.join)
    rows = [measure(model, name, costs, options.nodes) for model in MODELS for name in HOURS]
    if options.json:
        print(json.dumps({"traces": rows, "choice_ms": choice_ms()}, indent=1))
        return
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    print(f"choice among 1,024 GPUs: {choice_ms()} ms")


if __name__ == "__main__":
    main()
