"""A run of another framework trains on in a plain torch script, by ``everstep.checkpoint``."""

import json

import pytest
import torch

from everstep import checkpoint
from tests.support.fixture_runs import RUNS, llama_config, trained_on
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

    losses = trained_on(model, optimizer, report)
    assert losses == pytest.approx(report["losses_after"], abs=1e-5)
