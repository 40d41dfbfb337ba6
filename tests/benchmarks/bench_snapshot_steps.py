"""Measures a training's cost of a snapshot after every step, and of storing every tenth step.

    python -m tests.benchmarks snapshot_steps [--states 3 200] [--only snapshots copies]

Real workers train the reference decoder on random tokens. Two other processes are the memory of two
nodes' keepers; each node has half of the workers. Blocks of steps with and without snapshots take
turns, there and back, in one attempt of the same processes. The first steps of a block do not
count, because the snapshot before them is still under way.

- ``snapshots``: one after every step, into the memory of the worker's node.
- ``copies``: every keeper copies the snapshots of the other node as well.
- ``replicas``, ``replicas_copies``: each node trains one copy of the model (HSDP), and every worker
  saves a share of it. The other node's replica provides the redundancy in the first, the network in
  the second.
- ``stored``: as ``snapshots``, and the keepers store every tenth step, as by default.
- ``async_save``: the peer of ``stored``. Plain torch with FSDP trains the same model and calls
  ``dcp.async_save`` after every tenth step. Both write into the page cache.

``wall`` is the median over pairs of blocks of the ratio of their step times, less 1; ``sure`` is
its confidence interval of 95 %. A block counts with its median step, or with its mean where only
every tenth step is stored. ``processor`` is the same for the processor time per step of all workers
and keepers. ``keepers_ms`` is the keepers' part, ``beside_ms`` that of the threads that complete
snapshots. ``own`` is the share of a step's processor time that these two use and that training
waits. It lacks what snapshots slow down indirectly, but it also holds on a busy machine.

On 2 idle cores a run of 3 MB takes about 3 minutes, one of 200 MB about 5, of ``stored`` 10.
"""

import argparse
import functools
import itertools
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from tests.benchmarks.common import load_average, percentile
from tests.benchmarks.peer_saving import train_plainly
from tests.benchmarks.snapshot_ways import SmallCopies, by_way, counts, switch
from tests.benchmarks.steps import Job, Meter, batch
from tests.support.node_memory import NodeProcess
from tests.support.ranks import Place, running
from ucp_core.layout import ParallelLayout
from ucp_core.storage import open_store
from workers.models import Decoder, mean_loss
from workers.process import tuned
from workers.protocol import Assignment, Completed, KeeperOrder
from workers.settings import (
    CheckpointSettings,
    Settings,
    SnapshotSettings,
    TrainSettings,
)
from workers.state import replicas_of
from workers.telemetry import ProgressRecord
from workers.train import Session, WorkerContext, run_attempt
from workers.train.boundary.cadence import Cadence
from workers.train.lm import adamw

#: The largest share of a step that a snapshot may cost, by megabytes of state per worker.
TARGETS: Final = {3: 0.02, 200: 0.05}
NODES: Final = ("node-a", "node-b")
NEVER: Final = 10**9
#: Steps between two versions in storage: everstep's default.
STORE_EVERY: Final = 10
NICENESS: Final = 15
RUN_S_MAX: Final = 3600.0
NUM_SAMPLES: Final = 1 << 20


def settings(job: Job) -> Settings:
    """Return what workers and keepers are told."""
    return Settings(
        train=TrainSettings(
            steps=job.num_steps,
            global_batch=job.global_batch,
            micro_batch=job.micro_batch,
            precision=job.precision,
            warmup_steps=0,
            schedule="constant",
        ),
        checkpoint=CheckpointSettings(every_steps=NEVER, keep=2),
        snapshot=SnapshotSettings(every_steps=1),
    )


def train(
    place: Place,
    *,
    job: Job,
    nodes: Sequence[tuple[str, Path, int]],
    layout: ParallelLayout,
    is_guarded: bool,
) -> dict[str, Any]:
    """Be one worker; return what the meter saw.

    Args:
        place: Which one.
        job: The training.
        nodes: Name, directory and keeper's process of every node.
        layout: How the model is spread.
        is_guarded: Whether it saves the share of its replica on the other node, too.
    """
    others = tuple(rank for rank in replicas_of(layout, place.rank) if rank != place.rank)
    # As Ray's workers are: keepers send beside trainers, and copy in what those leave.
    os.nice(NICENESS)
    node, keeper_directory, _ = nodes[place.rank * len(nodes) // job.workers]
    store, directory = open_store(str(place.directory / "run"))
    meter = Meter(job, [pid for _, _, pid in nodes] if place.rank == 0 else [])
    context = WorkerContext(
        worker=f"w{place.rank:04d}",
        settings=settings(job),
        store=store,
        directory=directory,
        progress=ProgressRecord.create(place.progress_path, worker=f"w{place.rank:04d}"),
        ring_path=str(place.ring_path),
        yield_requested=lambda _: False,
        fenced=lambda _: False,
        node=node,
        keeper_directory=keeper_directory,
    )
    assignment = Assignment(
        attempt=1,
        rank=place.rank,
        layout=layout,
        store_host="127.0.0.1",
        store_port=place.port,
        resume_step=0,
        resume_attempt=0,
        lineage=((1, 0),),
        guards=others if is_guarded else None,
    )
    outcome = run_attempt(assignment, context, functools.partial(task, job=job, meter=meter))
    assert isinstance(outcome, Completed), outcome
    return meter.seen()


def task(session: Session, *, job: Job, meter: Meter) -> None:
    """Train, and save as the way of each block says."""
    model = session.model(lambda: Decoder(job.shape))
    session.optimizer(lambda parameters: adamw(parameters, session.settings.train))
    device = next(model.parameters()).device
    cadences = {
        way: Cadence(
            snapshot_every=NEVER if way == "none" else 1,
            storage_every=STORE_EVERY if way == "stored" else NEVER,
            last_step=job.num_steps,
        )
        for way in job.ways
    }
    small = SmallCopies(device) if job.probes else None
    for step in session.steps(NUM_SAMPLES):
        meter.tick(counts(session) if job.probes else None)
        # As if it had been asked for in the settings; all ranks do so before the same step.
        way = job.way(step.number)
        session._boundary._cadence = cadences[way]
        if job.probes:
            switch(session, way)
        for samples in step.micro_batches():
            inputs, targets = (
                tokens.to(device)
                for tokens in batch(samples.tolist(), job.shape.vocab_size, job.sequence_length)
            )
            step.backward(mean_loss(model(inputs), targets), targets.numel())
            if small is not None:
                small.send(way)
        step.apply()
    if small is not None:
        meter.more["small_ms"] = small.ms()


def run_ours(job: Job, folder: Path, *, copies: bool, replicas: int = 1) -> dict[str, Any]:
    """Train with keepers; return costs, and what became of the snapshots.

    Args:
        job: The training.
        folder: For the run.
        copies: Whether keepers copy each other's snapshots.
        replicas: Copies of the model; of more than one the workers save each other's shares,
            unless keepers copy.
    """
    layout = ParallelLayout(dp_replicate=replicas, dp_shard=job.workers // replicas)
    way = job.ways[1]
    with ExitStack() as stack:
        nodes = []
        for name in NODES:
            node = NodeProcess(name, folder / name, folder / "run", settings(job))
            stack.callback(node.kill)
            nodes.append(node)
        for node in nodes:
            others = tuple(other.peer() for other in nodes if other is not node and copies)
            node.order(KeeperOrder(attempt=1, lineage=((1, 0),), copies_of=others))
        places = [(node.node, node.directory, node.pid) for node in nodes]
        ranks = stack.enter_context(
            running(
                functools.partial(
                    train,
                    job=job,
                    nodes=places,
                    layout=layout,
                    is_guarded=replicas > 1 and not copies,
                ),
                job.workers,
                folder,
            )
        )
        seen = ranks.results(RUN_S_MAX)
        of_block = statistics.mean if way == "stored" else statistics.median
        found = costs(job, seen, of_block=of_block)
        if job.probes:
            found["ways"] = by_way(job, seen[0], seen[0]["small_ms"])
        held = [part for node in nodes for part in node.inventory().parts]
        found["held_bytes"] = {
            kind: max((p.held.data_bytes for p in held if ("/" in p.arena) == is_copy), default=0)
            for kind, is_copy in {"own": False, "copy": True}.items()
        }
    if way == "stored":
        assert list((folder / "run/checkpoints").iterdir()), "nothing was stored"
    lines = [json.loads(x) for x in (folder / "run/metrics/rank0.jsonl").read_text().splitlines()]
    for each, told in found.get("ways", {}).items():
        hows = [line["snapshot"] for line in lines if job.is_kept(line["step"], each)]
        told["taken"], told["asked"] = hows.count("taken"), len(hows)
    asked = [line for line in lines if job.is_kept(line["step"], way)]
    taken = [line["snapshot_s"] for line in asked if line["snapshot"] == "taken"]
    assert taken, "no snapshot was taken"
    stall_ms = 1e3 * percentile(taken, 0.5)
    own_ms = job.workers * stall_ms + sum(
        found[name][way] - found[name]["none"] for name in ("keepers_ms", "beside_ms")
    )
    return found | {
        "own": round(own_ms / found["processor_ms"]["none"], 4),
        "taken": len(taken),
        "asked": len(asked),
        "stall_ms": round(stall_ms, 2),
    }


def run_peer(job: Job, folder: Path) -> dict[str, Any]:
    """Train in plain torch; return the costs of ``dcp.async_save``."""
    train_peer = functools.partial(train_plainly, job=job, save_every=STORE_EVERY)
    with running(train_peer, job.workers, folder) as ranks:
        return costs(job, ranks.results(RUN_S_MAX), of_block=statistics.mean)


def costs(
    job: Job, seen: Sequence[dict[str, Any]], *, of_block: Callable[[list[float]], float]
) -> dict[str, Any]:
    """Return what each way costs over the way "none"."""
    wall_s: dict[str, list[float]] = {way: [] for way in job.ways}
    sums_s: dict[str, dict[str, list[float]]] = {
        name: {way: [] for way in job.ways} for name in ("used_s", "others_s", "beside_s")
    }
    for way, first, last in job.blocks():
        times = seen[0]["times_s"][first : last + 1]
        wall_s[way].append(of_block([b - a for a, b in itertools.pairwise(times)]))
        for name, of_way in sums_s.items():
            total_s = sum(one[name][last] - one[name][first] for one in seen)
            of_way[way].append(total_s / (last - first))
    used_s = sums_s["used_s"]
    found: dict[str, Any] = {"rounds": job.rounds, "steps_a_block": job.block}
    for way in job.ways[1:]:
        found[way] = {"wall": _above(wall_s, way), "processor": _above(used_s, way)}
    for name, of_way in {
        "step_ms": wall_s,
        "processor_ms": used_s,
        "keepers_ms": sums_s["others_s"],
        "beside_ms": sums_s["beside_s"],
    }.items():
        found[name] = {way: round(1e3 * statistics.median(v), 2) for way, v in of_way.items()}
    return found


def _above(values: dict[str, list[float]], way: str) -> dict[str, Any]:
    ratios = [a / b - 1 for a, b in zip(values[way], values["none"], strict=True)]
    # By the binomial distribution, whatever that of the ratios is.
    beyond = max(0, int(len(ratios) / 2 - 0.98 * math.sqrt(len(ratios))))
    sure = sorted(ratios)[beyond : len(ratios) - beyond]
    return {
        "median": round(statistics.median(ratios), 4),
        "sure": [round(sure[0], 4), round(sure[-1], 4)],
        "quartile_low": round(percentile(ratios, 0.25), 4),
        "quartile_high": round(percentile(ratios, 0.75), 4),
    }


def main() -> None:
    """Print one JSON object per size and run; ``missed`` says that a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, nargs="+", default=[3, 200], help="megabytes each")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=0, help="default: by the state's size")
    parser.add_argument("--block", type=int, default=0, help="steps; default: by the same")
    parser.add_argument("--batch", type=int, default=0, help="samples; default: by the same")
    parser.add_argument(
        "--only", nargs="+", default=["snapshots", "copies", "stored", "async_save"]
    )
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(tuned(os.environ))
    runs: dict[str, tuple[tuple[str, ...], Callable[[Job, Path], dict[str, Any]]]] = {
        "snapshots": (("none", "snapshots"), functools.partial(run_ours, copies=False)),
        "copies": (("none", "snapshots"), functools.partial(run_ours, copies=True)),
        "replicas": (
            ("none", "snapshots"),
            functools.partial(run_ours, copies=False, replicas=len(NODES)),
        ),
        "replicas_copies": (
            ("none", "snapshots"),
            functools.partial(run_ours, copies=True, replicas=len(NODES)),
        ),
        "stored": (("none", "stored"), functools.partial(run_ours, copies=False)),
        "async_save": (("none", "async_save"), run_peer),
    }
    for megabytes, name in itertools.product(options.states, options.only):
        ways, run = runs[name]
        job = Job.of_size(
            megabytes,
            workers=options.workers,
            ways=ways,
            lingers=name in {"stored", "async_save"},
            global_batch=options.batch,
            rounds=options.rounds,
            block=options.block,
        )
        begun_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = run(job, Path(folder))
        if "snapshots" in ways:
            found["missed"] = found["snapshots"]["wall"]["median"] > TARGETS[megabytes]
        head = {
            "megabytes": megabytes,
            "workers": options.workers,
            "global_batch": job.global_batch,
            "run": name,
        }
        tail = {"seconds": round(time.monotonic() - begun_s), "load": load_average()}
        print(json.dumps({**head, **found, **tail}), flush=True)


if __name__ == "__main__":
    main()
