"""How many flipped bits ``train.recheck`` finds, whom it convicts, and what it costs.

    python -m tests.benchmarks recheck [--injected 50] [--clean 1000] [--rounds 5]

Real workers train by gloo. In each of ``injected`` attempts of three workers a drawn rank flips a
drawn bit from a drawn step on: of each result of a layer, of the gradients that it gives to a
reduction, or once of one of its weights. ``found`` counts those that the next check found,
``right`` those of them with that rank alone, and ``harmless`` those that changed no result at all:
the run ended with the weights of the undisturbed one. ``convicted`` counts ranks in ``clean``
checks of a run without faults. ``step_ratio`` is the median step with a check over that without,
where each worker has ``micro_batches`` of them, in blocks that take turns.
"""

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any, Final

from tests.benchmarks.common import load_average, paired
from tests.support.attempts import finish, lines, reset, result
from tests.support.trainers import Run
from workers.protocol import Completed, Raised
from workers.settings import CheckpointSettings, RunSettings, Settings, TrainSettings

SCRIPT: Final = str(Path(__file__).parents[1] / "support/train_corrupt.py")
EVERY: Final = 4
STEPS: Final = 12
WORKERS: Final = 3


def chosen(*arguments: str, recheck: int, steps: int = STEPS, batch: int = 24) -> Settings:
    """Return a run of small steps."""
    return Settings(
        run=RunSettings(directory="run", script=SCRIPT, arguments=arguments),
        train=TrainSettings(
            steps=steps, global_batch=batch, micro_batch=2, deterministic=True, recheck=recheck
        ),
        checkpoint=CheckpointSettings(every_steps=steps),
    )


def inject(run: Run, injected: int, seed: int) -> dict[str, Any]:
    """Return what was found of as many injected faults."""
    finish(run, chosen(recheck=EVERY), num_workers=WORKERS)
    digest = result(run)["weights_digest"]
    reset(run)
    drawn = random.Random(seed)
    found, right, harmless, missed = 0, 0, 0, []
    for _ in range(injected):
        how = drawn.choice(("matmul", "bucket", "weight"))
        first, rank = drawn.randint(2, STEPS - EVERY + 1), drawn.randrange(WORKERS)
        fault = f"{how}:{first}:{rank}:{drawn.randrange(64)}:{drawn.randrange(32)}"
        outcomes = [left.outcome for left in run.train(chosen(fault, recheck=EVERY), num_workers=3)]
        due = -(-first // EVERY) * EVERY
        if all(isinstance(one, Completed) for one in outcomes):
            is_same = result(run)["weights_digest"] == digest
            harmless += is_same
            missed += [] if is_same else [fault]
        elif all(isinstance(one, Raised) and one.step == due for one in outcomes):
            found += 1
            right += all(isinstance(one, Raised) and one.ranks == (rank,) for one in outcomes)
        else:
            missed.append(fault)
        reset(run)
    return {"injected": injected, "found": found, "right": right, "harmless": harmless,
            "missed": missed}  # fmt: skip


def check_clean(run: Run, clean: int) -> dict[str, Any]:
    """Return how many ranks were convicted in as many checks."""
    lefts = run.train(chosen(recheck=1, steps=clean), num_workers=WORKERS)
    convicted = {rank for left in lefts for rank in getattr(left.outcome, "ranks", ())}
    assert convicted or all(isinstance(left.outcome, Completed) for left in lefts), lefts
    reset(run)
    return {"checks": clean, "convicted": len(convicted)}


def measure(run: Run, rounds: int) -> dict[str, Any]:
    """Return what a step with a check takes, over one without."""
    batch, slow = 24, "slow=0.005"
    times_s: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(rounds):
        for recheck, found in times_s.items():
            finish(run, chosen(slow, recheck=recheck, batch=batch), num_workers=WORKERS)
            found.append(statistics.median(line["step_s"] for line in lines(run)[2:]))
            reset(run)
    return {"micro_batches": batch // 2 // WORKERS, "step_ratio": paired(times_s[1], times_s[0])}


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--injected", type=int, default=50)
    parser.add_argument("--clean", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Run(Path(folder)) as run:
        found = inject(run, options.injected, options.seed)
        found |= check_clean(run, options.clean) | measure(run, options.rounds)
    print(json.dumps({**found, "load": load_average()}), flush=True)


if __name__ == "__main__":
    main()
