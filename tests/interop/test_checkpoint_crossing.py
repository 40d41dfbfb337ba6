"""A run of another framework trains on in a plain torch script, by ``everstep.checkpoint``."""

import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from everstep import checkpoint
from tests.support.fixture_runs import RUNS, batch, llama_config
from tests.support.foreign_reading import checkpoint_fixture
from ucp_core.formats import open_source
from ucp_core.storage import LocalStore

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")


@pytest.mark.parametrize(("name", "num_heads"), RUNS)
def test_the_next_losses_are_those_of_the_framework_that_saved(name: str, num_heads: int) -> None:
    """Weights, moments, step counts and hyper-parameters count: the script has others."""
    folder = checkpoint_fixture(name)
    report = json.loads((folder / "README.json").read_text())["report"]
    config = llama_config(open_source(LocalStore(), str(folder / "checkpoint")), num_heads)
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=1.0)
    checkpoint.load(folder / "checkpoint", model=model, optimizer=optimizer)

    losses = []
    done = len(report["losses_before"])
    for step in range(done, done + len(report["losses_after"])):
        ids = batch(report, step, config.vocab_size)
        logits = model(input_ids=ids[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses == pytest.approx(report["losses_after"], abs=1e-5)
