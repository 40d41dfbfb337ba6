"""Megatron-core itself trains and saves, we convert, Megatron-core loads it and trains on.

It saves the state again as soon as it is loaded, so every element that it holds is compared. The
losses of the next steps are those of the run that went on.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forked_commands import ForkedCommands
from tests.support.made import save_part, tensor_of
from tests.support.megatron_files import batch
from ucp_core.conversion import convert
from ucp_core.formats import export, open_source
from ucp_core.inspection import diff
from ucp_core.storage import LocalStore

SCRIPT = "tests.support.train_megatron"
MEMORY_BYTES = 32 << 20
STEPS = 3
#: The order in which ranks add up depends on their number.
LOSS_TOLERANCE = 1e-6
#: Hyper-parameters that a checkpoint has to replace.
SPOILT = {"seed": 2, "lr": 0.5, "beta1": 0.1}

SOURCES: dict[str, dict[str, Any]] = {
    # Flat buffers of two ranks, which Megatron itself loads at two tensor-parallel ranks only.
    "dense": {"num_ranks": 2, "tp": 2, "sharding": "dp_reshardable"},
    "bf16": {"num_ranks": 1, "bf16": True, "sharding": "fully_reshardable"},
    "experts": {"num_ranks": 1, "experts": 4, "sharding": "fully_reshardable"},
}
#: Saved by us, of models of Hugging Face, which have q, k and v, gate and up apart; and experts.
OURS = LLAMA, MIXTRAL = "llama", "mixtral"
CASES: dict[str, dict[str, Any]] = {
    # The same files for any number of tensor-parallel ranks: one is tried of each.
    "dense-to-tp2": {"source": "dense", "num_ranks": 2, "tp": 2},
    "dense-to-pp2-by-way-of-universal": {"source": "dense", "num_ranks": 2, "pp": 2},
    "bf16-to-dp2": {"source": "bf16", "num_ranks": 2, "bf16": True},
    "experts-to-one-rank": {"source": "experts", "num_ranks": 1, "experts": 4},
    "llama-to-tp2": {"source": LLAMA, "num_ranks": 2, "tp": 2},
    "mixtral-to-one-rank": {"source": MIXTRAL, "num_ranks": 1, "experts": 4},
    "mixtral-to-ep2": {"source": MIXTRAL, "num_ranks": 2, "experts": 4, "ep": 2},
    "experts-to-ep2": {"source": "experts", "num_ranks": 2, "experts": 4, "ep": 2},
}

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None,
        reason="megatron-core is not installed: pip install -c constraints.txt -e '.[interop]'",
    ),
]


def _train_ours(name: str, out: Path) -> None:
    """Train a model of transformers as Megatron does, save it in between, and tell its losses."""
    import transformers

    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 88,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    if name == MIXTRAL:
        config = transformers.MixtralConfig(**sizes, num_local_experts=4)
        model = transformers.MixtralForCausalLM(config)
    # Large enough that places which are swapped show in the loss.
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(named.values(), lr=1e-2, weight_decay=0.1)
    losses: list[float] = []
    for step in range(2 * STEPS):
        if step == STEPS:
            _save(named, optimizer, out / name)
        tokens = batch(step)
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    (out / f"{name}.json").write_text(json.dumps({"losses": losses[STEPS:]}))


def _save(named: dict[str, Any], optimizer: torch.optim.Optimizer, folder: Path) -> None:
    tensors = [
        tensor_of(fqn, value.shape, memoryview(value.detach().numpy().tobytes()), slot=slot)
        for fqn, parameter in named.items()
        for slot, value in {"weight": parameter, **optimizer.state[parameter]}.items()
    ]
    group = {k: v for k, v in optimizer.state_dict()["param_groups"][0].items() if k != "params"}
    groups = [{**group, "params": list(named)}]
    save_part(LocalStore(), str(folder), tensors, step=STEPS, attempt=0, param_groups=groups)


def _write(name: str, out: Path) -> str:
    """Convert what Megatron saved; return the folder of the iteration."""
    case, store = CASES[name], LocalStore()
    source = open_source(store, str(out / case["source"]))
    if "universal" in name:
        convert(source, store, str(out / f"{name}.universal"), memory_bytes=MEMORY_BYTES)
        source = open_source(store, str(out / f"{name}.universal"))
    export(
        source,
        store,
        str(out / f"{name}.export"),
        format="megatron-core",
        memory_bytes=MEMORY_BYTES,
        ep=case.get("ep", 1),
        query_groups=2 if case["source"] in OURS else None,
        fsync=False,
    )
    return str(out / f"{name}.export" / f"iter_{STEPS:07d}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which every run saved its state and told its losses."""
    out = tmp_path_factory.mktemp("megatron")
    with ForkedCommands([SCRIPT], out / "log") as commands:

        def run(do: str, cases: dict[str, dict[str, Any]]) -> None:
            for num_ranks in (1, 2):
                own = [
                    {**case, "do": do, "name": name, "steps": STEPS}
                    for name, case in cases.items()
                    if case["num_ranks"] == num_ranks
                ]
                job = out / f"{do}-{num_ranks}.json"
                job.write_text(json.dumps(own))
                commands.run(SCRIPT, [str(job), str(out)], num_ranks=num_ranks)

        run("train", {name: {**case, "seed": 1} for name, case in SOURCES.items()})
        for name in OURS:
            _train_ours(name, out)
        loads = {name: {**case, **SPOILT} for name, case in CASES.items()}
        run("load", {n: {**case, "directory": _write(n, out)} for n, case in loads.items()})
    return out


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case["source"] in SOURCES])
def test_megatron_holds_the_same_bits(runs: Path, name: str) -> None:
    """Halves of a gate that are swapped, or a layer in another's place, load without a word."""
    source, again = (
        open_source(LocalStore(), str(runs / folder)) for folder in (CASES[name]["source"], name)
    )

    report = diff(source, again)

    assert report.tensors == ()
    assert report.num_equal == len(source.state_map.entries)
    theirs = [{**group, "params": ()} for group in source.param_groups]
    found = [{**g, "params": ()} for g in again.param_groups if not g["is_expert_parallel"]]
    assert found == theirs


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_as_if_nothing_had_happened(runs: Path, name: str) -> None:
    """The first loss shows the weights, the later ones moments, steps and hyper-parameters."""
    expected, found = (
        json.loads((runs / f"{run}.json").read_text())["losses"]
        for run in (CASES[name]["source"], name)
    )

    assert found == pytest.approx(expected, rel=0, abs=LOSS_TOLERANCE)
