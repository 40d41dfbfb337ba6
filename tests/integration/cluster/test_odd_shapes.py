"""A script with parameters and an optimizer of odd kinds, as a reader would run it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from orchestrator.config import RunConfig
from orchestrator.driver import export_run
from orchestrator.driver.launch import Launched
from tests.support.trainers import Run
from workers.protocol import Completed
from workers.settings import RunSettings, Settings

pytestmark = pytest.mark.timeout(900)

SCRIPT = Path(__file__).parents[2] / "support/train_odd_shapes.py"
PARTS = SCRIPT.with_name("train_parts.py")


def test_parts_that_are_used_late_or_rarely_end_equal_though_a_worker_dies(
    nodes: Any, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The optimizer's state of a part appears on all workers in one step, which is saved."""
    (tmp_path / "alone").mkdir()
    config = make_config(
        run__script=PARTS,
        run__arguments=json.dumps([f"die={tmp_path / 'died'}"]),
        workers__max=3,
        workers__standby_per_node=0,
        train__steps=12,
        train__global_batch=16,
        train__micro_batch=2,
    )
    with Run(tmp_path / "alone") as run:
        chosen = RunSettings(directory="run", script=str(PARTS))
        (left,) = run.train(Settings(run=chosen, train=config.train), num_workers=1)
        assert isinstance(left.outcome, Completed), left.outcome

    summary = Launched(config, nodes).follow(lambda _: None)

    assert summary["outcome"] == "completed", summary["reason"]
    assert [one["kind"] for one in summary["incidents"]] == ["crash"]
    alone = json.loads((tmp_path / "alone/result.json").read_text())
    assert summary["weights_digest"] == alone["weights_digest"]


@pytest.mark.chaos
def test_what_it_trains_ends_equal_though_two_workers_die(
    nodes: Any, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Alone, without a fault and without a controller, it has the same weights."""
    (tmp_path / "alone").mkdir()
    (tmp_path / "deaths").mkdir()
    config = make_config(
        run__script=SCRIPT,
        run__arguments=json.dumps(["own", str(tmp_path / "deaths")]),
        workers__max=3,
        workers__standby_per_node=0,
        train__steps=8,
        train__warmup_steps=2,
    )
    with Run(tmp_path / "alone") as run:
        chosen = RunSettings(directory="run", script=str(SCRIPT), arguments=("own",))
        settings = Settings(run=chosen, train=config.train)
        (left,) = run.train(settings, num_workers=1)
        assert isinstance(left.outcome, Completed), left.outcome

    summary = Launched(config, nodes).follow(lambda _: None)
    export_run(
        config.run.directory, str(tmp_path / "hf"), format="huggingface", memory_bytes=64 << 20
    )

    assert summary["outcome"] == "completed", summary["reason"]
    assert len(summary["incidents"]) >= 2
    alone = json.loads((tmp_path / "alone/result.json").read_text())
    assert summary["weights_digest"] == alone["weights_digest"]
    exported = load_file(tmp_path / "hf/model.safetensors")
    assert exported["head.logit_scale"].shape == ()
    assert exported["head.empty"].shape == (0, 3)
