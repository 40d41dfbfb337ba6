"""MoEs have a matrix for each expert in files of the hub, and one tensor in transformers."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ucp_core
from everstep import RunSettings, Session, Settings, TaskError, run
from tests.support.made import tensor_of
from tests.unit.workers.models.test_huggingface import MOE, SIZES
from ucp_core.geometry import Box
from ucp_core.native import Checkpoint
from workers.models import as_in_module, causal_lm

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

#: More experts than ten, whose numbers do not sort as texts.
CONFIGS: dict[str, dict[str, Any]] = {
    "Mixtral": {"intermediate_size": 16, "num_local_experts": 12, **MOE},
    "Qwen2Moe": {
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 8, "num_experts": 12, **MOE,
    },
}  # fmt: skip
W1 = "model.layers.1.block_sparse_moe.experts.7.w1.weight"


def saved(folder: Path, kind: str = "Mixtral", **how: Any) -> tuple[Path, dict[str, Tensor]]:
    """Return a folder of random weights in bfloat16, and them by transformers' reading of it."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **CONFIGS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, **how)
    again = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return folder, dict(again.named_parameters())


def fitted(folder: Path) -> Checkpoint:
    with torch.device("meta"):
        model = causal_lm(str(folder))
    checkpoint = ucp_core.open(str(folder))
    needed = dict(model.named_parameters())
    return Checkpoint(
        store=checkpoint.store, directory=checkpoint.directory,
        manifest=as_in_module(checkpoint.manifest, model, needed),
    )  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_each_box_of_a_fused_tensor_is_read_from_the_files_of_experts(
    tmp_path: Path, kind: str
) -> None:
    """A rank reads its own boxes, which may begin and end within experts and matrices."""
    folder, expected = saved(tmp_path, kind)
    checkpoint = fitted(folder)
    checkpoint.state_map.prove_coverage()
    fused = {name for name in expected if ".experts." in name}
    assert len(fused) == 4

    for name in fused:
        shape = expected[name].shape
        for dim, size in enumerate(shape):
            box = Box.full(shape).with_dim(dim, size // 3, size - 1)
            part = torch.empty(box.shape)
            need = tensor_of(name, tuple(shape), part.numpy().data.cast("B"), box=box)
            ucp_core.load(checkpoint, [need], widen=True)
            assert torch.equal(part, expected[name][tuple(map(slice, *box))]), (name, dim)


@pytest.mark.parametrize("layout", ["hub", "module"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_run_starts_with_the_values_that_transformers_loads(
    tmp_path: Path, kind: str, layout: str
) -> None:
    """From either layout, in several files."""
    how = {"save_original_format": layout == "hub", "max_shard_size": "60KB"}
    folder, expected = saved(tmp_path / "model", kind, **how)
    assert len(list(folder.glob("*.safetensors"))) > 1
    seen: dict[str, Tensor] = {}

    def task(session: Session) -> None:
        model: nn.Module = session.model(lambda: causal_lm(str(folder)))
        session.optimizer(lambda held: torch.optim.SGD(held.values()))
        named: Any = model.named_parameters()
        seen.update({name: value.full_tensor().clone() for name, value in named})
        for step in session.steps(1):
            session.train_step(lambda _: (model(input_ids=torch.tensor([[1]])).logits.sum(), 1))
            assert step.number == 1

    run(
        task,
        directory=str(tmp_path / "run"),
        settings=Settings(run=RunSettings(directory="run", init_from=str(folder))),
        steps=1, global_batch=1, micro_batch=1, warmup_steps=0,
    )  # fmt: skip

    assert seen.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in seen.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(W1), "dtype: 11 of BF16[16, 32], 12 of BF16[16, 32]"),
        (lambda tensors: tensors.update({W1: tensors[W1].float()}), "12 of F32[16, 32]"),
        (lambda tensors: tensors.update({W1: tensors[W1][1:]}), "12 of BF16[15, 32]"),
    ],
    ids=["missing", "dtype", "shape"],
)  # fmt: skip
def test_experts_that_are_not_alike_are_refused_by_name(
    tmp_path: Path, change: Any, message: str
) -> None:
    folder, _ = saved(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(TaskError, match=re.escape(message)) as caught:
        fitted(folder)
    assert "cannot build model.layers.1.mlp.experts.gate_up_proj from" in str(caught.value)


def test_a_model_of_another_library_keeps_its_names(tmp_path: Path) -> None:
    """Names say nothing by themselves: only transformers' own models have its conversions."""
    folder, _ = saved(tmp_path)
    manifest = ucp_core.open(str(folder)).manifest
    model = nn.Linear(1, 1)

    assert as_in_module(manifest, model, {"model.layers.1.mlp.experts.gate_up_proj"}) is manifest
