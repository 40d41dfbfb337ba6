"""A run of another framework trains on under torch, from what we wrote for its loader."""

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

from tests.support.fixture_runs import RUNS, llama_config, trained_on
from tests.support.foreign_reading import checkpoint_fixture
from ucp_core.formats import open_source
from ucp_core.formats.dcp import writer as dcp_writer
from ucp_core.storage import LocalStore

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.parametrize(("name", "num_heads"), RUNS)
def test_the_next_losses_are_those_of_the_framework_that_saved(
    tmp_path: Path, name: str, num_heads: int
) -> None:
    """Four steps, so moments, step counts and hyper-parameters count as much as the weights."""
    folder = checkpoint_fixture(name)
    report = json.loads((folder / "README.json").read_text())["report"]
    source = open_source(LocalStore(), str(folder / "checkpoint"))
    dcp_writer.write(source, LocalStore(), str(tmp_path / "dcp"), memory_bytes=16 << 20)
    torch.manual_seed(0)
    config = llama_config(source, num_heads)
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=1.0)

    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments}
    # DeepSpeed's optimizer has not all hyper-parameters that torch's has.
    planner = DefaultLoadPlanner(allow_partial_load=not name.startswith("dcp"))
    load(state, storage_reader=FileSystemReader(tmp_path / "dcp"), planner=planner, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)

    losses = trained_on(model, optimizer, report)
    assert losses == pytest.approx(report["losses_after"], abs=1e-5)
