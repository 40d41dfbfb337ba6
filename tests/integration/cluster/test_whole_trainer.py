"""A Trainer's script as people write it, on four workers, through two kills."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import RunConfig
from orchestrator.driver import export_run
from orchestrator.driver.faults import kill_node_of, signal_rank
from orchestrator.driver.launch import Launched
from tests.interop.test_whole_trainer import check_alike, results
from tests.support.reach import reach

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
pytest.importorskip("accelerate", reason="the extra hf is not installed")
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    "killed",
    [
        pytest.param(False, id="undisturbed", marks=pytest.mark.chaos),
        pytest.param(True, id="killed"),
    ],
)
def test_it_comes_to_what_trainer_comes_to(
    nodes: Any, make_config: Callable[..., RunConfig], tmp_path: Path, *, killed: bool
) -> None:
    """A node and rank 0 are lost: the same metrics, best step, folder and tokens."""
    from tests.support.ports import trainer_whole

    for name in ("plain", "ours"):
        (tmp_path / name).mkdir()
    trainer_whole.main(transformers.Trainer, str(tmp_path / "trainer"), str(tmp_path / "plain"))
    arguments = [str(tmp_path / "unused"), str(tmp_path / "ours"), "0.5" if killed else "0"]
    run = Launched(
        make_config(
            run__script=trainer_whole.__file__,
            run__arguments=json.dumps(arguments),
            train__steps=trainer_whole.STEPS,
            train__global_batch=8,
            train__micro_batch=2,
            workers__standby_per_node=0,
            checkpoint__every_steps=100,
            checkpoint__keep=2,
        ),
        nodes,
    )
    if killed:
        status = reach(run, 1)
        kill_node_of(run, 1)
        status = reach(run, status["step"] + 1, attempt=status["attempt"] + 1)
        signal_rank(run, 0, signal.SIGKILL)
    summary = run.follow(lambda _: None)

    assert summary["outcome"] == "completed", summary["reason"]
    faults = {incident["kind"] for incident in summary["incidents"]}
    assert (faults >= {"crash", "node_loss"}) == killed
    check_alike(tmp_path / "ours", tmp_path / "plain", rel=1e-3)
    step = results(tmp_path / "ours")["best"][0]
    assert summary["best"]["step"] == step
    out = str(tmp_path / "exported")
    document = export_run(
        run.config.run.directory, out, format="huggingface", memory_bytes=64 << 20, best=True
    )
    assert document["step"] == step
    opened = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    prompt = results(tmp_path / "ours")["generated"][:4]
    tokens = opened.generate(
        transformers.BatchEncoding({"input_ids": [prompt]}, tensor_type="pt")["input_ids"],
        max_new_tokens=8,
        do_sample=False,
    )
    assert tokens[0].tolist() == results(tmp_path / "ours")["generated"]
