"""Real DeepSpeed trains, we convert, real DeepSpeed loads it elsewhere and trains on.

The truth is what the training processes themselves held and how they went on: every fp32
parameter and every slot must be equal bit for bit, and the next steps' losses too.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.support.deepspeed_folders import loaded
from tests.support.forked_commands import ForkedCommands
from tests.support.training_states import TrainingState
from ucp_core.formats import open_source
from ucp_core.formats.deepspeed import universal_writer as deepspeed_universal_writer
from ucp_core.formats.deepspeed import writer as deepspeed_writer
from ucp_core.language import Cut, Replicated, Rules
from ucp_core.language.rules import Rule
from ucp_core.native import Checkpoint
from ucp_core.storage import LocalStore

SCRIPT = "tests.support.train_deepspeed"
#: The pipeline: first layers of its stages, and the layers of its tied module.
STAGES = {1: (0,), 2: (0, 2)}
TIED_LAYERS = {"embed": (0, 4)}
MEMORY_BYTES = 32 << 20
STEPS = 3
#: The order in which ranks add up their gradients depends on their number.
LOSS_TOLERANCE = 1e-6
BF16_TOLERANCE = 2e-2

#: Parameters of the model that are cut over tensor-parallel ranks.
RULES = Rules(
    (
        Rule(r"(up|gate)\.weight", Cut(0)),
        Rule(r"down\.weight", Cut(1)),
        Rule(r"(embed|norm|head)\..*", Replicated()),
    )
)

SOURCES: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero1-one-group": {"stage": 1, "groups": 1},
    "zero3-bf16": {"stage": 3, "dtype": "bf16", "sub_group_size": 20},
    "zero2-sgd": {"stage": 2, "optimizer": "sgd"},
    "zero1-parallel": {"stage": 1, "model": "parallel"},
    "zero1-pp2": {"stage": 1, "pp": 2},
    "zero1-tp2": {"stage": 1, "model": "parallel", "tp": 2},
    "zero1-experts-ep2": {"stage": 1, "model": "experts", "ep": 2},
}


def _case(source: str, world_size: int, **target: Any) -> Any:
    kind = "universal" if target.get("universal") else "native"
    dtype = target.setdefault("dtype", SOURCES[source].get("dtype", "fp32"))
    tp, pp = target.setdefault("tp", 1), target.get("pp", 1)
    layout = f"dp{world_size // tp // pp}" + (f"-tp{tp}" if tp > 1 else "")
    layout += f"-pp{pp}" if "pp" in target else ""
    layout += f"-ep{target['ep']}" if "ep" in target else ""
    layout += f"-of-which-sp{target['sp']}" if "sp" in target else ""
    fused = "-fused" if "fused" in target else ""
    name = f"{source}{fused}-to-{kind}-zero{target['stage']}-{layout}-{dtype}"
    target |= {"name": name, "source": source, "world_size": world_size}
    for key in ("groups", "optimizer", "model"):
        if key in SOURCES[source]:
            target[key] = SOURCES[source][key]
    return pytest.param(target, id=name)


CASES = [
    _case("zero1", 2, stage=0),
    _case("zero1", 2, stage=1),
    _case("zero1", 2, stage=2),
    _case("zero1", 2, stage=3, sub_group_size=20),
    _case("zero1", 2, stage=1, universal=True),
    _case("zero1", 2, stage=2, universal=True),
    _case("zero1-one-group", 2, stage=3, universal=True),
    _case("zero3-bf16", 2, stage=3, sub_group_size=7),
    _case("zero3-bf16", 2, stage=1),
    _case("zero3-bf16", 2, stage=1, dtype="fp32"),
    _case("zero2-sgd", 2, stage=3),
    _case("zero2-sgd", 2, stage=1, universal=True),
    _case("zero1-parallel", 2, stage=1, tp=2),
    _case("zero1-parallel", 2, stage=3, tp=2),
    _case("zero1-parallel", 2, stage=1, tp=2, universal=True),
    _case("zero1-tp2", 2, stage=1, tp=2),
    _case("zero1-tp2", 2, stage=3),
    _case("zero1-pp2", 2, stage=1, pp=2),
    _case("zero1-pp2", 2, stage=1, pp=1),
    _case("zero1-pp2", 1, stage=0, pp=1),
    _case("zero1-pp2", 1, stage=1, pp=1, universal=True),
    _case("zero1", 1, stage=1),
    _case("zero1", 1, stage=3, persistence=100),
    _case("zero3-bf16", 1, stage=2),
    _case("zero1", 1, stage=2, universal=True),
    _case("zero1", 2, stage=1, sp=2),
    _case("zero1", 2, stage=3, sp=2),
    _case("zero1", 3, stage=1),
    _case("zero1", 3, stage=3),
    _case("zero1-experts-ep2", 1, stage=1, ep=1),
    _case("zero1-experts-ep2", 2, stage=0, ep=2),
    _case("zero1-experts-ep2", 2, stage=1, ep=1),
    _case("zero1-experts-ep2", 2, stage=2, ep=2),
    _case("zero1-experts-ep2", 4, stage=1, ep=2),
    _case("zero1-experts-ep2", 2, stage=2, ep=2, fused=True),
    _case("zero1-experts-ep2", 4, stage=1, ep=2, fused=True),
]

pytestmark = [
    pytest.mark.timeout(1000),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="deepspeed is not installed: pip install -c constraints.txt -e '.[interop]'",
    ),
]


def _launch(
    commands: ForkedCommands, cases: list[dict[str, Any]], world_size: int, out: Path
) -> None:
    path = out / f"job-{cases[0]['name']}.json"
    path.write_text(json.dumps(cases))
    commands.run(SCRIPT, [str(path), str(out)], num_ranks=world_size)


def _tensors(out: Path, name: str) -> dict[str, Any]:
    return safetensors.numpy.load_file(out / f"{name}.safetensors")


def _fused(source: Checkpoint, directory: str) -> Checkpoint:
    """Save a state with the experts of its layer as ``transformers`` has them, in one tensor."""
    whole: dict[str, dict[str, Any]] = {}
    for (name, slot), value in sorted(loaded(source).items()):
        whole.setdefault(slot, {})[name.replace("deepspeed_moe.gate.wg", "gate")] = value
    for held in whole.values():
        matrices = {
            matrix: np.stack(
                [
                    held.pop(
                        f"moe.deepspeed_moe.experts.deepspeed_experts.{number}.{matrix}.weight"
                    )
                    for number in range(4)
                ]
            )
            for matrix in ("gate_proj", "up_proj", "down_proj")
        }
        held["moe.experts.gate_up_proj"] = np.concatenate(
            [matrices["gate_proj"], matrices["up_proj"]], 1
        )
        held["moe.experts.down_proj"] = matrices["down_proj"]
    groups: list[dict[str, Any]] = []
    for group in source.param_groups:
        names = [name.replace("deepspeed_moe.gate.wg", "gate") for name in group["params"]]
        if not group.get("moe"):
            groups.append({**group, "params": names})
    groups[0]["params"] += ["moe.experts.gate_up_proj", "moe.experts.down_proj"]
    weights = whole.pop("weight")
    whole["step"] = {name: np.array(float(STEPS), np.float32) for name in weights}
    extra = dict(source.extra)
    state = TrainingState(weights=weights, slots=whole, groups=groups, extra=extra, step=STEPS)
    return state.save(LocalStore(), directory)


def _convert(case: dict[str, Any], out: Path) -> None:
    """Convert what DeepSpeed itself saved; nothing is copied on the way."""
    store, directory = LocalStore(), str(out / f"{case['name']}.ds")
    source = open_source(store, str(out / f"{case['source']}.ds"))
    case["directory"] = directory
    if case.get("fused"):
        source = _fused(source, str(out / f"{case['name']}.fused"))
    if case.get("universal"):
        deepspeed_universal_writer.write(
            source,
            store,
            directory,
            memory_bytes=MEMORY_BYTES,
            rules=RULES if case["tp"] > 1 else None,
            fsync=False,
        )
        return
    pipeline: dict[str, Any] = {}
    if "pp" in case:
        pipeline = {"stages": STAGES[case["pp"]], "tied_layers": TIED_LAYERS}
    deepspeed_writer.write(
        source,
        store,
        directory,
        memory_bytes=MEMORY_BYTES,
        stage=case["stage"],
        dp=case["world_size"] // case["tp"] // case.get("pp", 1),
        tp=case["tp"],
        ep=case.get("ep", 1),
        rules=RULES,
        dtype=case["dtype"],
        sub_group_size=case.get("sub_group_size", 10**9),
        fsync=False,
        **pipeline,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which every run told its state and its losses."""
    out = tmp_path_factory.mktemp("deepspeed")
    trains = [
        {"do": "train", "name": name, "steps": STEPS, "directory": str(out / f"{name}.ds")} | facts
        for name, facts in SOURCES.items()
    ]
    with ForkedCommands([SCRIPT], out / "log") as commands:
        _launch(commands, trains, 2, out)
        # DeepSpeed keeps its groups of ranks in globals, so one process can have one kind only.
        by_world: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
        for parameters in CASES:
            case = dict(parameters.values[0], do="load", steps=STEPS)
            _convert(case, out)
            kind = (case["world_size"], case.get("sp", 1), case.get("ep", 1))
            by_world.setdefault(kind, []).append(case)
        for (world_size, *_), cases in by_world.items():
            # After an engine with tensor parallelism DeepSpeed makes none without in one process.
            ordered = sorted(cases, key=lambda case: int(case["tp"]))
            _launch(commands, ordered, world_size, out)
    return out


@pytest.mark.parametrize("case", CASES)
def test_deepspeed_holds_the_same_bits(runs: Path, case: dict[str, Any]) -> None:
    """A range that is one element off loads without a word."""
    expected, found = _tensors(runs, case["source"]), _tensors(runs, case["name"])

    assert found.keys() == expected.keys()
    for key, array in expected.items():
        assert np.array_equal(found[key].reshape(array.shape), array), key


@pytest.mark.parametrize("case", CASES)
def test_hyper_parameters_steps_and_schedule_are_those_of_the_source(
    runs: Path, case: dict[str, Any]
) -> None:
    """The loading run was built with others, which must all be replaced, group by group."""
    expected = json.loads((runs / f"{case['source']}.json").read_text())
    found = json.loads((runs / f"{case['name']}.json").read_text())

    for key in ("groups", "steps", "global_steps", "lr_scheduler"):
        assert found[key] == expected[key], key
    assert found["mine"] == [1, "two"]


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_as_if_nothing_had_happened(runs: Path, case: dict[str, Any]) -> None:
    """The first loss shows the weights, the later ones the moments, steps and learning rates."""
    expected = json.loads((runs / f"{case['source']}.json").read_text())["losses"]
    found = json.loads((runs / f"{case['name']}.json").read_text())["losses"]

    exact = "bf16" not in case["source"]
    tolerance = LOSS_TOLERANCE if exact else BF16_TOLERANCE
    assert found == pytest.approx(expected, rel=0, abs=tolerance)
