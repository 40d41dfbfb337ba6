"""Checkpoints written for DeepSpeed, read again: the same state for any layout of the target."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.made import room_for
from tests.support.training_states import TrainingState, adam_state, random_shapes
from ucp_core.errors import UcpError
from ucp_core.formats import open_source
from ucp_core.formats.deepspeed import universal_writer as deepspeed_universal_writer
from ucp_core.formats.deepspeed import writer as deepspeed_writer
from ucp_core.geometry import TensorKey
from ucp_core.language import Cut, Pattern, Replicated, Rules, split
from ucp_core.language.rules import Rule
from ucp_core.native import Checkpoint, load
from ucp_core.storage import MemoryStore

MEMORY_BYTES = 32 << 20


def _state(seed: int, num_tensors: int, num_groups: int) -> TrainingState:
    rng = random.Random(seed)
    shapes = random_shapes(rng, num_tensors)
    state = adam_state(shapes, num_groups=num_groups, seed=seed)
    if rng.random() < 0.5:
        state.frozen = {"frozen.w": np.full((3, 4), 0.25, np.float32)}
    if rng.random() < 0.5:
        state.buffers = {"count": np.array([1, 2, 3], np.int64)}
    if rng.random() < 0.5:
        state.ties = {"alias": rng.choice(list(shapes))}
    if rng.random() < 0.5:
        state.extra = {"lr_scheduler": {"last_epoch": 3}, "client_state": {"mine": [1]}}
    return state


STATES = st.builds(_state, st.integers(0, 2**32), st.integers(2, 7), st.integers(1, 2))


def _rules(state: TrainingState, rng: random.Random, tp: int, *, near_even: bool) -> Rules:
    """Return a pattern for every tensor; a plain cut is torch's, or nearly even as AutoTP's."""
    rules = [Rule(name, Replicated()) for name in state.buffers]
    for name, array in {**state.weights, **state.frozen}.items():
        choices: list[Pattern] = [Replicated()]
        choices += [
            Cut(dim, widths=_near_even(extent, tp) if near_even else None)
            for dim, extent in enumerate(array.shape)
            if extent >= tp
        ]
        choices += [
            Cut(dim, parts=(tp, extent - tp))
            for dim, extent in enumerate(array.shape)
            if extent % tp == 0 and extent >= 2 * tp
        ]
        rules.append(Rule(name.replace(".", r"\."), rng.choice(choices)))
    return Rules(tuple(rules))


def _near_even(extent: int, tp: int) -> tuple[int, ...]:
    return tuple(extent // tp + (rank < extent % tp) for rank in range(tp))


def _assert_same(state: TrainingState, found: Checkpoint) -> None:
    entries = found.state_map.entries
    need = [room_for(entries[TensorKey(name, slot)]) for name, slot, _ in state.tensors()]
    load(found, need)
    for tensor, (name, slot, array) in zip(need, state.tensors(), strict=True):
        assert tensor.shape == array.shape, (name, slot)
        assert bytes(tensor.data) == array.tobytes(), (name, slot)
    assert len(entries) == len(need)
    assert [dict(group) for group in found.param_groups] == state.groups
    assert found.manifest.ties == state.ties
    assert dict(found.manifest.roles) == {
        **dict.fromkeys(state.frozen, "frozen"),
        **dict.fromkeys(state.buffers, "buffer"),
    }
    assert found.step == state.step
    assert found.extra.get("lr_scheduler") == state.extra.get("lr_scheduler")
    assert found.extra.get("client_state", {}) == state.extra.get("client_state", {})


def _starved(state: TrainingState, rules: Rules | None, tp: int) -> set[tuple[str, int]]:
    """Return trained parameters, and the dim, of which the rules leave a rank without any part."""
    found: set[tuple[str, int]] = set()
    if rules is None:
        return found
    for name, array in state.weights.items():
        pattern = rules.match(name)
        assert pattern is not None
        for shard in split(pattern, array.shape, tp, name=name).shards:
            found |= {(name, dim) for dim, extent in enumerate(shard) if extent == 0}
    return found


# The last tensor-parallel rank has nothing of the last parameter, or of the first of two.
@example(state=_state(0, 2, 2), stage=3, dp=2, tp=3, sub_group_size=20, near_even=False, seed=1)
@example(state=_state(0, 2, 2), stage=3, dp=1, tp=3, sub_group_size=3, near_even=False, seed=0)
# The last rank has nothing of a tied parameter: no bytes that the alias could share.
@example(state=_state(0, 2, 1), stage=0, dp=1, tp=3, sub_group_size=3, near_even=False, seed=1)
@settings(max_examples=30)
@given(
    state=STATES,
    stage=st.integers(0, 3),
    dp=st.integers(1, 9),
    tp=st.integers(1, 3),
    sub_group_size=st.sampled_from([3, 20, 10**9]),
    near_even=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_native_checkpoint_reads_back_as_it_was(
    *,
    state: TrainingState,
    stage: int,
    dp: int,
    tp: int,
    sub_group_size: int,
    near_even: bool,
    seed: int,
) -> None:
    """Reader and writer know the format each by itself, so they can differ.

    A trained parameter of which a tensor-parallel rank would have nothing is refused.
    """
    rules = _rules(state, random.Random(seed), tp, near_even=near_even) if tp > 1 else None
    target: dict[str, Any] = {"stage": stage, "dp": dp, "tp": tp}
    store = MemoryStore()

    def write() -> None:
        deepspeed_writer.write(
            state.save(MemoryStore(), "source"),
            store,
            "out",
            memory_bytes=MEMORY_BYTES,
            rules=rules,
            sub_group_size=sub_group_size,
            **target,
        )

    starved = _starved(state, rules, tp) if stage > 0 else set()
    if starved:
        with pytest.raises(UcpError, match=f"over tp={tp}") as caught:
            write()
        assert (caught.value.facts["fqn"], caught.value.facts["dim"]) in starved
        assert not store.exists("out/latest")
        return
    write()

    # The written checkpoint says how it is cut.
    _assert_same(state, open_source(store, "out"))


@settings(max_examples=15)
@given(state=STATES)
def test_a_universal_folder_reads_back_as_it_was(state: TrainingState) -> None:
    """It holds the metadata of two forms; a reader must not take it for a mixture of two runs."""
    store = MemoryStore()

    deepspeed_universal_writer.write(
        state.save(MemoryStore(), "source"), store, "out", memory_bytes=MEMORY_BYTES
    )

    _assert_same(state, open_source(store, "out"))
