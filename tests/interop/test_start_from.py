"""Runs of other frameworks go on under everstep, from the checkpoint as it lies."""

import json
from pathlib import Path

import pytest
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

import everstep
import ucp_core
from tests.support.fixture_runs import RUNS, batch, llama_config
from tests.support.foreign_reading import checkpoint_fixture

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")


@pytest.mark.parametrize(("name", "num_heads"), RUNS)
def test_a_run_goes_on_with_the_losses_that_its_framework_had(
    tmp_path: Path, name: str, num_heads: int
) -> None:
    """Weights, moments and counts of FSDP2, ZeRO and tensor parallel ranks, on one worker."""
    path = checkpoint_fixture(name) / "checkpoint"
    report = json.loads((path.parent / "README.json").read_text())["report"]
    done = len(report["losses_before"])
    config = llama_config(ucp_core.open(path), num_heads)
    losses: list[float] = []

    def train(session: everstep.Session) -> None:
        model = session.model(lambda: transformers.LlamaForCausalLM(config))
        session.optimizer(lambda held: AdamW(held.values(), weight_decay=0.1, betas=(0.9, 0.95)))
        for step in session.steps(report["args"]["bs"]):
            for _ in step.micro_batches():
                ids = batch(report, done + step.number - 1, config.vocab_size)
                logits = model(input_ids=ids[:, :-1]).logits
                loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
                step.backward(loss, tokens=ids[:, 1:].numel())
            step.apply()
            losses.append(step.loss)

    everstep.run(
        train,
        directory=str(tmp_path),
        settings=everstep.Settings(
            run=everstep.RunSettings(directory="run", init_from=str(path), init_state="all")
        ),
        steps=len(report["losses_after"]),
        global_batch=report["args"]["bs"],
        micro_batch=report["args"]["bs"],
        lr=1e-3,
        warmup_steps=0,
        schedule="constant",
    )

    assert losses == pytest.approx(report["losses_after"], abs=1e-5)
