"""Every block of the guide is run, as a reader would paste it."""

import json
import re
from pathlib import Path

import pytest

from tests.arch.tree import guide_text
from tests.support.attempts import curve, finish, reset
from tests.support.forking import run_script
from tests.support.trainers import Run
from ucp_core.layout import ParallelLayout
from workers.settings import RunSettings, Settings, TrainSettings

BLOCKS = re.findall(r"```python\n(.*?)```", guide_text(), re.DOTALL)
[*NAMES] = [re.search(r'directory="runs/(\w+)"', block).group(1) for block in BLOCKS]  # type: ignore[union-attr]


def _make_base_model(directory: Path) -> None:
    """Save a tiny model as from the hub, in bfloat16."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory / "base-model")


@pytest.mark.parametrize("name", NAMES)
def test_a_block_runs(tmp_path: Path, name: str) -> None:
    """To its last step, and it learns."""
    script = tmp_path / "train.py"
    script.write_text(BLOCKS[NAMES.index(name)])
    if "transformers" in script.read_text():
        pytest.importorskip("transformers", reason="the extra hf is not installed")
        _make_base_model(tmp_path)

    run_script(script, tmp_path)

    lines = (tmp_path / f"runs/{name}/metrics/rank0.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[-1] < losses[0]
    assert (tmp_path / f"runs/{name}/result.json").exists()


@pytest.mark.parametrize(
    ("name", "layout"),
    [("planned", ParallelLayout(tp=2, pp=2)), ("long", ParallelLayout(dp_shard=2, cp=2))],
)
def test_a_plan_of_the_guide_cuts_the_model(
    name: str, layout: ParallelLayout, tmp_path: Path, run: Run
) -> None:
    """Alone nothing uses it. Four workers with parts of it, or of sequences, learn as one does."""
    script = tmp_path / "train.py"
    script.write_text(BLOCKS[NAMES.index(name)])
    train = TrainSettings(steps=5, global_batch=8, micro_batch=4, lr=1e-2)
    settings = Settings(run=RunSettings(directory="run", script=str(script)), train=train)
    finish(run, settings, num_workers=1)
    alone = curve(run.directory)
    reset(run)
    finish(run, settings, num_workers=4, layout=layout)

    assert len(alone) == train.steps
    for step, values in curve(run.directory).items():
        assert values == pytest.approx(alone.pop(step), rel=1e-5)
    assert not alone
