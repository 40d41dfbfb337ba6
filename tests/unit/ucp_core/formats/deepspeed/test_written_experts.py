"""Files for expert-parallel ranks of DeepSpeed are written, and read again."""

from typing import Any

import numpy as np
import pytest

from tests.support.deepspeed_folders import assert_equal, loaded
from tests.support.torch_files import load_torch_file
from tests.support.training_states import TrainingState, adam_state
from ucp_core.errors import UcpError
from ucp_core.formats import open_source
from ucp_core.formats.deepspeed import universal_writer
from ucp_core.formats.deepspeed.writer import write
from ucp_core.formats.deepspeed.writing import spread
from ucp_core.native import Checkpoint
from ucp_core.storage import MemoryStore

MEMORY_BYTES = 32 << 20
_EXPERTS = ".deepspeed_moe.experts.deepspeed_experts."
#: In the module's order: experts of the first layer, then of the second.
LAYERS = {"second": 2, "first": 4}
LAYOUTS = [(1, 1), (2, 2), (4, 2)]


def _state(*, num_groups: int = 1, frozen: bool = False) -> TrainingState:
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (5, 3)}
    for layer, count in LAYERS.items():
        shapes[f"{layer}.deepspeed_moe.gate.wg.weight"] = (count, 3)
        for number in range(count):
            shapes[f"{layer}{_EXPERTS}{number}.up.weight"] = (4, 3)
            shapes[f"{layer}{_EXPERTS}{number}.up.bias"] = (4,)
    shapes["head.weight"] = (5, 3)
    state = adam_state(shapes, num_groups=num_groups)
    if frozen:
        for number in range(LAYERS["first"]):
            name = f"first{_EXPERTS}{number}.scale"
            state.frozen[name] = np.full(3, number, np.float32)
    return state


def _written(source: Checkpoint, store: MemoryStore, place: str, **target: Any) -> Checkpoint:
    write(source, store, place, memory_bytes=MEMORY_BYTES, **target)
    return open_source(store, place)


def _load(store: MemoryStore, place: str, name: str) -> Any:
    return load_torch_file(store.read(f"{place}/global_step7/{name}"))


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(("dp", "ep"), LAYOUTS)
def test_what_is_written_is_read_again(stage: int, dp: int, ep: int) -> None:
    """Every element of every slot, and what was read is written for other ranks, too."""
    # Without ZeRO nothing says which of two groups has a parameter.
    state = _state(num_groups=2 if stage else 1, frozen=stage > 0)
    # Then experts are on neighbours.
    state.extra["ds_config"] = {"use_data_before_expert_parallelism": stage == 2}
    store = MemoryStore()
    source = state.save(store, "source")
    expected = loaded(source)

    found = _written(source, store, "one", stage=stage, dp=dp, ep=ep)
    again = _written(found, store, "two", stage=1, dp=2, ep=1)

    assert_equal(loaded(found), expected)
    assert_equal(loaded(again), expected)


def test_a_rank_has_its_experts_in_the_module_s_order() -> None:
    """Also from a source with more ranks, in whose groups one rank's come before another's."""
    store = MemoryStore()

    found = _written(_state().save(store, "source"), store, "one", stage=1, dp=2, ep=2)
    _written(found, store, "two", stage=1)

    for place, ep in (("one", 2), ("two", 1)):
        model = _load(store, place, "mp_rank_00_model_states.pt")
        dense, of_experts = model["param_shapes"]
        assert not any(_EXPERTS in name for name in [*dense, *model["module"]])
        assert list(of_experts) == [
            f"{layer}{_EXPERTS}{number}.up.{kind}"
            for layer, count in LAYERS.items()
            for number in range(count // ep)
            for kind in ("weight", "bias")
        ]
        assert model["num_experts"] == [*LAYERS.values()]
        name = f"zero_pp_rank_{ep - 1}_mp_rank_00_optim_states.pt"
        state = _load(store, place, name)["optimizer_state_dict"]
        assert list(state["param_slice_mappings"][1]) == list(of_experts)
        assert state["partition_count"] == [ep, 1]
        group = state["base_optimizer_state"]["param_groups"][1]
        assert (group["moe"], group["name"]) == (True, f"ep_size_{ep}")
        expert = _load(store, place, "layer_1_expert_3_mp_rank_00_model_states.pt")
        assert list(expert) == [f"first{_EXPERTS}3.up.weight", f"first{_EXPERTS}3.up.bias"]


def test_experts_with_gate_and_up_in_turn_are_refused() -> None:
    """GPT-OSS calls them alike; cut in halves, each would be a mix of both."""
    store = MemoryStore()
    source = adam_state(
        {"mlp.experts.gate_up_proj": (4, 3, 10), "mlp.experts.down_proj": (4, 5, 3)}
    )

    with pytest.raises(UcpError, match=r"mlp\.experts\.gate_up_proj: .* not those of Mixtral"):
        write(source.save(store, "s"), store, "out", memory_bytes=MEMORY_BYTES, dp=2, ep=2)


def test_experts_of_one_tensor_become_matrices_of_their_own() -> None:
    """Every slot is cut alike: gate above up, and an expert after the other."""
    store = MemoryStore()
    shapes = {"mlp.experts.gate_up_proj": (4, 6, 5), "mlp.experts.down_proj": (4, 5, 3)}
    source = adam_state(shapes).save(store, "s")
    wholes = loaded(source)

    found = loaded(_written(source, store, "out", stage=1, dp=2, ep=2))

    for slot in ("weight", "exp_avg", "exp_avg_sq"):
        up = wholes["mlp.experts.gate_up_proj", slot]
        down = wholes["mlp.experts.down_proj", slot]
        for expert in range(4):
            name = f"mlp{_EXPERTS}{expert}"
            assert (found[f"{name}.gate_proj.weight", slot] == up[expert, :3]).all()
            assert (found[f"{name}.up_proj.weight", slot] == up[expert, 3:]).all()
            assert (found[f"{name}.down_proj.weight", slot] == down[expert]).all()


def test_groups_that_were_cut_for_their_size_are_cut_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with fewer experts has fewer groups of them, as DeepSpeed makes them."""
    monkeypatch.setattr(spread, "_GROUP_ELEMENTS_MAX", 40)
    store = MemoryStore()
    state = _state()

    def num_groups(place: str) -> int:
        return len(_load(store, place, "mp_rank_00_model_states.pt")["param_shapes"])

    # 6 experts of 16 elements, of which 2 fit into a group.
    source = _written(state.save(store, "source"), store, "one", stage=1)
    found = _written(source, store, "two", stage=1, dp=2, ep=2)
    again = _written(found, store, "again", stage=1)

    assert [num_groups(place) for place in ("one", "two", "again")] == [4, 3, 4]
    assert_equal(loaded(again), loaded(state.save(store, "expected")))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"dp": 4, "ep": 4}, "ep=4: the source has 2, 4 experts in a layer"),
        ({"dp": 4, "ep": 3}, "ep=3 must divide dp=4"),
        ({"dp": 2, "ep": 2, "stage": 3}, "no stage 3"),
    ],
)
def test_a_layout_that_deepspeed_lacks_is_refused(target: dict[str, Any], words: str) -> None:
    store = MemoryStore()

    with pytest.raises(UcpError, match=words):
        write(_state().save(store, "source"), store, "out", memory_bytes=MEMORY_BYTES, **target)

    assert not store.exists("out/latest")


def test_a_model_without_experts_has_no_expert_parallel_ranks() -> None:
    store = MemoryStore()
    source = adam_state({"a": (2, 3)}).save(store, "source")

    with pytest.raises(UcpError, match="ep=2: the source has no experts in a layer"):
        write(source, store, "out", memory_bytes=MEMORY_BYTES, dp=2, ep=2)


def test_the_universal_form_has_no_experts() -> None:
    """DeepSpeed would give each rank the experts of the first."""
    store = MemoryStore()

    with pytest.raises(UcpError, match="an expert of DeepSpeed's MoE"):
        universal_writer.write(
            _state().save(store, "source"), store, "out", memory_bytes=MEMORY_BYTES
        )
