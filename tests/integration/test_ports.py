"""Scripts in the manner of known ones: how few lines change, and what is kept when workers die."""

import hashlib
import json
import random
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

import ucp_core
from tests.arch.tree import ROOT, guide_text
from tests.support.attempts import curve, finish, lines, newest, of_script, reset, result
from tests.support.foreign_reading import loaded
from tests.support.forking import SECONDS_MAX, run_script
from tests.support.ports.changes import changes
from tests.support.trainers import Run, Trainer
from workers.protocol import Completed, Raised
from workers.settings import Settings

PORTS = ROOT / "tests/support/ports"
#: The most lines that may be new. Removed lines do not count.
NUM_NEW_MAX = {"nanogpt": 10, "titan": 40, "trainer": 2, "lightning": 30}
#: Imports of each script. Only the packages of the last two may be missing.
NEEDS = {"nanogpt": "torch", "titan": "torch", "trainer": "transformers", "lightning": "lightning"}


@pytest.mark.parametrize("port", NUM_NEW_MAX)
def test_few_lines_of_a_script_change_and_the_guide_shows_all(port: str) -> None:
    """The promise is about what the user has to touch, so the two files are compared."""
    lines = changes(port)
    num_new = sum(line.startswith("+") and bool(line[1:].strip()) for line in lines)

    assert 2 <= num_new <= NUM_NEW_MAX[port]
    guide = guide_text()
    text = "\n".join(lines)
    assert f"```diff\n{text}\n```" in guide, (
        f"in the guide, {port} should change like this:\n{text}"
    )
    num_gone = sum(line.startswith("-") for line in lines)
    assert f"{num_new} lines added, {num_gone} removed" in guide


@pytest.mark.parametrize(
    "name", ["nanogpt_plain", "nanogpt_elastic", "titan_plain", "titan_elastic"]
)
def test_a_script_runs_alone_and_learns(name: str, tmp_path: Path) -> None:
    """The original too: else the changed lines would be those of an invented script."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # The script itself, or one rank of torchrun's.
    rank = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    printed = run_script(PORTS / f"{name}.py", tmp_path, environment=rank)

    losses = [float(loss) for loss in re.findall(r"(?:train|loss) (\d+\.\d+)", printed)]
    assert len(losses) >= 3
    assert losses[-1] < losses[0]


def _settings(port: str, directory: Path, *, steps: int, every_steps: int = 1) -> Settings:
    output = str(directory / "output")
    return of_script(
        PORTS / f"{port}_elastic.py", output, every_steps=every_steps, steps=steps, global_batch=16,
        micro_batch=2, deterministic=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    "port",
    [
        pytest.param(port, marks=[] if port in {"nanogpt", "trainer"} else pytest.mark.chaos)
        for port in NEEDS
    ],
)
def test_a_port_has_the_same_bits_on_one_to_five_workers(port: str, tmp_path: Path) -> None:
    """A fused AdamW rounds elements behind the last whole vector of a shard in another way."""
    pytest.importorskip(NEEDS[port], reason="an extra is not installed: hf or interop")
    settings = _settings(port, tmp_path, steps=4, every_steps=4)
    directory = tmp_path / "run"
    directory.mkdir()
    digests = []
    with Run(directory) as run:
        # Alone a Trainer script gets the trained weights back, so that comes last.
        for num_workers in (2, 3, 4, 5, 1):
            finish(run, settings, num_workers=num_workers)
            checkpoint = ucp_core.open(f"{directory}/checkpoints/step-00000004")
            state = {key: loaded(checkpoint, *key) for key in checkpoint.state_map.entries}
            digests.append((str(curve(directory)), result(run)["weights_digest"], digest_of(state)))
            reset(run)

    assert len(set(digests)) == 1, digests


def digest_of(state: Mapping[Any, Tensor]) -> str:
    digest = hashlib.sha256()
    for key, tensor in sorted(state.items()):
        digest.update(f"{key} {tensor.dtype} {tensor.tolist()}".encode())
    return digest.hexdigest()


def compare_with_calm_run(port: str, directory: Path, *, steps: int, num_faults: int) -> None:
    """Train calmly in one worker, and in several of which one after the other is killed.

    Curve, weights and what the script has registered must be the same.
    """
    settings = _settings(port, directory, steps=steps)
    for name in ("calm", "disturbed"):
        (directory / name).mkdir()
    with Run(directory / "calm") as calm:
        (left,) = calm.train(settings, num_workers=1)
        assert left.outcome == Completed(attempt=1, step=steps), left.outcome
    with Run(directory / "disturbed") as run:
        _train_through_faults(run, settings, num_faults)

    assert curve(run.directory) == curve(calm.directory)
    assert result(run)["weights_digest"] == result(calm)["weights_digest"]
    assert _registered(run) == _registered(calm) != {}


def _train_through_faults(run: Run, settings: Settings, num_faults: int) -> None:
    """Kill a worker some steps after each re-forming; often a new one takes its place."""
    draw = random.Random(num_faults)
    members, resume = [0, 1, 2], (0, 0)
    run.begin(settings, num_workers=len(members))
    for _ in range(num_faults):
        _wait_for_step(run, resume[0] + draw.randint(2, 5))
        dead = members.pop(draw.randrange(len(members)))
        run.trainers[dead].process.kill()
        run.trainers[dead].process.join()
        for number in members:
            run.trainers[number].fence(len(run.lineage))
        for number in members:
            left = run.trainers[number].left()
            assert not isinstance(left.outcome, Completed | Raised), left.outcome
        if len(members) == 1 or draw.random() < 0.5:
            members.append(len(run.trainers))
            run.trainers.append(Trainer(f"w{members[-1]:04d}", run.directory))
        resume = newest(run)
        run.begin(settings, num_workers=len(members), members=members, resume=resume)
    for number in members:
        outcome = run.trainers[number].left().outcome
        assert outcome == Completed(attempt=num_faults + 1, step=settings.train.steps), outcome


def _wait_for_step(run: Run, step: int) -> None:
    deadline_s = time.monotonic() + SECONDS_MAX
    path = run.directory / "metrics/rank0.jsonl"
    # Its first line comes a moment after the file.
    while not path.exists() or all(line["step"] < step for line in lines(run)[-1:]):
        assert time.monotonic() < deadline_s, f"step {step} is not reached"
        time.sleep(0.01)


def _registered(run: Run) -> Any:
    """Return what the newest checkpoint has of the script's own state, without its speeds."""
    (manifest,) = run.directory.glob(f"checkpoints/step-{newest(run)[0]:08}/manifest.json")

    def timeless(values: dict[str, Any]) -> dict[str, Any]:
        speeds = ("_runtime", "_per_second")
        return {key: value for key, value in values.items() if not key.endswith(speeds)}

    return json.loads(manifest.read_text(), object_hook=timeless)["extra"]["registered"]


@pytest.mark.parametrize("port", ["nanogpt", "titan"])
def test_a_worker_of_a_port_dies_and_nothing_shows(port: str, tmp_path: Path) -> None:
    """The script has a scheduler and numbers of its own, which a new worker must get.

    Trainer and Lightning, whose packages are large, are in ``tests/chaos``, with more faults.
    """
    compare_with_calm_run(port, tmp_path, steps=10, num_faults=1)
